"""The caches that are compared: how each is made, filled with a given context, and weighed.

    kvcalib                         CalibratedCache
    full                            DynamicCache in the model's own precision
    bfloat16                        the whole model in bfloat16, DynamicCache in bfloat16
    quanto4 quanto2 hqq4 hqq2       transformers' QuantizedCache, as its documentation sets it up

A prefill is computed once, its keys and values are handed to every cache: what a cache stores depends on nothing else.
Each contender has a model of its own that shares the weights, because a living CalibratedCache changes the attention
setting of the model it belongs to.
"""

import copy
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import Cache, DynamicCache, QuantizedCache

from kvcalib.artifact.schema import Artifact
from kvcalib.errors import ConfigError
from kvcalib.models.families import attention_modules
from kvcalib.runtime.cache import CalibratedCache
from kvcalib.runtime.layer import CalibratedLayer

States = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""Layer -> keys after rotary embedding and values, both [1, H, T, D]."""
BACKENDS = {"quanto": ("optimum.quanto", "optimum-quanto"), "hqq": ("hqq", "hqq")}
"""Backend -> (module, package)."""
AXES = {"quanto": 0, "hqq": 1}
"""The axes that transformers' documentation names for each backend."""


class Contender(NamedTuple):
    """make: a new, empty cache for `model`. missing: what has to be installed first, or None."""

    name: str
    model: Any
    make: Callable[[], Cache]
    missing: str | None = None


def contenders(model, artifact: Artifact, peers: list[str]) -> list[Contender]:
    """kvcalib first, then `peers` in their order."""
    plain = twin(model)
    found = [Contender("kvcalib", model, lambda: CalibratedCache(artifact, model))]
    makers = {"full": _full, "bfloat16": _bfloat16}
    return found + [makers.get(name, _quantised)(name, plain) for name in peers]


def twin(model):
    """The same model as an object of its own: weights and buffers are shared."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


def _full(name: str, model) -> Contender:
    return Contender(name, model, lambda: DynamicCache(config=model.config))


def _bfloat16(name: str, model) -> Contender:
    half = copy.deepcopy(model).to(torch.bfloat16)
    return Contender(name, half, lambda: DynamicCache(config=half.config))


def _quantised(name: str, model) -> Contender:
    backend, bits = name[:-1], int(name[-1])
    module, package = BACKENDS[backend]
    axis = AXES[backend]

    def make() -> Cache:
        return QuantizedCache(backend, config=model.config, nbits=bits, axis_key=axis, axis_value=axis)

    return Contender(name, model, make, None if _installed(module) else f"pip install {package}")


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package above it is not there either
        return False


def check_layers(model) -> None:
    """Raises ConfigError for models that keep more than keys and values: their caches cannot be filled from outside."""
    layers = len(DynamicCache(config=model.config).layers)
    if len(attention_modules(model)) < layers:
        raise ConfigError(
            f"some of the {layers} layers of {type(model).__name__} keep a state instead of keys and values, which"
            " decoding cannot be timed with; use bench.contexts=[] and bench.prefill=[]"
        )


def prefilled(model, ids: torch.Tensor, *, chunk: int = 512, tick=lambda tokens: None) -> States:
    """Keys and values of ids [T], computed with an exact cache."""
    cache, parts = DynamicCache(config=model.config), {}
    update = cache.update

    def keep(key, value, layer_idx, *args, **kwargs):
        parts.setdefault(layer_idx, []).append((key, value))
        return update(key, value, layer_idx, *args, **kwargs)

    cache.update = keep
    with torch.no_grad():
        for part in ids.split(chunk):
            model.base_model(part[None], cache=cache, use_cache=True)
            tick(len(part))
    del cache
    return {i: tuple(torch.cat(x, dim=2) for x in zip(*parts.pop(i), strict=True)) for i in sorted(parts)}


def filled(contender: Contender, states: States, tokens: int, batch: int) -> Cache:
    """A cache that holds the first `tokens` of the states in each of `batch` equal rows."""
    cache, dtype = contender.make(), contender.model.dtype
    for index, pair in states.items():
        key, value = (x[:, :, :tokens].to(dtype).expand(batch, -1, -1, -1) for x in pair)
        if type(cache.layers[index]) is CalibratedLayer:
            _fill(cache.layers[index], key, value)
        else:
            cache.update(key, value, index)
    return cache


def _fill(layer: CalibratedLayer, key: torch.Tensor, value: torch.Tensor) -> None:
    """What `update` and `attend` leave behind, without the attention between them."""
    positions = torch.arange(key.shape[2], device=key.device).expand(key.shape[0], -1)
    layer.lazy_initialization(key, value)
    layer.store.append(key, value, positions)
    layer.store.flush()


def held_bytes(cache: Cache) -> int:
    """Bytes of everything that the cache stores."""
    if type(cache) is CalibratedCache:
        return int(cache.memory_report()["total_bytes"])
    return sum(_stored({}, [vars(layer) for layer in cache.layers]).values())


def _stored(seen: dict[int, int], thing) -> dict[int, int]:
    """{address: bytes} of every tensor storage inside nested containers; quantised tensors are taken apart."""
    if isinstance(thing, torch.Tensor):
        if inner := getattr(thing, "__tensor_flatten__", None):
            names, _ = inner()
            return _stored(seen, [getattr(thing, name) for name in names])
        storage = thing.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
    elif isinstance(thing, dict):
        _stored(seen, list(thing.values()))
    elif isinstance(thing, (list, tuple)):
        for item in thing:
            _stored(seen, item)
    return seen
