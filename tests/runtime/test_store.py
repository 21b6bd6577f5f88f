"""The store alone, without a model: arrival in any pieces, padding, crop and row operations."""

import pytest
import torch

from kvcalib.errors import UnsupportedModel
from kvcalib.quant.rope import make_rope
from kvcalib.quant.spec import PAGE, CacheSpec, Tables, TensorSpec
from kvcalib.runtime.store import LayerStore
from tests.helpers import KEYS, VALUES

HEADS, DIM, TOKENS = 2, 16, 150


def store(key="static", value="token", *, window=0, sink=1) -> LayerStore:
    spec = CacheSpec(KEYS[key], VALUES[value], window, sink)
    rope = make_rope(DIM, "half", 1.0 / 100 ** (torch.arange(8) / 8))
    return LayerStore(spec, _tables(spec.key), _tables(spec.value), rope)


def _tables(spec: TensorSpec) -> Tables:
    count = 2**spec.bits if spec.bits < 8 else 253
    uniform = spec.levels == "uniform" and spec.range != "static"
    levels = torch.arange(count).float() if uniform else torch.linspace(-1, 1, count).bfloat16().float()
    books = HEADS if spec.books == "head" else 1
    frame = torch.zeros(HEADS, DIM), torch.full((HEADS, DIM), 2.0)
    return Tables(*frame, levels.unique()[None].expand(books, -1).contiguous())


@pytest.fixture
def tokens():
    generator = torch.Generator().manual_seed(3)
    key, value = torch.randn(2, 1, HEADS, TOKENS, DIM, generator=generator)
    return key, value, torch.arange(TOKENS)[None]


def fill(target: LayerStore, tokens, sizes) -> LayerStore:
    start = 0
    for size in sizes:
        part = slice(start, start + size)
        target.append(tokens[0][:, :, part], tokens[1][:, :, part], tokens[2][:, part])
        target.flush()
        start += size
    return target


def pages_of(target: LayerStore, row: int = 0) -> torch.Tensor:
    return target.pages[row, : target.page_counts[row]]


