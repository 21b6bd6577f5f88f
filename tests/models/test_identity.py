import json
import subprocess
import sys

import torch

from kvcalib.models.identity import config_hash, identity, weights_hash
from tests.models.zoo import tiny


def test_equal_for_the_same_weights_and_json_ready():
    first, second = identity(tiny("llama")), identity(tiny("llama"))
    assert first == second
    assert json.loads(json.dumps(first)) == first
    assert first["shapes"]["1"] == [2, 16, 16, 4]


def test_config_hash_ignores_where_and_in_which_precision_the_model_was_loaded():
    model, other = tiny("llama"), tiny("llama").to(torch.bfloat16)
    other.config._name_or_path = "/some/folder"
    other.config.use_cache = False
    assert config_hash(model) == config_hash(other)
    assert weights_hash(model) != weights_hash(other)


def test_a_model_of_inference_mode_has_a_hash():
    with torch.inference_mode():
        model = tiny("llama").bfloat16().float()
    assert next(model.parameters()).is_inference()
    assert weights_hash(model) == weights_hash(tiny("llama").bfloat16().float())


def test_config_hash_sees_what_shapes_the_cache():
    base = config_hash(tiny("llama"))
    assert config_hash(tiny("llama", num_key_value_heads=1)) != base
    assert config_hash(tiny("llama-linear")) != base


def test_weights_hash_sees_any_key_or_value_weight_and_no_other():
    for family, name in [
        ("llama", "v_proj"),
        ("phi3", "qkv_proj"),
        ("qwen3", "k_norm"),
        ("gpt2", "c_attn"),
    ]:
        model = tiny(family)
        before = weights_hash(model)
        weights = dict(model.named_parameters())
        last = [key for key in weights if f".{name}." in key][-1]
        with torch.no_grad():
            weights[last].flatten()[-1] += 1
        assert weights_hash(model) != before, family
    model = tiny("llama")
    before = weights_hash(model)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert weights_hash(model) == before


def test_weights_hash_sees_writes_through_data():
    model = tiny("llama", hidden_size=256, num_attention_heads=4, head_dim=64)
    hashes = {weights_hash(model)}
    weight = model.model.layers[1].self_attn.k_proj.weight
    for change in (lambda w: w.add_(0.5), lambda w: w[3].mul_(2), lambda w: w[:, 5].mul_(2), lambda w: w.neg_()):
        change(weight.data)
        hashes.add(weights_hash(model))
    assert len(hashes) == 5


def test_the_hash_of_unchanged_weights_is_computed_once(monkeypatch):
    model = tiny("llama")
    before = weights_hash(model)
    monkeypatch.setattr("kvcalib.models.identity._hash", None)
    assert weights_hash(model) == before


def test_identity_is_stable_across_processes():
    code = (
        "from tests.models.zoo import tiny; from kvcalib.models.identity import identity;"
        "import json; print(json.dumps(identity(tiny('qwen3'))))"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=_environment()
    ).stdout
    assert json.loads(output.splitlines()[-1]) == identity(tiny("qwen3"))


def _environment():
    import os
    from pathlib import Path

    root = str(Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": root, "PYTHONHASHSEED": "7"}
