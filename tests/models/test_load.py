import json
import logging
import os
import shutil
import time

import pytest
import torch
from huggingface_hub import constants

from kvcalib.errors import ConfigError, MissingInput, UnsupportedModel
from kvcalib.kernels.cpu import build
from kvcalib.kernels.cpu.build import CannotBuild
from kvcalib.models import gguf
from kvcalib.models.expanded import expanded_folder
from kvcalib.models.load import load_model
from kvcalib.models.tiny import random_model

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
GGUF_CONFIG = {**CONFIG, "vocab_size": 260}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A tiny model and its tokenizer in a folder."""
    folder = tmp_path_factory.mktemp("model")
    for part in random_model(CONFIG, seed=0):
        part.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A copy to damage."""
    return shutil.copytree(saved, tmp_path / "model")


def edit(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def load(path, **kwargs):
    return load_model(source="hub", path=str(path), **kwargs)


def refused(path, kind=MissingInput, **kwargs) -> str:
    with pytest.raises(kind) as caught:
        load(path, **kwargs)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert len(sentence) < 400
    return sentence


def test_folder(saved):
    model, tokenizer = load(saved)
    original, _ = random_model(CONFIG, seed=0)
    assert not model.training
    assert torch.equal(model.lm_head.weight, original.lm_head.weight)
    assert tokenizer("ab").input_ids == [97, 98]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype(saved, dtype):
    assert str(load(saved, dtype=dtype)[0].dtype) == f"torch.{dtype}"
    tiny, _ = load_model(source="random", config=CONFIG, dtype=dtype)
    assert str(tiny.dtype) == f"torch.{dtype}"


def test_auto_dtype_is_that_of_the_checkpoint(folder):
    random_model(CONFIG, seed=0)[0].to(torch.bfloat16).save_pretrained(folder)
    assert load(folder)[0].dtype == torch.bfloat16
    assert load_model(source="random", config=CONFIG)[0].dtype == torch.float32


def test_path_overrides_every_source(saved):
    for source in ("gguf", "random"):
        model, _ = load_model(source=source, path=str(saved), config={}, packages=["nothing"])
        assert model.config.hidden_size == 64


def test_loading_says_nothing(folder, capfd, caplog):
    caplog.set_level(logging.INFO)
    load(folder)
    edit(folder, num_hidden_layers=3)
    refused(folder)
    assert capfd.readouterr() == ("", "")
    assert not caplog.records


def test_settings_of_transformers_are_left_as_they_were(saved):
    from transformers.utils import logging as hf_logging

    before = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    load(saved)
    assert (hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()) == before


def test_missing_folder_file_or_source(tmp_path):
    assert "no such folder" in refused(tmp_path / "nothing")
    assert "no such file" in refused(tmp_path / "nothing.gguf")
    (tmp_path / "a.txt").write_text("x")
    assert "is a file" in refused(tmp_path / "a.txt")
    with pytest.raises(ConfigError, match=r"model\.path"):
        load_model(source="hub")


def test_incomplete_folders(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "pickled" in refused(folder)
    (folder / "pytorch_model.bin").rename(folder / "m.gguf")
    assert f"did you mean model.path={folder / 'm.gguf'}" in refused(folder)
    (folder / "config.json").unlink()
    assert "no config.json" in refused(folder)


def test_a_missing_shard_is_named(folder):
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "no model-00001-of-00002.safetensors" in refused(folder)


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"weight_map": []}'])
def test_a_damaged_list_of_shards(folder, text):
    (folder / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json is damaged" in refused(folder)


def test_words_that_are_none(tmp_path):
    with pytest.raises(ConfigError, match="model.dtype=fp16 must be auto, float32, bfloat16, float16"):
        load_model(source="random", dtype="fp16")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="device=cuda but torch sees no GPU"):
            load_model(source="random", device="cuda")
    with pytest.raises(MissingInput, match="there is no such folder"):
        load_model(source="hub", path=tmp_path / "nothing")


def test_a_machine_without_a_home(monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("pathlib.Path.home", homeless)
    with pytest.raises(MissingInput, match="set XDG_CACHE_HOME or HOME"):
        gguf.cache_home()
    with pytest.raises(CannotBuild, match="set XDG_CACHE_HOME or HOME"):
        build._library("g++")


def test_a_folder_without_tokenizer(folder):
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert "no tokenizer" in refused(folder)


def test_damaged_files(folder):
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(2000)
    assert "weights are damaged" in refused(folder)
    edit(folder, num_attention_heads=7)
    assert "config.json is damaged" in refused(folder)
    (folder / "config.json").write_text("{")
    assert "config.json is damaged" in refused(folder)
    (folder / "x.gguf").write_bytes(b"nope" * 9)
    assert "not a GGUF file" in refused(folder / "x.gguf")


def test_weights_that_the_checkpoint_lacks_are_not_drawn_at_random(folder):
    edit(folder, num_hidden_layers=3)
    assert "lacks 9 weights, for instance model.layers.2." in refused(folder)


def test_weights_of_other_shapes(folder):
    edit(folder, intermediate_size=100)
    assert "do not fit the config" in refused(folder)


def test_model_types_that_transformers_does_not_know(folder):
    edit(folder, model_type="zzz")
    assert "pip install --upgrade transformers" in refused(folder, UnsupportedModel)
    edit(folder, auto_map={"AutoConfig": "code.Config"})
    assert "code that comes with weights is not run" in refused(folder, UnsupportedModel)
    edit(folder, model_type="t5", auto_map={})
    assert "'t5' is not a causal language model" in refused(folder, UnsupportedModel)


def test_hub_id_offline_is_a_sentence_at_once(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    begun = time.monotonic()
    sentence = refused("meta-llama/Llama-2-7b-hf")
    assert time.monotonic() - begun < 3
    assert "meta-llama/Llama-2-7b-hf" in sentence
    assert "refused" in sentence
    assert "hf download meta-llama/Llama-2-7b-hf --local-dir FOLDER" in sentence
    assert "model.path=FOLDER" in sentence
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in refused("meta-llama/Llama-2-7b-hf")
    assert "neither a folder here nor a hub id" in refused("no such/folder/here")


def test_what_the_hub_refuses_says_what_to_do(monkeypatch):
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    from kvcalib.models import hub

    class Response:
        status_code, headers, request = 403, {}, None

    def snapshot(name, *, local_files_only=False, **kwargs):
        if local_files_only:
            raise LocalEntryNotFoundError("not cached")
        raise answer

    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    monkeypatch.setattr("kvcalib.hub.why_unreachable", lambda: None)
    for kind, words in [
        (GatedRepoError, "accept its licence on https://huggingface.co/owner/name"),
        (RepositoryNotFoundError, "no such public repository"),
        (RevisionNotFoundError, "owner/name (model.revision=v9): it has no such revision"),
    ]:
        answer = kind("denied", response=Response())
        assert words in refused("owner/name", revision="v9")
    answer = OSError("connection reset")
    assert "the download failed (connection reset)" in refused("owner/name")


def test_a_cached_hub_model_needs_no_network(saved, monkeypatch):
    from kvcalib.models import hub

    def snapshot(name, *, local_files_only=False, **kwargs):
        assert local_files_only, "went to the network"
        return str(saved)

    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    assert load("owner/name")[0].config.hidden_size == 64


def test_a_model_that_does_not_fit_the_device(monkeypatch, saved):
    def full(self, device):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr("transformers.PreTrainedModel.to", full)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(ConfigError, match="GiB of weights do not fit on device=cuda"):
        load(saved, device="cuda")


def gguf_of(model, file):
    """The tiny llama as a .gguf file with a byte vocabulary, as llama.cpp would write it."""
    import gguf

    from kvcalib.models.tiny import byte_tokenizer

    config, writer = model.config, gguf.GGUFWriter(file, "llama")
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    vocabulary = {**byte_tokenizer().get_vocab(), "ab": 259}
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(vocabulary, key=vocabulary.get))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        base, _, suffix = name.rpartition(".")
        writer.add_tensor(f"{names.get_name(base)}.{suffix}", weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def gguf_file(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "tiny.gguf"
    gguf_of(random_model(GGUF_CONFIG, seed=0)[0], file)
    return file


def expansions(tmp_path):
    return sorted((tmp_path / "cache" / "kvcalib").glob("tiny-*"))


def test_gguf_is_expanded_once(gguf_file, tmp_path, monkeypatch):
    first, tokenizer = load(gguf_file, dtype="float32")
    original, _ = random_model(GGUF_CONFIG, seed=0)
    assert torch.equal(first.model.embed_tokens.weight, original.model.embed_tokens.weight)
    [kept] = expansions(tmp_path)
    assert kept.name.startswith("tiny-float32-")
    monkeypatch.setattr("kvcalib.models.load._read_gguf", None)  # never read again
    again, same = load(gguf_file, dtype="float32")
    for name, weight in first.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name
    assert tokenizer("hello").input_ids == same("hello").input_ids


def test_an_expansion_that_is_damaged_is_made_anew(gguf_file, tmp_path):
    load(gguf_file, dtype="float32")
    [kept] = expansions(tmp_path)
    (kept / "model.safetensors").write_bytes(b"cut")
    load(gguf_file, dtype="float32")
    assert (kept / "model.safetensors").stat().st_size > 1000
    assert sorted(p.name for p in kept.parent.iterdir()) == [".sha256", kept.name]


def test_another_content_under_the_same_name_is_another_expansion(gguf_file, tmp_path):
    load(gguf_file, dtype="float32")
    gguf_of(random_model(GGUF_CONFIG, seed=9)[0], gguf_file)
    model, _ = load(gguf_file, dtype="float32")
    other, _ = random_model(GGUF_CONFIG, seed=9)
    assert torch.equal(model.model.embed_tokens.weight, other.model.embed_tokens.weight)
    assert len(expansions(tmp_path)) == 2, "what another process may be reading is not deleted"


def test_copies_of_a_file_share_an_expansion(gguf_file, tmp_path, monkeypatch):
    load(gguf_file, dtype="float32")
    (tmp_path / "clone").mkdir()
    copy = shutil.copy(gguf_file, tmp_path / "clone" / "tiny.gguf")
    monkeypatch.setattr("kvcalib.models.load._read_gguf", None)
    load(copy, dtype="float32")
    monkeypatch.setattr("kvcalib.models.expanded.file_hash", None)  # both are remembered
    load(copy, dtype="float32")
    load(gguf_file, dtype="float32")


def test_two_processes_expand_the_same_file(gguf_file, tmp_path, monkeypatch):
    from kvcalib.models import load as module

    read = module._read_gguf

    def slow(*arguments):
        parts = read(*arguments)
        monkeypatch.setattr(module, "_read_gguf", read)
        load(gguf_file, dtype="float32")  # the other process is done first
        return parts

    monkeypatch.setattr(module, "_read_gguf", slow)
    load(gguf_file, dtype="float32")
    [kept] = expansions(tmp_path)
    assert sorted(p.name for p in kept.parent.iterdir()) == [".sha256", kept.name]


def test_an_expansion_is_announced(gguf_file, caplog, capsys):
    caplog.set_level(logging.INFO)
    load(gguf_file, dtype="float32")
    assert "expanding tiny.gguf" in caplog.text
    assert "expanded in" in caplog.text
    assert "4/4" in capsys.readouterr().err


def test_what_a_killed_expansion_left_is_deleted_after_a_day(gguf_file):
    folder = expanded_folder(gguf_file, torch.float32).parent
    for name, age in (("yesterday", 25), ("running", 1)):
        (left := folder / f".partial-{name}").mkdir(parents=True)
        (left / "model").touch()
        os.utime(left, times=(time.time() - age * 3600,) * 2)
    load(gguf_file, dtype="float32")
    assert [path.name for path in folder.glob(".partial-*")] == [".partial-running"]


def test_gguf_loads_where_no_expansion_can_be_kept(gguf_file, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    model, _ = load(gguf_file, dtype="float32")
    assert model.config.hidden_size == 64
    assert "cannot keep the expanded weights" in caplog.text


def test_gguf_in_a_folder_by_name(gguf_file, tmp_path):
    model, _ = load_model(source="gguf", path=str(tmp_path), gguf_file="tiny.gguf")
    assert model.dtype == torch.float32


def test_damaged_and_unknown_gguf(gguf_file):
    content = gguf_file.read_bytes()
    gguf_file.write_bytes(content.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0llamx", 1))
    assert "cannot read tiny.gguf" in refused(gguf_file, UnsupportedModel)
    gguf_file.write_bytes(content[: len(content) // 2])
    with pytest.raises((MissingInput, UnsupportedModel), match=r"tiny\.gguf"):
        load(gguf_file)


def test_a_gguf_of_a_few_bytes_is_a_sentence(tmp_path):
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\3\0\0\0xx")
    assert "cut.gguf is damaged" in refused(tmp_path / "cut.gguf")


@pytest.mark.parametrize(
    ("error", "package"),
    [
        (ImportError("This needs Accelerate: `pip install 'accelerate>=0.26.0'`"), "accelerate"),
        (ImportError("Please install torch and gguf>=0.10.0 to load a GGUF checkpoint in PyTorch."), "gguf"),
        (ModuleNotFoundError("No module named 'a.b'", name="a.b"), "a"),
    ],
)
@pytest.mark.parametrize("what", ["AutoConfig", "AutoTokenizer", "AutoModelForCausalLM"])
def test_a_missing_package_is_named(saved, gguf_file, monkeypatch, caplog, error, package, what):
    def lacking(*args, **kwargs):
        raise error

    load(gguf_file, dtype="float32")
    monkeypatch.setattr(f"kvcalib.models.load.{what}.from_pretrained", lacking)
    for path in (saved, gguf_file):
        sentence = refused(path, dtype="float32")
        assert f"pip install --upgrade {package}`" in sentence
        assert "damaged" not in sentence
    assert "damaged" not in caplog.text


def test_a_missing_package_without_a_name(saved, monkeypatch):
    def lacking(*args, **kwargs):
        raise ImportError("something is missing")

    monkeypatch.setattr("kvcalib.models.load.AutoTokenizer.from_pretrained", lacking)
    assert "(something is missing)" in refused(saved)


def test_loading_is_a_public_name():
    import kvcalib

    assert kvcalib.load_model is load_model
    assert "load_model" in dir(kvcalib)
