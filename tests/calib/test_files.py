import pytest
import torch

from kvcalib.calib.files import Reader, read_rope, rope_tensors, save
from kvcalib.errors import MissingInput
from kvcalib.quant.rope import make_rope


def test_round_trip_of_views_and_header(tmp_path):
    x = torch.arange(12.0).view(3, 4)
    save(
        tmp_path / "deep" / "a.safetensors",
        {"t": x.T, "row": x[0], "same": x[0]},
        {"layers": [3, 5]},
    )
    reader = Reader(tmp_path / "deep" / "a.safetensors", "collect")
    assert torch.equal(reader["t"], x.T)
    assert torch.equal(reader["same"], x[0])
    assert reader.header == {"layers": [3, 5]}
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["a.safetensors"]


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    save(path, {"t": torch.zeros(1)}, {"n": 1})

    def broken(tensors, target, metadata):
        target.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr("kvcalib.artifact.files.save_file", broken)
    with pytest.raises(KeyboardInterrupt):
        save(path, {"t": torch.ones(1)}, {"n": 2})
    assert Reader(path, "collect").header == {"n": 1}


@pytest.mark.parametrize("content", [None, b"", b"not safetensors at all"])
def test_absent_or_damaged_names_the_stage(tmp_path, content):
    path = tmp_path / "a.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(MissingInput, match="stage=fisher"):
        Reader(path, "fisher")


def test_rope_round_trip(tmp_path):
    rope = make_rope(8, "interleaved", torch.tensor([1.0, 0.1, 0.01]), 1.3)
    save(tmp_path / "r", rope_tensors(4, rope), {})
    for stored, made in zip(read_rope(Reader(tmp_path / "r", "collect"), 4), rope, strict=True):
        assert torch.equal(stored, made)
