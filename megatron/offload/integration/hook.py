# SPDX-License-Identifier: Apache-2.0
"""Functions that we put on the modules of others, as hooks or in place of theirs: `Hook`.

Trainers copy models (`deepcopy` for a reference model or an average of the weights) and pickle
them (`torch.save(model)`). What hangs on a module goes along, and the copy would tell of its passes
as if it were the model. So in a copy each of these is what stood in its place before, or does
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def do_nothing(*_: Any, **__: Any) -> None:
    """What a hook becomes in a copy of its module."""


class Hook:
    """Calls a function.

    Args:
        function: what is called.
        original: what copies and pickles of the module have in its place.
    """

    def __init__(
        self, function: Callable[..., Any], original: Callable[..., Any] = do_nothing
    ) -> None:
        self._function, self._original = function, original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __reduce__(self) -> Any:  # of pickle and of deepcopy
        return _as_it_is, (self._original,)


class LeftOutOfGraphs(Hook):
    """Calls a function, unless `torch.compile` traces it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return None if torch.compiler.is_compiling() else self._function(*args, **kwargs)


class OutsideOfGraphs(Hook):
    """Calls a function that `torch.compile` does not look into: its graph ends before the call.

    A graph that began earlier would find the module as it was then: parameters, say, that are not
    in their places yet.
    """

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


def _as_it_is(one: Any) -> Any:
    return one
