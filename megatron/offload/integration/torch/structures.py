# SPDX-License-Identifier: Apache-2.0
"""Containers and objects, recorded as they are and rebuilt: `Structure`.

A layer may change what it is called with: append to a list, set an entry of a dict, put keys and
values into a cache. `argument_snapshot.py` makes a `Structure` before, and decides what becomes of
the tensors. Nothing is copied here but containers, objects and small arrays themselves.
`attribute_snapshot.py` asks here what is an array, and which slots an object has.
"""

from __future__ import annotations

import array
import collections
import copy
import copyreg
import enum
import functools
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy
import torch

# Objects within objects, beside the containers between them: a cache of an encoder and a decoder
# has two caches, each of these its layers, each of these tensors.
_MOST_OBJECTS_DEEP = 3

# From what a value was reached: the path before, and an index, a key or `.` and an attribute.
Path = tuple[Any, Any]

_CONTAINERS = (list, dict, set, collections.deque)
ARRAYS = (numpy.ndarray, array.array, bytearray)
_MOST_IN_ARRAY = 1 << 16  # bytes: counters and statistics, not data sets
_FREQUENT = {type(None), bool, int, float, str}
_ATOMS = (  # they do not change, or what changes of them is seen elsewhere
    complex,
    bytes,
    type,
    enum.Enum,
    random.Random,
    torch.nn.Module,
    torch.Generator,
    torch.dtype,
    torch.device,
    torch.Size,
)


class Structure:
    """Values as they were when this was made.

    Args:
        values: with their names, for paths.
        of_tensor: called with each tensor, its path and whether it is within something that may
            change; what it gives is kept in the tensor's place.
    """

    def __init__(
        self,
        values: Iterable[tuple[str, Any]],
        of_tensor: Callable[[torch.Tensor, Path, bool], Any],
    ) -> None:
        self._of_tensor = of_tensor
        self._known: dict[int, tuple[Any, _Thing]] = {}  # by address; what has it is held
        self.kept = [self._taken(value, (None, name), 0, False) for name, value in values]
        del self._of_tensor, self._known  # so that nothing refers to itself

    def made(self, other: Callable[[Any], Any]) -> list[Any]:
        """The values, with containers and objects of their own.

        Args:
            other: called with what is neither; what it gives takes its place.
        """
        made: dict[int, Any] = {}
        return [_made(one, other, made) for one in self.kept]

    def _taken(self, value: Any, path: Path, depth: int, inside: bool) -> Any:
        if type(value) in _FREQUENT:
            return value
        if isinstance(value, torch.Tensor):
            return self._of_tensor(value, path, inside)
        if isinstance(value, _ATOMS):
            return value
        if isinstance(value, tuple):
            parts = [self._taken(one, (path, i), depth, inside) for i, one in enumerate(value)]
            is_same = all(part is one for part, one in zip(parts, value, strict=True))
            return value if is_same else _Tuple(type(value), parts)
        if id(value) in self._known:
            return self._known[id(value)][1]
        blank = _blank(value)
        is_plain = type(value) in _CONTAINERS
        if blank is None or (depth == _MOST_OBJECTS_DEEP and not is_plain):
            return value
        thing = _Thing(blank)
        self._known[id(value)] = value, thing
        within = depth if is_plain else depth + 1
        if isinstance(value, dict):
            entries = _dict_of(value).items(value)
            thing.items = {key: self._taken(v, (path, key), within, True) for key, v in entries}
        elif isinstance(value, _CONTAINERS):
            thing.items = [self._taken(v, (path, i), within, True) for i, v in enumerate(value)]
        if not is_plain:
            thing.attributes = {
                name: self._taken(v, (path, "." + name), within, True)
                for name, v in _attributes(value)
            }
        return thing


def text_of(path: Path) -> str:
    """A path for people: `past_key_values.layers[3].keys`."""
    before, last = path
    if before is None:
        return str(last)
    is_attribute = isinstance(last, str) and last.startswith(".")
    return text_of(before) + (last if is_attribute else f"[{last!r}]")


class _Thing:
    """A container or an object: how an empty one is made, and what it held."""

    __slots__ = ("attributes", "blank", "items")

    def __init__(self, blank: Callable[[], Any]) -> None:
        self.blank = blank
        self.items: Any = None  # a dict, or a list of what is in a list, set or deque
        self.attributes: dict[str, Any] = {}


class _Tuple:
    """A tuple with something in it that may change."""

    __slots__ = ("parts", "type")

    def __init__(self, type_: type, parts: list[Any]) -> None:
        self.type = type_
        self.parts = parts


def _made(kept: Any, other: Callable[[Any], Any], made: dict[int, Any]) -> Any:
    if isinstance(kept, _Tuple):
        parts = [_made(one, other, made) for one in kept.parts]
        return kept.type(*parts) if hasattr(kept.type, "_fields") else kept.type(parts)
    if not isinstance(kept, _Thing):
        return other(kept)
    if id(kept) in made:
        return made[id(kept)]
    thing = made[id(kept)] = kept.blank()
    if isinstance(kept.items, dict):
        put = _dict_of(thing).__setitem__
        for key, one in kept.items.items():
            put(thing, key, _made(one, other, made))
    elif kept.items is not None:
        parts = [_made(one, other, made) for one in kept.items]
        add = set.update if isinstance(thing, set) else type(thing).extend
        add(thing, parts)
    slots = slots_of(type(thing))
    for name, one in kept.attributes.items():
        value = _made(one, other, made)
        if name in slots:
            object.__setattr__(thing, name, value)
        else:
            vars(thing)[name] = value
    return thing


def _dict_of(value: Any) -> Any:
    """The class whose methods see a dict's own entries, whatever its class makes of them."""
    is_ordered = isinstance(value, collections.OrderedDict)
    return collections.OrderedDict if is_ordered else dict


def _blank(value: Any) -> Callable[[], Any] | None:
    """How an empty one of its class is made; None: what it is made of cannot be seen."""
    cls: Any = type(value)
    if cls is collections.deque:
        return functools.partial(cls, (), value.maxlen)
    if cls is collections.defaultdict:
        return functools.partial(cls, value.default_factory)
    if cls in _CONTAINERS:
        return cls
    if isinstance(value, ARRAYS):
        return functools.partial(copy.copy, copy.copy(value)) if is_small_array(value) else None
    if not hasattr(value, "__dict__") and not slots_of(cls):
        return None
    try:
        cls.__new__(cls)
    except Exception:  # a function, or what needs arguments
        return None
    return functools.partial(cls.__new__, cls)


def _attributes(value: Any) -> list[tuple[str, Any]]:
    found = list(getattr(value, "__dict__", {}).items())
    return found + [(n, getattr(value, n)) for n in slots_of(type(value)) if hasattr(value, n)]


def is_small_array(values: Any) -> bool:
    """Whether one of `ARRAYS` is to be copied, in case that a layer changes it."""
    if isinstance(values, numpy.ndarray):
        return values.nbytes <= _MOST_IN_ARRAY
    return len(values) * getattr(values, "itemsize", 1) <= _MOST_IN_ARRAY


def slots_of(cls: type) -> Sequence[str]:
    """Names of attributes that are in slots."""
    names: Sequence[str] = copyreg._slotnames(cls)  # type: ignore[attr-defined]
    return names
