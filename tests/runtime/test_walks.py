"""Any order of operations: after each of them, and with any padding, the logits are those of DynamicCache."""

import random

import pytest
import torch
from transformers import DynamicCache

from kvcalib.quant.spec import CacheSpec, TensorSpec
from kvcalib.runtime.cache import CalibratedCache
from tests.helpers import make_artifact
from tests.models.zoo import tiny

KEY, VALUE = TensorSpec(8, "uniform", "group", group=8, rope="pre"), TensorSpec(8, "uniform", "token", scope="head")
"""Eight bits: as good as exact."""


class Pair:
    """Our cache and DynamicCache of one model, side by side through the same calls."""

    def __init__(self, family: str, sink: int, attention: str = "sdpa"):
        self.model = tiny(family)
        self.model.set_attn_implementation(attention)
        self.generator = torch.Generator().manual_seed(11)
        artifact = make_artifact(self.model, CacheSpec(KEY, VALUE, 0, sink), self.tokens(1, 60))
        self.caches = CalibratedCache(artifact, self.model), DynamicCache(config=self.model.config)
        self.mask = None

    def tokens(self, rows: int, count: int) -> torch.Tensor:
        return torch.randint(3, 290, (rows, count), generator=self.generator)

    def start(self, pads: list[int], columns: int) -> None:
        self.mask = torch.ones(len(pads), 0, dtype=torch.long)
        self.go_on(columns, (torch.arange(columns) >= torch.tensor(pads)[:, None]).long())

    def go_on(self, count: int, shown: torch.Tensor | None = None) -> None:
        """`count` more tokens; compares the logits of those that are no padding."""
        rows = self.mask.shape[0]
        shown = torch.ones(rows, count, dtype=torch.long) if shown is None else shown
        self.mask = torch.cat([self.mask, shown], dim=1)
        positions = (self.mask.cumsum(1) - 1).clamp_min(0)[:, -count:]
        ids, options = self.tokens(rows, count), {"attention_mask": self.mask, "position_ids": positions}
        with torch.no_grad():
            ours, theirs = (self.model(ids, cache=cache, **options).logits[shown.bool()] for cache in self.caches)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0.05)

    def crop(self, count: int) -> None:
        self.mask = self.mask[:, : self.mask.shape[1] - count]
        for cache in self.caches:
            cache.crop(-count)

    def select(self, rows: list[int]) -> None:
        self.mask = self.mask[rows]
        for cache in self.caches:
            cache.batch_select_indices(torch.tensor(rows))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("sink", [0, 2])
def test_only_a_row_that_has_packed_nothing_is_left(attention, sink):
    pair = Pair("llama", sink, attention)
    pair.start([0, 60], 80)
    pair.select([1])
    pair.go_on(5)
    pair.crop(3)
    pair.go_on(60)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("sink", [0, 2])
@pytest.mark.parametrize("kept", [1, 5, 20, 34, 60])
def test_a_padded_batch_goes_back_below_its_first_page(attention, sink, kept):
    pair = Pair("llama", sink, attention)
    pair.start([10, 13], 90)
    pair.crop(90 - 13 - kept)
    pair.go_on(5)
    pair.crop(6)
    pair.go_on(50)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "falcon"])
@pytest.mark.parametrize("seed", range(5))
def test_random_walks(family, seed):
    choose = random.Random(f"{family} {seed}")
    pair = Pair(family, choose.choice([0, 1, 3]))
    pads = [choose.choice([0, 0, 7, 30, 50]) for _ in range(choose.choice([1, 2, 3]))]
    pair.start(pads, 60)
    for _ in range(8):
        rows, columns = pair.mask.shape
        longest_pad = int((pair.mask.cumsum(1) == 0).sum(1).max())
        step = choose.choice(["go on", "go on", "crop", "select"])
        if step == "crop" and family != "gemma3_text":  # a window that forgets may refuse
            pair.crop(choose.randrange(columns - longest_pad))
        elif step == "select":
            pair.select([choose.randrange(rows) for _ in range(choose.choice([1, 2, 3]))])
        pair.go_on(choose.choice([1, 1, 5, 40]))
