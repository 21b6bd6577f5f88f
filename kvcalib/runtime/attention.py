"""The seam to transformers: one attention function, its mask function, and what a model carries while a cache lives.

A cache layer returns itself from `update` in place of keys and values. The models hand whatever they get to the
attention function registered in their config; `kvcalib` and its variant for eager attention call the layer's
`attend` for such a handle and the original function for plain tensors, so a model works with any other cache, or
none, as before. The mask function of the same name is the original's own; without it masks would be None and padded
rows wrong.

Falcon calls torch's scaled_dot_product_attention by itself. It gets a `TorchHandle`, which torch asks to answer in its
place; its attention setting stays as it is.

Position ids are read by a hook on the model's rotary module, the one place through which they pass in every family
(some models do not hand them to `Cache.update`). Hooks on its attention modules tell a cache that it is this model that
runs, and not another with a cache of its own; hooks on the whole and on its base, whether a pass came to its end. All
are kept per thread, so two threads may use one model.

`attach` knows the living caches of a model; when the last one is gone, the hooks and the attention setting are too.
"""

import sys
import threading
import weakref
from collections.abc import Iterator

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvcalib.errors import UnsupportedModel
from kvcalib.models.families import attends_by_torch, attention_modules
from kvcalib.runtime.handles import Handle, TorchHandle, foreign
from kvcalib.runtime.passes import Pass, call_of

_NAMES = {"sdpa": "kvcalib", "eager": "kvcalib_eager"}
_attachments: "weakref.WeakKeyDictionary[torch.nn.Module, Attachment]" = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def _attention_function(original: str):
    def attention(module, query, key, value, attention_mask, **options):
        def base(query, key, value, mask):
            return _original(module, original)(module, query, key, value, mask, **options)

        if isinstance(key, Handle):
            return key.attend(module, query, attention_mask, base, **options)
        return base(query, key, value, attention_mask)

    return attention


def _original(module, name: str):
    """Eager attention is a function of the model's own file; the others are registered."""
    if name == "eager":
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[name]


for _name, _ours in _NAMES.items():  # at import: a model that was pickled with our setting needs them, and has Watch
    AttentionInterface.register(_ours, _attention_function(_name))
    AttentionMaskInterface.register(_ours, ALL_MASK_ATTENTION_FUNCTIONS[_name])


class Watch:
    """Forward hooks that keep the pass of each thread: the innermost, where a hook calls the model again.

    Copies and pickles empty.
    """

    def __init__(self):
        self._seen = threading.local()

    def __reduce__(self):
        return Watch, ()

    def current(self) -> Pass:
        """The innermost pass that runs in this thread; one that is finished where only a part of the model does."""
        if not hasattr(self._seen, "passes"):
            self._seen.passes = [Pass()]
        passes = self._seen.passes
        while len(passes) > 2 and not passes[-1].running:  # Ctrl-C has left it behind, and somebody went on
            passes[-1].end()
            passes.pop()
        return passes[-1]

    def begin(self, module, _args) -> None:
        self.current()  # so that there is a list, without what Ctrl-C left behind
        call = call_of(module)
        first, *others = self._seen.passes
        outer = [each for each in others if each.running and not each.is_of(call)]
        for each in others:
            if each not in outer:
                each.end()
        self._seen.passes = [first, *outer, Pass(call)]

    def finish(self, module, _args, output) -> None:
        """Called after an error, too, but for Ctrl-C; then there is no output, and there may have been no `begin`."""
        self.current()  # so that there is a list, without what Ctrl-C left behind
        call = call_of(module)
        first, *others = self._seen.passes
        for depth, each in enumerate(others):
            if each.is_of(call):
                each.end() if output is None else each.finish()
                self._seen.passes = [first, *others[:depth]]
                return

    def begin_base(self, module, args) -> None:
        """The base of a model belongs to the pass of the whole, unless a hook calls it once more."""
        if not self.current().running or self.current().base is not None:
            self.begin(module, args)
        self.current().base = id(call_of(module))

    def finish_base(self, module, args, output) -> None:
        current, call = self.current(), call_of(module)
        if current.base == id(call) and not current.is_of(call):
            current.base = None
        else:
            self.finish(module, args, output)

    def positions(self, _module, args, kwargs) -> None:
        self.current().positions = kwargs["position_ids"] if "position_ids" in kwargs else args[1]

    def enter(self, _module, _args) -> None:
        self.current().inside = True

    def leave(self, _module, _args, _output) -> None:
        self.current().inside = False


