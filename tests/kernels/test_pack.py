"""The packing kernel writes the bytes of the reference."""

from threading import Barrier, Thread

import pytest
import torch

from kvcalib.kernels import dispatch, reference
from kvcalib.kernels.cpu import build
from kvcalib.kernels.cpu import pack as compiled_pack
from kvcalib.kernels.cpu.attend import ISAS, supported
from kvcalib.kernels.cpu.pack import pack
from kvcalib.quant.codec import dequantise
from kvcalib.quant.page import PageLayout, read_page
from kvcalib.quant.spec import PAGE, CacheSpec, TensorSpec
from tests.kernels.packed import Shape, make_rope, make_tables
from tests.kernels.test_cpu import KEY, KEYS, VALUE, VALUES

SHAPES = {
    "plain": Shape(),
    "narrow": Shape(dim=20, value_dim=36, heads=3),
    "wide": Shape(dim=128, value_dim=80, heads=1),
    "odd": Shape(value_dim=17, heads=3),
    "partial rotary": Shape(dim=64, rotary=24, gain=1.3),
    "bfloat16": Shape(dtype=torch.bfloat16),
    "float16": Shape(dtype=torch.float16),
    "float64": Shape(dtype=torch.float64),
}
SUMS = {"token, per head", "norm", "mixed", "mixed to 6", "mixed, norm", "mixed, per channel"}
"""Specs whose ranges, ranks or rotations are sums, which torch adds up in another order."""

pytestmark = pytest.mark.skipif(not build.has_compiler(), reason="no C++ compiler")


@pytest.fixture(params=ISAS)
def isa(request):
    if request.param not in supported():
        pytest.skip(f"this processor has no {request.param}")
    return request.param


def inputs(shape: Shape, pages: int = 3):
    g = torch.Generator().manual_seed(7)
    buffer = torch.randn(2, shape.heads, pages * PAGE + 9, shape.dim + shape.value_dim, generator=g)
    buffer *= 1 + 10 * (torch.rand(buffer.shape, generator=g) < 0.01)
    both = buffer[0].to(shape.dtype)
    key, value = both[..., : shape.dim], both[..., shape.dim :]
    columns = torch.randperm(pages * PAGE + 9, generator=g)[: pages * PAGE].sort().values
    positions = 1000 + torch.arange(pages * PAGE) + 50 * (torch.arange(pages * PAGE) >= PAGE)
    counts = torch.tensor([PAGE] * (pages - 1) + [11])
    return key, value, columns, positions, counts


def both(
    key_spec: TensorSpec,
    value_spec: TensorSpec,
    shape: Shape,
    isa: str | None = None,
    feedback: float = 1.0,
    width: int | None = None,
):
    """Pages of the kernel, pages of the reference, layout, tables. feedback: times the matrices; width: of all."""
    g = torch.Generator().manual_seed(3)
    specs = ((key_spec, shape.dim), (value_spec, shape.value_dim))
    tables = [make_tables(spec, shape.heads, dim, g) for spec, dim in specs]
    for i, (spec, _) in enumerate(specs):
        if spec.feeds_back:
            tables[i] = tables[i]._replace(feedback=tables[i].feedback * feedback)
        if width is not None:
            tables[i] = tables[i]._replace(widths=torch.full_like(tables[i].widths, width))
    layout = PageLayout(CacheSpec(key_spec, value_spec, 0, 0), *tables)
    arguments = (*inputs(shape), layout, *tables, make_rope(shape))
    return pack(*arguments, isa=isa), reference.pack(*arguments), layout, tables


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (TensorSpec(3, "nuq", "static", rope="pre", outliers=0.01, rank="threshold"), VALUE),
        (KEY, TensorSpec(3, "nuq", "token", outliers=0.02, rank="tails")),
    ],
)
def test_outliers_chosen_as_kvquant_does_are_packed_by_the_reference(key, value):
    g = torch.Generator().manual_seed(3)
    shape = Shape()
    tables = [make_tables(spec, shape.heads, dim, g) for spec, dim in ((key, shape.dim), (value, shape.value_dim))]
    layout = PageLayout(CacheSpec(key, value, 0, 0), *tables)
    arguments = (*inputs(shape), layout, *tables, make_rope(shape))
    assert torch.equal(dispatch.pack(*arguments), reference.pack(*arguments))
    with pytest.raises(AssertionError, match="outliers"):
        pack(*arguments)


@pytest.mark.parametrize("rank", ["error", "range"])
@pytest.mark.parametrize("rounding", ["nearest", "feedback"])
def test_a_share_of_outliers_that_rounds_to_none_per_page(rank, rounding, isa):
    spec = TensorSpec(3, "nuq", "static", rope="pre", outliers=1e-5, rank=rank, rounding=rounding)
    found, expected, layout, tables = both(spec, VALUE, Shape(), isa)
    assert spec.outliers_per_page(*tables[0].zero.shape) == 0
    check(found, expected, layout, tables, exactly=False)


