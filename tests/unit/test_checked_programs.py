# SPDX-License-Identifier: Apache-2.0
"""Which programs are trusted, and of which uses values are kept."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch

from megatron.offload.activations.saved import checked_programs
from megatron.offload.activations.saved.checked_programs import CheckedProgram, CheckedPrograms
from megatron.offload.activations.saved.recipe import SAMPLED_OF, Layout, Step
from megatron.offload.activations.saved.replay_operations import normed
from megatron.offload.activations.saved.scope import Scope


def program(
    programs: CheckedPrograms,
    size: int,
    *constants: Any,
    layer: str = "0",
    version: int = 0,
    dtype: torch.dtype = torch.float32,
) -> CheckedProgram:
    """`operator.add` of one operand, whose result has one dimension of that size."""
    step = Step(operator.add, (~0,), constants)
    return programs.of(Scope(layer=layer), (step,), Layout((size,), (1,), dtype), version)


def right_in(programs: CheckedPrograms, num_shapes: int, *constants: Any) -> None:
    for size in range(100, 100 + num_shapes):
        program(programs, size, *constants).note(True)


def test_a_program_is_trusted_when_it_was_right_twice() -> None:
    one = program(CheckedPrograms(trusts_kinds=True), 8)
    for _ in range(2):
        assert not one.is_trusted
        one.note(True)
    assert one.is_trusted


def test_one_that_was_right_in_eight_shapes_is_trusted_in_others() -> None:
    programs = CheckedPrograms(trusts_kinds=True)
    right_in(programs, 7, 0.5, (3, 4), 2)
    assert not program(programs, 8, 0.5, (5, 6), 7).is_trusted
    program(programs, 200, 0.5, (3, 4), 2).note(True)
    assert program(programs, 8, 0.5, (5, 6), 7).is_trusted


@pytest.mark.parametrize(
    ("constants", "changes"),
    [
        ((0.25,), {}),
        ((0.5,), {"layer": "1"}),
        ((0.5,), {"version": 1}),
        ((0.5,), {"dtype": torch.float64}),
        ((None,), {}),
    ],
)
def test_what_differs_in_more_than_shapes_is_not(constants, changes) -> None:
    programs = CheckedPrograms(trusts_kinds=True)
    right_in(programs, 8, 0.5)
    assert not program(programs, 8, *constants, **changes).is_trusted


def test_one_that_was_wrong_in_a_shape_is_compared_in_each() -> None:
    programs = CheckedPrograms(trusts_kinds=True)
    right_in(programs, 8)
    assert program(programs, 8).is_trusted
    wrong = program(programs, 300)
    wrong.note(False)
    assert wrong.is_refused and not program(programs, 300).is_trusted
    assert not program(programs, 8).is_trusted and not program(programs, 8).is_refused
    right_in(programs, 8)
    assert not program(programs, 8).is_trusted


def test_beside_a_codec_each_shape_is_compared() -> None:
    programs = CheckedPrograms(trusts_kinds=False)
    right_in(programs, 20)
    assert not program(programs, 8).is_trusted


def test_where_forward_runs_another_kernel_each_shape_is_compared() -> None:
    programs = CheckedPrograms(trusts_kinds=True)

    def normed_in(size: int) -> CheckedProgram:
        steps = (Step(normed, (~0, None, ~1)),)
        return programs.of(Scope(), steps, Layout((size, 64), (64, 1), torch.float32), 0)

    for size in range(20):
        normed_in(size).note(True)
    assert not normed_in(20).is_trusted


def test_all_uses_of_one_that_was_not_compared_are_sampled() -> None:
    programs = CheckedPrograms(trusts_kinds=True)
    right_in(programs, 8)
    trusted, compared = program(programs, 8), program(programs, 9)
    compared.note(True)
    compared.note(True)
    assert len({trusted.use() for _ in range(3 * SAMPLED_OF)} - {None}) == 3 * SAMPLED_OF
    assert len({compared.use() for _ in range(3 * SAMPLED_OF)} - {None}) == 3


def test_shapes_that_come_once_are_forgotten(monkeypatch) -> None:
    monkeypatch.setattr(checked_programs, "_MOST_PROGRAMS", 16)
    programs = CheckedPrograms(trusts_kinds=True)
    first = program(programs, 0)
    for size in range(1, 100):
        program(programs, size).note(True)
    assert len(programs) == 16
    assert program(programs, 99).num_checks == 1 and program(programs, 0) is not first
    assert program(programs, 0).is_trusted
