"""The artifact file: what goes in comes out, and what is damaged, foreign or half-written does not load."""

import json
import re
import time
from dataclasses import fields, replace
from threading import Thread

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from kvcalib import load_artifact
from kvcalib.artifact.fingerprint import checksum, fingerprint
from kvcalib.artifact.io import save_artifact
from kvcalib.artifact.schema import VERSION, Artifact, LayerTables, check_model, tensor_fields, validate
from kvcalib.errors import ArtifactError, ConfigError
from kvcalib.quant.spec import CacheSpec, Tables, TensorSpec
from tests.kernels.packed import make_tables

KEY = TensorSpec(3, "nuq", "static", rope="pre", outliers=0.01, rank="error")
VALUE = TensorSpec(2, "uniform", "token", books="head")
Q_NORM = TensorSpec(2, "nuq", "token", books="head", q_norm=True)


def tables(bits: int, books: int = 1) -> Tables:
    levels = torch.linspace(-1, 1, 2**bits).bfloat16().float().expand(books, -1)
    return Tables(torch.randn(2, 8), torch.rand(2, 8) + 0.1, levels, torch.rand(2, 8) if bits == 3 else None)


@pytest.fixture
def artifact() -> Artifact:
    shared = tables(3)
    layers = {1: LayerTables(shared, tables(2, 2)), 4: LayerTables(shared, tables(2, 2))}
    return Artifact(
        CacheSpec(KEY, VALUE, 128, 4),
        layers,
        model={"layers": 2, "shapes": {"1": [2, 8, 8, 4], "4": [2, 8, 8, 4]}, "config_sha256": "abc"},
        calibration={"windows": "hash", "count": 3, "none": None},
        settings={"quant": {"name": "x"}, "list": [1, 2]},
        summary={"seconds": 1.5, "not_a_number": float("nan")},
    )


@pytest.fixture
def path(artifact, tmp_path):
    return save_artifact(artifact, tmp_path / "deep" / "kvcalib.safetensors")


def rewrite(path, *, tensors=None, header=None, text=None, metadata=None):
    """Saves a changed copy over `path`; text: in place of the header. Its checksum fits, unless metadata is given."""
    with safe_open(path, "pt") as handle:
        old = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
        meta = handle.metadata()
    parsed = json.loads(meta["kvcalib"]) | (header or {})
    new, text = (tensors or (lambda t: t))(old), text or json.dumps(parsed)
    save_file(new, path, metadata=metadata or {"kvcalib": text, "sha256": checksum(text, new)})


def test_every_field_comes_back(artifact, path):
    back = load_artifact(path)
    for field in fields(Artifact):
        if field.compare and field.name not in ("layers", "summary"):
            assert getattr(back, field.name) == getattr(artifact, field.name)
    assert back.summary == {"seconds": 1.5, "not_a_number": None}
    assert back.layers.keys() == artifact.layers.keys()
    for index, layer in artifact.layers.items():
        for name in ("key", "value"):
            for old, new in zip(getattr(layer, name), getattr(back.layers[index], name), strict=True):
                assert (old is None and new is None) or torch.equal(old, new)


def test_what_others_read_has_the_names_that_it_always_had(path):
    """A name that changes needs a new version, or files of yesterday are refused for what they lack."""
    assert VERSION == 1
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["kvcalib"])
        tensors = {name for name in file.keys() if name.startswith("layers.4.")}  # noqa: SIM118 (not a dict)
    assert set(header) == {"version", "spec", "layers", "model", "calibration", "settings", "summary"}
    assert tensors == {f"layers.4.{name}" for name in ("key.zero", "key.scale", "key.levels", "key.weight")} | {
        f"layers.4.value.{name}" for name in ("zero", "scale", "levels")
    }
    mixed = replace(KEY, levels="mixed", rounding="feedback")
    assert set(tensor_fields(mixed)) == {"zero", "scale", "levels", "weight", "widths", "feedback", "order"}
    assert set(tensor_fields(Q_NORM)) == {"zero", "scale", "levels", "edges"}


