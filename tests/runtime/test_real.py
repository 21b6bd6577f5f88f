"""Real weights through the cache: exactness on a long prompt, three bits, padding, a file, and the memory promise."""

import subprocess
import sys
from pydoc_data.topics import topics

import pytest
import torch
from transformers import DynamicCache

from kvcalib.artifact.io import save_artifact
from kvcalib.quant.spec import CacheSpec, TensorSpec
from kvcalib.runtime.cache import CalibratedCache
from tests.helpers import IDENTITY, make_artifact
from tests.models.test_real import GEMMA3, SMOLLM2, load
from tests.runtime.test_memory import held_bytes

pytestmark = pytest.mark.slow

KEY = TensorSpec(3, "nuq", "static", rope="pre", outliers=0.01)
VALUE = TensorSpec(3, "nuq", "token", scope="layer", outliers=0.01)
GREEDY = {"max_new_tokens": 24, "do_sample": False}
CONTINUE = """
import sys, torch
from kvcalib import CalibratedCache
from tests.models import test_real
from tests.runtime.test_real import GREEDY
model, _ = test_real.load(getattr(test_real, sys.argv[1]))
cache = CalibratedCache.load(sys.argv[2], sys.argv[3], model)
ids = torch.load(sys.argv[4])
torch.save(model.generate(ids, cache=cache, **GREEDY), sys.argv[5])
"""


@pytest.fixture(scope="module", params=["SMOLLM2", "GEMMA3"])
def real(request):
    """(name, model, ids [1, 700], artifact of 3 bits, window 128 and sink 4)."""
    model, tokenizer = load({"SMOLLM2": SMOLLM2, "GEMMA3": GEMMA3}[request.param])
    ids = tokenizer("\n\n".join(topics[name] for name in sorted(topics)), return_tensors="pt").input_ids
    artifact = make_artifact(model, CacheSpec(KEY, VALUE, 128, 4), ids[:, 5000:5600])
    return request.param, model, ids[:, :700], artifact


def kl(ours, theirs):
    theirs = theirs.log_softmax(-1)
    return (theirs.exp() * (theirs - ours.log_softmax(-1))).sum(-1).mean().item()


def test_identity_and_the_window_are_exact(real):
    _, model, ids, artifact = real
    expected = model.generate(ids, cache=DynamicCache(config=model.config), **GREEDY)
    identity = make_artifact(model, CacheSpec(IDENTITY, IDENTITY, 0, 0), ids[:, :40])
    roomy = type(artifact)(CacheSpec(KEY, VALUE, 2048, 4), artifact.layers, artifact.model)
    for exact in (identity, roomy):
        assert torch.equal(model.generate(ids, cache=CalibratedCache(exact, model), **GREEDY), expected)


def test_three_bits_stay_close(real):
    """Levels that were not even fitted; the artifact of `make run` does better (see the README)."""
    _, model, ids, artifact = real
    ours, theirs = CalibratedCache(artifact, model), DynamicCache(config=model.config)
    with torch.no_grad():
        for part in ids.split(100, dim=1):
            logits, expected = model(part, cache=ours).logits, model(part, cache=theirs).logits
    assert max(layer.store.page_counts[0] for layer in ours.layers) >= 16
    assert 0 < kl(logits, expected) < 0.1


def test_rows_of_a_padded_batch(real):
    _, model, ids, artifact = real
    starts, length = (0, 60, 150), 400
    batch, mask = torch.zeros(3, length, dtype=torch.long), torch.zeros(3, length, dtype=torch.long)
    for row, start in enumerate(starts):
        batch[row, start:], mask[row, start:] = ids[0, : length - start], 1
    both = CalibratedCache(artifact, model)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        model(batch[:, :-1], attention_mask=mask[:, :-1], position_ids=positions[:, :-1], cache=both)
        last = model(batch[:, -1:], attention_mask=mask, position_ids=positions[:, -1:], cache=both).logits[:, -1]
        for row, start in enumerate(starts):
            single = CalibratedCache(artifact, model)
            model(ids[:, : length - start - 1], cache=single)
            alone = model(ids[:, length - start - 1 : length - start], cache=single).logits[:, -1]
            assert kl(last[row : row + 1], alone) < 1e-3
            ours, theirs = both.layers[0].store, single.layers[0].store
            count = theirs.page_counts[0]
            assert ours.page_counts[row] == count
            assert (ours.pages[row, :count] != theirs.pages[0, :count]).float().mean() < 1e-3


def test_another_process_goes_on_from_the_file(real, tmp_path):
    name, model, ids, artifact = real
    where = save_artifact(artifact, tmp_path / "kvcalib.safetensors")
    cache = CalibratedCache.from_pretrained(where, model)
    with torch.no_grad():
        model(ids[:, :680], cache=cache)
    saved = cache.save(tmp_path / "prefix.safetensors")
    torch.save(ids, tmp_path / "ids.pt")
    out = tmp_path / "out.pt"
    command = [sys.executable, "-c", CONTINUE, name, saved, where, tmp_path / "ids.pt", out]
    subprocess.run([str(part) for part in command], check=True)
    assert torch.equal(torch.load(out), model.generate(ids, cache=cache, **GREEDY))


def test_memory_of_4096_tokens():
    model, tokenizer = load(SMOLLM2)
    ids = tokenizer("\n\n".join(topics[name] for name in sorted(topics)), return_tensors="pt").input_ids
    artifact = make_artifact(model, CacheSpec(KEY, VALUE, 128, 4), ids[:, 5000:5300])
    cache = CalibratedCache(artifact, model.to(torch.bfloat16))
    with torch.no_grad():
        for part in ids[:, :4096].split(512, dim=1):
            model(part, cache=cache)
    report = cache.memory_report()
    assert report["total_bytes"] == pytest.approx(held_bytes(cache), abs=1)
    fp16 = 2 * 2 * 30 * 3 * 64 * 4096
    assert report["total_bytes"] / fp16 < 0.30