@pytest.mark.parametrize(("key", "value"), [("static", "token"), ("group", "channels"), ("fp8", "fp8")])
@pytest.mark.parametrize(("window", "sink"), [(0, 0), (0, 1), (16, 4), (64, 3)])
def test_the_same_bits_however_the_tokens_arrive(tokens, key, value, window, sink):
    whole = fill(store(key, value, window=window, sink=sink), tokens, [TOKENS])
    for sizes in ([1] * TOKENS, [7] * 21 + [3], [40, 1, 1, 64, 44]):
        pieces = fill(store(key, value, window=window, sink=sink), tokens, sizes)
        assert pieces.page_counts == whole.page_counts == [(TOKENS - sink - window) // PAGE]
        assert torch.equal(pages_of(pieces), pages_of(whole))
        assert torch.equal(pieces.sink_key, whole.sink_key)
        assert all(torch.equal(a, b) for a, b in zip(pieces.recent(), whole.recent(), strict=True))


def test_the_window_never_holds_more_than_its_tokens_and_one_page(tokens):
    target = store(window=8, sink=2)
    for step in range(TOKENS):
        part = slice(step, step + 1)
        target.append(tokens[0][:, :, part], tokens[1][:, :, part], tokens[2][:, part])
        target.flush()
        assert target.recent_length < 8 + 2 + PAGE
        assert target.page_counts[0] * PAGE + target.sink_counts[0] + target.recent_length == step + 1
        assert target.recent_key.shape[2] <= 4 * PAGE


def test_padding_enters_nothing_and_rows_do_not_touch_each_other(tokens):
    alone = fill(store(window=4, sink=2), tokens, [TOKENS])
    pad = 13
    key = torch.cat([torch.full((1, HEADS, pad, DIM), 1e4), tokens[0]], 2).expand(2, -1, -1, -1).clone()
    value = torch.cat([torch.full((1, HEADS, pad, DIM), -1e4), tokens[1]], 2).expand(2, -1, -1, -1).clone()
    positions = torch.cat([torch.ones(1, pad, dtype=torch.int64), tokens[2]], 1).expand(2, -1).clone()
    positions[1] = torch.arange(TOKENS + pad)
    both = store(window=4, sink=2)
    both.append(key, value, positions)
    real = torch.ones(2, TOKENS + pad, dtype=torch.bool)
    real[0, :pad] = False
    both.drop_padding(real)
    both.flush()
    assert torch.equal(pages_of(both, 0), pages_of(alone))
    assert torch.equal(both.sink_key[0], alone.sink_key[0])
    assert not torch.equal(pages_of(both, 1)[:1], pages_of(alone)[:1])


@pytest.mark.parametrize("count", [0, 1, 20, 21, 22, 53, 54, 100, 149, 150, 999])
def test_crop_then_the_same_tokens_again_gives_the_same_pages(tokens, count):
    target = fill(store("static", "token", window=4, sink=1), tokens, [TOKENS])
    whole = pages_of(target).clone()
    target.crop(count)
    left = max(TOKENS - count, 0)
    assert target.length == left
    assert target.page_counts[0] * PAGE + target.sink_counts[0] + int(target.waiting[0].sum()) == left
    kept = target.page_counts[0]
    assert torch.equal(pages_of(target), whole[:kept])
    if left:
        rest = [t[:, :, left:] for t in tokens[:2]] + [tokens[2][:, left:]]
        fill(target, rest, [TOKENS - left] if count else [])
        assert target.page_counts == [whole.shape[0]] if count else True


@pytest.mark.parametrize("count", [10, 30, 60, 110])
def test_a_crop_of_a_padded_batch_takes_the_same_columns_from_every_row(tokens, count):
    pad = 20
    batch = [t[:, :, :120].expand(2, -1, -1, -1) for t in tokens[:2]] + [tokens[2][:, :120].expand(2, -1)]
    target = store(window=0, sink=0)
    target.append(*batch)
    real = torch.ones(2, 120, dtype=torch.bool)
    real[1, :pad] = False
    target.drop_padding(real)
    target.flush()
    target.crop(count)
    for row, tokens_left in ((0, 120 - count), (1, max(120 - count - pad, 0))):
        assert target.page_counts[row] * PAGE + int(target.waiting[row].sum()) == tokens_left
    assert target.recent_length == 0 or target.waiting[:, -1].any()


def test_a_crop_inside_a_page_keeps_what_was_stored(tokens):
    target = fill(store("static", "token", sink=1), tokens, [TOKENS])
    key, value, positions = target.decode(target.pages[0, 2:3])
    target.crop(TOKENS - (1 + 2 * PAGE + 10))
    kept = target.waiting[0].nonzero()[:, 0]
    recent_key, recent_value = target.recent()
    torch.testing.assert_close(recent_key[0][:, kept].transpose(0, 1), key[:10])
    torch.testing.assert_close(recent_value[0][:, kept].transpose(0, 1), value[:10])
    assert target.positions[0, kept].tolist() == positions[:10].tolist()


def test_rows_can_be_selected_and_repeated(tokens):
    rows = [torch.cat([t, t + 1]) for t in tokens[:2]] + [tokens[2].expand(2, -1)]
    target = fill(store(window=3), rows, [TOKENS])
    first, second = pages_of(target, 0).clone(), pages_of(target, 1).clone()
    target.select_rows(torch.tensor([1, 0, 1]))
    assert target.batch == 3
    assert torch.equal(pages_of(target, 1), first)
    assert torch.equal(pages_of(target, 2), second)
    assert {t.shape[0] for t in target.tensors().values()} == {3}


def test_a_page_ends_where_positions_jump(tokens):
    positions = tokens[2].clone()
    positions[0, 45:] -= 7  # a second turn that continues before the padding of the first
    jumps = (*tokens[:2], positions)
    whole = fill(store(sink=1), jumps, [TOKENS])
    sizes = whole.layout.read(pages_of(whole), "tokens")[:, 0].tolist()
    assert sizes == [32, 12, 32, 32, 32]
    assert whole.layout.read(pages_of(whole), "first_position")[:, 0].tolist() == [1, 33, 38, 70, 102]
    pieces = fill(store(sink=1), jumps, [1] * TOKENS)
    assert torch.equal(pages_of(pieces)[: len(sizes)], pages_of(whole)[: pieces.page_counts[0]])
    whole.crop(TOKENS - 40)
    assert (whole.page_counts, int(whole.waiting.sum())) == ([1], 7)


def test_a_sliding_window_forgets_pages_and_stays_small(tokens):
    spec = CacheSpec(KEYS["static"], VALUES["token"], 0, 1)
    target = LayerStore(spec, _tables(spec.key), _tables(spec.value), store().rope, sliding_window=20)
    for turn in range(8):
        fill(target, (*tokens[:2], tokens[2] + turn * TOKENS), [TOKENS])
    assert target.length == 8 * TOKENS
    assert target.page_counts[0] <= (20 + 64) // PAGE + 4
    assert target.pages.shape[1] <= 2 * target.page_counts[0] + TOKENS // PAGE
    assert target.forgotten[0] + target.page_counts[0] * PAGE + target.recent_length + 1 == 8 * TOKENS
    allowed = torch.ones(1, 1, target.length, dtype=torch.bool)
    allowed[..., :-20] = False
    assert target.packed(allowed, 1).moved_visible.sum() == 20 - target.recent_length
    target.crop(30)
    with pytest.raises(UnsupportedModel, match="sliding window"):
        target.crop(900)


def test_packing_beyond_the_frequencies_of_the_model_is_refused(tokens):
    target = LayerStore(*_parts(), valid_to=100)
    with pytest.raises(UnsupportedModel, match="beyond 100 tokens"):
        fill(target, tokens, [TOKENS])


def _parts():
    spec = CacheSpec(KEYS["static"], VALUES["token"], 0, 1)
    return spec, _tables(spec.key), _tables(spec.value), store().rope


def test_memory_that_no_token_owns_is_never_read(tokens, monkeypatch):
    """Fresh memory is NaN; a row that reads it would be NaN too."""
    fresh = torch.Tensor.new_empty

    def poisoned(self, *shape, **options):
        tensor = fresh(self, *shape, **options)
        return tensor.fill_(torch.nan if tensor.is_floating_point() else 255)

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    target = fill(store(window=5), tokens, [1] * TOKENS)
    from kvcalib.kernels.reference import attend

    out = attend(torch.randn(1, 4, 1, DIM), target.packed(None, 1), scale=0.25)
    assert out.isfinite().all()