def test_files_of_yesterday_load(artifact, path):
    """A format that came later is off where a file does not name it."""
    spec = artifact.spec.to_dict()
    for part in ("key", "value"):
        del spec[part]["q_norm"]
    rewrite(path, header={"spec": spec})
    assert load_artifact(path).spec == artifact.spec


@pytest.fixture
def normed(artifact) -> Artifact:
    """Values with Q-Norm, a book per head."""
    shared = artifact.layers[1]
    moved = shared.value._replace(levels=1.5 * shared.value.levels, edges=torch.tensor([[-0.5, 0.01, 0.5]] * 2))
    moved = moved._replace(levels=moved.levels.bfloat16().float())
    return replace(artifact, spec=replace(artifact.spec, value=Q_NORM), layers={1: LayerTables(shared.key, moved)})


def test_edges_come_back_to_the_last_bit(normed, tmp_path):
    back = load_artifact(save_artifact(normed, tmp_path / "kvcalib.safetensors"))
    assert back.spec == normed.spec
    assert torch.equal(back.layers[1].value.edges, normed.layers[1].value.edges)
    assert back.layers[1].key.edges is None
    assert fingerprint(back) == fingerprint(normed)
    other = normed.layers[1].value._replace(edges=normed.layers[1].value.edges + 0.125)
    assert fingerprint(replace(normed, layers={1: LayerTables(normed.layers[1].key, other)})) != fingerprint(normed)


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        (None, "edges are missing or not [2, 3]"),
        (torch.tensor([[-0.5, 0.0, 0.5]]), "edges are missing or not [2, 3]"),
        (torch.tensor([[-0.5, 0.0, 0.5, 1.0]] * 2), "edges are missing or not [2, 3]"),
        (torch.tensor([[-0.5, 0.0, 0.5], [0.0, 0.0, 0.5]]), "edges are not finite and strictly increasing"),
        (torch.tensor([[-0.5, 0.0, torch.inf]] * 2), "edges are not finite and strictly increasing"),
    ],
)
def test_edges_that_cannot_be_are_refused(normed, edges, message):
    value = normed.layers[1].value._replace(edges=edges)
    with pytest.raises(ArtifactError, match=re.escape(f"layers.1.value: {message}")):
        validate(replace(normed, layers={1: LayerTables(normed.layers[1].key, value)}))


@pytest.fixture
def unbiased(artifact) -> Artifact:
    """Values with a read frame."""
    spec = TensorSpec(2, "nuq", "norm", unbiased=True)
    value = artifact.layers[1].value
    value = value._replace(levels=value.levels[:1], read_zero=value.zero + 0.1, read_scale=1.5 * value.scale)
    return replace(
        artifact, spec=replace(artifact.spec, value=spec), layers={1: LayerTables(artifact.layers[1].key, value)}
    )


def test_a_read_frame_comes_back_to_the_last_bit(unbiased, tmp_path):
    back = load_artifact(save_artifact(unbiased, tmp_path / "kvcalib.safetensors"))
    assert back.spec == unbiased.spec
    for field in ("read_zero", "read_scale"):
        assert torch.equal(getattr(back.layers[1].value, field), getattr(unbiased.layers[1].value, field))
        assert getattr(back.layers[1].key, field) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"read_zero": None}, "read_zero or read_scale is missing or not [2, 8]"),
        ({"read_scale": torch.ones(2, 4)}, "read_zero or read_scale is missing or not [2, 8]"),
        ({"read_scale": torch.zeros(2, 8)}, "read_zero or read_scale is not finite"),
        ({"read_zero": torch.full((2, 8), torch.nan)}, "read_zero or read_scale is not finite"),
    ],
)
def test_a_read_frame_that_cannot_be_is_refused(unbiased, change, message):
    value = unbiased.layers[1].value._replace(**change)
    with pytest.raises(ArtifactError, match=re.escape(f"layers.1.value: {message}")):
        validate(replace(unbiased, layers={1: LayerTables(unbiased.layers[1].key, value)}))


