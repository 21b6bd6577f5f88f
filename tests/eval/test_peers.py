import importlib.util
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache

from kvcalib.errors import MissingInput, UnsupportedModel
from kvcalib.eval import peers
from kvcalib.eval.measure import Foreign, measure
from kvcalib.eval.peers import IdealPeer, Peer, check_peer, real_peer
from kvcalib.eval.reference import reference
from tests.models.zoo import tiny


def library(name: str):
    package = {"quanto": "optimum", "hqq": "hqq"}[name]
    missing = importlib.util.find_spec(package) is None
    return pytest.param(name, marks=pytest.mark.skipif(missing, reason=f"{peers.PACKAGES[name]} (extra `peers`)"))


LIBRARIES = [library("quanto"), library("hqq")]


def peer(name: str, bits: int) -> Peer:
    axis = {"quanto": 0, "hqq": 1}[name]
    return Peer(name, bits, 64, axis, axis)


@pytest.mark.parametrize("name", LIBRARIES)
def test_bits_are_those_that_are_stored(name, model, windows):
    for bits in (4, 2):
        cache = IdealPeer(peer(name, bits), model, sink=1)
        with torch.no_grad():
            model(windows[:1], cache=cache, use_cache=True)
        assert set(cache.bits["key"] + cache.bits["value"]) == {bits + 32 / 64}


@pytest.mark.parametrize("name", LIBRARIES)
def test_every_token_but_the_sink_is_read_as_quantised(name, model, windows):
    ideal, exact = IdealPeer(peer(name, 2), model, sink=2), DynamicCache(config=model.config)
    key, value = torch.randn(2, 1, 2, 64, 32)
    read, _ = ideal.update(key, value, 0)
    assert torch.equal(read[:, :, :2], key[:, :, :2])
    changed = (read != key).any(-1)[0, :, 2:]
    assert changed.all()
    assert exact.update(key, value, 0)[0].shape == read.shape


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_whole_measurement(name, model, tokenizer, windows, progress, tmp_path):
    needles = {"tasks": ["passkey"], "lengths": [299, 301], "depths": [0.0], "trials": 1, "seed": 0}
    reference(model, tokenizer, windows, out=tmp_path, progress=progress, **needles)
    found = {}
    for bits in (4, 2):
        member = Foreign(peer(name, bits), model, 1)
        found[bits] = measure(model, tokenizer, member, windows, tmp_path, seed=0, progress=progress)
    assert 0 < found[4]["kl"] < found[2]["kl"]
    assert [row["packed"] for row in found[2]["needle"]] == [1, 1]


def test_a_missing_package_is_a_sentence_with_the_command(monkeypatch, model):
    def missing(*args, **kwargs):
        raise ImportError("no such library")

    monkeypatch.setattr(peers, "QuantizedCache", missing)
    with pytest.raises(MissingInput, match="optimum-quanto is not there: `pip install optimum-quanto`"):
        real_peer(peer("quanto", 4), model)


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_model_that_the_library_refuses_is_a_sentence(name):
    with pytest.raises(UnsupportedModel, match="refuses this model: .*full attention"):
        real_peer(peer(name, 4), tiny("gemma3_text"))


@pytest.mark.parametrize("name", LIBRARIES)
def test_versions_that_have_grown_apart_are_a_sentence(name, model, monkeypatch):
    """A library that changed a signature is a row of a comparison and not its end."""
    check_peer(peer(name, 2), model)
    kind = type(real_peer(peer(name, 2), model).layers[0])
    monkeypatch.setattr(kind, "_quantize", lambda self, tensor, axis, scale: tensor)
    with pytest.raises(UnsupportedModel, match=f"{peers.PACKAGES[name]} and transformers .* do not work together"):
        check_peer(peer(name, 2), model)


@pytest.mark.parametrize("name", [LIBRARIES[0]])
def test_a_lock_that_quanto_waits_for_is_told(name, model, monkeypatch, tmp_path, caplog):
    lock = tmp_path / "library" / "extensions" / "cpp" / "build" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(peers, "find_spec", lambda name: spec)
    peers._tell_of_lock.cache_clear()
    for _ in range(2):
        real_peer(peer(name, 4), model)
    assert caplog.text.count(f"quanto waits until {lock} is gone") == 1
    peers._tell_of_lock.cache_clear()
