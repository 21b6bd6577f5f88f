"""What the capturing cache sees equals what the model computes, and the model is left as it was."""

import pytest
import torch

from kvcalib.calib import taps
from kvcalib.errors import ConfigError, UnsupportedModel
from kvcalib.models.families import attention_modules
from kvcalib.models.rotary import rotary
from kvcalib.quant.rope import to_post_rope, to_pre_rope
from tests.calib.conftest import make_windows
from tests.models.zoo import tiny

# family -> the module whose output is the key before rotary embedding
PRE_ROPE = {
    "llama": "k_proj",
    "llama-yarn": "k_proj",
    "qwen2": "k_proj",
    "qwen3": "k_norm",
    "phi": "k_proj",
    "gemma3_text": "k_norm",
    "cohere": "k_proj",
    "smollm3": "k_proj",
}


def captured(model, ids) -> dict:
    found = {}

    def on_kv(layer, key, value):
        found[layer] = (key, value)
        return key, value

    with torch.no_grad():
        output = taps.run(model, ids, on_kv, rotary(model), head=True)
    return found, output.logits


@pytest.mark.parametrize("family", PRE_ROPE)
def test_unrotated_key_is_the_projection(family):
    model, ids = tiny(family), make_windows(1, 40).ids[0]
    outputs = {}
    for index, module in attention_modules(model).items():
        tap = getattr(module, PRE_ROPE[family])
        tap.register_forward_hook(lambda m, a, out, index=index: outputs.__setitem__(index, out))
    found, _ = captured(model, ids)
    infos, positions = rotary(model), torch.arange(40)
    for layer, (key, _) in found.items():
        rope = taps.rope_of(infos[layer], key.shape[-1])
        pre = to_pre_rope(taps.by_token(key), positions, rope)
        heads = pre.shape[1]
        expected = outputs[layer].detach()
        if expected.dim() == 4 and expected.shape[1] == heads:  # norms after the transpose
            expected = expected.transpose(1, 2)
        expected = expected.reshape(40, heads, -1)[..., rope.order]
        torch.testing.assert_close(pre, expected, rtol=1e-4, atol=1e-4)
        again = to_post_rope(pre, positions, rope)
        torch.testing.assert_close(again, taps.by_token(key)[..., rope.order], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "qwen3_next", "gpt_neox"])
def test_capturing_does_not_change_the_model(family):
    model, ids = tiny(family), make_windows(1, 50).ids[0]
    found, logits = captured(model, ids)
    with torch.no_grad():
        torch.testing.assert_close(logits, model(ids[None]).logits)
    assert sorted(found) == sorted(rotary(model))


def test_what_on_kv_returns_is_attended_to(llama):
    ids = make_windows(1, 40).ids[0]
    _, logits = captured(llama, ids)
    with torch.no_grad():
        changed = taps.run(llama, ids, lambda i, k, v: (k, torch.zeros_like(v)), rotary(llama), head=True).logits
    assert (changed - logits).abs().max() > 1e-3


def test_layer_that_bypasses_the_cache_is_named(llama):
    class Deaf(taps.CaptureCache):
        def update(self, key_states, value_states, layer_idx, *args, **kwargs):
            if layer_idx == 1:
                return key_states, value_states
            return super().update(key_states, value_states, layer_idx)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(taps, "CaptureCache", Deaf)
        with pytest.raises(UnsupportedModel, match=r"layers \[1\]"):
            captured(llama, make_windows(1, 20).ids[0])


def _look_inside(model):
    with taps.frozen(model):
        assert not any(m.training for m in model.modules())
        assert not any(p.requires_grad for p in model.parameters())
        assert not any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
        raise RuntimeError("inside")


def test_frozen_restores_everything():
    model = tiny("llama", attention_dropout=0.5)
    model.gradient_checkpointing_enable()
    model.train()
    model.lm_head.eval()
    model.model.norm.weight.requires_grad_(False)
    before = [m.training for m in model.modules()], [p.requires_grad for p in model.parameters()]
    checkpointed = [getattr(m, "gradient_checkpointing", None) for m in model.modules()]
    with pytest.raises(RuntimeError, match="inside"):
        _look_inside(model)
    assert before == (
        [m.training for m in model.modules()],
        [p.requires_grad for p in model.parameters()],
    )
    assert checkpointed == [getattr(m, "gradient_checkpointing", None) for m in model.modules()]


def test_windows_beyond_the_frequencies_are_refused():
    infos = rotary(tiny("llama-dynamic"))
    taps.check_length(infos, 32)
    with pytest.raises(ConfigError, match="data.length=33"):
        taps.check_length(infos, 33)