def test_copies_of_a_layout_are_packed_in_threads():
    """Each finds no plan yet, and puts its own in the place of another's."""
    g = torch.Generator().manual_seed(3)
    shape = Shape(heads=3, dim=64, value_dim=64)
    tables = [make_tables(spec, shape.heads, 64, g) for spec in (KEY, VALUE)]
    values, rope = inputs(shape, pages=12), make_rope(shape)
    expected = reference.pack(*values, PageLayout(CacheSpec(KEY, VALUE, 0, 0), *tables), *tables, rope)
    for _ in range(20):
        layout, found = PageLayout(CacheSpec(KEY, VALUE, 0, 0), *tables), []
        together = Barrier(4)

        def work(layout=layout, found=found, together=together):
            copies = [table._replace(zero=table.zero.clone()) for table in tables]
            together.wait()
            found.append(pack(*values, layout, *copies, rope))

        threads = [Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 4
        assert all(torch.equal(pages, found[0]) for pages in found)
        check(found[0], expected, layout, tables, exactly=False)


def check(found, expected, layout, tables, *, exactly: bool) -> None:
    if exactly:
        assert torch.equal(found, expected)
        return
    assert (found == expected).float().mean() > 0.98
    for index, name in enumerate(("key", "value")):
        spec = layout.tensor_spec(name)
        values = [dequantise(read_page(pages, layout)[index], spec, tables[index]) for pages in (found, expected)]
        assert (values[0] - values[1]).norm() < 0.02 * values[1].norm()


@pytest.mark.parametrize("key", KEYS)
def test_keys(key, isa):
    exactly = key not in SUMS and not KEYS[key].feeds_back
    check(*both(KEYS[key], VALUES["fp8"], Shape(), isa), exactly=exactly)


@pytest.mark.parametrize("value", VALUES)
def test_values(value, isa):
    exactly = (
        value not in SUMS
        and not VALUES[value].feeds_back
        and not (VALUES[value].range == "token" and VALUES[value].outliers)
    )
    check(*both(KEYS["fp8"], VALUES[value], Shape(), isa), exactly=exactly)


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape, isa):
    check(*both(KEY, VALUE, SHAPES[shape], isa), exactly=False)


@pytest.mark.parametrize("key", ["static 3", "mixed", "group of 8", "token", "mixed, norm"])
def test_error_feedback(key, isa):
    spec = TensorSpec(**(KEYS[key].__dict__ | {"rounding": "feedback"}))
    check(*both(spec, VALUE, Shape(), isa), exactly=False)


@pytest.mark.parametrize("key", ["trellis", "trellis, post", "trellis, group of 8"])
@pytest.mark.parametrize("value", ["trellis, static", "trellis, group"])
@pytest.mark.parametrize("shape", ["plain", "narrow", "wide"])
def test_the_path_of_a_trellis_is_that_of_the_reference(key, value, shape, isa):
    """Byte for byte where nothing is fed back: with feedback, sums in another order move what is looked for."""
    check(*both(KEYS[key], VALUES[value], SHAPES[shape], isa, feedback=0.0), exactly=True)


@pytest.mark.parametrize("width", range(1, 7))
def test_the_path_of_every_width(width, isa):
    check(*both(KEYS["trellis"], VALUES["trellis, static"], Shape(), isa, feedback=0.0, width=width), exactly=True)


def test_pages_of_a_trellis_on_another_device_are_packed_on_the_cpu(monkeypatch):
    g, shape, spec = torch.Generator().manual_seed(3), Shape(), KEYS["trellis"]
    tables = [make_tables(s, shape.heads, shape.dim, g) for s in (spec, VALUE)]
    layout = PageLayout(CacheSpec(spec, VALUE, 0, 0), *tables)
    plain = PageLayout(CacheSpec(KEY, VALUE, 0, 0), *tables)
    assert dispatch.packs_on_cpu("cuda", "auto", layout)
    assert not dispatch.packs_on_cpu("cuda", "auto", plain)
    assert not dispatch.packs_on_cpu("cuda", "reference", layout)
    assert not dispatch.packs_on_cpu("cpu", "auto", layout)
    arguments = (*inputs(shape), layout, *tables, make_rope(shape))
    expected = pack(*arguments)
    monkeypatch.setattr(dispatch, "packs_on_cpu", lambda *_: True)  # as if these tensors were elsewhere
    plans = [compiled_pack.plan_for(layout, *dispatch.tables_on_cpu(layout, arguments[-3:])[:2]) for _ in range(2)]
    assert plans[0] is plans[1]
    assert torch.equal(dispatch.pack(*arguments), expected)
    assert compiled_pack.plan_for(layout, *dispatch.tables_on_cpu(layout, arguments[-3:])[:2]) is plans[0]


def test_instruction_sets_write_the_same_bytes():
    found = [both(KEY, VALUE, Shape(heads=3, dim=64, value_dim=64), isa)[0] for isa in supported()]
    assert all(torch.equal(found[0], other) for other in found)


def test_ties_and_constants():
    """Equal scores everywhere: as many outliers as ever, and a step of 0."""
    shape, g = Shape(), torch.Generator().manual_seed(3)
    tables = [make_tables(spec, shape.heads, shape.dim, g) for spec in (KEYS["group of 8"], VALUE)]
    layout = PageLayout(CacheSpec(KEYS["group of 8"], VALUE, 0, 0), *tables)
    key, value, *where = inputs(shape)
    flat = (tables[1].zero + tables[1].scale)[:, None].expand(value.shape).contiguous()  # u = 1 everywhere
    pages = pack(torch.ones_like(key), flat, *where, layout, *tables, make_rope(Shape(rotary=0)))
    rows = layout.read(pages, "value_rows")
    assert (rows[:, -1] == layout.sections["value_positions"].shape[0]).all()
    back = dequantise(read_page(pages, layout)[1], VALUE, tables[1])
    torch.testing.assert_close(back[0], flat[:, :PAGE].transpose(0, 1), rtol=0, atol=2e-3)
