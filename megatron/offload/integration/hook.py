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

from megatron.offload.errors import PREFIX


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


def outside_of_graphs(what: str, to_do: str, *, recursive: bool = True) -> Callable[[Any], Any]:
    """Decorates a function that `torch.compile` does not look into: its graph ends before the call.

    Where no graph may end (`fullgraph=True`), torch raises an error, and the sentence stands in it.

    Args:
        what: is done in there.
        to_do: by a user who wants one graph.
        recursive: else what the function calls is compiled as elsewhere.
    """
    sentence = f"{PREFIX}{what}, so a graph ends here, which fullgraph=True forbids; {to_do}"
    return torch.compiler.disable(recursive=recursive, reason=sentence)


class OutsideOfGraphs(Hook):
    """Calls a function that `torch.compile` does not look into: its graph ends before the call.

    A graph that began earlier would find the module as it was then: parameters, say, that are not
    in their places yet.
    """

    @outside_of_graphs(
        "bytes come and go between the layers of this model",
        "leave it out, or compile the layers one by one: layer.compile(fullgraph=True)",
    )
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


def _as_it_is(one: Any) -> Any:
    return one