def test_a_read_frame_goes_with_unbiased_and_only_with_it(unbiased):
    spec = replace(unbiased.spec.value, unbiased=False)
    with pytest.raises(ArtifactError, match="layers.1.value: read_zero and read_scale are for unbiased=true"):
        validate(replace(unbiased, spec=replace(unbiased.spec, value=spec)))


def test_edges_go_with_q_norm_and_only_with_it(normed, tmp_path):
    without = replace(normed, spec=replace(normed.spec, value=replace(Q_NORM, q_norm=False)))
    with pytest.raises(ArtifactError, match="layers.1.value: edges are for q_norm=true"):
        validate(without)
    path = save_artifact(normed, tmp_path / "kvcalib.safetensors")
    rewrite(path, tensors=lambda t: {k: v for k, v in t.items() if "edges" not in k})
    with pytest.raises(ArtifactError, match=r"missing tensors \['layers.1.value.edges'\]"):
        load_artifact(path)


def test_nothing_but_the_file_is_left(path):
    assert [p.name for p in path.parent.iterdir()] == ["kvcalib.safetensors"]
    assert path.read_bytes().find(b"pickle") == -1


def test_a_write_that_fails_leaves_the_old_file(artifact, path, monkeypatch):
    before = path.read_bytes()

    def broken(tensors, target, metadata):
        target.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("kvcalib.artifact.files.save_file", broken)
    with pytest.raises(ConfigError, match="cannot be written .disk full.: give another place"):
        save_artifact(artifact, path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_many_writers_of_one_file_and_a_reader(artifact, tmp_path):
    """Every file that is ever seen is whole."""
    path, failed = save_artifact(artifact, tmp_path / "shared.safetensors"), []

    def often(act):
        try:
            for _ in range(40):
                act()
        except Exception as error:
            failed.append(error)

    threads = [Thread(target=often, args=(act,)) for act in 2 * [lambda: save_artifact(artifact, path)]]
    threads.append(Thread(target=often, args=(lambda: load_artifact(path),)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("field", ["widths", "zero"])
def test_tables_in_another_dtype_are_a_sentence(field, tmp_path):
    spec = CacheSpec(TensorSpec(3, "mixed", "static", rope="pre"), TensorSpec(3, "nuq", "token"), 0, 0)
    tables = make_tables(spec.key, 2, 8, torch.Generator().manual_seed(0))
    value = make_tables(spec.value, 2, 8, torch.Generator().manual_seed(0))
    path = save_artifact(Artifact(spec, {0: LayerTables(tables, value)}, model={}), tmp_path / "a.safetensors")
    rewrite(path, tensors=lambda t: t | {f"layers.0.key.{field}": t[f"layers.0.key.{field}"].to(torch.float64)})
    with pytest.raises(ArtifactError, match=f"layers.0.key.{field} is in torch.float64, not in"):
        load_artifact(path)


def test_a_table_of_another_rank_is_a_sentence(artifact):
    """Checks that come after do not stumble over it."""
    for shape in ((8,), (1, 2, 8)):
        key = artifact.layers[1].key._replace(zero=torch.zeros(shape), scale=torch.ones(shape))
        broken = replace(artifact, layers=artifact.layers | {1: replace(artifact.layers[1], key=key)})
        with pytest.raises(ArtifactError, match=r"are not both \[heads, dim\]"):
            validate(broken)


def test_a_flipped_bit_anywhere_is_noticed(path):
    data = path.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    names = data.index(b'"__metadata__"'), data.index(b'"kvcalib"'), data.index(b'"sha256"')
    places = {*torch.linspace(8, len(data) - 1, 60).long().tolist(), *range(names[0], names[1] + 12)}
    for place in sorted(places | {*range(names[2], header)}):
        path.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
        with pytest.raises(ArtifactError, match=re.escape(str(path))):
            load_artifact(path)


def test_a_setting_changed_by_hand_is_noticed(path):
    data = path.read_bytes()
    assert data.count(b'\\"sink\\": 4') == 1
    path.write_bytes(data.replace(b'\\"sink\\": 4', b'\\"sink\\": 9'))
    with pytest.raises(ArtifactError, match="is damaged .its checksum does not match"):
        load_artifact(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"header": {"version": 99}}, "version 99"),
        ({"header": {"spec": {"key": 1}}}, "spec is damaged"),
        ({"header": {"layers": [1]}}, "unexpected tensors"),
        ({"header": {"layers": ["1", 4]}}, "layers in its header is ['1', 4], not a list of different layer indices"),
        ({"header": {"layers": [1, 1, 4]}}, "layers in its header"),
        ({"header": {"layers": 3}}, "layers in its header"),
        ({"header": {"model": ["x"]}}, "model in its header is ['x'], not a dictionary"),
        ({"header": {"settings": None}}, "settings in its header"),
        ({"header": {"layers": [1, 4, 5]}}, "missing tensors"),
        ({"tensors": lambda t: t | {"more": torch.ones(1)}}, "unexpected tensors ['more']"),
        ({"tensors": lambda t: {k: v for k, v in t.items() if k != "layers.1.key.zero"}}, "missing tensors"),
        ({"tensors": lambda t: t | {"layers.1.key.scale": torch.zeros(2, 8)}}, "scale is not finite and positive"),
        (
            {"tensors": lambda t: t | {"layers.1.key.levels": torch.ones(1, 8, dtype=torch.bfloat16)}},
            "strictly increasing",
        ),
        ({"tensors": lambda t: t | {"layers.4.value.zero": torch.full((2, 8), torch.nan)}}, "zero is not finite"),
        (
            {"tensors": lambda t: t | {"layers.1.key.weight": -torch.ones(2, 8)}},
            "weight is missing, not [heads, dim], negative",
        ),
        ({"text": "{"}, "header is damaged"),
        ({"metadata": {"format": "pt"}}, "not a kvcalib artifact"),
    ],
)
def test_a_damaged_file_is_refused_with_the_reason(path, change, message):
    rewrite(path, **change)
    with pytest.raises(ArtifactError, match=re.escape(message)) as caught:
        load_artifact(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("key", {"bits": 9}, "spec.key.bits=9 must be 1 to 8, or 16"),
        ("key", {"bits": 0}, "spec.key.bits=0"),
        ("key", {"bits": "3"}, "spec.key.bits='3'"),
        ("value", {"bits": True}, "spec.value.bits=True"),
        ("value", {"levels": "nuq2"}, "spec.value.levels='nuq2' must be uniform or nuq"),
        ("value", {"range": None}, "spec.value.range=None"),
        ("value", {"scope": "row"}, "spec.value.scope='row'"),
        ("value", {"rank": 1}, "spec.value.rank=1"),
        ("value", {"books": ["layer"]}, "spec.value.books=['layer']"),
        ("value", {"rope": "pre"}, "spec.value.rope='pre' must be none"),
        ("key", {"rope": "mid"}, "spec.key.rope='mid' must be pre or post or none"),
        ("key", {"rotation": "givens"}, "spec.key.rotation='givens'"),
        ("key", {"rotation": "hadamard"}, "spec.key.rotation=hadamard must be none"),
        ("key", {"group": 12}, "spec.key.group=12 must divide 32"),
        ("key", {"group": 0}, "spec.key.group=0"),
        ("key", {"outliers": 0.6}, "spec.key.outliers=0.6 must be 0 to 0.5"),
        ("key", {"outliers": -0.1}, "spec.key.outliers=-0.1"),
        ("key", {"outliers": None}, "spec.key.outliers=None"),
        ("key", {"q_norm": 1}, "spec.key.q_norm=1 must be true or false"),
        ("key", {"unbiased": "yes"}, "spec.key.unbiased='yes' must be true or false"),
        ("key", {"unbiased": True, "range": "group"}, "spec.key.unbiased=true needs levels nuq or mixed, range static"),
        ("key", {"unbiased": True, "q_norm": True}, "rank error or range, and no q_norm"),
        ("key", {"q_norm": True, "rounding": "feedback"}, "spec.key.q_norm=true needs levels=nuq, rounding=nearest"),
        ("key", {"q_norm": True, "books": "channel"}, "rounding=nearest and books=layer or head"),
        ("value", {"q_norm": True}, "spec.value.q_norm=true needs levels=nuq, rounding=nearest"),
        ("key", {"levels": "none"}, "spec.key.bits=3 does not go with levels=none"),
        ("key", {"bits": 16}, "spec.key.bits=16 does not go with levels=nuq"),
        ("key", {"levels": "fp8"}, "spec.key.levels=fp8 needs bits=8 and range=static"),
        ("value", {"range": "norm"}, "spec.value.range=norm needs levels nuq, nf or mixed"),
        ("value", {"rotation": "hadamard", "bits": 16, "levels": "none"}, "rotation=hadamard needs quantised values"),
        ("value", {"rotation": "hadamard", "range": "static"}, "needs quantised values with range=token or norm"),
        ("value", {"rank": "threshold"}, "spec.value.rank=threshold needs range=static, rounding=nearest"),
        ("key", {"rank": "tails"}, "spec.key.rank=tails needs range=token and scope=layer"),
        (None, {"window": -1}, "spec.window=-1 must be a count of tokens"),
        (None, {"sink": 1.5}, "spec.sink=1.5"),
    ],
)
def test_a_format_that_cannot_be_read_is_refused_with_the_field(artifact, path, part, change, message):
    spec = artifact.spec.to_dict()
    (spec[part] if part else spec).update(change)
    rewrite(path, header={"spec": spec})
    with pytest.raises(ArtifactError, match=re.escape(message)) as caught:
        load_artifact(path)
    assert str(path) in str(caught.value)
    with pytest.raises(ArtifactError, match=re.escape(message)):
        validate(replace(artifact, spec=CacheSpec.from_dict(spec)))


