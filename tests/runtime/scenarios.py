"""What users do with a cache: each scenario drives any cache and returns tokens and logits to compare.

A scenario gets a `Run` and a function that makes an empty cache. Every one of them also serves as the reference, with
DynamicCache; `crop` differs there, because layers with a sliding window cannot go back in transformers' own cache.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import DynamicCache

from tests.models.zoo import STATEFUL

PROMPT, NEW = 24, 6


@dataclass(frozen=True)
class Run:
    """ids, mask [B, PROMPT]: the prompt, left padded where mask is 0; more [B, 12]: tokens that come later."""

    model: object
    draft: object
    ids: torch.Tensor
    mask: torch.Tensor
    more: torch.Tensor

    @property
    def batch(self) -> int:
        return self.ids.shape[0]

    def generate(self, cache, ids=None, mask=None, **options):
        """[B, NEW] new tokens and their logits."""
        ids, mask = self.ids if ids is None else ids, self.mask if mask is None else mask
        settings = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
        settings |= {"return_dict_in_generate": True, "output_logits": True} | options
        out = self.model.generate(ids, attention_mask=mask, cache=cache, **settings)
        return out.sequences[:, ids.shape[1] :], torch.stack(out.logits) if out.logits else None

    def forward(self, cache, ids, seen):
        """Logits of the columns of `ids` that hold tokens. seen [B, past + T]: the mask so far."""
        positions = (seen.cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        with torch.no_grad():
            logits = self.model(ids, attention_mask=seen, position_ids=positions, cache=cache).logits
        return logits[seen[:, -ids.shape[1] :].bool()]

    def longer(self, count: int, mask=None) -> torch.Tensor:
        mask = self.mask if mask is None else mask
        return torch.cat([mask, mask.new_ones(len(mask), count)], dim=1)

    def filled(self, cache):
        self.forward(cache, self.ids, self.mask)
        return cache

    def goes_on(self, cache, rows=slice(None)):
        """Three calls after the prompt: 5 tokens, 1 token, 6 tokens; rows: of the prompt, now in the cache."""
        more, mask, logits = self.more[rows], self.mask[rows], []
        for start, end in ((0, 5), (5, 6), (6, 12)):
            logits.append(self.forward(cache, more[:, start:end], self.longer(end, mask)))
        return torch.cat(logits)


def greedy(run, make):
    return run.generate(make())


def sampling(run, make):
    torch.manual_seed(5)
    return run.generate(make(), do_sample=True, top_k=20)


def beams(run, make):
    return run.generate(make(), num_beams=3, num_return_sequences=2)[0], None


def assisted(run, make):
    return run.generate(make(), assistant_model=run.draft)


def chunked(run, make):
    return run.generate(make(), prefill_chunk_size=7)


def turns(run, make):
    """A second question to the same cache, after the answer to the first."""
    cache = make()
    first, _ = run.generate(cache)
    ids = torch.cat([run.ids, first, run.more], dim=1)
    second, logits = run.generate(cache, ids, run.longer(ids.shape[1] - PROMPT))
    return torch.cat([first, second], dim=1), logits


def crop(run, make):
    """Goes back by 12 tokens, 3 of them of the prompt, and takes another way."""
    cache = run.filled(make())
    run.forward(cache, run.more[:, :9], run.longer(9))
    cache.crop(-12)
    kept = run.mask[:, :-3]
    return None, run.forward(cache, run.more, torch.cat([kept, kept.new_ones(run.batch, 12)], dim=1))


def crop_reference(run, make):
    """The same way without a detour."""
    cache, kept = make(), run.mask[:, :-3]
    run.forward(cache, run.ids[:, :-3], kept)
    return None, run.forward(cache, run.more, torch.cat([kept, kept.new_ones(run.batch, 12)], dim=1))


def repeat(run, make):
    cache = run.filled(make())
    cache.batch_repeat_interleave(2)
    return None, run.goes_on(cache, torch.arange(run.batch).repeat_interleave(2))


def select(run, make):
    cache, rows = run.filled(make()), torch.arange(run.batch)[-2:]
    cache.batch_select_indices(rows)
    return None, run.goes_on(cache, rows)


def reset(run, make):
    cache = run.filled(make())
    run.goes_on(cache)
    cache.reset()
    return None, run.goes_on(run.filled(cache))


def reset_reference(run, make):
    return None, run.goes_on(run.filled(make()))


def deepcopied(run, make):
    """The copy and the original each go their own way."""
    cache = run.filled(make())
    twin = copy.deepcopy(cache)
    ours = run.goes_on(cache)
    return None, torch.cat([ours, run.forward(twin, run.more.flip(1), run.longer(12))])


SCENARIOS: dict[str, Callable] = {
    function.__name__: function
    for function in (greedy, sampling, beams, assisted, chunked, turns, crop, repeat, select, reset, deepcopied)
}
REFERENCES = {"crop": crop_reference, "reset": reset_reference}
BACKWARD = ("assisted", "crop", "repeat", "select")
"""What transformers' own cache cannot do either where a layer keeps a state."""


def reference(name: str, run: Run, *, model):
    """The scenario with transformers' own cache."""
    return REFERENCES.get(name, SCENARIOS[name])(run, lambda: DynamicCache(config=model.config))


def possible(family: str, name: str, batch: int) -> bool:
    """assisted decoding is for one row in transformers."""
    return not (name in BACKWARD and family.split("-")[0] in STATEFUL) and not (name == "assisted" and batch > 1)
