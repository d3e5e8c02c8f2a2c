# SPDX-License-Identifier: Apache-2.0
"""Which programs have given the bytes that were saved, by layer: `CheckedPrograms`.

The finder of recipes asks it whether a program has to be compared, and says what came of it.

Note [Other shapes]
Batches that are padded to their longest text have another shape in each step, and experts get
another number of tokens. To compare in each shape anew takes a replay in forward, for which an
accelerator's host waits, and reads what has left memory already. So where the same operations have
been right `_CHECKS_OF_A_KIND` times in a layer, and never wrong, they are trusted in other shapes.
Each use is sampled then: Note [Samples] in `recipe.py`. A CPU compares in each shape: its functions
round what is left over from vectors otherwise, and no host waits for a device. So does an
accelerator where forward runs another kernel, which may be one of several by the shape.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.offload.activations.saved.recipe import SAMPLED_OF, Layout, Program, Step
from megatron.offload.activations.saved.replay_operations import (
    OF_OTHER_KERNELS,
    steps_of_a_row,
)
from megatron.offload.activations.saved.scope import Scope

_CHECKS = 2  # of a program
_CHECKS_OF_A_KIND = 8
_MOST_UNSEEN = 4  # passes in which exact operands were missing, before a program is given up
_MOST_PROGRAMS = 1 << 15  # some 2 KiB each: of a step with 32 layers some 50 shapes


@dataclasses.dataclass
class _Kind:
    """Programs that differ in shapes only."""

    num_right: int = 0
    was_wrong: bool = False


@dataclasses.dataclass
class CheckedProgram:
    """A program in a layer, and what is known of it."""

    program: Program
    kind: _Kind
    num_checks: int = 0
    num_unseen: int = 0  # times that exact operands were not there, where a codec is used
    num_uses: int = 0  # another one at first for each, see Note [Samples]
    is_refused: bool = False

    @property
    def is_trusted(self) -> bool:
        """Whether it need not be compared."""
        return self._is_checked or (
            self.kind.num_right >= _CHECKS_OF_A_KIND and not self.kind.was_wrong
        )

    @property
    def _is_checked(self) -> bool:
        return self.num_checks >= _CHECKS

    def note(self, is_right: bool) -> None:
        """It was compared."""
        self.num_checks += is_right
        self.kind.num_right += is_right
        self.is_refused = not is_right
        self.kind.was_wrong |= not is_right

    def note_unseen(self) -> None:
        """It could not be compared, for a codec has changed what it is made of."""
        self.num_unseen += 1
        self.is_refused = self.num_unseen == _MOST_UNSEEN

    def use(self) -> int | None:
        """It is used once more; the number of the sample that is to be kept, None: none is."""
        self.num_uses += 1
        is_unseen = self.is_trusted and not self._is_checked
        if self.num_uses % SAMPLED_OF and not is_unseen:
            return None
        return self.num_uses if is_unseen else self.num_uses // SAMPLED_OF


class CheckedPrograms:
    """Those of all layers.

    Args:
        trusts_kinds: a program is trusted for others of its kind.
    """

    def __init__(self, *, trusts_kinds: bool) -> None:
        self._trusts_kinds = trusts_kinds
        self._programs: dict[Any, CheckedProgram] = {}
        self._kinds: dict[Any, _Kind] = {}

    def __len__(self) -> int:
        """How many are known."""
        return len(self._programs)

    def of(
        self, scope: Scope, steps: tuple[Step, ...], layout: Layout, version: int
    ) -> CheckedProgram:
        """The program of these steps in a layer.

        Args:
            scope: that saves its result.
            steps: of it.
            layout: of its result.
            version: how often the result was changed in place when it was saved.
        """
        place = scope.chunk, scope.layer, scope.part
        key = place, steps, layout, version
        found = self._programs.get(key)
        if found is None:
            if len(self._programs) == _MOST_PROGRAMS:  # shapes that come once
                del self._programs[next(iter(self._programs))]
            program = Program(steps, layout, steps_of_a_row(steps, layout))
            is_same_kernel = OF_OTHER_KERNELS.isdisjoint(step.operation for step in steps)
            trusts = self._trusts_kinds and is_same_kernel
            kind = self._kind_of(place, steps, layout, version) if trusts else _Kind()
            found = CheckedProgram(program, kind, num_uses=len(self._programs))
            self._programs[key] = found
        return found

    def _kind_of(self, place: Any, steps: tuple[Step, ...], layout: Layout, version: int) -> _Kind:
        without_shapes = tuple(
            (step.operation, step.values, *(one for one in step.constants if not _is_shape(one)))
            for step in steps
        )
        key = place, without_shapes, len(layout.shape), layout.dtype, version
        return self._kinds.setdefault(key, _Kind())


def _is_shape(constant: Any) -> bool:
    """Whether a constant may be a size, or a place in a dimension."""
    return type(constant) in (int, tuple)
