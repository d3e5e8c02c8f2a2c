# SPDX-License-Identifier: Apache-2.0
"""What integrations put on objects of others: `put`, `replaced` for a while, `within` a context.

`Replaced` is what stays in the place of modules as long as offload is on.

Wrappers pass attributes on: one that is set on Fabric's module is set on the model in it as well,
one that is set on a module of `torch.compile` only there. So these write into the object itself.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

_NOTHING: Any = object()
Context = contextlib.AbstractContextManager[Any]


class Replaced(Protocol):
    """Computes in the place of modules."""

    def connect(self) -> None:
        """Takes the modules' place."""
        ...

    def close(self) -> None:
        """Gives it back."""
        ...


def put(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Sets an attribute of one object, and neither of its class nor of what it wraps.

    Args:
        owner: a module, an optimizer.
        name: of a method, say: what the class has there is hidden.
        value: anything; a module too is no submodule by that.

    Returns:
        A function that puts back what the object itself had there, if anything.
    """
    own = vars(owner)
    before = own.get(name, _NOTHING)
    own[name] = value

    def undo() -> None:
        if before is _NOTHING:
            own.pop(name, None)
        else:
            own[name] = before

    return undo


@contextlib.contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """A context in which one object has other attributes; as `put`."""
    undone = [put(owner, name, value) for name, value in values.items()]
    try:
        yield
    finally:
        for undo in undone:
            undo()


def within(owner: Any, name: str, around: Callable[[], Context]) -> Callable[[], None]:
    """Has a function of one object run in a context; as `put`.

    Args:
        owner: an optimizer, say; where it has no such function, nothing is done.
        name: of the function.
        around: gives the context, at each call.
    """
    function = getattr(owner, name, None)
    if function is None:
        return lambda: None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with around():
            return function(*args, **kwargs)

    return put(owner, name, call)


def beginning_with(call: Callable[[], object]) -> Callable[[], Context]:
    """Gives contexts for `within` in which something is called first, and nothing at the end."""

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        call()
        yield

    return context
