"""The kernels under AddressSanitizer and UndefinedBehaviorSanitizer: `make sanitize`.

Not part of a plain test run, for it compiles everything once more, with instruments.
"""

import ctypes
import os
import struct
import subprocess
from pathlib import Path

import pytest
import torch

from kvcalib.kernels.cpu import attend, build, pack
from kvcalib.quant.spec import PAGE
from tests.kernels.packed import make_packed, make_rope
from tests.kernels.test_cpu import KEY, KEYS, SHAPES, VALUE, VALUES, Shape

FLAGS = ["-std=c++17", "-O1", "-g", "-w", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
DRIVER = Path(__file__).parent / "sanitize" / "driver.cpp"

pytestmark = pytest.mark.skipif("KVCALIB_SANITIZE" not in os.environ, reason="make sanitize")


def cases():
    shape = Shape()
    yield from ((KEYS[key], VALUE, shape) for key in KEYS)
    yield from ((KEY, VALUES[value], shape) for value in VALUES)
    yield from ((KEY, VALUE, SHAPES[name]) for name in SHAPES)
    for name in ("small", "many queries", "wide"):
        yield from ((KEYS[key], VALUES[value], SHAPES[name]) for key in KEYS for value in ("mixed", "channels 4"))


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sanitize")
    objects, running = [], []
    include = ["-I", str(build.SOURCES)]
    units = {"driver": [str(DRIVER)]} | {  # on one thread: the OpenMP library that torch brings is not linked
        name: [str(build.SOURCES / source), *(f for f in flags if f.startswith(("-m", "-DKV_ISA", "-ffp")))]
        for name, (source, *flags) in build.objects().items()
    }
    for name, command in units.items():
        objects.append(str(folder / f"{name}.o"))
        running.append(subprocess.Popen(["g++", "-c", *command, *include, *FLAGS, "-o", objects[-1]]))
    assert all(process.wait() == 0 for process in running)
    program = folder / "driver"
    subprocess.run(["g++", *FLAGS, *objects, "-o", str(program)], check=True)
    return program


def test_no_byte_outside_of_a_buffer_is_touched(program, tmp_path):
    file = tmp_path / "cases"
    with open(file, "wb") as out:
        count = sum(_record(out, *case) for case in cases())
    done = subprocess.run([program, file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert done.stdout == f"{count} cases, 0 wrong\n"


def _record(out, key, value, shape: Shape) -> int:
    packed = _dense(make_packed(key, value, shape))
    query = torch.randn(len(shape.counts), shape.heads * shape.group, shape.queries, shape.dim)
    scale = shape.dim**-0.5
    expected = attend.attend(query, packed, scale=scale).float().contiguous()
    call, alive = attend.call_struct(query, packed, expected, scale, None)
    plan = attend.plan_of(packed)
    known = [*_flat(alive), packed.pages, packed.page_counts, packed.sink_counts, expected]
    _write(out, plan.struct, plan.buffers.values())
    _write(out, call, known, last="output")
    _record_pack(out, packed, shape)
    return 1


def _record_pack(out, packed, shape: Shape) -> None:
    tokens = 2 * PAGE
    key, value = (torch.randn(shape.heads, tokens, dim).to(shape.dtype) for dim in (shape.dim, shape.value_dim))
    where = torch.arange(tokens), torch.arange(tokens), torch.full((2,), PAGE)
    tables = packed.layout, packed.key_tables, packed.value_tables
    pages = pack.pack(key, value, *where, *tables, make_rope(shape))
    call, alive = pack.call_struct(key, value, *where, packed.layout, make_rope(shape), pages)
    plan = pack.plan_for(*tables)
    _write(out, plan.struct, plan.buffers)
    _write(out, call, [*_flat(alive), pages], last="out")


def _dense(packed):
    """Without spare capacity: the end of a buffer is the end of what may be read."""
    used = int(packed.page_counts.max())
    exact = {
        name: getattr(packed, name).contiguous() for name in ("sink_key", "sink_value", "recent_key", "recent_value")
    }
    return packed._replace(pages=packed.pages[:, :used].contiguous(), **exact)


def _flat(tensors):
    for item in tensors:
        if isinstance(item, torch.Tensor):
            yield item
        elif item is not None:
            yield from _flat(item)


def _write(out, value: ctypes.Structure, buffers, last: str | None = None) -> None:
    """One struct and everything that it points to, the buffer of field `last` at the end."""
    data = bytes(value)
    contents = dict(_content(buffer) for buffer in buffers)
    contents.pop(0, None)  # an empty tensor is nowhere
    places = [(name, place) for name, place in _pointers(type(value), 0) if _address(data, place) in contents]
    places.sort(key=lambda item: item[0] == last)
    out.write(struct.pack("<q", len(data)) + data + struct.pack("<q", len(places)))
    for _, place in places:
        content = contents[_address(data, place)]
        out.write(struct.pack("<qq", place, len(content)) + content)


def _content(buffer) -> tuple[int, bytes]:
    if isinstance(buffer, torch.Tensor):
        return buffer.data_ptr(), buffer.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return ctypes.addressof(buffer), bytes(buffer)


def _address(data: bytes, place: int) -> int:
    return struct.unpack_from("<q", data, place)[0]


def _pointers(kind, start: int):
    for name, field in kind._fields_:
        place = start + getattr(kind, name).offset
        if issubclass(field, ctypes.Structure):
            yield from _pointers(field, place)
        elif field is ctypes.c_void_p or hasattr(field, "contents"):
            yield name, place
