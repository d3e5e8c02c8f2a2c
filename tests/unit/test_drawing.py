# SPDX-License-Identifier: Apache-2.0
"""How strategies look in pictures: the same everywhere, and no two of them alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.offload.commands.drawing import Label, begin_near, figure, label_points, look_of
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


def test_words_beside_points_cover_no_points_and_no_other_words(tmp_path: Path) -> None:
    """Six points, so close that words above each would lie on those of the next."""
    places = [(float(x), 10.0 + 0.1 * (x % 2)) for x in range(6)]
    with figure(tmp_path / "a.png", figsize=(4, 3), layout="constrained") as (drawn, axes):
        axes.plot(*zip(*places, strict=True), "o")
        axes.set_ylim(5, 15)
        label_points(drawn, axes, [Label(x, y, f"{x:.0f}000 MiB") for x, y in places])
        renderer = drawn.canvas.get_renderer()
        boxes = [one.get_window_extent(renderer) for one in axes.texts]
        points = axes.transData.transform(places)
    assert [one.get_text() for one in axes.texts] == [f"{x}000 MiB" for x in range(6)]
    for number, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[number + 1 :])
        assert not any(box.contains(*point) for point in points)
        assert axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1


def test_the_ways_of_a_day_on_a_gpu_look_like_their_strategies() -> None:
    from check.gpu_day.pictures import _LOOKS, _NAMES, look_of_way

    for way, strategy in (("none", "off"), ("checkpointing", "recompute"), ("auto", "auto")):
        look = look_of(strategy)
        expected = {"color": look.color, "marker": look.marker, "fillstyle": "full"}
        assert look_of_way(way) == expected
    ways = {*_NAMES, *_LOOKS}
    assert len({tuple(look_of_way(way).values()) for way in ways}) == len(ways)
