# SPDX-License-Identifier: Apache-2.0
"""How a saved tensor is computed again from others: `Recipe`, its `Program`, and the operations.

`recipes.py` finds recipes in autograd's graph, a record keeps one, the hooks run it. Nothing here
looks at a graph or moves a byte.

Note [Same operation on the same bytes]
A program calls the operations that the forward pass called, with the same operands, constants,
shapes and strides, so its result has the same bytes. Autocast is off, because its casts are steps
of the program; nothing is recorded for autograd, which has the nodes of the forward pass.

Note [Row by row]
The log-softmax of a loss is what takes the most memory in many steps, and a wider copy of the
logits takes as much again. Each of its rows comes of one row of the logits, so such a program runs
on a part of the rows at a time; and that is how it is compared with what forward has saved.

Autograd alone does not need the logits, so what writes to them behind its back (through `data`, or
a kernel) would do no harm without us. A value of each row is kept, and has to be the same again: it
depends on all of the row.

Note [Samples]
A script may also write to a result that no operation saves, unseen by autograd (under `no_grad`,
through `data`), and may begin with it after the passes in which recipes are compared. So of one use
in `SAMPLED_OF` of a recipe some values of the result are kept, and have to be the same again. Other
recipes are sampled in other passes, and each time other values of a result: what is written to the
same few places is seen in the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from megatron.offload.errors import ChangedInPlaceError, OffloadError

SAMPLED_OF = 8  # uses of a recipe
_NUM_SAMPLED = 256  # values
_NEXT_SAMPLE = 1009  # values behind the one before, from the beginning again behind the last
_NUM_PARTS = 16
_LEAST_PART = 1 << 20  # bytes

_WRITTEN = (
    "activation offload: what is computed again of other saved tensors has other values than in "
    "forward: one of them, such as a model's bf16 logits, or a result between them was changed "
    "behind autograd's back (under no_grad, through .data, or by a kernel in place); the gradient "
    "would be wrong; write to a clone, or set --activation-replay off"
)

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


class Sample(NamedTuple):
    """Some values of a result; the number says which."""

    number: int
    values: torch.Tensor


class Program:
    """Operations in the order in which they run.

    Attributes:
        steps: the last one gives the result.
        layout: of the result.
        of_a_row: what makes rows of the result of the same rows of the only operand, one after the
            other; empty: it is not made row by row.
    """

    __slots__ = ("_last_uses", "layout", "of_a_row", "steps")

    def __init__(
        self, steps: tuple[Step, ...], layout: Layout, of_a_row: tuple[Step, ...] = ()
    ) -> None:
        self.steps = steps
        self.layout = layout
        self.of_a_row = of_a_row
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
        if self.of_a_row:
            shape, stride, dtype = self.layout
            made = _only(operands).new_empty_strided(shape, stride, dtype=dtype)
            for rows, part in self._by_rows(operands):
                self._rows_of(made)[rows] = part
            return made
        return self._at_once(operands)

    def gives(self, operands: list[torch.Tensor | None], target: torch.Tensor) -> bool:
        """Whether it gives the bytes of a tensor. `operands` as for `run`."""
        if self.of_a_row:
            wanted = self._rows_of(target)
            return all(_same_bytes(part, wanted[rows]) for rows, part in self._by_rows(operands))
        return _same_bytes(self._at_once(operands), target)

    def sample_of(self, result: torch.Tensor, number: int | None) -> Sample | None:
        """Copies some values: Note [Samples].

        Args:
            result: of the program, or a tensor with its layout.
            number: of the sample, which says what values these are; None: there is none.
        """
        return None if number is None else Sample(number, self._sampled(result, number).clone())

    def require_sampled(self, result: torch.Tensor, sample: Sample) -> None:
        """Raises ChangedInPlaceError where the result has other values than those of a sample."""
        found = self._sampled(result, sample.number)
        require_same_values(found, sample.values, ChangedInPlaceError, _WRITTEN)

    def _sampled(self, result: torch.Tensor, number: int) -> torch.Tensor:
        """A value of each row (Note [Row by row]), or some values, far from each other; a view."""
        if self.of_a_row:
            return self._rows_of(result)[:, 0]
        num_values = result.numel()
        distance = max(num_values // _NUM_SAMPLED, 1)
        first = number * _NEXT_SAMPLE % distance
        return result.detach().as_strided((min(num_values, _NUM_SAMPLED),), (distance,), first)

    def _rows_of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().reshape(-1, self.layout.shape[-1])

    def _by_rows(self, operands: list[torch.Tensor | None]) -> Iterator[tuple[slice, torch.Tensor]]:
        """Parts of the result, and which rows they are."""
        given = self._rows_of(_only(operands))
        row_bytes = given.shape[1] * self.layout.dtype.itemsize
        num_rows = max(len(given) // _NUM_PARTS, _LEAST_PART // row_bytes, 1)
        for start in range(0, len(given), num_rows):
            rows = slice(start, start + num_rows)
            part = given[rows]
            with torch.no_grad(), torch._C._DisableAutocast():
                for step in self.of_a_row:
                    part = step.operation(part, *step.constants)
            yield rows, part

    def _at_once(self, operands: list[torch.Tensor | None]) -> torch.Tensor:
        if torch.is_grad_enabled():  # seldom so in backward, and the context takes microseconds
            with torch.no_grad():
                return self._at_once(operands)
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
            Empty once the record has the bytes for good, as are the bases.
        bases: the records whose bytes have to be in memory, those behind replayed operands too.
        depth: 1, or more where operands are replayed in turn.
        copied_bytes: of the operands, copies of parameters and small buffers.
        stream: of the device, on which those copies were made.
        codes_bytes: that a codec has made of the bytes, which it decodes; 0: no codec has.
        is_exact: it gives the bytes that were saved; not so where a codec is among its steps, or
            among those of its operands.
        frees: operands were saved for it alone. They go when it has run for the last time, see
            `Reader.compute`.
        sample: values of its result, which have to be there again; None: this use is not sampled.
    """

    __slots__ = (
        *("bases", "codes_bytes", "copied_bytes", "depth", "is_exact", "operands", "program"),
        *("frees", "sample", "stream"),
    )

    def __init__(
        self,
        program: Program,
        operands: list[Any],
        bases: list[Any],
        depth: int,
        copied_bytes: int = 0,
        *,
        codes_bytes: int = 0,
        is_exact: bool = True,
        frees: bool = False,
        sample: Sample | None = None,
    ) -> None:
        self.frees = frees
        self.copied_bytes = copied_bytes
        self.codes_bytes = codes_bytes
        self.is_exact = is_exact and not codes_bytes
        self.sample = sample if self.is_exact else None
        self.program = program
        self.operands = operands
        self.bases = bases
        self.depth = depth
        self.stream: Any = None

    @property
    def encodes(self) -> bool:
        """Whether it decodes what a codec has made of the bytes."""
        return self.codes_bytes > 0

    def run(self, operands: list[torch.Tensor | None]) -> torch.Tensor:
        """The tensor, in memory of its own; `operands` as for `Program.run`.

        Raises:
            ChangedInPlaceError: it is another one than in forward. On an accelerator the device
                stops with an assertion.
        """
        result = self.program.run(operands)
        if self.sample is not None:
            self.program.require_sampled(result, self.sample)
        return result


def _only(operands: list[torch.Tensor | None]) -> torch.Tensor:
    (operand,) = operands
    assert operand is not None
    return operand


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype is not other.dtype or one.shape != other.shape or one.device != other.device:
        return False
    return torch.equal(bits_of(one), bits_of(other))


def require_same_values(
    found: torch.Tensor, expected: torch.Tensor, error: type[OffloadError], sentence: str
) -> None:
    """Raises an error where what was computed again is not what forward had.

    A NaN is any other NaN: a cast to fewer bits, which stands for its operand, has its own. The
    sign of a zero does not matter. An accelerator stops by itself, and nothing waits for it.
    """
    are_nan = found.isnan().logical_and_(expected.isnan())
    is_same = found.eq(expected).logical_or_(are_nan).all()
    if found.device.type != "cpu":
        torch._assert_async(is_same, sentence)
    elif not is_same:
        raise error(sentence)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as integers, a view: NaN equals itself there, and 0 is not -0."""
    real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return real.view(_INTEGERS[real.element_size()])
