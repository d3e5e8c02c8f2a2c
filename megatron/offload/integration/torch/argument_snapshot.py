# SPDX-License-Identifier: Apache-2.0
"""What a layer was called with, as it was before its forward: `ArgumentSnapshot`.

`layer_calls.py` makes one for each call of a layer that is to run again in backward, and for calls
that only show what a layer changes. The first run gets what the caller gave, so a cache has in it
what it has without us. What runs again gets containers and objects of its own.

Note [Tensors among arguments]
What runs again needs the tensors that the first run has found. Those that nothing changes in place
are held, without a copy. A cache also has in it what other layers have put there: a tensor with a
graph that the layer's own graph does not lead to is held weakly, or a cache that the script has
dropped would keep all keys and values in memory. Where such a tensor is gone, or others have
changed it in place since, a tensor without bytes stands for it: layers ask for shapes (how long is
the cache?), and one that computes with it gets an error.
A layer that changes tensors in place (a static cache, a counter) needs copies from before. Its
first call shows which these are: small ones are copied for it, and a call with large ones within a
container or an object is not recomputed. Later calls copy what earlier ones have changed. What has
a graph is never copied: a layer that changes that in place does not run again.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from megatron.offload.errors import ChangedInPlaceError
from megatron.offload.integration.torch.noted_tensor import (
    SMALL_BYTES,
    Changes,
    NotedTensor,
    NotedTensors,
    is_strided,
    nodes_before,
)
from megatron.offload.integration.torch.structures import Path, Structure, text_of

_OF_LAYER = "of the layer: "  # before the names of keywords; no function has such parameters


class ArgumentSnapshot:
    """The arguments of a call, and the context variables that it finds, noted before it.

    Args:
        args: of the call.
        kwargs: likewise.
        names: of the parameters of the layer's forward, for people.
        changes: of the layer's earlier calls.
    """

    def __init__(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        names: Sequence[str],
        changes: Changes,
        *,
        copies: bool,
    ) -> None:
        self._changes = changes
        self._copies = copies
        self._begin: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        self._num_args, self._keys = len(args), list(kwargs)
        positions = [names[i] if i < len(names) else f"argument {i + 1}" for i in range(len(args))]
        self._given: list[Any] | None = [*args, *kwargs.values()]
        self._tensors = NotedTensors()
        named = zip([*positions, *self._keys], self._given, strict=True)
        self._structure = Structure(named, self._noted)
        # By backward they are others again, and a device's backward runs in a thread of its own.
        self._variables = contextvars.copy_context()

    def _noted(self, tensor: torch.Tensor, path: Path, is_inside: bool) -> Any:
        one = self._tensors.get(id(tensor))
        if one is None:
            one = self._tensors[id(tensor)] = NotedTensor(tensor, path)
            if self._copies and not one.has_graph and is_strided(tensor):
                is_small = tensor.nbytes <= SMALL_BYTES
                if path in self._changes.copied or (is_small and not self._changes.is_known):
                    one.copy = tensor.detach().clone()
        one.is_inside = one.is_inside or is_inside
        if not is_inside and one.copy is None:
            return tensor
        one.is_held = True
        return one

    # -- Before the layer runs ------------------------------------------------------------------

    @property
    def is_certain(self) -> bool:
        """Whether there is a copy of all that the layer may well change in place."""
        return self._changes.is_known or not any(
            one.is_inside and one.copy is None and not one.has_graph
            for one in self._tensors.values()
        )

    def passed(self) -> tuple[list[Any], dict[str, Any]]:
        """What a checkpoint is called with and holds until backward, in the arguments' place.

        Keywords have other names: torch's checkpoint has some of its own, such as `debug`, which it
        would take for itself.
        """
        assert self._given is not None
        values = [
            value if kept is value else _Given(number)
            for number, (kept, value) in enumerate(
                zip(self._structure.kept, self._given, strict=True)
            )
        ]
        in_names = zip(self._keys, values[self._num_args :], strict=True)
        return values[: self._num_args], {_OF_LAYER + key: value for key, value in in_names}

    def run(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Runs the layer, with what `passed` gave: for the first time, or again.

        Raises:
            ChangedInPlaceError: it runs again, and what it was called with is no longer there.
        """
        runs_again = self._given is None
        arguments = self._made() if runs_again else self._given

        def argument(value: Any) -> Any:
            assert arguments is not None
            return arguments[value.number] if isinstance(value, _Given) else value

        args = tuple(argument(one) for one in args)
        kwargs = {key.removeprefix(_OF_LAYER): argument(one) for key, one in kwargs.items()}
        try:
            if runs_again:
                return self._variables.copy().run(forward, *args, **kwargs)
            return forward(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            advice = "give layers what stays as it is until backward, or do not recompute this one"
            self._tensors.explain(error, "its arguments", advice)
            raise

    # -- After it -------------------------------------------------------------------------------

    def end(self, results: Iterable[torch.Tensor]) -> None:
        """The first run has ended. Holds no more than what a second one needs.

        Raises:
            ChangedInPlaceError: it cannot run again as it is to.
        """
        given, self._given = self._given or [], None
        advice = "have the layer change a copy"
        self._tensors.note_changes(self._changes, advice, copies=self._copies)
        if not self._copies:
            return
        of_others = [one for one in self._tensors.values() if one.is_inside and one.has_graph]
        used = nodes_before(self._begin, results) if of_others else set()
        for one in self._tensors.values():
            one.settle(used)
        # A checkpoint has the rest, and perhaps it is to leave memory.
        for number, (kept, value) in enumerate(zip(self._structure.kept, given, strict=True)):
            if kept is value:
                self._structure.kept[number] = None

    # -- When it runs again ---------------------------------------------------------------------

    def _made(self) -> list[Any]:
        for one in self._tensors.values():
            if not one.is_inside and one.copy is None and one.was_changed:
                raise ChangedInPlaceError(
                    f"{text_of(one.path)}, with which a recomputed layer was called, was changed "
                    "in place since; change a copy of it, or do not recompute the layer"
                )
        return self._structure.made(self._tensors.present())


class _Given:
    """Stands for an argument that may change."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number
