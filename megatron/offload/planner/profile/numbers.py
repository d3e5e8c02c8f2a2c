# SPDX-License-Identifier: Apache-2.0
"""The numbers of a profile, wherever they stand in it: `with_numbers`.

Profiles are averaged over ranks, scaled, interpolated and checked; this goes through them once for
all of these. It knows dataclasses and tuples, not what their fields mean.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import is_dataclass, replace
from typing import Any


def with_numbers(change: Callable[..., float], value: Any, *others: Any, name: str = "") -> Any:
    """Rebuilds a dataclass or a tuple with every int and float in it replaced.

    Args:
        change: gets a field's name (of a tuple's entries: the tuple's own) and the number that
            stands there, of `value` and of each of the others; gives the number to put there.
        value: of frozen dataclasses, tuples, numbers and others; the others are left as they are.
        others: of the same shape. Where one has no number, the last one's entry is taken.
        name: of the field that holds it.

    Raises:
        ValueError: tuples are not equally long.
    """
    every = (value, *others)
    last: Any = every[-1]
    is_record = is_dataclass(last)
    names = getattr(last, "__dataclass_fields__", None) or getattr(last, "_fields", None)
    if names is not None:
        fields = {
            one: with_numbers(change, *(getattr(each, one) for each in every), name=one)
            for one in names
        }
        return replace(last, **fields) if is_record else last._replace(**fields)
    if isinstance(last, tuple):
        entries = zip(*every, strict=True)
        return tuple(with_numbers(change, *entry, name=name) for entry in entries)
    are_numbers = all(isinstance(one, int | float) for one in every)
    return change(name, *every) if are_numbers else last
