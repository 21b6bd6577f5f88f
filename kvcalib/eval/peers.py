"""Quantised caches of other libraries, run for real: transformers' QuantizedCache with quanto and hqq.

    ideal   every key and value past the sink goes through the library's own quantiser and back, and every query reads
            the result, its own token included: the protocol that papers and `SimulatedCache` use
    real    the library's cache as it ships (the last 128 tokens exact, then all quantised anew): for retrieval

Bits are those of the tensors that the library stores, ranges counted with 16 bits each as in a half-precision model.
"""

import logging
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import __version__ as transformers_version
from transformers.cache_utils import Cache, DynamicCache, QuantizedCache

from kvcalib.errors import MissingInput, UnsupportedModel

log = logging.getLogger(__name__)

PACKAGES = {"quanto": "optimum-quanto", "hqq": "hqq"}
MULTIPLE = 32
"""Tokens of which the quantised prompt has a multiple: hqq puts codes of different groups into a byte, four at most."""


class Peer(NamedTuple):
    """library: of PACKAGES; axes as the library counts them; group: elements that share a range."""

    library: str
    bits: int
    group: int
    axis_key: int
    axis_value: int


class IdealPeer(DynamicCache):
    """Use once, with a whole window in one pass. Keeps nothing; counts stored bits in `bits` (key, value)."""

    def __init__(self, peer: Peer, model, sink: int):
        super().__init__(config=model.config)
        self._peer, self._sink, self._layers = peer, sink, real_peer(peer, model).layers
        self.bits: dict[str, list[float]] = {"key": [], "value": []}

    def update(self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *args, **kwargs):
        layer = self._layers[layer_idx]
        layer.lazy_initialization(key, value)
        axes = {"key": self._peer.axis_key, "value": self._peer.axis_value}
        return tuple(self._round_trip(x, layer, name, axes[name]) for name, x in (("key", key), ("value", value)))

    def _round_trip(self, x: torch.Tensor, layer, name: str, axis: int) -> torch.Tensor:
        stored = layer._quantize(x.contiguous(), axis=axis)
        self.bits[name].append(stored_bits(self._peer.library, stored) / x.numel())
        return torch.cat([x[:, :, : self._sink], layer._dequantize(stored)[:, :, self._sink :].to(x.dtype)], dim=2)


def real_peer(peer: Peer, model) -> Cache:
    """The library's own cache. Raises MissingInput without the package, UnsupportedModel for a model it refuses."""
    options = {"nbits": peer.bits, "q_group_size": peer.group}
    axes = {"axis_key": peer.axis_key, "axis_value": peer.axis_value}
    try:
        if peer.library == "quanto":
            _tell_of_lock()
        return QuantizedCache(peer.library, model.config, **options, **axes)
    except ImportError as error:
        package = PACKAGES[peer.library]
        raise MissingInput(
            f"{package} is not there: `pip install {package}`, or `pip install kvcalib[peers]`"
        ) from error
    except ValueError as error:
        raise UnsupportedModel(f"transformers' QuantizedCache refuses this model: {error}") from error


@cache
def _tell_of_lock() -> None:
    """quanto compiles when it is first used, and waits without a word, for ever, for a lock that was left behind."""
    package = find_spec("optimum") and find_spec("optimum.quanto")
    for folder in package.submodule_search_locations if package else ():
        for lock in Path(folder).rglob("build/lock"):
            log.warning(
                "quanto waits until %s is gone: another process compiles, or was killed as it did; then delete it",
                lock,
            )


def check_peer(peer: Peer, model) -> None:
    """Raises as `real_peer`, and UnsupportedModel where the installed versions have grown apart."""
    layer, weights = real_peer(peer, model).layers[0], next(model.parameters())
    x = torch.ones(1, 1, 2 * peer.group, 2 * peer.group, dtype=weights.dtype, device=weights.device)
    try:
        layer.lazy_initialization(x, x)
        for axis in (peer.axis_key, peer.axis_value):
            stored = layer._quantize(x, axis=axis)
            stored_bits(peer.library, stored)
            layer._dequantize(stored)
    except (TypeError, AttributeError, KeyError) as error:
        raise UnsupportedModel(
            f"this version of {PACKAGES[peer.library]} and transformers {transformers_version} do not work together: "
            f"{error}"
        ) from error


def stored_bits(library: str, stored) -> float:
    """Bits of what the library keeps of one tensor."""
    return sum(16 * t.numel() if t.is_floating_point() else 8 * t.nbytes for t in _PARTS[library](stored))


def _quanto_parts(stored) -> Iterator[torch.Tensor]:
    yield stored._data._data  # the packed bytes inside the tensor subclass
    yield from (stored._scale, stored._shift)


def _hqq_parts(stored) -> Iterator[torch.Tensor]:
    codes, meta = stored
    yield codes
    yield from (meta["scale"], meta["zero"])


_PARTS: dict[str, Callable] = {"quanto": _quanto_parts, "hqq": _hqq_parts}
