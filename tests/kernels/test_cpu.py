"""The compiled kernel against float64 on the same packed bytes, for every kind of page and every instruction set."""

import os
import subprocess
import sys

import pytest
import torch

from kvcalib.errors import ConfigError
from kvcalib.kernels import dispatch, reference
from kvcalib.kernels.cpu import build
from kvcalib.kernels.cpu.attend import ISAS, attend, supported
from kvcalib.kernels.packed import Packed
from kvcalib.quant.codec import quantise
from kvcalib.quant.page import PageLayout, write_page
from kvcalib.quant.spec import TensorSpec
from tests.kernels.packed import Shape, attend_exactly, make_packed

KEY = TensorSpec(3, "nuq", "static", rope="pre", outliers=0.02, rank="error")
VALUE = TensorSpec(3, "nuq", "token", outliers=0.02)
IDENTITY = TensorSpec(16, "none", "static")
KEYS = {
    **{f"static {b}": TensorSpec(b, "nuq", "static", rope="pre", outliers=0.02, rank="error") for b in range(1, 9)},
    "static, post": TensorSpec(4, "uniform", "static", rope="post"),
    "static, per head": TensorSpec(3, "nuq", "static", rope="pre", books="head"),
    "static, per channel": TensorSpec(4, "nuq", "static", rope="pre", books="channel"),
    "q-norm": TensorSpec(2, "nuq", "static", rope="pre", outliers=0.02, rank="error", q_norm=True),
    "unbiased": TensorSpec(3, "nuq", "static", rope="pre", outliers=0.02, rank="error", unbiased=True),
    "trellis, unbiased": TensorSpec(
        6, "mixed", "static", rope="pre", outliers=0.01, rank="error", rounding="trellis", unbiased=True
    ),
    "fp8": TensorSpec(8, "fp8", "static", rope="post"),
    "mixed": TensorSpec(5, "mixed", "static", rope="pre", outliers=0.01, rank="error"),
    "mixed to 6": TensorSpec(6, "mixed", "static", rope="pre", outliers=0.01, rank="error"),
    "mixed, per channel": TensorSpec(5, "mixed", "static", rope="pre", books="channel"),
    "mixed, norm": TensorSpec(5, "mixed", "norm", rope="pre", outliers=0.01, rank="error", scope="head"),
    "trellis": TensorSpec(6, "mixed", "static", rope="pre", outliers=0.01, rank="error", rounding="trellis"),
    "trellis, post": TensorSpec(4, "mixed", "static", rope="post", rounding="trellis"),
    "trellis, norm": TensorSpec(6, "mixed", "norm", rope="pre", scope="head", rounding="trellis"),
    **{
        f"trellis, group of {n}": TensorSpec(6, "mixed", "group", group=n, rope="pre", rounding="trellis")
        for n in (8, 16, 32)
    },
    **{f"group of {n}": TensorSpec(4, "uniform", "group", group=n, rope="pre", outliers=0.02) for n in (1, 8, 16, 32)},
    "group, per channel": TensorSpec(2, "nuq", "group", rope="pre", books="channel"),
    "token": TensorSpec(4, "uniform", "token", rope="post"),
    "token, per head": TensorSpec(4, "nf", "token", scope="head", rope="pre", outliers=0.02),
    "token, channels": TensorSpec(4, "nuq", "token", scope="channels", group=4, rope="pre"),
    "identity": IDENTITY,
    "identity, pre": TensorSpec(16, "none", "static", rope="pre"),
}  # fmt: skip
VALUES = {
    **{f"token {bits}": TensorSpec(bits, "nuq", "token", outliers=0.02) for bits in range(1, 9)},
    "token, per head": TensorSpec(4, "uniform", "token", scope="head", rotation="hadamard"),
    "token, per channel": TensorSpec(3, "nuq", "token", books="channel"),
    "q-norm": TensorSpec(3, "nuq", "token", books="head", q_norm=True),
    "channels 4": TensorSpec(3, "uniform", "token", scope="channels", group=4, outliers=0.02),
    "channels 16": TensorSpec(3, "uniform", "token", scope="channels", group=16, outliers=0.02),
    "group": TensorSpec(4, "uniform", "group", group=8, outliers=0.02),
    "static": TensorSpec(4, "nuq", "static", outliers=0.02, rank="error"),
    "fp8": TensorSpec(8, "fp8", "static"),
    "norm": TensorSpec(4, "nf", "norm", rotation="hadamard", outliers=0.01, rank="error"),
    "mixed": TensorSpec(5, "mixed", "norm", rotation="hadamard"),
    "mixed to 6": TensorSpec(6, "mixed", "norm", rotation="hadamard"),
    "mixed, per channel": TensorSpec(5, "mixed", "norm", books="channel", scope="head"),
    "trellis": TensorSpec(6, "mixed", "norm", rotation="hadamard", outliers=0.01, rank="error", rounding="trellis"),
    "unbiased": TensorSpec(4, "nuq", "norm", rotation="hadamard", outliers=0.01, rank="error", unbiased=True),
    "trellis, unbiased": TensorSpec(6, "mixed", "norm", rotation="hadamard", rounding="trellis", unbiased=True),
    "trellis, static": TensorSpec(6, "mixed", "static", rounding="trellis"),
    "trellis, token": TensorSpec(6, "mixed", "token", scope="head", rounding="trellis"),
    "trellis, group": TensorSpec(6, "mixed", "group", group=8, rounding="trellis"),
    "identity": IDENTITY,
}
SHAPES = {
    "one head": Shape(heads=1, group=1, counts=(2,)),
    "small": Shape(dim=20, value_dim=36, group=3, counts=(3,)),
    "wide": Shape(dim=256, value_dim=80, group=8, heads=1, counts=(2,)),
    "values only as wide as a tile": Shape(dim=64, value_dim=16, group=4),
    "several queries": Shape(queries=3, group=3, counts=(4,)),
    "many queries": Shape(queries=70, group=2, recent=90, counts=(3,)),
    "rows": Shape(counts=(3, 0, 19, 1), queries=2),
    "long": Shape(counts=(70,), heads=1, recent=40),
    "short page": Shape(short=11, counts=(2, 4)),
    "partial rotary": Shape(dim=64, rotary=24, gain=1.3),
    "no rotary": Shape(rotary=0),
    "far": Shape(first=120_000, counts=(2,)),
    "nothing exact": Shape(sink=0, recent=0),
    "many sinks": Shape(sink=40, recent=33),
    "bfloat16": Shape(dtype=torch.bfloat16, recent=40, group=5),
    "float16": Shape(dtype=torch.float16, recent=40, group=7),
    "float64": Shape(dtype=torch.float64),
}

