"""The decisive test: un-rotating what reaches the cache gives the key as projected.

The projected key is taken independently, from a hook on the last module that makes it.
"""

import pytest
import torch
from transformers import DynamicCache

from kvcalib.errors import UnsupportedModel
from kvcalib.models.families import attention_modules, layer_shapes
from kvcalib.models.rotary import RotaryInfo, check_length, check_rotary, rotary, unrotate_key, valid_length
from kvcalib.quant.rope import make_rope, to_pre_rope
from tests.models.zoo import FAMILIES, tiny


def capture(model, ids, **kwargs):
    """Keys [H, T, D] as they reach Cache.update, by layer."""
    keys, cache = {}, DynamicCache(config=model.config)
    update = cache.update

    def record(key, value, layer_idx, *args, **inner):
        keys[layer_idx] = key[0].clone()
        return update(key, value, layer_idx, *args, **inner)

    cache.update = record
    with torch.no_grad():
        model(ids[None], cache=cache, **kwargs)
    return keys


def projected(model, ids, **kwargs):
    """Keys [H, T, D] before RoPE, from hooks on the last module that makes them."""
    taps, shapes = {}, layer_shapes(model)
    handles = []
    for index, layer in attention_modules(model).items():
        name, read = last_module(layer, shapes[index])
        hook = lambda _m, _a, out, i=index, read=read: taps.__setitem__(i, read(out[0]))  # noqa: E731
        handles.append(getattr(layer, name).register_forward_hook(hook))
    capture(model, ids, **kwargs)
    for handle in handles:
        handle.remove()
    return taps


def last_module(layer, shape):
    """(name, function) of the module whose output, cut by the function, is the key before RoPE."""
    heads, dim = shape.heads, shape.key_dim

    def flat(out):  # [T, H*D] or [T, H, D]
        return out.reshape(out.shape[0], heads, dim).transpose(0, 1)

    def by_head(out):  # [H, T, D] or [T, H, D], told apart by the head axis
        return out if out.shape[0] == heads else out.transpose(0, 1)

    for name in ("k_norm", "k_layernorm"):
        if getattr(layer, name, None) is not None:
            return name, (flat if type(layer).__name__.startswith("Olmo") else by_head)
    if hasattr(layer, "qkv_proj"):
        start = shape.query_heads * dim
        return "qkv_proj", lambda out: flat(out[:, start : start + heads * dim])
    if hasattr(layer, "_split_heads"):  # Falcon cuts its fused projection in one of three ways
        return "query_key_value", lambda out: layer._split_heads(out[None])[1][0].transpose(0, 1)
    if hasattr(layer, "query_key_value"):
        return "query_key_value", lambda out: out.view(-1, heads, 3, dim)[:, :, 1].transpose(0, 1)
    if hasattr(layer, "kv_heads"):  # GPTBigCode: all queries, then one key and one value head
        return "c_attn", lambda out: flat(out[:, -2 * heads * dim : -heads * dim])
    if hasattr(layer, "c_attn"):
        return "c_attn", lambda out: flat(out.chunk(3, dim=-1)[1])
    return "k_proj", flat


def unrotated(keys, positions, infos):
    """Un-rotate with the package's own rope functions, back in the model's channel order."""
    result = {}
    for index, info in infos.items():
        rope = make_rope(keys[index].shape[-1], info.kind, info.inv_freq, info.scaling)
        canonical = to_pre_rope(keys[index].transpose(0, 1), positions, rope)
        result[index] = canonical[..., rope.order.argsort()].transpose(0, 1)
    return result


def assert_recovered(model, ids, infos, first=0):
    positions = torch.arange(first, first + len(ids))
    kwargs = {"position_ids": positions[None]}
    recovered = unrotated(capture(model, ids, **kwargs), positions, infos)
    expected = projected(model, ids, **kwargs)
    assert set(recovered) == set(expected) == set(infos)
    for index, key in expected.items():
        scale = key.abs().max()
        assert scale > 0.1
        torch.testing.assert_close(recovered[index] / scale, key / scale, atol=1e-5, rtol=0)


@pytest.fixture
def ids(generator):
    return torch.randint(3, 256, (24,), generator=generator)


@pytest.mark.parametrize("family", FAMILIES)
def test_unrotated_cached_key_is_the_projected_key(family, ids):
    model = tiny(family)
    assert_recovered(model, ids, rotary(model))


