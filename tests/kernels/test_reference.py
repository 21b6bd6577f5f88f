"""The reference against attention written out token by token in float64."""

import math

import pytest
import torch

from kvcalib.kernels.reference import attend
from kvcalib.quant.codec import dequantise
from kvcalib.quant.page import read_page
from kvcalib.quant.spec import PAGE
from tests.runtime.test_store import DIM, HEADS, fill, store


def oracle(query, target, visible, *, scale, softcap=None, window=None):
    """Row 0 of `target`: every token in float64, rotated as a complex number, one at a time."""
    columns = []
    for sink in range(target.sink_counts[0]):
        key, value = target.sink_key[0, :, sink], target.sink_value[0, :, sink]
        columns.append((key.double(), value.double(), int(target.sink_positions[0, sink]), None))
    for page in target.pages[0, : target.page_counts[0]]:
        coded_key, coded_value, first = read_page(page, target.layout)
        keys = dequantise(coded_key, target.spec.key, target.key_tables).double()
        values = dequantise(coded_value, target.spec.value, target.value_tables).double()
        for t in range(PAGE):
            columns.append((_rotate(keys[t], int(first) + t, target), values[t], int(first) + t, None))
    key, value = target.recent()
    for r in range(target.recent_length):
        columns.append((key[0, :, r].double(), value[0, :, r].double(), int(target.positions[0, r]), r))
    out = torch.zeros(query.shape[2], query.shape[1], DIM, dtype=torch.float64)
    for t in range(query.shape[2]):
        at = int(target.positions[0, -query.shape[2] + t])
        for head in range(query.shape[1]):
            scores, values = [], []
            for key, value, position, recent in columns:
                seen = visible[0, t, recent] if recent is not None else window is None or at - position < window
                if seen:
                    score = float(query[0, head, t].double() @ key[head // (query.shape[1] // HEADS)]) * scale
                    scores.append(softcap * math.tanh(score / softcap) if softcap else score)
                    values.append(value[head // (query.shape[1] // HEADS)])
            out[t, head] = torch.tensor(scores).double().softmax(0) @ torch.stack(values)
    return out


def _rotate(key, position, target):
    if target.spec.key.rope != "pre":
        return key
    a, b = key[:, : DIM // 2], key[:, DIM // 2 :]
    turned = torch.complex(a, b) * torch.polar(torch.ones(DIM // 2).double(), position * target.rope.inv_freq.double())
    return torch.cat([turned.real, turned.imag], -1)


@pytest.fixture
def tokens():
    generator = torch.Generator().manual_seed(5)
    key, value = torch.randn(2, 1, HEADS, 110, DIM, generator=generator)
    return key, value, 1000 + torch.arange(110)[None]


@pytest.mark.parametrize(
    ("key", "value"), [("static", "token"), ("group", "channels"), ("fp8", "fp8"), ("static", "identity")]
)
@pytest.mark.parametrize("options", [{}, {"softcap": 0.7}, {"window": 40}])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("queries", [1, 4])
def test_attend_is_softmax_over_everything_stored(tokens, key, value, options, group, queries):
    target = fill(store(key, value, window=2, sink=3), tokens, [110])
    query = torch.randn(1, HEADS * group, queries, DIM)
    allowed = torch.ones(1, queries, 110, dtype=torch.bool).tril(110 - queries)
    if "window" in options:
        allowed = allowed.triu(110 - queries - options["window"] + 1)
    packed = target.packed(allowed if "window" in options else None, queries)
    got = attend(query, packed, scale=0.3, softcap=options.get("softcap"))
    expected = oracle(query, target, allowed[..., -target.recent_length :], scale=0.3, **options)
    torch.testing.assert_close(got[0].double(), expected, rtol=1e-4, atol=3e-5)  # fp32 angles at position 1100


def test_a_query_that_sees_nothing_gives_zeros(tokens):
    target = fill(store(window=2, sink=0), [t[..., :20, :] if t.dim() == 4 else t[:, :20] for t in tokens], [20])
    packed = target.packed(torch.zeros(1, 1, 20, dtype=torch.bool), 1)
    assert torch.equal(attend(torch.randn(1, 2, 1, DIM), packed, scale=1.0), torch.zeros(1, 1, 2, DIM))


def test_a_mask_hides_tokens_that_are_already_packed(tokens):
    target = fill(store(window=2, sink=3), tokens, [110])
    query, allowed = torch.randn(1, HEADS, 1, DIM), torch.ones(1, 1, 110, dtype=torch.bool)
    everything = attend(query, target.packed(None, 1), scale=0.3)
    torch.testing.assert_close(attend(query, target.packed(allowed, 1), scale=0.3), everything)
    allowed[..., 1:90] = False
    some = attend(query, target.packed(allowed, 1), scale=0.3)
    assert (some - everything).abs().max() > 0.05
