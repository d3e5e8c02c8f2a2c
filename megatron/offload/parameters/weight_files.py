# SPDX-License-Identifier: Apache-2.0
"""A saved model's tensors in safetensors files, read one by one: `WeightFiles`.

The format (github.com/huggingface/safetensors): eight bytes with the length of a JSON header, the
header, the tensors' bytes. The header gives each tensor's type, shape and range of these bytes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron.offload.device.device import memory_at
from megatron.offload.documents import from_json, reading
from megatron.offload.errors import PARAMETERS_PREFIX, ConfigurationError

_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_LENGTH_BYTES, _MOST_HEADER_BYTES = 8, 100_000_000
_ADVICE = "give a folder with a model that save_pretrained has written, or a .safetensors file"


class SavedTensor(NamedTuple):
    """Where a tensor is."""

    path: Path
    dtype: torch.dtype | None  # None: none that a layer computes in
    shape: tuple[int, ...]
    start: int  # of its bytes in the file

    @property
    def num_bytes(self) -> int:
        """Of the tensor."""
        return 0 if self.dtype is None else math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> torch.Tensor:
        """The tensor, in new memory on the CPU.

        Raises:
            OSError: it cannot be read, or the file is cut short.
        """
        tensor = torch.empty(self.shape, dtype=self.dtype)
        if not self.num_bytes:
            return tensor
        with self.path.open("rb", buffering=0) as file:
            self.read_into(file.fileno(), memory_at(tensor.data_ptr(), self.num_bytes))
        return tensor

    def read_into(self, fd: int, memory: memoryview, skipped_bytes: int = 0) -> None:
        """Fills memory with the tensor's bytes, from behind the first few of them.

        Raises:
            OSError: they cannot be read, or the file is cut short.
        """
        at, end = self.start + skipped_bytes, self.start + skipped_bytes + len(memory)
        while at < end:
            count = os.preadv(fd, [memory[len(memory) - (end - at) :]], at)
            if not count:
                raise OSError(f"{self.path} was cut short at byte {at}")
            at += count


class SavedPiece(NamedTuple):
    """A tensor that is a part of a parameter, or of a storage with several."""

    tensor: SavedTensor
    start: int  # its first byte there


def plain_name(name: str) -> str:
    """A parameter's name without what peft's wrappers add."""
    return name.replace("base_model.model.", "", 1).replace(".base_layer.", ".")


class WeightFiles:
    """The tensors of a saved model by their names.

    Args:
        path: a folder as `save_pretrained` writes it, or a file.
        base: what names of the model beneath a head begin with, which files may leave out.

    Raises:
        ConfigurationError: it is none, or a file there is damaged.
        OSError: a file cannot be read.
    """

    def __init__(self, path: Path, base: str = "") -> None:
        self.path, self._base = path, base
        self._tensors: dict[str, SavedTensor] = {}
        for file in _files(path):
            self._tensors |= _tensors_of(file)

    @property
    def names(self) -> list[str]:
        """Of all tensors, as the files have them."""
        return list(self._tensors)

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name; `name` as for `[]`."""
        return any(one in self._tensors for one in self._names_of(name))

    def __getitem__(self, name: str) -> SavedTensor:
        """A tensor; `name` is a parameter's in a model that may be wrapped.

        Raises:
            KeyError: there is none.
        """
        for one in self._names_of(name):
            if one in self._tensors:
                return self._tensors[one]
        raise KeyError(name)

    def _names_of(self, name: str) -> Iterator[str]:
        """Names that a parameter may have in a file: without peft's wrappers, and the base's."""
        for one in dict.fromkeys((name, plain_name(name))):
            yield one
            if self._base:
                yield one.removeprefix(f"{self._base}.")
                yield f"{self._base}.{one}"


def _files(path: Path) -> Iterable[Path]:
    if not path.is_dir():
        return [path]
    if (whole := path / _WHOLE).exists():  # the one that transformers prefers
        return [whole]
    index = path / _INDEX
    if index.exists():
        with reading(f"{PARAMETERS_PREFIX}{index} is no index of safetensors files", _ADVICE):
            names = set(from_json(index.read_bytes())["weight_map"].values())
            return [path / name for name in sorted(names)]
    found = sorted(path.glob("*.safetensors"))
    if not found:
        raise ConfigurationError(f"{PARAMETERS_PREFIX}{path} has no *.safetensors; {_ADVICE}")
    return found


def _tensors_of(path: Path) -> dict[str, SavedTensor]:
    size = path.stat().st_size
    with (
        path.open("rb") as file,
        reading(f"{PARAMETERS_PREFIX}{path} is no safetensors file", _ADVICE),
    ):
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if length > min(size - _LENGTH_BYTES, _MOST_HEADER_BYTES):
            raise ValueError(f"its header would have {length} bytes")
        header = from_json(file.read(length))
        start = _LENGTH_BYTES + length
        return {
            name: _tensor(path, value, start, size)
            for name, value in header.items()
            if name != "__metadata__"
        }


def _tensor(path: Path, value: dict[str, Any], start: int, size: int) -> SavedTensor:
    """What a header says of a tensor."""
    begin, end = value["data_offsets"]
    dtype = _TYPES.get(value["dtype"])
    one = SavedTensor(path, dtype, tuple(map(int, value["shape"])), start + begin)
    if begin < 0 or (dtype and end - begin != one.num_bytes) or start + end > size:
        raise ValueError(f"a tensor of {one.num_bytes} bytes is said to be at {begin} to {end}")
    return one
