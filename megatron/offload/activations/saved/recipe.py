# SPDX-License-Identifier: Apache-2.0
"""How a saved tensor is computed again from others: `Recipe`, its `Program`, and the operations.

`recipes.py` finds recipes in autograd's graph, a record keeps one, the hooks run it. Nothing here
looks at a graph or moves a byte.

Note [Same operation on the same bytes]
A program calls the operations that the forward pass called, with the same operands, constants,
shapes and strides, so its result has the same bytes. Autocast is off, because its casts are steps
of the program; nothing is recorded for autograd, which has the nodes of the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size

Operation = Callable[..., Any]


class Step(NamedTuple):
    """One operation of a program.

    Attributes:
        operation: gets values, then constants.
        values: of a negative number `~n` operand n, else the result of that step.
        constants: that follow.
    """

    operation: Operation
    values: tuple[int | None, ...]
    constants: tuple[Any, ...] = ()


class Layout(NamedTuple):
    """What a result looks like, beside its bytes."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Program:
    """Operations in the order in which they run.

    Attributes:
        steps: the last one gives the result.
        layout: of the result.
    """

    __slots__ = ("_last_uses", "layout", "steps")

    def __init__(self, steps: tuple[Step, ...], layout: Layout) -> None:
        self.steps = steps
        self.layout = layout
        self._last_uses: list[list[int]] = [[] for _ in steps]
        last = {one: number for number, step in enumerate(steps) for one in step.values}
        for one, number in last.items():
            if one is not None:
                self._last_uses[number].append(one)

    def run(self, operands: list[torch.Tensor | None]) -> torch.Tensor:
        """The tensor, in memory of its own.

        Args:
            operands: as the recipe has them; each is taken out after its last use, so that a chain
                of operations holds one result at a time.
        """
        if torch.is_grad_enabled():  # seldom so in backward, and the context takes microseconds
            with torch.no_grad():
                return self.run(operands)
        results: list[torch.Tensor | None] = []
        with torch._C._DisableAutocast():
            for step, ended in zip(self.steps, self._last_uses, strict=True):
                arguments = [
                    None if one is None else operands[~one] if one < 0 else results[one]
                    for one in step.values
                ]
                for one in ended:
                    if one < 0:
                        operands[~one] = None
                    else:
                        results[one] = None
                results.append(step.operation(*arguments, *step.constants))
                del arguments
        result = results[-1]
        assert result is not None
        is_own = not result._is_view() and result.untyped_storage().nbytes() == result.nbytes
        if is_own and result.stride() == self.layout.stride:
            return result
        laid_out = result.new_empty_strided(self.layout.shape, self.layout.stride)
        return laid_out.copy_(result)


class Recipe:
    """A program and what it is run on.

    Attributes:
        program: what is computed.
        operands: what autograd holds of each operand: a view of a record, or a tensor that stays.
        bases: the records whose bytes have to be in memory, those behind replayed operands too.
        depth: 1, or more where operands are replayed in turn.
        copied_bytes: of the operands, copies of parameters.
        stream: of the device, on which those copies were made.
        encodes: it decodes what a codec has made of the bytes.
        is_exact: it gives the bytes that were saved; not so where a codec is among its steps, or
            among those of its operands.
    """

    __slots__ = (
        *("bases", "copied_bytes", "depth", "encodes", "is_exact", "operands", "program"),
        "stream",
    )

    def __init__(
        self,
        program: Program,
        operands: list[Any],
        bases: list[Any],
        depth: int,
        copied_bytes: int = 0,
        *,
        encodes: bool = False,
        is_exact: bool = True,
    ) -> None:
        self.copied_bytes = copied_bytes
        self.encodes = encodes
        self.is_exact = is_exact and not encodes
        self.program = program
        self.operands = operands
        self.bases = bases
        self.depth = depth
        self.stream: Any = None


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as integers, a view: NaN equals itself there, and 0 is not -0."""
    real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return real.view(_INTEGERS[real.element_size()])