pytestmark = pytest.mark.skipif(not build.has_compiler(), reason="no C++ compiler")


@pytest.fixture(params=ISAS)
def isa(request):
    if request.param not in supported():
        pytest.skip(f"this processor has no {request.param}")
    return request.param


def check(packed, shape: Shape, isa: str, **options):
    """At most thrice the error of torch in fp32, both against float64: over all elements, and about so for each.

    The kernel adds the channels of a score one after the other, torch in blocks whose size depends on the processor.
    """
    g = torch.Generator().manual_seed(1)
    query = torch.randn(len(shape.counts), shape.heads * shape.group, shape.queries, shape.dim, generator=g)
    query = query.transpose(1, 2).contiguous().transpose(1, 2)  # as models hand it over
    options = {"scale": shape.dim**-0.5} | options
    exact = attend_exactly(query, packed, **options)
    if shape.dtype == torch.float64:
        query = query.double()
    got = attend(query, packed, isa=isa, **options)
    assert got.dtype == query.dtype
    sane = packed._replace(sink_key=_zero_for_nan(packed.sink_key), sink_value=_zero_for_nan(packed.sink_value))
    error, torch_error = got - exact, reference.attend(query.float(), sane, **options) - exact
    assert error.norm() <= 3 * torch_error.norm() + 1e-8 * error.numel() ** 0.5
    assert error.abs().max() <= 4 * torch_error.abs().max() + 1e-7


@pytest.mark.parametrize("key", KEYS)
def test_every_kind_of_key(key, isa):
    shape = Shape()
    check(make_packed(KEYS[key], VALUE, shape), shape, isa)


