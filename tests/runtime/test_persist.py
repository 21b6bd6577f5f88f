"""A saved cache continues in another process as it would have in its own, and nowhere else."""

import copy
import json
import os
import threading

import pytest
import torch
from safetensors.torch import load_file, safe_open, save_file

from kvcalib.artifact.fingerprint import checksum
from kvcalib.artifact.io import load_artifact, save_artifact
from kvcalib.errors import ArtifactError, ConfigError
from kvcalib.runtime.cache import CalibratedCache
from tests.helpers import cache_spec, filled, left_padded, make_artifact
from tests.models.zoo import tiny


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


@pytest.fixture(scope="module")
def ids():
    return torch.randint(3, 300, (3, 150), generator=torch.Generator().manual_seed(8))


@pytest.fixture(scope="module")
def artifact(model, ids):
    return make_artifact(model, cache_spec("static", "token", window=8, sink=2), ids[:1])


def assert_same_store(ours, theirs):
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        if not hasattr(mine, "store"):
            continue
        mine, other = mine.store, other.store
        assert (mine.page_counts, mine.sink_counts, mine.length) == (other.page_counts, other.sink_counts, other.length)
        for row, count in enumerate(mine.page_counts):
            assert torch.equal(mine.pages[row, :count], other.pages[row, :count])
        for a, b in zip(mine.recent(), other.recent(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    "family", ["llama", "mistral", "gemma3_text", "qwen3_next", "gpt2", "llama-yarn", "glm", "phi3-longrope"]
)
@pytest.mark.parametrize("rows", [1, 3])
def test_the_same_continuation_after_a_trip_through_a_file(family, rows, ids, tmp_path):
    model = tiny(family)
    ids = ids[:rows, : 30 if "longrope" in family else 150]
    mask = left_padded(ids) if rows > 1 and "longrope" not in family else None
    artifact = make_artifact(model, cache_spec("static", "token", window=4, sink=2), ids[:1])
    cache = filled(artifact, model, ids, mask)
    path = cache.save(tmp_path / "deep" / "prefix.safetensors")
    again = CalibratedCache.load(path, artifact, tiny(family))
    assert_same_store(cache, again)
    assert again.get_seq_length() == ids.shape[1]
    assert list(tmp_path.glob("deep/*")) == [path]
    (tmp_path / "other").touch()
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode
    more = None if mask is None else torch.cat([mask, torch.ones(rows, 2, dtype=mask.dtype)], 1)
    with torch.no_grad():
        for step in range(2):
            seen = None if more is None else more[:, : more.shape[1] - 1 + step]
            ours = model(ids[:, :1], attention_mask=seen, cache=cache).logits
            theirs = again._model(ids[:, :1], attention_mask=seen, cache=again).logits
            assert torch.equal(ours, theirs)
    assert_same_store(cache, again)


def test_an_artifact_is_the_same_before_and_after_a_trip_through_a_file(model, ids, tmp_path):
    """Also what the file keeps in fewer bits."""
    artifact = make_artifact(model, cache_spec("feedback", "norm", window=8, sink=2), ids[:1])
    loaded = load_artifact(save_artifact(artifact, tmp_path / "artifact.safetensors"))
    path = filled(loaded, model, ids).save(tmp_path / "prefix.safetensors")
    assert CalibratedCache.load(path, artifact, model).get_seq_length() == ids.shape[1]


def test_generate_after_loading_by_path_of_the_artifact(model, ids, artifact, tmp_path):
    where = save_artifact(artifact, tmp_path / "kvcalib.safetensors")
    cache = filled(artifact, model, ids[:1])
    path = cache.save(tmp_path / "prefix.safetensors")
    prompt, options = torch.cat([ids[:1], ids[1:2, :9]], 1), {"max_new_tokens": 40, "do_sample": False}
    expected = model.generate(prompt, cache=cache, **options)
    for given in (where, load_artifact(where)):
        again = CalibratedCache.load(path, given, model)
        assert torch.equal(model.generate(prompt, cache=again, **options), expected)


def test_a_loaded_cache_can_do_all_that_a_filled_one_can(model, ids, artifact, tmp_path):
    mask = left_padded(ids)
    path = filled(artifact, model, ids, mask).save(tmp_path / "prefix.safetensors")
    for act in (
        lambda cache: cache.crop(-70),
        lambda cache: cache.batch_select_indices(torch.tensor([2, 0])),
        lambda cache: cache.batch_repeat_interleave(2),
        lambda cache: cache.reorder_cache(torch.tensor([1, 1, 0])),
    ):
        ours, theirs = filled(artifact, model, ids, mask), CalibratedCache.load(path, artifact, model)
        act(ours), act(theirs)
        assert_same_store(ours, copy.deepcopy(theirs))


def test_an_empty_cache_and_one_in_the_window_can_be_saved(model, ids, artifact, tmp_path):
    for count in (0, 5):
        cache = filled(artifact, model, ids[:, :count]) if count else CalibratedCache(artifact, model)
        again = CalibratedCache.load(cache.save(tmp_path / "x.safetensors"), artifact, model)
        assert again.get_seq_length() == count
        with torch.no_grad():
            assert torch.equal(model(ids, cache=again).logits, model(ids, cache=cache).logits)


def test_the_file_is_as_small_as_the_cache(model, ids, artifact, tmp_path):
    cache = filled(artifact, model, ids)
    path = cache.save(tmp_path / "prefix.safetensors")
    held = cache.memory_report()["key_bytes"] + cache.memory_report()["value_bytes"]
    assert path.stat().st_size < held + 20_000


def test_no_byte_of_the_file_depends_on_memory_that_nobody_owns(model, ids, artifact, tmp_path):
    mask = left_padded(ids)
    first = load_file(filled(artifact, model, ids, mask).save(tmp_path / "a"))
    cache = filled(artifact, model, ids, mask)
    for layer in cache.layers:
        for row, count in enumerate(layer.store.page_counts):
            layer.store.pages[row, count:] = 77
    second = load_file(cache.save(tmp_path / "b"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_refused_for_another_artifact(model, ids, artifact, tmp_path):
    path = filled(artifact, model, ids).save(tmp_path / "prefix.safetensors")
    other = make_artifact(model, artifact.spec, ids[1:2])
    with pytest.raises(ArtifactError, match="prefix.safetensors was saved with another artifact"):
        CalibratedCache.load(path, other, model)


@pytest.mark.parametrize("weight", ["layers.0.mlp.down_proj", "embed_tokens", "norm"])
def test_refused_for_a_model_whose_keys_come_from_other_weights(model, ids, artifact, tmp_path, weight):
    """The artifact fits (same key and value projections), the tokens do not."""
    path = filled(artifact, model, ids).save(tmp_path / "prefix.safetensors")
    tuned = tiny("llama")
    with torch.no_grad():
        tuned.model.get_submodule(weight).weight.mul_(1.01)
    CalibratedCache(artifact, tuned)
    with pytest.raises(ArtifactError, match="saved with another model: some weights"):
        CalibratedCache.load(path, artifact, tuned)


def test_refused_in_another_precision(model, ids, artifact, tmp_path):
    path = filled(artifact, model, ids).save(tmp_path / "prefix.safetensors")
    with pytest.raises(ArtifactError, match="dtype: file has float32, model has bfloat16"):
        CalibratedCache.load(path, artifact, tiny("llama").bfloat16())


def test_truncated_at_any_length_is_refused(model, ids, artifact, tmp_path):
    data = filled(artifact, model, ids).save(tmp_path / "whole").read_bytes()
    path = tmp_path / "prefix.safetensors"
    for kept in (0, 4, 8, 100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:kept])
        with pytest.raises(ArtifactError, match="prefix.safetensors is not a readable safetensors file"):
            CalibratedCache.load(path, artifact, model)


def test_a_flipped_bit_anywhere_is_noticed(model, ids, artifact, tmp_path):
    data = filled(artifact, model, ids).save(tmp_path / "whole").read_bytes()
    path = tmp_path / "prefix.safetensors"
    for place in torch.linspace(8, len(data) - 1, 40).long().tolist():
        broken = bytearray(data)
        broken[place] ^= 4
        path.write_bytes(broken)
        with pytest.raises(ArtifactError, match=r"prefix\.safetensors"):
            CalibratedCache.load(path, artifact, model)


def test_other_files_are_refused_by_name(model, ids, artifact, tmp_path):
    with pytest.raises(ArtifactError, match=r"no saved cache at .*nowhere"):
        CalibratedCache.load(tmp_path / "nowhere", artifact, model)
    where = save_artifact(artifact, tmp_path / "kvcalib.safetensors")
    with pytest.raises(ArtifactError, match="not a saved cache"):
        CalibratedCache.load(where, artifact, model)


def by_hand(path, **changes):
    """The file with another header, under a checksum that fits."""
    with safe_open(path, "pt") as handle:
        tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
        header = json.loads(handle.metadata()["kvcalib_cache"])
    header = {name: value for name, value in (header | changes).items() if value is not None}
    text = json.dumps(header)
    save_file(tensors, path, {"format": "pt", "kvcalib_cache": text, "sha256": checksum(text, tensors)})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        *(({name: None}, f"its header has no {name}") for name in ("artifact", "model", "weights", "layers")),
        ({"layers": [1, 2]}, "its header has no layers"),
        ({"layers": {"0": None, "1": None}}, "holds 2 layers"),
    ],
)
def test_a_header_made_by_hand_is_refused(changes, words, model, ids, artifact, tmp_path):
    path = filled(artifact, model, ids).save(tmp_path / "prefix.safetensors")
    by_hand(path, **changes)
    with pytest.raises(ArtifactError, match=words):
        CalibratedCache.load(path, artifact, model)


