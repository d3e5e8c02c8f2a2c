# SPDX-License-Identifier: Apache-2.0
"""What integrations put on modules and optimizers of others: `put`, and `replaced` for a while.

Wrappers pass attributes on: one that is set on Fabric's module is set on the model in it as well,
one that is set on a module of `torch.compile` only there. So these write into the object itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

_NOTHING: Any = object()


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
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """A context in which one object has something else under a name; as `put`."""
    undo = put(owner, name, value)
    try:
        yield
    finally:
        undo()
