"""kvcalib: calibrate a model's KV cache to 2-4 real bits, ship one file, generate from it.

The names that a user of the library needs are loaded on first access, so that
`import kvcalib` (and with it `python -m kvcalib --help`) costs no torch import.
"""

from __future__ import annotations

from importlib import import_module

__version__ = "0.1.0"
__all__ = ["CalibratedCache", "__version__", "load_artifact", "load_model"]

_LAZY = {
    "CalibratedCache": "kvcalib.runtime.cache",
    "load_artifact": "kvcalib.artifact.io",
    "load_model": "kvcalib.models.load",
}


def __getattr__(name: str):
    if name not in _LAZY:
        raise AttributeError(f"module 'kvcalib' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
