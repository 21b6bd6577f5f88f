"""A saved cache that was made by hand, with a checksum that fits, reaches no kernel."""

import json

import pytest
import torch
from safetensors.torch import load_file, safe_open, save_file

from kvcalib.artifact.fingerprint import checksum
from kvcalib.errors import ArtifactError
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


def edited(path, tensors=None, header=None):
    """The same file with a change, and a checksum that fits: only its content can tell."""
    with safe_open(path, framework="pt") as handle:
        metadata = handle.metadata()
    held, content = load_file(path), json.loads(metadata["kvcalib_cache"])
    (tensors or (lambda held: None))(held)
    (header or (lambda content: None))(content)
    text = json.dumps(content)
    held = {name: tensor.contiguous() for name, tensor in held.items()}
    save_file(held, path, metadata | {"kvcalib_cache": text, "sha256": checksum(text, held)})


def in_page(name, value):
    """Overwrites a section of the first page of layer 0."""

    def change(held, layout):
        layout.read(held["layers.0.pages"][0, :1], name)[:] = value

    return change


@pytest.mark.parametrize(
    ("tensors", "header"),
    [
        (None, {"page_counts": [50, 50, 50]}),
        (None, {"page_counts": [1, 4, 4]}),
        (None, {"page_counts": [-1, 4, 4]}),
        (None, {"page_counts": [4, 4]}),
        (None, {"page_counts": 4}),
        (None, {"sink_counts": [2, 1, 2]}),
        (None, {"sink_counts": [2, 9, 2]}),
        (None, {"forgotten": [0, 32, 0]}),
        (None, {"length": 1000}),
        (None, {"length": "150"}),
        (None, {"is_long": 1}),
        (lambda held, _: held.pop("layers.0.pages"), {}),
        (lambda held, _: held.update({"layers.0.more": torch.ones(3)}), {}),
        (lambda held, _: held.update({"layers.0.pages": held["layers.0.pages"][:, :, :-5]}), {}),
        (lambda held, _: held.update({"layers.0.pages": held["layers.0.pages"][:, :2]}), {}),
        (lambda held, _: held.update({"layers.0.recent_key": held["layers.0.recent_key"].double()}), {}),
        (lambda held, _: held.update({"layers.0.recent_value": held["layers.0.recent_value"].bfloat16()}), {}),
        (lambda held, _: held.update({"layers.0.sink_key": held["layers.0.sink_key"][:, :, :1]}), {}),
        (lambda held, _: held.update({"layers.0.positions": held["layers.0.positions"].int()}), {}),
        (lambda held, _: held.update({"layers.0.waiting": ~held["layers.0.waiting"]}), {}),
        (in_page("tokens", 33), {}),
        (in_page("tokens", 1 << 20), {}),
        (in_page("first_position", -5), {}),
        (in_page("key_positions", -1), {}),
        (in_page("key_rows", 30000), {}),
        (in_page("value_rows", 0), {}),
    ],
)
def test_a_file_that_was_made_by_hand_reaches_no_kernel(model, ids, artifact, tmp_path, tensors, header):
    """What the kernel takes on trust is checked, because a checksum can be made by anyone."""
    cache = filled(artifact, model, ids, left_padded(ids))
    path, layout = cache.save(tmp_path / "prefix.safetensors"), cache.layers[0].store.layout
    edited(path)
    CalibratedCache.load(path, artifact, model)
    change = None if tensors is None else lambda held: tensors(held, layout)
    edited(path, change, lambda content: content["layers"]["0"].update(header))
    with pytest.raises(ArtifactError, match=r"prefix\.safetensors holds no whole cache: layer 0: .*save it again"):
        CalibratedCache.load(path, artifact, model)


@pytest.mark.parametrize(
    ("tensors", "flags"),
    [
        (None, {"conv_kernel_size": {}}),
        (None, {"has_previous_state": True}),
        (None, {"more": 1}),
        (lambda held, name: held.update({name.replace("conv.0", "foo.7"): torch.ones(3)}), {}),
        (lambda held, name: held.update({name.replace("conv.0", "conv.7"): torch.ones(3)}), {}),
    ],
)
def test_states_that_were_made_by_hand_are_refused(ids, tmp_path, tensors, flags):
    model = tiny("lfm2")
    artifact = make_artifact(model, cache_spec(window=8, sink=2), ids[:1])
    path = filled(artifact, model, ids).save(tmp_path / "prefix.safetensors")
    name = next(name for name in load_file(path) if name.endswith("conv.0"))
    index = name.split(".")[1]
    edited(path)
    CalibratedCache.load(path, artifact, model)
    change = None if tensors is None else lambda held: tensors(held, name)
    edited(path, change, lambda content: content["layers"][index].update(flags))
    with pytest.raises(ArtifactError, match=rf"layer {index}: its (counts|tensors) are not those of a cache"):
        CalibratedCache.load(path, artifact, model)


def test_a_file_with_other_layers_is_refused(model, ids, artifact, tmp_path):
    path = filled(artifact, model, ids).save(tmp_path / "prefix.safetensors")
    edited(path, header=lambda content: content["layers"].pop("1"))
    with pytest.raises(ArtifactError, match="holds 1 layers, this model has 2"):
        CalibratedCache.load(path, artifact, model)
