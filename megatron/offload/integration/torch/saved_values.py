# SPDX-License-Identifier: Apache-2.0
"""What a saved model's files have of each parameter and buffer: `SavedValues`.

Usually a tensor of the same name. From version 5 on, transformers also renames tensors and joins
them when it loads a model: the experts of a layer are one parameter, and in the files each expert
has tensors of its own. transformers has a table of that for each kind of model, which is followed
here as `from_pretrained` follows it, and its own operations make the values.
"""

from __future__ import annotations

import copy
import functools
import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from megatron.offload.errors import PARAMETERS_PREFIX, ConfigurationError
from megatron.offload.parameters.weight_files import (
    SavedPiece,
    SavedTensor,
    WeightFiles,
    plain_name,
)

_TABLE = "transformers.conversion_mapping"  # which version 4 does not have
# Operations after which the tensors lie one behind the other, row by row of the table's patterns:
# all experts in one dimension, and before that the halves of each in the next one.
_JOINS = (
    [("MergeModulelist", 0)],
    [("MergeModulelist", 0), ("Concatenate", 1)],
    [("Concatenate", 0)],
)


class SavedValue(Protocol):
    """What the files have of one parameter or buffer."""

    @property
    def tensors(self) -> Sequence[SavedTensor]:
        """Of which it is made."""
        ...

    @property
    def pieces(self) -> Sequence[SavedPiece] | None:
        """The tensors, if they are its bytes one behind the other; None: it is computed."""
        ...

    def read(self, dtype: torch.dtype) -> torch.Tensor:
        """The value in a type, in new memory on the CPU.

        Raises:
            ConfigurationError: the tensors do not make one.
            OSError: a file cannot be read.
        """
        ...


@dataclass(frozen=True)
class _Whole:
    """One tensor, as it is."""

    tensor: SavedTensor

    @property
    def tensors(self) -> Sequence[SavedTensor]:
        return (self.tensor,)

    @property
    def pieces(self) -> Sequence[SavedPiece]:
        return (SavedPiece(self.tensor, 0),)

    def read(self, dtype: torch.dtype) -> torch.Tensor:
        return self.tensor.read().to(dtype)


@dataclass(frozen=True)
class _Made:
    """What a converter of transformers makes of several tensors, or several of one.

    Attributes:
        name: of the value.
        converter: an entry of the table.
        target: the name for which the converter is called.
        model: whose parameter it is.
        found: names and tensors by the patterns of the converter, experts in their order.
    """

    name: str
    converter: Any
    target: str
    model: Any
    found: dict[str, list[tuple[str, SavedTensor]]] = field(default_factory=dict)

    @property
    def tensors(self) -> Sequence[SavedTensor]:
        return [tensor for of_pattern in self.found.values() for _, tensor in of_pattern]

    @property
    def pieces(self) -> Sequence[SavedPiece] | None:
        steps = [(type(one).__name__, getattr(one, "dim", None)) for one in self._operations]
        each = [self.found.get(pattern, []) for pattern in self.converter.source_patterns]
        is_whole = len(set(map(len, each))) == 1 and self.converter.target_patterns[1:] == []
        if steps not in _JOINS or not is_whole:
            return None
        tensors = [tensor for row in zip(*each, strict=True) for _, tensor in row]
        starts = itertools.accumulate((one.num_bytes for one in tensors), initial=0)
        return [SavedPiece(tensor, start) for tensor, start in zip(tensors, starts, strict=False)]

    @property
    def _operations(self) -> Sequence[Any]:
        operations: Sequence[Any] = self.converter.operations
        return operations

    def read(self, dtype: torch.dtype) -> torch.Tensor:
        converter = copy.deepcopy(self.converter)
        for pattern, named in self.found.items():
            for name, tensor in named:  # read one pattern after the other, when it is their turn
                read = functools.partial(_read_as, tensor, dtype)
                converter.add_tensor(self.target, name, pattern, read)
        try:
            made = converter.convert(self.target, model=self.model, config=self.model.config)
            value = made[self.name]
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"{PARAMETERS_PREFIX}transformers makes no {self.name} of the tensors in "
                f"{self.tensors[0].path.parent} ({error}); give the folder of this model, or load "
                "it by from_pretrained"
            ) from None
        found: torch.Tensor = value[0] if isinstance(value, list) else value
        return found


def _read_as(tensor: SavedTensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.read().to(dtype)


class SavedValues:
    """What files have of a model's parameters and buffers.

    Args:
        model: perhaps wrapped by peft.
        path: a folder with safetensors files, or one of these.

    Raises:
        ConfigurationError: there are no such files.
        OSError: one cannot be read.
    """

    def __init__(self, model: torch.nn.Module, path: Path) -> None:
        self.path = path
        self._files = WeightFiles(path, str(getattr(model, "base_model_prefix", "")))
        self._converted = _converted(model, self._files)

    def get(self, name: str) -> SavedValue | None:
        """By the name in the model; None: the files have nothing of it."""
        if self._converted is not None:
            return self._converted.get(plain_name(name))
        return _Whole(self._files[name]) if self._files.has(name) else None


def _converted(model: torch.nn.Module, files: WeightFiles) -> Mapping[str, SavedValue] | None:
    """By names without wrappers, as transformers would load them; None: it loads no such model."""
    table = sys.modules.get(_TABLE)  # a model of transformers has had it imported
    inner: Any = getattr(model, "get_base_model", lambda: model)()
    if table is None or not isinstance(inner, sys.modules["transformers"].PreTrainedModel):
        return None
    from transformers import core_model_loading as loading

    transforms = table.get_model_conversion_mapping(inner)
    renamings = [one for one in transforms if isinstance(one, loading.WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, loading.WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    named = itertools.chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    )
    own, prefix = {plain_name(name): True for name, _ in named}, inner.base_model_prefix
    found: dict[str, SavedValue] = {}
    for name in sorted(files.names, key=loading.dot_natural_key):
        target, pattern = loading.rename_source_key(name, renamings, converters, prefix, own)
        if target not in own and name in own:
            target, pattern = loading.rename_source_key(name, [], [], prefix, own)
        if pattern is None:
            found.setdefault(target, _Whole(files[name]))
            continue
        made = found.setdefault(target, _Made(target, by_pattern[pattern], target, inner))
        if isinstance(made, _Made):
            made.found.setdefault(pattern, []).append((name, files[name]))
            first, *others = made.converter.target_patterns
            for other in others:  # made of the same tensors
                name_of_other = target.replace(first, other)
                found.setdefault(name_of_other, replace(made, name=name_of_other))
    return found