def test_a_file_without_a_checksum_is_refused(path):
    with safe_open(path, "pt") as handle:
        text = handle.metadata()["kvcalib"]
    rewrite(path, tensors=lambda held: {name: 7 * tensor for name, tensor in held.items()}, metadata={"kvcalib": text})
    with pytest.raises(ArtifactError, match="checksum"):
        load_artifact(path)


def test_what_is_changed_after_it_was_looked_at_is_looked_at_again(path):
    artifact = load_artifact(path)
    index, layer = next(iter(artifact.layers.items()))
    validate(artifact)
    kept = layer.key.scale.clone()
    layer.key.scale[0, 0] = -1
    with pytest.raises(ArtifactError, match="scale is not finite and positive"):
        validate(artifact)
    layer.key.scale.copy_(kept)
    validate(artifact)
    artifact.layers[index] = replace(layer, key=layer.key._replace(zero=layer.key.zero[:, :-1]))
    with pytest.raises(ArtifactError, match=r"are not both \[heads, dim\]"):
        validate(artifact)


def test_more_outliers_than_a_page_holds_are_refused(artifact):
    key = replace(artifact.spec.key, levels="nuq", range="static", rank="threshold", rounding="nearest", outliers=0.3)
    with pytest.raises(ArtifactError, match=r"outliers=0.3 are more than the \d+ that a page of"):
        validate(replace(artifact, spec=replace(artifact.spec, key=key)))