@pytest.mark.parametrize("value", VALUES)
def test_every_kind_of_value(value, isa):
    shape = Shape()
    check(make_packed(KEY, VALUES[value], shape), shape, isa)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape(shape, isa):
    check(make_packed(KEY, VALUE, SHAPES[shape]), SHAPES[shape], isa)


@pytest.mark.parametrize("key", ["mixed", "trellis", "group of 8", "token, channels", "identity, pre"])
@pytest.mark.parametrize("value", ["mixed", "trellis", "channels 4", "group", "identity"])
@pytest.mark.parametrize("shape", ["small", "many queries", "rows"])
def test_combinations(key, value, shape):
    check(make_packed(KEYS[key], VALUES[value], SHAPES[shape]), SHAPES[shape], supported()[-1])


@pytest.mark.parametrize("queries", [1, 40])
@pytest.mark.parametrize("width", range(1, 7))
def test_every_width_of_a_trellis(width, queries, isa):
    shape = Shape(dim=64, value_dim=80, queries=queries)
    check(_one_width(make_packed(KEYS["trellis"], VALUES["trellis"], shape), width, shape), shape, isa)


def _one_width(packed: Packed, width: int, shape: Shape) -> Packed:
    """The same layer with one width everywhere, and random codes: they decode however they came about."""
    g = torch.Generator().manual_seed(5)
    tables = [t._replace(widths=torch.full_like(t.widths, width)) for t in (packed.key_tables, packed.value_tables)]
    layout = PageLayout(packed.layout.spec, *tables)
    specs, dims = (layout.spec.key, layout.spec.value), (shape.dim, shape.value_dim)
    codes = [
        quantise(torch.randn(3, 32, 2, d, generator=g), *each) for d, *each in zip(dims, specs, tables, strict=True)
    ]
    codes = [c._replace(codes=torch.randint(0, 2**width, c.codes.shape, generator=g).to(torch.uint8)) for c in codes]
    pages = write_page(*codes, torch.arange(3) * 32, layout)[None]
    return packed._replace(pages=pages, layout=layout, key_tables=tables[0], value_tables=tables[1])


@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_softcap(softcap, isa):
    shape = Shape(counts=(4,), queries=3, dim=64)
    check(make_packed(KEY, VALUE, shape), shape, isa, softcap=softcap, scale=1.0)


@pytest.mark.parametrize("shape", ["rows", "many queries", "many sinks", "short page"])
def test_masks_over_what_has_moved(shape, isa):
    shape = SHAPES[shape]
    packed = make_packed(KEY, VALUE, shape)
    slots = shape.sink + 32 * max(shape.counts)
    moved = torch.rand(len(shape.counts), shape.queries, slots, generator=torch.Generator().manual_seed(2)) < 0.4
    check(packed._replace(moved_visible=moved), shape, isa)


def test_a_query_that_sees_nothing_gives_zeros(isa):
    shape = Shape(queries=2)
    packed = make_packed(KEY, VALUE, shape)
    moved = torch.zeros(1, 2, shape.sink + 32 * 3, dtype=torch.bool)
    hidden = packed._replace(moved_visible=moved, recent_visible=torch.zeros_like(packed.recent_visible))
    assert torch.equal(attend(torch.randn(1, 4, 2, 32), hidden, scale=1.0, isa=isa), torch.zeros(1, 2, 4, 32))


def test_large_scores_do_not_overflow(isa):
    shape = Shape(counts=(20,))
    check(make_packed(KEY, VALUE, shape), shape, isa, scale=100.0)


@pytest.mark.parametrize("queries", [1, 3])  # with one, threads also decide whether they share out heads
def test_the_number_of_threads_changes_nothing(queries):
    shape = Shape(counts=(40, 17), queries=queries, group=3)
    packed, query = make_packed(KEY, VALUE, shape), torch.randn(2, 6, queries, 32)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(attend(query, packed, scale=0.2))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("odd", [torch.nan, torch.inf])
