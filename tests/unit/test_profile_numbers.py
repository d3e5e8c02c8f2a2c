# SPDX-License-Identifier: Apache-2.0
"""Every number of a profile is found once, and nothing else is touched."""

from __future__ import annotations

import pytest

from megatron.offload.planner.profile.numbers import with_numbers
from megatron.offload.planner.profile.pipeline_schedule import PipelinePosition
from tests.support.stages import layer, part


def test_numbers_get_the_name_of_their_field_and_the_rest_stays() -> None:
    position = PipelinePosition(4, 1, 1, 2)
    found: list[tuple[str, float]] = []

    def double(name: str, number: float) -> float:
        found.append((name, number))
        return number * 2

    parts = (part("mlp", 8, recompute_s=0.5), part("attention", 6))
    (doubled, place, words) = with_numbers(double, (layer(parts=parts), position, "a test"))
    assert [number for name, number in found if name == "movable_bytes"] == [8, 6]
    assert place == PipelinePosition(8, 2, 2, 4) and isinstance(place, PipelinePosition)
    assert [one.movable_bytes for one in doubled.parts] == [16, 12]
    assert [one.recompute_s for one in doubled.parts] == [1.0, None]
    assert (doubled.name, doubled.forward_s, words) == ("decoder.0", 2.0, "a test")
    with_numbers(double, (1.5,), name="before_s")
    assert found[-1] == ("before_s", 1.5)  # a tuple's entry


def test_several_of_one_shape_are_walked_together() -> None:
    one, other = part(recompute_s=1.0), part(size=4, recompute_s=None)
    both = with_numbers(lambda _, a, b: a + b, one, other)
    assert both.movable_bytes == 12 and both.recompute_s is None
    with pytest.raises(ValueError, match="shorter"):
        with_numbers(lambda _, a, b: a + b, (1, 2), (1,))
