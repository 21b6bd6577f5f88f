"""Files between stages: safetensors with a JSON header, whole or absent.

The header travels in the metadata entry "kvcalib".
"""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from kvcalib.artifact.files import save_whole
from kvcalib.errors import MissingInput
from kvcalib.quant.rope import Rope

_HEADER = "kvcalib"


def save(path: Path, tensors: dict[str, torch.Tensor], header: dict) -> None:
    """Writes tensors (any device and layout) and a JSON header."""
    whole = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    save_whole(path, whole, {_HEADER: json.dumps(header, sort_keys=True)})


class Reader:
    """Tensors of one file, read one at a time; `header` is the JSON written with them.

    Raises MissingInput, naming the stage that writes the file, if it is absent or damaged.
    """

    def __init__(self, path: Path, stage: str):
        try:
            self._handle = safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            mend = f"run `python -m kvcalib stage={stage} stage.force=true`"
            raise MissingInput(f"cannot read {path} ({error}); {mend}") from error
        self.header = json.loads(self._handle.metadata()[_HEADER])

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._handle.get_tensor(name)


def layers(reader: Reader) -> list[int]:
    """Layer indices that the file holds."""
    return reader.header["layers"]


def rope_tensors(index: int, rope: Rope) -> dict[str, torch.Tensor]:
    """A layer's Rope under names that `read_rope` finds."""
    return {f"layers.{index}.rope.{name}": value for name, value in rope._asdict().items()}


def read_rope(reader: Reader, index: int) -> Rope:
    """Inverse of `rope_tensors`."""
    return Rope(*(reader[f"layers.{index}.rope.{name}"] for name in Rope._fields))
