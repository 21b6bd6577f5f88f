import pytest
import torch
from transformers import DynamicCache

from kvcalib.eval.reference import head, read_hidden, read_trials, reference
from tests.models.zoo import tiny

NEEDLES = {"tasks": ["passkey"], "lengths": [300, 4096], "depths": [0.0, 0.5], "trials": 1, "seed": 0}


@pytest.fixture
def measured(model, tokenizer, windows, progress, tmp_path):
    summary = reference(model, tokenizer, windows, out=tmp_path, progress=progress, **NEEDLES)
    return summary, tmp_path


def test_the_head_gives_the_very_logits_of_the_whole_model(measured, model, windows):
    hidden = list(read_hidden(measured[1]))
    assert len(hidden) == len(windows)
    for window, states in zip(windows, hidden, strict=True):
        with torch.no_grad():
            whole = model(window[None], cache=DynamicCache(config=model.config), use_cache=True).logits[0]
            assert torch.equal(head(model, states), whole)


@pytest.mark.parametrize("family", ["gemma2", "cohere", "granite", "qwen2"])
def test_what_a_family_does_after_its_head_is_kept(family, tmp_path, tokenizer, progress):
    """Gemma 2 caps its logits, Cohere and Granite scale them."""
    model, window = tiny(family, vocab_size=259), torch.randint(3, 200, (1, 40))
    reference(model, tokenizer, window, out=tmp_path, progress=progress, **NEEDLES | {"trials": 0})
    with torch.no_grad():
        whole = model(window, cache=DynamicCache(config=model.config), use_cache=True).logits[0]
        assert torch.equal(head(model, next(read_hidden(tmp_path))), whole)
    assert "forward" not in vars(model.base_model)


def test_perplexity_and_trials_are_written_down(measured, model, windows):
    summary, folder = measured
    with torch.no_grad():
        logits = model(windows).logits[:, :-1].float()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    assert summary["ppl_fp"] == pytest.approx(loss.exp().item(), rel=1e-4)
    assert summary["tokens"] == windows[:, 1:].numel()
    trials = read_trials(folder)
    assert [(t.length, t.depth) for t, _ in trials] == [(300, 0.0), (300, 0.5)], (
        "4096 tokens are too long for the model"
    )
    assert summary["needle_fp"] == 0
