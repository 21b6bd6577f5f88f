import numpy as np
import pytest
import torch

from kvcalib.calib import taps
from kvcalib.calib.collect import FILE, collect
from kvcalib.calib.files import Reader
from kvcalib.errors import ConfigError
from kvcalib.fit.thresholds import tail_quantile
from kvcalib.models.rotary import rotary
from kvcalib.quant.rope import to_pre_rope
from tests.calib.conftest import SINK, make_windows, quiet
from tests.models.zoo import tiny


def statistics(model, windows, out, **kwargs):
    infos = rotary(model)
    collect(model, infos, windows, sink=SINK, out=out, progress=quiet, **kwargs)
    return Reader(out / FILE, "collect")


def whole_sample(model, windows, layer: int) -> dict:
    """Everything at once, [windows * (T - sink), H, D]."""
    parts = {"key": [], "key_post": [], "value": []}

    def on_kv(index, key, value):
        if index == layer:
            rope = taps.rope_of(infos[layer], key.shape[-1])
            tokens = taps.by_token(key)
            parts["key"].append(to_pre_rope(tokens, torch.arange(len(tokens)), rope)[SINK:])
            parts["key_post"].append(tokens[SINK:, :, rope.order])
            parts["value"].append(taps.by_token(value)[SINK:])
        return key, value

    infos = rotary(model)
    with torch.no_grad():
        for ids in windows.ids:
            taps.run(model, ids, on_kv, infos, head=False)
    return {name: torch.cat(part).double() for name, part in parts.items()}


def same(a: Reader, b: Reader, **tolerance) -> None:
    for layer in a.header["layers"]:
        for name in ("key", "key_post", "value"):
            for field in ("low", "high", "mean", "std"):
                tensor = f"layers.{layer}.{name}.{field}"
                torch.testing.assert_close(a[tensor], b[tensor], **tolerance)


@pytest.mark.parametrize("layer", [0, 1])
def test_percentiles_and_moments_of_everything_but_the_sink(llama, tmp_path, layer):
    windows = make_windows()
    reader = statistics(llama, windows, tmp_path, tail_share=0.03)
    for name, x in whole_sample(llama, windows, layer).items():
        field = {f: reader[f"layers.{layer}.{name}.{f}"] for f in ("low", "high", "mean", "std")}
        count = reader.header["count"]
        assert count == len(x) == 3 * 98
        found = tail_quantile(field["low"], field["high"], count=count, q_lo=0.02, q_hi=0.98)
        expected = np.percentile(x.numpy(), [2, 98], axis=0)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(field["mean"].double(), x.mean(0), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(field["std"].double(), x.std(0, correction=0), rtol=1e-4, atol=1e-5)


def test_order_of_windows_does_not_matter(llama, tmp_path):
    windows, flipped = make_windows(), make_windows()
    flipped.ids = flipped.ids.flip(0)
    a, b = statistics(llama, windows, tmp_path / "a"), statistics(llama, flipped, tmp_path / "b")
    same(a, b, rtol=1e-5, atol=1e-6)


def test_training_mode_and_checkpointing_change_nothing(llama, tmp_path):
    trained = tiny("llama", attention_dropout=0.5)
    trained.gradient_checkpointing_enable()
    trained.train()
    a = statistics(llama, make_windows(), tmp_path / "a")
    same(a, statistics(trained, make_windows(), tmp_path / "b"), rtol=0, atol=0)
    assert trained.training


def test_bfloat16_model(llama, tmp_path):
    a = statistics(llama, make_windows(), tmp_path / "a")
    b = statistics(tiny("llama").bfloat16(), make_windows(), tmp_path / "b")
    for name in ("layers.0.key.std", "layers.1.value.std"):
        torch.testing.assert_close(a[name], b[name], rtol=0.05, atol=0.01)


@pytest.mark.parametrize("family", ["qwen3_next", "gemma3_text", "gpt_neox", "cohere2"])
def test_keyed_by_the_real_layer_index(family, tmp_path):
    model = tiny(family)
    reader = statistics(model, make_windows(1, 40), tmp_path)
    assert reader.header["layers"] == sorted(rotary(model))


def test_not_a_number_names_the_layer(tmp_path):
    model = tiny("llama")
    model.model.layers[1].self_attn.v_proj.weight.data[3] = float("nan")
    with pytest.raises(ConfigError, match=r"layer 1: value .*model\.dtype"):
        statistics(model, make_windows(1, 40), tmp_path)
    assert not list(tmp_path.iterdir())