def test_layers_of_different_lengths_are_refused(model, ids, artifact, tmp_path):
    """Each is whole by itself: the first is empty."""
    cache = filled(artifact, model, ids)
    cache.layers[0].store.reset()
    path = cache.save(tmp_path / "prefix.safetensors")
    with pytest.raises(ArtifactError, match=r"its layers have \[0, 150\] tokens"):
        CalibratedCache.load(path, artifact, model)


def test_a_newer_version_is_refused(model, ids, artifact, tmp_path, monkeypatch):
    from kvcalib.runtime import persist

    monkeypatch.setattr(persist, "VERSION", 2)
    path = filled(artifact, model, ids).save(tmp_path / "prefix.safetensors")
    monkeypatch.undo()
    with pytest.raises(ArtifactError, match="cache version 2, this kvcalib reads version 1"):
        CalibratedCache.load(path, artifact, model)


def test_a_failed_save_leaves_the_file_before_it(model, ids, artifact, tmp_path, monkeypatch):
    path = filled(artifact, model, ids).save(tmp_path / "prefix.safetensors")
    before = path.read_bytes()

    def full_disk(tensors, file, metadata):
        file.write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr("kvcalib.artifact.files.save_file", full_disk)
    with pytest.raises(ConfigError, match="cannot be written .no space"):
        filled(artifact, model, ids[:, :40]).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_place_that_is_no_file_is_a_sentence(model, ids, artifact, tmp_path, monkeypatch):
    cache = filled(artifact, model, ids[:1, :20])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("x")
    os.mkfifo(tmp_path / "pipe")
    for place, words in (
        (tmp_path, "is a folder"),
        ("", "is a folder"),
        ("file/prefix", "is a file and no folder"),
        ("pipe", "is no plain file"),
    ):
        with pytest.raises(ConfigError, match=f"{words}.*prefix.safetensors"):
            cache.save(place)
    for place, words in (
        (None, "by its path, not by NoneType"),
        ("~no-such-user/x", "cannot be written"),
        ("a" * 300, "File name"),
        ("a\0", "null"),
    ):
        with pytest.raises(ConfigError, match=words):
            cache.save(place)
    (tmp_path / ("b" * 255)).touch(mode=0o600)
    cache.save("b" * 255)
    assert (tmp_path / ("b" * 255)).stat().st_mode & 0o777 == 0o600
    (tmp_path / ("b" * 255)).unlink()
    with pytest.raises(ArtifactError, match="is a folder"):
        CalibratedCache.load(tmp_path, artifact, model)
    with pytest.raises(ArtifactError, match="by its path, not by int"):
        CalibratedCache.load(3, artifact, model)
    assert {path.name for path in tmp_path.iterdir()} == {"file", "pipe"}


