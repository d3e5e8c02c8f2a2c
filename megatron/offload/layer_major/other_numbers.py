# SPDX-License-Identifier: Apache-2.0
"""Random numbers that torch's own generators do not draw: `OtherNumbers`.

Those of Python's `random`, of numpy, and of generators that a model has among its attributes or
that a layer gets. A layer that runs again needs them where they were, and a layer-major step has to
know that micro-batches draw from them. Their states are read and set; nothing is drawn here.
"""

from __future__ import annotations

import contextlib
import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

_Access = tuple[Callable[[], Any], Callable[[Any], Any]]  # reads a state, and sets it

_OF_EACH_MODULE = set(vars(torch.nn.Module()))
_FREQUENT = (type(None), bool, int, float, str, torch.Tensor, torch.nn.Module)


class OtherNumbers:
    """The generators beside torch's own: the process's, and those that some objects have.

    Args:
        owners: modules, of whose attributes generators count and what lists, tuples and dicts among
            these hold; lists, tuples, dicts; generators.
    """

    def __init__(self, owners: Iterable[Any] = ()) -> None:
        self._accesses: list[_Access] = [(random.getstate, random.setstate)]
        if (numpy := sys.modules.get("numpy")) is not None:
            self._accesses.append((numpy.random.get_state, numpy.random.set_state))
        found = {id(one): access for owner in owners for one, access in _generators_in(owner)}
        self._accesses += found.values()

    def states(self) -> list[bytes]:
        """The state of each, to be compared and to be set."""
        return [pickle.dumps(read()) for read, _ in self._accesses]

    @contextlib.contextmanager
    def at(self, states: Sequence[bytes]) -> Iterator[None]:
        """A context in which they begin at states that `states` gave; then they are as before."""
        present = self.states()
        self._set(states)
        try:
            yield
        finally:
            self._set(present)

    def _set(self, states: Sequence[bytes]) -> None:
        for (_, write), state in zip(self._accesses, states, strict=True):
            write(pickle.loads(state))


def _generators_in(owner: Any) -> Iterator[tuple[Any, _Access]]:
    if isinstance(owner, torch.nn.Module):
        attributes = vars(owner).items()
        values = [value for name, value in attributes if name not in _OF_EACH_MODULE]
        for value in values:
            yield from _generators_in(value) if not isinstance(value, _FREQUENT) else ()
    elif isinstance(owner, list | tuple | Mapping):
        for value in owner.values() if isinstance(owner, Mapping) else owner:
            if (access := _access_to(value)) is not None:
                yield value, access
    elif (access := _access_to(owner)) is not None:
        yield owner, access


def _access_to(value: Any) -> _Access | None:
    """How the state of a generator is read and set; None: it is no generator."""
    if isinstance(value, _FREQUENT):
        return None
    if isinstance(value, torch.Generator):
        # As bytes: what pickle makes of two equal tensors differs.
        return (
            lambda: value.get_state().numpy().tobytes(),
            lambda state: value.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8)),
        )
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    if (numpy := sys.modules.get("numpy")) is None:
        return None
    if isinstance(value, numpy.random.RandomState):
        return value.get_state, value.set_state
    if isinstance(value, numpy.random.Generator):
        bits = value.bit_generator
        return lambda: bits.state, lambda state: setattr(bits, "state", state)
    return None