class Attachment:
    """What one model carries while CalibratedCaches of it are alive."""

    def __init__(self, model):
        self.owners: list[weakref.ref] = []
        self.complete = False
        self._model = weakref.ref(model)
        self._watch, self._hooks = Watch(), []
        self._by_torch = attends_by_torch(model)
        self.original = _original_name(model)

    def positions(self) -> torch.Tensor | None:
        """Position ids [1 or B, T] of the forward pass that runs in this thread; None without rotary embedding.

        Raises UnsupportedModel where it is another model that runs.
        """
        if not self._watch.current().inside:
            raise foreign()
        positions = self._watch.current().positions
        if positions is None or positions.dim() < 3:
            return positions
        if (positions != positions[:1]).any():
            raise UnsupportedModel(
                "positions of images and video (height, width and time) cannot be cached; pass text alone"
            )
        return positions[0]  # one copy for each section of the rotary embedding

    def current_pass(self) -> Pass | None:
        """The pass that runs in this thread; None where only a part of the model does."""
        return self._watch.current() if self._watch.current().running else None

    def handle(self, layer: Handle, key: torch.Tensor, length: int):
        """What `update` returns for key [B, H, T, D] when `length` columns are cached."""
        return TorchHandle(layer, key, length) if self._by_torch else layer

    def insist(self) -> None:
        """Takes the attention setting back if somebody has changed it under a living cache."""
        model = self._model()
        if model is None or self._by_torch:
            return
        configs = model.config, model.base_model.config  # two where another head shares the base
        if any(config._attn_implementation not in _NAMES.values() for config in configs):
            self.original = _original_name(model)
            _set_attention(model, _NAMES[self.original])

    def switch_on(self, model) -> None:
        rotary, attention = _rotary_modules(model), list(attention_modules(model).values())
        if not self._by_torch:
            _set_attention(model, _NAMES[self.original])
        for module in [model, model.base_model, *rotary, *attention]:
            _remove_copied_hooks(module)
        self._hooks.append(model.register_forward_pre_hook(self._watch.begin))
        self._hooks.append(model.register_forward_hook(self._watch.finish, always_call=True))
        if model.base_model is not model:
            self._hooks.append(model.base_model.register_forward_pre_hook(self._watch.begin_base))
            self._hooks.append(model.base_model.register_forward_hook(self._watch.finish_base, always_call=True))
        for module in rotary:
            self._hooks.append(module.register_forward_pre_hook(self._watch.positions, with_kwargs=True))
        for module in attention:
            self._hooks.append(module.register_forward_pre_hook(self._watch.enter))
            self._hooks.append(module.register_forward_hook(self._watch.leave, always_call=True))
        self.complete = True

    def switch_off(self, model) -> None:
        self.complete = False
        if model.config._attn_implementation in _NAMES.values():  # else somebody has changed it since: theirs stays
            _set_attention(model, self.original)
        for hook in self._hooks:
            hook.remove()


def _original_name(model) -> str:
    """The model's own attention; a copy of an attached model still has ours in its config."""
    current = model.config._attn_implementation
    own = {ours: original for original, ours in _NAMES.items()}.get(current, current)
    allowed = ["sdpa"] if attends_by_torch(model) else sorted(_NAMES)
    if own not in allowed:
        raise UnsupportedModel(
            f"attention implementation {own!r} cannot read a quantised cache; "
            f"load the model with attn_implementation set to one of {allowed}"
        )
    return own


def _set_attention(model, name: str) -> None:
    """Of the text decoder: towers for images and sound keep what they have."""
    text = model.config.get_text_config(decoder=True)
    others = [(config, config._attn_implementation_internal) for config in _below(model.config) if config is not text]
    model.set_attn_implementation(name)
    for config, own in others:
        config._attn_implementation_internal = own  # the public name would set what is below, too


def _below(config) -> Iterator:
    """The configs inside of a config, at any depth."""
    for name in config.sub_configs:
        if (inner := getattr(config, name, None)) is not None:
            yield inner
            yield from _below(inner)


def _rotary_modules(model) -> list:
    return [module for name, module in model.named_modules() if name.rpartition(".")[2].startswith("rotary_emb")]


def _remove_copied_hooks(module) -> None:
    """Hooks that came along when an attached model was copied; not those of a living one that shares the module."""
    living = [attachment._watch for attachment in _attachments.values()]
    before = module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs
    after = module._forward_hooks, module._forward_hooks_always_called
    for hooks, flags in (before, after):
        for key, hook in list(hooks.items()):
            watch = getattr(hook, "__self__", None)
            if type(watch) is Watch and not any(watch is each for each in living):
                del hooks[key]
                flags.pop(key, None)


def attach(model, owner) -> Attachment:
    """Switches `model` to the kvcalib attention until `owner` (a cache) is garbage."""
    with _lock:
        attachment = _attachments.get(model)
        if attachment is None or not attachment.complete:  # an interrupt came while it was made
            if attachment is not None:
                attachment.switch_off(model)
            attachment = _attachments[model] = Attachment(model)
            attachment.switch_on(model)
        attachment.owners = [*filter(lambda ref: ref() is not None, attachment.owners), weakref.ref(owner)]
    weakref.finalize(owner, _sweep)
    _sweep()
    return attachment


def _sweep() -> None:
    """Switches off what no cache needs. Called wherever one becomes garbage, even inside `attach`: it waits for none.

    Whoever holds the lock meanwhile calls it after letting go; what an interrupt leaves is done with the next cache.
    """
    while _unused() and not _lock.locked():
        with _lock:
            for model in _unused():
                _attachments[model].switch_off(model)
                del _attachments[model]


def _unused() -> list:
    """Models of which no cache lives. Others may attach meanwhile: what is gone through is copied in one step."""
    found = ((model, _attachments.get(model)) for ref in _attachments.keyrefs() if (model := ref()) is not None)
    return [model for model, each in found if each is not None and all(ref() is None for ref in each.owners)]