@pytest.mark.parametrize(("levels", "kind"), [("uniform", "token"), ("nf", "norm")])
def test_channels_of_a_range_must_divide_the_head(artifact, levels, kind):
    spec = replace(artifact.spec, value=TensorSpec(2, levels, kind, scope="channels", group=16, books="head"))
    with pytest.raises(ArtifactError, match="group=16 does not divide its 8 channels"):
        validate(replace(artifact, spec=spec))


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"1": [2, 8, 8, 4]}, "layer 4 has tables, but the model caches nothing there"),
        ({"1": [2, 8, 8, 4], "4": [2, 8, 8, 4], "5": [2, 8, 8, 4]}, "layer 5 has no tables"),
        ({"1": [1, 8, 8, 4], "4": [2, 8, 8, 4]}, "layers.1.key is (2, 8), the model's heads are (1, 8)"),
        ({"1": [2, 8, 8, 4], "4": [2, 8, 4, 4]}, "layers.4.value is (2, 8), the model's heads are (2, 4)"),
    ],
)
def test_tables_that_do_not_fit_the_model_are_refused(artifact, shapes, message):
    model = artifact.model | {"shapes": shapes}
    with pytest.raises(ArtifactError, match=re.escape(message)):
        check_model(replace(artifact, model=model), model)