@pytest.mark.parametrize("family", FAMILIES)
def test_check_accepts_what_rotary_found(family):
    model = tiny(family)
    check_rotary(model, rotary(model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama-yarn", "qwen3", "glm", "gemma3_text"])
def test_half_precision_keeps_frequencies_and_passes_the_check(family, dtype):
    exact = rotary(tiny(family))
    model = tiny(family).to(dtype)
    for index, info in rotary(model).items():
        assert info.inv_freq.dtype == torch.float32
        assert info.kind == exact[index].kind
    check_rotary(model, rotary(model))


@pytest.mark.parametrize("family", ["llama", "cohere", "glm", "smollm3", "phi3-longrope", "gemma3_text"])
def test_check_catches_a_wrong_description(family):
    model = tiny(family)
    right = rotary(model)
    index = max(right)
    info = right[index]
    wrong = {"half": "interleaved", "interleaved": "half", "none": "half"}[info.kind]
    dims = info.dims or 16
    frequencies = info.inv_freq if info.dims else torch.ones(8)
    broken = RotaryInfo(wrong, dims, frequencies, info.scaling, info.sliding_window)
    with pytest.raises(UnsupportedModel, match=f"layer {index} "):
        check_rotary(model, {**right, index: broken})
    if info.kind != "none" and info.valid_to is None:
        broken = RotaryInfo(info.kind, dims, frequencies * 1.5, info.scaling, info.sliding_window)
        with pytest.raises(UnsupportedModel, match=f"layer {index} "):
            check_rotary(model, {**right, index: broken})


@pytest.mark.parametrize("family", ["phi3-longrope", "llama-dynamic"])
def test_beyond_the_original_length_the_frequencies_are_the_models(family, generator):
    model = tiny(family)
    short = rotary(model)
    assert short[0].valid_to == 32
    ids = torch.randint(3, 256, (60,), generator=generator)
    long = rotary(model, length=60)
    assert not torch.equal(long[0].inv_freq, short[0].inv_freq)
    assert_recovered(model, ids, long)
    check_rotary(model, long)
    after = rotary(model)
    assert torch.equal(after[0].inv_freq, short[0].inv_freq)


def test_reading_the_frequencies_does_not_disturb_the_model(generator):
    model = tiny("llama-dynamic")
    ids = torch.randint(3, 256, (60,), generator=generator)
    before = capture(model, ids)
    rotary(model)
    rotary(model, length=40)
    after = capture(model, ids)
    assert all(torch.equal(before[i], after[i]) for i in before)


def test_partial_scaled_and_unrotated_layers():
    assert rotary(tiny("gpt_neox"))[0].dims == 4
    assert rotary(tiny("glm"))[0].kind == "interleaved"
    assert rotary(tiny("llama-yarn"))[0].scaling > 1.1
    assert [info.kind for info in rotary(tiny("smollm3")).values()] == ["half"] * 3 + ["none"]
    assert [info.kind for info in rotary(tiny("gpt2")).values()] == ["none"] * 2


def test_sliding_windows_and_per_type_frequencies():
    infos = rotary(tiny("gemma3_text"))
    assert [info.sliding_window for info in infos.values()] == [16] * 5 + [None]
    assert not torch.equal(infos[0].inv_freq, infos[5].inv_freq)
    assert rotary(tiny("mistral"))[1].sliding_window == 16
    assert rotary(tiny("qwen2"))[0].sliding_window is None


def test_unrotate_key_leaves_the_tail_of_a_partial_head():
    info = rotary(tiny("gpt_neox"))[0]
    key = torch.randn(1, 4, 1, 16)
    turned = unrotate_key(key, 5, info)
    assert torch.equal(turned[..., 4:], key[..., 4:])
    assert not torch.allclose(turned[..., :4], key[..., :4])
    torch.testing.assert_close(turned[..., :4].norm(dim=-1), key[..., :4].norm(dim=-1))


def test_sequences_longer_than_the_frequencies_hold_are_refused():
    assert valid_length(rotary(tiny("llama"))) is None
    limit = valid_length(rotary(tiny("llama-dynamic")))
    assert limit == 32
    check_length(10**9, None)
    check_length(32, limit)
    with pytest.raises(UnsupportedModel, match="33 tokens is too long .* within 32 tokens"):
        check_length(33, limit)
    assert valid_length(rotary(tiny("llama-dynamic"), length=60)) == 60
    assert valid_length(rotary(tiny("phi3-longrope"), length=60)) is None