def test_a_link_stays_a_link(model, ids, artifact, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "real")
    cache = filled(artifact, model, ids[:1, :20])
    assert cache.save(tmp_path / "link") == tmp_path / "link"
    assert (tmp_path / "link").is_symlink()
    assert CalibratedCache.load(tmp_path / "real", artifact, model).get_seq_length() == 20


@pytest.mark.parametrize("name", ["x" * 300, "~nosuchuser/x", "a\0b", "pipe", "not\udcffutf8"])
def test_a_path_that_cannot_be_looked_at_is_a_sentence(model, ids, artifact, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    with pytest.raises(ArtifactError, match="no saved cache at|not a readable safetensors file"):
        CalibratedCache.load(name, artifact, model)
    with pytest.raises(ArtifactError, match="no artifact at"):
        load_artifact(name)


def test_a_name_in_any_bytes(model, ids, artifact, tmp_path):
    path = filled(artifact, model, ids).save(tmp_path / "not\udcffutf8")
    assert CalibratedCache.load(path, artifact, model).get_seq_length() == 150


def test_one_saves_while_another_loads(model, ids, artifact, tmp_path):
    """Header and tensors are of one file, the old or the new."""
    caches, path, over = [filled(artifact, model, ids[:, :n]) for n in (60, 150)], tmp_path / "prefix", []

    def save():
        for turn in range(200):
            caches[turn % 2].save(path)
        over.append(True)

    caches[1].save(path)
    thread = threading.Thread(target=save)
    thread.start()
    seen = set()
    while not over:
        seen.add(CalibratedCache.load(path, artifact, model).get_seq_length())
    thread.join()
    assert seen == {60, 150}


def test_what_becomes_of_the_file_afterwards_does_not_matter(model, ids, artifact, tmp_path):
    """Written over in place, where a map of the file would follow, or cut short, where reading it would kill."""
    whole = save_artifact(artifact, tmp_path / "artifact")
    prefix = filled(artifact, model, ids).save(tmp_path / "prefix")
    loaded = load_artifact(whole)
    cache, expected = (CalibratedCache.load(prefix, each, model) for each in (loaded, artifact))
    for path in (whole, prefix):
        size = path.stat().st_size
        with path.open("r+b") as file:
            file.write(bytes(size))
            file.truncate(size // 2)
    with torch.no_grad():
        assert torch.equal(model(ids[:, :40], cache=cache).logits, model(ids[:, :40], cache=expected).logits)
    for index, layer in loaded.layers.items():
        for ours, theirs in zip(layer.key, artifact.layers[index].key, strict=True):
            assert ours is theirs or torch.equal(ours, theirs)


def test_the_file_is_plain_safetensors(model, ids, artifact, tmp_path):
    path = filled(artifact, model, ids).save(tmp_path / "prefix.safetensors")
    assert "layers.1.pages" in load_file(path)
    with safe_open(path, framework="pt") as handle:
        header = json.loads(handle.metadata()["kvcalib_cache"])
    assert header["layers"]["0"]["length"] == 150
    save_file(load_file(path), path)
    with pytest.raises(ArtifactError, match="not a saved cache"):
        CalibratedCache.load(path, artifact, model)


def test_keys_after_rotary_may_be_at_any_position(model, ids, tmp_path):
    artifact = make_artifact(model, cache_spec("token", "token", sink=1), ids[:1])
    cache = CalibratedCache(artifact, model)
    with torch.no_grad():
        model(ids[:1], position_ids=torch.arange(ids.shape[1])[None] - 40, cache=cache)
    cache.save(tmp_path / "cache.safetensors")
    assert_same_store(CalibratedCache.load(tmp_path / "cache.safetensors", artifact, model), cache)
