"""`CalibratedCache`: a transformers Cache that keeps keys and values in the bits of a calibrated artifact.

cache = CalibratedCache.from_pretrained("runs/smollm2-mixed3/export/kvcalib.safetensors", model)
model.generate(**inputs, cache=cache)
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from kvcalib.artifact.io import load_artifact
from kvcalib.artifact.schema import Artifact, LayerTables, check_model, validate
from kvcalib.errors import ArtifactError, UnsupportedModel
from kvcalib.models.identity import identity
from kvcalib.quant.spec import CacheSpec
from kvcalib.runtime.attention import attach
from kvcalib.runtime.layer import CalibratedLayer
from kvcalib.runtime.memory import memory_report
from kvcalib.runtime.modes import undisturbed
from kvcalib.runtime.persist import gather, load_cache, save_cache
from kvcalib.runtime.ropes import layer_ropes
from kvcalib.runtime.states import States
from kvcalib.runtime.undo import Undo, in_the_middle


class CalibratedCache(Cache):
    """artifact: from `kvcalib.load_artifact`; model: the transformers model that was calibrated.

    Raises ArtifactError when the artifact belongs to another model, UnsupportedModel when the model has a kind of
    layer that cannot be cached this way.
    """

    def __init__(self, artifact: Artifact, model):
        _check_kinds(artifact, model)
        check_model(artifact, identity(model))
        self._model, self._artifact = model, artifact
        self._attachment = attach(model, self)
        with undisturbed():
            layers = build_layers(model, artifact.spec, artifact.layers, self._attachment)
        super().__init__(layers=layers)
        self._watch_states()

    def _watch_states(self) -> None:
        self._states = States(self.layers)
        self._states_undo = Undo(self._states, self._attachment)

    @classmethod
    def from_pretrained(cls, path_or_hub_id: str | Path, model) -> "CalibratedCache":
        """path_or_hub_id: the artifact file, a folder that holds it, the folder of a run, or a hub id."""
        return cls(load_artifact(path_or_hub_id), model)

    @classmethod
    def load(cls, path: str | Path, artifact: Artifact | str | Path, model) -> "CalibratedCache":
        """The cache that `save` wrote, ready to go on. artifact: the one that filled it, or where that is.

        Raises ArtifactError when the file is damaged, or was saved with another artifact or another model.
        """
        cache = cls(artifact, model) if type(artifact) is Artifact else cls.from_pretrained(artifact, model)
        with undisturbed():
            load_cache(cache.layers, cache._artifact, model, path)
        return cache

    def save(self, path: str | Path) -> Path:
        """Writes everything the cache holds to one safetensors file, whole or not at all; see runtime/persist.py.

        The file names the model's weights as they are now: save before they are changed.
        """
        with self._at_rest():
            held = gather(self.layers)
        return save_cache(held, self._artifact, self._model, path)

    def memory_report(self) -> dict:
        """Every byte that the cache holds, and what it comes to per element; see runtime/memory.py."""
        for undo in self._undos():
            undo.tidy()
        return memory_report(self._ours(), self._states.tensors())

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the last -tokens_to_remove tokens of every layer."""
        with self._all_or_nothing():
            super().crop(tokens_to_remove)

    def reorder_cache(self, beam_idx) -> None:
        with self._all_or_nothing():
            super().reorder_cache(beam_idx)

    def batch_select_indices(self, indices) -> None:
        with self._all_or_nothing():
            super().batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        with self._all_or_nothing():
            super().batch_repeat_interleave(repeats)

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """What raises leaves all layers as they were."""
        self._settle()
        held = [self._states, *(layer.store for layer in self._ours())]
        before = [each.state() for each in held]
        try:
            yield
        except BaseException:
            for each, state in zip(held, before, strict=True):
                each.restore(state)
            raise

    @contextmanager
    def _at_rest(self) -> Iterator[None]:
        """Raises ConfigError where a pass runs, or has begun in another thread before this is over."""
        begun = [undo.begun for undo in self._undos()]
        self._settle()
        try:
            yield
        finally:
            self._settle()
            if begun != [undo.begun for undo in self._undos()]:
                raise in_the_middle()

    def _undos(self) -> list[Undo]:
        return [self._states_undo, *(layer.undo for layer in self._ours())]

    def _settle(self) -> None:
        for each in (self._states_undo, *self._ours()):
            each.settle()

    # --- states of linear attention, which a model reads and then changes in place --------------------------------

    def get_conv_state(self, *args, **kwargs):
        self._states_undo.begin()
        return super().get_conv_state(*args, **kwargs)

    def get_recurrent_state(self, *args, **kwargs):
        self._states_undo.begin()
        return super().get_recurrent_state(*args, **kwargs)

    def update_conv_state(self, *args, **kwargs):
        self._states_undo.begin()
        return super().update_conv_state(*args, **kwargs)

    def update_recurrent_state(self, *args, **kwargs):
        self._states_undo.begin()
        return super().update_recurrent_state(*args, **kwargs)

    def has_previous_state(self, *args, **kwargs) -> bool:
        self._states_undo.take_back()
        return super().has_previous_state(*args, **kwargs)

    def reset(self) -> None:
        super().reset()
        self._states_undo.commit()

    def __iter__(self):
        raise UnsupportedModel("a CalibratedCache holds no plain keys and values to go through; DynamicCache does")

    def _ours(self) -> list[CalibratedLayer]:
        return [layer for layer in self.layers if type(layer) is CalibratedLayer]

    def __reduce_ex__(self, protocol):
        raise UnsupportedModel(
            "a CalibratedCache belongs to a model in this process and is not pickled; cache.save(path) writes it to a"
            " file, copy.deepcopy makes a second one"
        )

    def __deepcopy__(self, memo) -> "CalibratedCache":
        """A cache of its own over the same model and tables."""
        twin = CalibratedCache(self._artifact, self._model)
        with undisturbed(), self._at_rest():
            twin.layers = copy.deepcopy(self.layers, memo | {id(self._attachment): self._attachment})
        twin._watch_states()
        return twin


def _check_kinds(artifact: Artifact, model) -> None:
    if not isinstance(artifact, Artifact):
        raise ArtifactError(
            f"CalibratedCache needs an artifact from load_artifact(path), not {type(artifact).__name__};"
            " for a path use CalibratedCache.from_pretrained(path, model)"
        )
    validate(artifact)  # it may have been changed in Python
    compiled = hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None
    if compiled or hasattr(getattr(model, "forward", None), "_torchdynamo_orig_callable"):
        raise UnsupportedModel(
            "a model under torch.compile cannot use a CalibratedCache: a compiled graph fixes its shapes, a cache"
            " grows; pass the model as it was before torch.compile"
        )
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModel(
            f"CalibratedCache needs the transformers model itself, not {type(model).__name__}; pass a PreTrainedModel"
        )


def build_layers(model, spec: CacheSpec, tables: dict[int, LayerTables], attachment) -> list:
    """One layer per decoder layer: ours where the artifact has tables, transformers' own elsewhere."""
    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    for index, (rope, *reach) in layer_ropes(model, tables).items():
        layers[index] = CalibratedLayer(spec, tables[index].key, tables[index].value, rope, attachment, *reach)
    return layers