@pytest.mark.parametrize("queries", [1, 3, 40])
def test_a_key_that_is_no_number_makes_no_answer(odd, queries, isa):
    """As full precision does; a query that does not see it is left alone."""
    shape = Shape(queries=queries, recent=40, counts=(20,))
    packed, query = make_packed(KEY, VALUE, shape), torch.rand(1, 4, queries, 32) + 0.1
    visible = packed.recent_visible.clone()
    visible[:, :, 7], visible[:, 0, 7] = True, queries == 1
    packed = packed._replace(recent_visible=visible)
    expected = attend(query, packed, scale=0.2, isa=isa)
    packed.recent_key[:, 0, 7] = odd
    found = attend(query, packed, scale=0.2, isa=isa)
    assert found[:, visible[0, :, 7], :2].isnan().all()
    assert torch.equal(found[:, ~visible[0, :, 7]], expected[:, ~visible[0, :, 7]])
    assert torch.equal(found[:, :, 2:], expected[:, :, 2:])  # of the other kv head


def test_the_environment_chooses(monkeypatch):
    shape = Shape()
    packed, query = make_packed(KEY, VALUE, shape), torch.randn(1, 4, 1, 32)
    monkeypatch.setenv(dispatch.VARIABLE, "reference")
    slow = dispatch.attend(query, packed, scale=0.2)
    assert torch.equal(slow, reference.attend(query, _sane(packed), scale=0.2))
    monkeypatch.setenv(dispatch.VARIABLE, "portable")
    assert torch.equal(dispatch.attend(query, packed, scale=0.2), attend(query, packed, scale=0.2, isa="portable"))
    monkeypatch.setenv(dispatch.VARIABLE, "sse9")
    with pytest.raises(ConfigError, match="KVCALIB_KERNEL=sse9 must be auto, reference or one of portable"):
        dispatch.attend(query, packed, scale=0.2)


def _sane(packed):
    return packed._replace(sink_key=_zero_for_nan(packed.sink_key), sink_value=_zero_for_nan(packed.sink_value))


def run_python(code: str, **environment) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | environment)


ATTEND = """
import logging, torch
logging.basicConfig(format="%(message)s", level=logging.INFO)
from kvcalib.kernels import dispatch
from tests.kernels.test_cpu import KEY, VALUE, Shape, make_packed
print(dispatch.attend(torch.ones(1, 4, 1, 32), make_packed(KEY, VALUE, Shape()), scale=0.2).sum())
"""


def test_without_a_compiler_torch_attends_and_one_line_says_so(tmp_path):
    done = run_python(ATTEND * 2, CXX="no-such-compiler", XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("no C++ compiler (no-such-compiler) was found") == 1
    assert "plain torch" in done.stderr


def test_a_named_kernel_that_cannot_be_had_is_an_error(tmp_path):
    done = run_python(ATTEND, CXX="no-such-compiler", KVCALIB_KERNEL="portable", XDG_CACHE_HOME=str(tmp_path))
    assert "ConfigError: KVCALIB_KERNEL=portable cannot be had: no C++ compiler" in done.stderr


@pytest.mark.slow
def test_two_processes_build_once_and_a_damaged_library_is_built_again(tmp_path):
    quick = tmp_path / "quick"  # without optimising, which takes minutes
    quick.write_text(f'#!/bin/sh\nexec {build._compiler()} "$@" -O0\n')
    quick.chmod(0o755)
    environment = {"XDG_CACHE_HOME": str(tmp_path), "CXX": str(quick)}
    killed = tmp_path / "kvcalib" / "kernels" / ".partial-killed"
    killed.mkdir(parents=True)
    first = subprocess.Popen(
        [sys.executable, "-c", ATTEND], stderr=subprocess.PIPE, text=True, env=os.environ | environment
    )
    second = run_python(ATTEND, **environment)
    logs = second.stderr + first.communicate()[1]
    assert first.returncode == second.returncode == 0, logs
    assert logs.count("building the CPU kernel") == 1
    assert not killed.exists()
    (library,) = tmp_path.glob("kvcalib/kernels/*/kernels.so")
    library.write_bytes(library.read_bytes()[:5000])
    again = run_python(ATTEND, **environment)
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("building the CPU kernel") == 1


def _zero_for_nan(poisoned):
    """What float64 arithmetic on whole tensors needs where a kernel must not read at all."""
    return torch.where(poisoned.isnan(), 0.0, poisoned)