def test_the_folder_of_a_run_stands_for_the_artifact_in_it(artifact, tmp_path):
    save_artifact(artifact, tmp_path / "run" / "export" / "kvcalib.safetensors")
    assert load_artifact(tmp_path / "run").model == artifact.model
    assert load_artifact(tmp_path / "run" / "export").model == artifact.model


def test_a_truncated_or_missing_file_is_refused_with_its_path(path):
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ArtifactError, match="not a readable safetensors file"):
        load_artifact(path)
    with pytest.raises(ArtifactError, match="stage=export"):
        load_artifact(path.with_name("other.safetensors"))


def test_levels_must_be_exact_in_bf16(artifact):
    layer = artifact.layers[1]
    odd = layer.key._replace(levels=layer.key.levels + 1e-4)
    with pytest.raises(ArtifactError, match="layers.1.key: levels are not exact in bf16"):
        validate(replace(artifact, layers={1: replace(layer, key=odd)}))


def test_another_model_is_refused_field_by_field(artifact):
    check_model(artifact, artifact.model)
    with pytest.raises(ArtifactError, match=r"shapes.1: artifact has \[2, 8, 8, 4\], model has \[4, 8, 8, 4\]"):
        check_model(artifact, artifact.model | {"shapes": {"1": [4, 8, 8, 4], "4": [2, 8, 8, 4]}})


def test_another_precision_of_the_same_model_is_the_same_model(artifact):
    calibrated = replace(artifact, model=artifact.model | {"dtype": "float32", "weights_sha256": "a"})
    check_model(calibrated, calibrated.model | {"dtype": "bfloat16", "weights_sha256": "b"})
    with pytest.raises(ArtifactError, match="weights_sha256"):
        check_model(calibrated, calibrated.model | {"weights_sha256": "b"})
    with pytest.raises(ArtifactError, match="config_sha256"):
        check_model(calibrated, calibrated.model | {"dtype": "bfloat16", "config_sha256": "b"})


@pytest.fixture
def no_hub(monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_a_hub_id_offline_is_a_sentence_at_once(no_hub, monkeypatch, capfd, caplog):
    begun = time.monotonic()
    with pytest.raises(ArtifactError, match=r"no artifact nobody/nothing: .*refused.*stage=export") as caught:
        load_artifact("nobody/nothing")
    assert time.monotonic() - begun < 3
    assert "\n" not in str(caught.value)
    with pytest.raises(ArtifactError, match="nor a hub id"):
        load_artifact("no body/no thing")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ArtifactError, match="HF_HUB_OFFLINE is set"):
        load_artifact("nobody/nothing")
    assert (capfd.readouterr().err, caplog.text) == ("", "")


def test_an_artifact_in_the_hub_cache_needs_no_network(no_hub, artifact):
    commit = "0" * 40
    repository = no_hub / "models--somebody--something"
    save_artifact(artifact, repository / "snapshots" / commit / "kvcalib.safetensors")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    assert load_artifact("somebody/something").spec == artifact.spec


def test_what_the_hub_refuses_is_a_sentence(no_hub, monkeypatch):
    monkeypatch.setattr("kvcalib.hub.why_unreachable", lambda: None)

    def refuse(name, file, *, local_files_only=False, **kwargs):
        from huggingface_hub.errors import LocalEntryNotFoundError

        raise LocalEntryNotFoundError("not cached") if local_files_only else OSError("reset\nand more")

    monkeypatch.setattr("kvcalib.artifact.io.hf_hub_download", refuse)
    with pytest.raises(ArtifactError, match=r"nobody/nothing: the download failed \(reset\)"):
        load_artifact("nobody/nothing")
