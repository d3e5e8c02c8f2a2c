# SPDX-License-Identifier: Apache-2.0
"""What the later modules of a frozen part are called with: `LaterCalls`, for one pass.

See Note [What a key holds] in `frozen_pass.py`. Most modules get the same objects as the one
before, but for their first argument, which is its result. Then what was told of the others holds,
and their values need not be looked at again.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from megatron.offload.frozen.digests import digest_of_framed, framed

# Tensors by id: themselves, their version, and which result of which module they are.
Made = dict[int, tuple[torch.Tensor, int, list[int]]]


def version_of(tensor: torch.Tensor) -> int:
    """Counts changes in place; -1: they are not counted."""
    return -1 if tensor.is_inference() else tensor._version


class _Given(NamedTuple):
    """A call, for the next one.

    Attributes:
        others: all arguments but the first.
        leaves: the tensors in them, with their versions.
        text: what the key holds of the call, around the number of the module before.
        digests: of the leaves, for each row.
    """

    others: tuple[Any, ...]
    leaves: list[tuple[torch.Tensor, int]]
    text: tuple[bytes, bytes]
    digests: list[bytes]


class CalledWith:
    """What a module of a part is called with, as it is before the call.

    A module may change what the one before has returned: the model gets that of no module that is
    skipped. What else it changes the model would find unchanged after a pass that is skipped.

    Args:
        args: of the call.
        kwargs: of the call.
        made: what modules before have returned.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], made: Made) -> None:
        inside = list(_values_in((*args, *kwargs.values())))
        self._tensors = [
            (one, version_of(one))
            for one in inside
            if isinstance(one, torch.Tensor) and made.get(id(one), (None,))[0] is not one
        ]
        self._containers = [(x, _content_of(x)) for x in inside if isinstance(x, list | dict)]

    @property
    def is_unchanged(self) -> bool:
        """Whether none of it was changed in place, nor a list or a dict in it."""
        if any(version != version_of(one) for one, version in self._tensors):
            return False
        return all(_are_same(_content_of(one), before) for one, before in self._containers)


class LaterCalls:
    """The calls of a pass so far, but for the first module's.

    Args:
        made: tensors that the modules returned; the pass adds to it.
    """

    def __init__(self, made: Made) -> None:
        self._made = made
        self._calls: list[tuple[bytes, list[bytes]]] = []  # what rows share, and each row's own
        self._before: _Given | None = None

    def clear(self) -> None:
        """The pass begins, with another number of rows perhaps."""
        self._calls, self._before = [], None

    def note(
        self,
        index: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        told: tuple[bytes, Sequence[torch.Tensor], list[bytes]],
    ) -> bool:
        """A module is called; False: not with what the one before returned.

        Args:
            index: of the module.
            args: of the call.
            kwargs: of the call.
            told: the JSON of the call, tensors in it that no module before has returned, and of
                each row their digests, framed.
        """
        text, leaves, digests = told
        self._calls.append((text, digests))
        around = text.split(_made_by(index - 1))
        others = (*args[1:], *kwargs, *kwargs.values())
        is_one = len(around) == 2 and b'"made"' not in around[0] + around[1]
        self._before = None
        if args and is_one and all(map(_stays, others)) and id(args[0]) in self._made:
            versions = [(one, version_of(one)) for one in leaves]
            self._before = _Given(others, versions, (around[0], around[1]), digests)
        return len(around) > 1

    def note_again(
        self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[torch.Tensor] | None:
        """`note` for a call with the result of the module before, and else with what that one got.

        Returns:
            The tensors in it, but for the first argument. None: it is another call, or wants other
            gradients, and was not noted.
        """
        before = self._before
        if before is None or not args:
            return None
        others = (*args[1:], *kwargs, *kwargs.values())
        first, version, place = self._made.get(id(args[0]), (None, 0, []))
        if not _are_same(others, before.others):
            return None
        if first is not args[0] or version != version_of(first) or place != [index - 1, 0]:
            return None
        for one, known in before.leaves:
            if known != version_of(one) or one.requires_grad or id(one) in self._made:
                return None
        begin, end = before.text
        self._calls.append((begin + _made_by(index - 1) + end, before.digests))
        return [one for one, _ in before.leaves]

    def digests(self, num_rows: int) -> list[bytes]:
        """Of all calls so far, for each row."""
        texts = [framed(text) for text, _ in self._calls]
        each = (
            b"".join([text + own[row] for text, (_, own) in zip(texts, self._calls, strict=True)])
            for row in range(num_rows)
        )
        return [digest_of_framed(one) for one in each]


def _made_by(module: int) -> bytes:
    """How the JSON of a call begins to tell of a module's result."""
    return f'"made":[{module},'.encode()


def _stays(value: Any) -> bool:
    """Whether a value is what it was as long as it is the same object, but for its tensors."""
    if type(value) is tuple:
        return all(map(_stays, value))
    return not isinstance(value, (list, dict))


def as_it_is(value: Any) -> Any:
    """A value whose lists and dicts the caller cannot change any more."""
    if type(value) in (tuple, list):
        return type(value)(map(as_it_is, value))
    if type(value) is dict:
        return {key: as_it_is(one) for key, one in value.items()}
    return copy.copy(value) if isinstance(value, dict) else value


def repeated(tensor: torch.Tensor, row: int) -> torch.Tensor:
    """One row in all places, laid out as the tensor is."""
    places = torch.full((len(tensor),), row, device=tensor.device)
    rows = tensor.detach().index_select(0, places)
    if 0 in tensor.stride():
        return rows[:1].expand(tensor.shape) if not tensor.stride(0) else rows
    made = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return made.copy_(rows)


def share_memory(tensors: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> bool:
    """Whether one of these lies in the memory of one of those."""
    memory = {one.untyped_storage()._cdata for one in others}
    return any(one.untyped_storage()._cdata in memory for one in tensors)


def _values_in(values: Iterable[Any]) -> Iterator[Any]:
    """Values, and those in lists, tuples and dicts among them."""
    for value in values:
        yield value
        if isinstance(value, list | tuple | dict):
            yield from _values_in(_content_of(value))


def _content_of(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [*container, *container.values()]
    return list(container)


def _are_same(now: Sequence[Any], before: Sequence[Any]) -> bool:
    return len(now) == len(before) and all(map(operator.is_, now, before))
