"""Hashes: of everything in an artifact that decides how a token is stored and read back, and of a whole file."""

import hashlib
import json

import torch

from kvcalib.artifact.schema import Artifact


def fingerprint(artifact: Artifact) -> str:
    """sha256 over the format and all tables; the same before and after a trip through a file."""
    digest = hashlib.sha256(json.dumps(artifact.spec.to_dict(), sort_keys=True).encode())
    for index, layer in sorted(artifact.layers.items()):
        for tables in (layer.key, layer.value):
            for name, tensor in tables._asdict().items():
                if tensor is not None:
                    same = tensor.float() if tensor.is_floating_point() else tensor  # a file may keep bfloat16
                    digest.update(f"{index}.{name}{list(tensor.shape)}".encode())
                    digest.update(same.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def checksum(header: str, tensors: dict[str, torch.Tensor]) -> str:
    """sha256 over what a safetensors file of ours holds."""
    digest = hashlib.sha256(header.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}{tensor.dtype}{list(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
