"""A data set that cannot be had is one sentence at once; one that is here needs no network."""

import time

import pytest
from huggingface_hub import constants

from kvcalib.data.hub import hub_column
from kvcalib.errors import MissingInput


@pytest.fixture
def dead(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")


def test_a_dead_network_is_a_sentence_at_once(dead, monkeypatch):
    def load(*args, **kwargs):
        raise ConnectionError("not here")

    monkeypatch.setattr("datasets.load_dataset", load)
    begun = time.monotonic()
    with pytest.raises(MissingInput, match=r"no text from a/b: .*refused.*data.path=FOLDER") as caught:
        hub_column("a/b", split="train")
    assert time.monotonic() - begun < 3
    assert "\n" not in str(caught.value)


def test_what_is_here_is_read_without_a_network(dead, monkeypatch):
    from datasets import config

    def load(name, *args, **kwargs):
        assert config.HF_HUB_OFFLINE, "went to the network"
        return {"text": [name, *args]}

    before = config.HF_HUB_OFFLINE
    monkeypatch.setattr("datasets.load_dataset", load)
    assert hub_column("a/b", "part", split="train") == ["a/b", "part"]
    assert before == config.HF_HUB_OFFLINE


def test_what_fails_after_the_hub_answered_is_a_sentence(monkeypatch):
    def load(*args, **kwargs):
        raise ValueError("no config named c\nand more")

    monkeypatch.setattr("datasets.load_dataset", load)
    monkeypatch.setattr("kvcalib.hub.why_unreachable", lambda: None)
    with pytest.raises(MissingInput, match=r"no text from a/b: the download failed \(no config named c\); pass files"):
        hub_column("a/b", "c", split="train")
