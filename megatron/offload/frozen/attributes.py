# SPDX-License-Identifier: Apache-2.0
"""What an attribute of a frozen module holds, for a key: `told_of`.

Numbers, text and names, what containers, arrays and objects hold of these, what functions have
bound, and tensors. `frozen_state.py` asks for each attribute in the first pass, and for those that
may change while they stay the same object in each pass. Nothing here is changed or kept.
"""

from __future__ import annotations

import collections
import enum
import functools
import json
import sys
import types
from collections.abc import Container, Iterable, Mapping
from typing import Any

import torch

from megatron.offload.frozen.digests import digest_of

_PLAIN = (bool, int, float, str, type(None))
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format, enum.Enum)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
_SEQUENCES: tuple[Any, ...] = (tuple, list, collections.deque)
_SETS: tuple[Any, ...] = (set, frozenset)

# Attributes that torch gives each module: its hooks, and what `frozen_state.py` looks at itself.
_OF_EACH_MODULE = {*vars(torch.nn.Module()), "forward", "_compiled_call_impl"} - {"training"}
# Packages whose objects hold states that decide no bits, and lead to all else in the process.
_OTHERS = {"accelerate", "asyncio", "concurrent", "deepspeed", "logging", "threading", "torch"}
_MOST_VALUES = 2000  # of an attribute; of a tokenizer's vocabulary the first ones
_MOST_DEEP = 5


def told_of(value: Any, tensors: list[torch.Tensor], known: Container[int] = ()) -> Any:
    """What an attribute adds to a key, as JSON.

    Args:
        value: of the attribute.
        tensors: tensors that it holds are added here; their bytes belong to the key.
        known: addresses of modules that are looked at in any case.
    """
    return _Telling(tensors, known).of(value, 0)


def is_told_once(value: Any) -> bool:
    """Whether an attribute holds what it held as long as it is the same object."""
    kind = type(value)
    if kind in _PLAIN or isinstance(value, _NAMED) or kind is types.BuiltinFunctionType:
        return True
    if kind is types.FunctionType:
        return not (value.__closure__ or value.__defaults__ or value.__kwdefaults__)
    return kind in (tuple, torch.Size) and all(type(one) in _PLAIN for one in value)


def own_attributes(module: torch.nn.Module) -> list[tuple[str, Any]]:
    """Those of a module that torch has not given it."""
    return [one for one in vars(module).items() if one[0] not in _OF_EACH_MODULE]


class _Telling:
    """One walk through what an attribute holds."""

    def __init__(self, tensors: list[torch.Tensor], known: Container[int]) -> None:
        self._tensors, self._known = tensors, known
        self._seen: dict[int, int] = {}
        self._left = _MOST_VALUES

    def of(self, value: Any, depth: int) -> Any:
        """What one value adds."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if isinstance(value, _NAMED):
            return {"named": str(value)}
        if isinstance(value, torch.Tensor):
            return self._of_tensor(value)
        name = f"{kind.__module__}.{kind.__qualname__}"
        if id(value) in self._known:
            return {"module": name}
        if id(value) in self._seen:
            return {"again": self._seen[id(value)]}
        if depth == _MOST_DEEP or self._left <= 0:
            return {"a": name}
        self._seen[id(value)] = len(self._seen)
        parts = self._parts_of(value, depth + 1)
        return {"a": name} if parts is None else {"a": name, "of": parts}

    def _parts_of(self, value: Any, depth: int) -> Any:
        """What is in a value; None: that is not looked at."""
        kind = type(value)
        for base in _SEQUENCES:
            if isinstance(value, base):  # whatever its class makes of iteration
                return self._each(base.__iter__(value), depth)
        for base in _SETS:
            if isinstance(value, base):
                return sorted(self._each(base.__iter__(value), depth), key=json.dumps)
        if isinstance(value, dict):
            return self._pairs(dict.items(value), depth)
        if isinstance(value, types.MappingProxyType):
            return self._items(value, depth)
        if isinstance(value, types.MethodType):
            return self._each((value.__func__, value.__self__), depth)
        if kind in _FUNCTIONS:
            return self._of_function(value, depth)
        if isinstance(value, functools.partial):
            return self._each((value.func, value.args, value.keywords), depth)
        if isinstance(value, type | types.ModuleType):
            return getattr(value, "__qualname__", value.__name__)
        if isinstance(value, torch.nn.Module):
            return [self._of_module(one, depth) for one in value.modules()]
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
            return self._of_array(numpy.asarray(value))
        if kind.__module__.partition(".")[0] in _OTHERS:
            return None
        own = getattr(value, "__dict__", None)
        return self._items(own, depth) if type(own) is dict else None

    def _each(self, values: Iterable[Any], depth: int) -> list[Any]:
        found = []
        for value in values:
            if self._left <= 0:
                found.append({"more": True})
                break
            self._left -= 1
            found.append(self.of(value, depth))
        return found

    def _items(self, values: Mapping[Any, Any], depth: int) -> list[Any]:
        return self._pairs(values.items(), depth)

    def _pairs(self, values: Iterable[tuple[Any, Any]], depth: int) -> list[Any]:
        flat = [one for pair in values for one in pair]
        return self._each(flat, depth)

    def _of_module(self, module: torch.nn.Module, depth: int) -> list[Any]:
        """A module that is no part of the model's tree, or lies within such a one."""
        if id(module) in self._known:
            return []
        self._seen.setdefault(id(module), len(self._seen))
        tensors = (*module._parameters.values(), *module._buffers.values())
        told = [self._of_tensor(one) for one in tensors if one is not None]
        return [type(module).__qualname__, told, self._pairs(own_attributes(module), depth)]

    def _of_function(self, function: Any, depth: int) -> list[Any]:
        bound = [getattr(function, name, None) for name in ("__defaults__", "__kwdefaults__")]
        cells = []
        for cell in getattr(function, "__closure__", None) or ():
            try:
                cells.append(cell.cell_contents)
            except ValueError:  # it is not filled yet
                cells.append(None)
        name = f"{function.__module__}.{function.__qualname__}"
        return [name, *self._each([*bound, *cells], depth)]

    def _of_tensor(self, tensor: torch.Tensor) -> Any:
        is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
        if not is_plain or tensor.layout is not torch.strided or tensor.is_meta:
            return {"a": type(tensor).__qualname__, "of": [list(tensor.shape), str(tensor.dtype)]}
        self._tensors.append(tensor)
        return {"tensor": len(self._tensors) - 1}

    def _of_array(self, array: Any) -> Any:
        about = [str(array.dtype), list(array.shape)]
        if array.dtype.hasobject:
            return about
        return [*about, digest_of(array.tobytes()).hex()]
