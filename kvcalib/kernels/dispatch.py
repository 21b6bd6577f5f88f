"""Chooses the kernel that attends over packed pages. Today: the torch reference, on every device."""

from kvcalib.kernels.reference import attend

__all__ = ["attend"]
