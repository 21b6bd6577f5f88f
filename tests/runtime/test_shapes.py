"""Every shape of head, every boundary in length, every magnitude: the packed cache reads back what it was given."""

import pytest
import torch

from kvcalib.calib.outliers import _power_of_two
from kvcalib.errors import UnsupportedModel
from kvcalib.fit.frame import frame_from_bounds, symmetric_frame
from kvcalib.kernels.reference import attend
from kvcalib.quant.rope import make_rope
from kvcalib.quant.spec import PAGE, CacheSpec, Tables, TensorSpec
from kvcalib.runtime.store import LayerStore
from tests.helpers import _levels, _widths
from tests.models.zoo import tiny
from tests.runtime.test_simulate import check

HEADS = {"MQA": 1, "GQA": 2, "MHA": 4}
FORMATS = [("static", "token"), ("mixed", "norm"), ("group", "channels"), ("token", "fp8")]


@pytest.mark.parametrize("dim", [20, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("key", "value"), FORMATS)
def test_attention_over_pages_of_every_shape_of_head(dim, heads, key, value):
    """The real cache against the simulation, through a model."""
    from tests.helpers import cache_spec

    if value == "channels" and dim % 8:
        pytest.skip("groups of 8 channels do not divide 20")
    model = tiny("llama", head_dim=dim, num_key_value_heads=HEADS[heads], num_hidden_layers=1)
    ids = torch.randint(3, 290, (1, 80), generator=torch.Generator().manual_seed(1))
    check(model, ids, cache_spec(key, value, window=3, sink=2), chunk=29)


SETTINGS = [
    (layout, scope, outliers, bits, window, sink)
    for layout in ("static", "group")
    for scope in ("layer", "head")
    for outliers in ((0.0, 0.0), (0.01, 0.0), (0.0, 0.02), (0.02, 0.01))
    for bits, window, sink in (((2, 5), 0, 0), ((3, 4), 17, 1), ((4, 2), 64, 4), ((5, 3), 1, 8), ((3, 3), 512, 4))
]


@pytest.mark.parametrize(("layout", "scope", "outliers", "bits", "window", "sink"), SETTINGS)
def test_every_combination_of_settings(layout, scope, outliers, bits, window, sink):
    """Bits, outliers, layout, window and sink of keys and values are independent of each other."""
    key = TensorSpec(bits[0], "uniform", layout, group=32, rope="post", outliers=outliers[0])
    value = TensorSpec(bits[1], "nuq", "token", scope=scope, outliers=outliers[1])
    model = tiny("llama", num_hidden_layers=1)
    ids = torch.randint(3, 290, (1, max(90, window + 120)), generator=torch.Generator().manual_seed(1))
    check(model, ids, CacheSpec(key, value, window, sink), chunk=53)


# --- the store alone ---------------------------------------------------------------------------------------------


def tables_for(x: torch.Tensor, spec: TensorSpec) -> Tables:
    """x [T, H, D] -> frames as calibration makes them."""
    low, high = x.double().amin(0).numpy(), x.double().amax(0).numpy()
    largest = torch.full(x.shape[1:], x.abs().max().double().item()).numpy()
    if not spec.quantised:
        frame = torch.zeros(x.shape[1:]), torch.full(x.shape[1:], _power_of_two(largest.max()))
    elif spec.range == "static":
        frame = frame_from_bounds(low, high)
    elif spec.levels == "fp8":
        frame = symmetric_frame(largest / 448)
    else:
        frame = symmetric_frame(largest / 256)
    books = spec.book_count(*x.shape[1:])
    tables = Tables(*frame, _levels(spec).expand(books, -1).contiguous())
    if spec.ranks_by_error:
        tables = tables._replace(weight=torch.ones(x.shape[1:]))
    if spec.levels == "mixed":
        tables = tables._replace(widths=_widths(x.abs().amax(0), tiles=spec.rope == "none"))
    return tables


def filled(key, value, spec: CacheSpec, sizes) -> LayerStore:
    """key [T, H, D], value [T, H, Dv] of one row."""
    rope = make_rope(key.shape[-1], "half", 1.0 / 100 ** (torch.arange(key.shape[-1] // 2) / 8))
    target, start = LayerStore(spec, tables_for(key, spec.key), tables_for(value, spec.value), rope), 0
    for size in sizes:
        part = slice(start, start + size)
        positions = torch.arange(start, start + size)[None]
        target.append(key[part].transpose(0, 1)[None], value[part].transpose(0, 1)[None], positions)
        target.flush()
        start += size
    return target


def read_back(target: LayerStore) -> tuple[torch.Tensor, torch.Tensor]:
    """Every token as the cache would give it to attention: [T, H, D], [T, H, Dv]."""
    key, value, _ = target.decode(target.pages[0, : target.page_counts[0]])
    sinks, recent = target.sink_counts[0], target.recent()
    waiting = target.waiting[0]
    parts_key = [target.sink_key[0, :, :sinks].transpose(0, 1).float(), key]
    parts_value = [target.sink_value[0, :, :sinks].transpose(0, 1).float(), value]
    parts_key.append(recent[0][0].transpose(0, 1)[waiting].float())
    parts_value.append(recent[1][0].transpose(0, 1)[waiting].float())
    return torch.cat(parts_key), torch.cat(parts_value)


def random_tokens(count, heads=2, key_dim=16, value_dim=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(count, heads, dim, generator=generator) for dim in (key_dim, value_dim))


POST = TensorSpec(4, "uniform", "static", rope="post")
VALUE = TensorSpec(4, "nuq", "token", scope="layer", outliers=0.01)


@pytest.mark.parametrize(("key_dim", "value_dim"), [(24, 40), (64, 16), (20, 128)])
def test_values_of_another_dimension_than_keys(key_dim, value_dim):
    key, value = random_tokens(80, key_dim=key_dim, value_dim=value_dim)
    target = filled(key, value, CacheSpec(POST, VALUE, 5, 2), [80])
    assert target.page_counts == [2]
    query = torch.randn(1, 4, 3, key_dim, generator=torch.Generator().manual_seed(9))
    seen = torch.ones(1, 3, 80, dtype=torch.bool)
    out = attend(query, target.packed(seen, 3), scale=0.2)
    assert out.shape == (1, 3, 4, value_dim)
    held_key, held_value = read_back(target)
    weights = torch.softmax(torch.einsum("hgtd,shd->hgts", query[0].unflatten(0, (2, 2)), held_key) * 0.2, -1)
    expected = torch.einsum("hgts,shd->thgd", weights, held_value).flatten(1, 2)
    torch.testing.assert_close(out[0], expected, rtol=0, atol=1e-5)


EDGES = [
    (window, sink, count)
    for window in (0, 1, 31, 32, 33, 64)
    for sink in (0, 1, 8)
    for count in sorted({1, sink, sink + 1, window, window + 1, sink + 31, sink + PAGE, sink + 33})
    if count
] + [
    (window, sink, window + sink + extra)
    for window in (0, 1, 31, 32, 512)
    for sink in (0, 1, 8)
    for extra in (31, 32, 33, 63, 64, 65)
]


@pytest.mark.parametrize(("window", "sink", "count"), EDGES)
def test_every_boundary_in_length(window, sink, count):
    key, value = random_tokens(count)
    spec = CacheSpec(POST, VALUE, window, sink)
    target = filled(key, value, spec, [count])
    stream = filled(key, value, spec, [1] * count if count < 130 else [count - 40] + [1] * 40)
    expected = max(0, (count - window - sink) // PAGE)
    assert target.page_counts == stream.page_counts == [expected]
    assert int(target.waiting.sum()) == count - expected * PAGE - (sink if expected else 0)
    held = read_back(target)
    assert all(torch.equal(a, b) for a, b in zip(held, read_back(stream), strict=True))
    for original, read in zip((key, value), held, strict=True):
        assert read.shape[0] == count
        exact = torch.cat([torch.arange(min(sink, count)), torch.arange(min(sink + expected * PAGE, count), count)])
        assert torch.equal(read[exact], original[exact])
        torch.testing.assert_close(read, original, rtol=0, atol=0.8)


FORMATS_ALONE = {
    "nuq": TensorSpec(4, "nuq", "static", outliers=0.01, rank="error"),
    "kivi": TensorSpec(4, "uniform", "group", group=32),
    "token": TensorSpec(4, "uniform", "token", scope="layer"),
    "head": TensorSpec(4, "nuq", "token", scope="head", outliers=0.02),
    "norm": TensorSpec(4, "nuq", "norm", rotation="hadamard"),
    "fp8": TensorSpec(8, "fp8", "static"),
    "none": TensorSpec(16, "none", "static"),
}


def odd_tokens(kind: str, magnitude: float) -> torch.Tensor:
    x = torch.randn(100, 2, 16, generator=torch.Generator().manual_seed(4)).clamp(-3, 3) / 3
    if kind == "constant channel":
        x[:, 0, 3] = 0.75
    elif kind == "zero tokens":
        x[10:75] = 0
    elif kind == "all zero":
        x.zero_()
    elif kind == "one token alone is large":
        x[40] *= 100
    return x * magnitude


KINDS = ["plain", "constant channel", "zero tokens", "all zero", "one token alone is large"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("magnitude", [1e-6, 1.0, 600.0, 7e4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FORMATS_ALONE)
def test_odd_magnitudes_lose_no_more_than_a_step(name, kind, magnitude, dtype):
    """The error of a token stays below what its own range, or its channel's, allows."""
    x = odd_tokens(kind, magnitude)
    if dtype == torch.float16 and x.abs().max() > 60000:
        pytest.skip("float16 has no such values")
    x = x.to(dtype)
    form = FORMATS_ALONE[name]
    spec = CacheSpec(TensorSpec(8, "fp8", "static", rope="post"), form, 0, 1)
    target = filled(x, x, spec, [100])
    _, held = read_back(target)
    assert target.page_counts == [3]
    assert held.isfinite().all()
    error, x = (held - x.float()).abs(), x.float()
    if kind == "all zero":
        assert error.max() <= 1e-12
        return
    spread = x.amax(0) - x.amin(0) if form.range in ("static", "group") else x.abs().amax((1, 2), keepdim=True)
    share = {"fp8": 0.07, "none": 0.002}.get(name, 0.3 if name == "norm" else 0.2)
    floor = 1e-3 * magnitude * (100 if kind.startswith("one token") else 1)
    assert (error <= share * spread + floor).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 2e18])
@pytest.mark.parametrize("where", ["key", "value"])
def test_what_is_not_finite_is_an_error_and_not_a_code(bad, where):
    key, value = random_tokens(80)
    clean = CacheSpec(POST, VALUE, 0, 1)
    target = filled(key, value, clean, [10])
    (key if where == "key" else value)[20, 0, 3] = bad
    target.append(key[10:].transpose(0, 1)[None], value[10:].transpose(0, 1)[None], torch.arange(10, 80)[None])
    with pytest.raises(UnsupportedModel, match=r"NaN, infinite or beyond 1e\+18 \(positions 1 to 64 of row 0\)"):
        target.flush()
