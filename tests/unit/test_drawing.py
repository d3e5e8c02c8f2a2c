# SPDX-License-Identifier: Apache-2.0
"""How strategies look in pictures: the same everywhere, and no two of them alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.offload.commands.drawing import begin_near, figure, look_of
from megatron.offload.commands.plan.curve import _STRATEGIES
from megatron.offload.commands.rok.strategy import STRATEGIES
from megatron.offload.commands.training_runs.trainer import PLACEMENT_FLAGS


def test_no_two_strategies_look_alike() -> None:
    names = {*STRATEGIES, *PLACEMENT_FLAGS, *_STRATEGIES.values()}
    looks = {name: look_of(name) for name in names}
    assert len(set(looks.values())) == len(names) > 12
    # In black and white as well, but for those that are never in one picture.
    markers = [looks[name].marker for name in STRATEGIES]
    assert len(set(markers)) == len(STRATEGIES)


@pytest.mark.parametrize(("values", "begins_at_0"), [([0.8, 1.0, 1.1], False), ([0.01, 1.0], True)])
def test_an_axis_that_does_not_begin_at_0_says_so(
    values: list[float], begins_at_0: bool, tmp_path: Path
) -> None:
    with figure(tmp_path / "a.png") as (_, axes):
        axes.plot(range(len(values)), values)
        begin_near(axes, values)
        bottom, top = axes.get_ylim()
        said = [text.get_text() for text in axes.texts]
    assert bottom <= min(values) and top > max(values)
    assert (bottom == 0) == begins_at_0
    assert said == ([] if begins_at_0 else ["the y axis does not begin at 0"])
