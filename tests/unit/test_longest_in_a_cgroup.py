# SPDX-License-Identifier: Apache-2.0
"""How far each way reaches within a limit: the search of `tools/check/longest_in_a_cgroup.py`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from check import longest_in_a_cgroup
from check.longest_in_a_cgroup import holds, limit_of, longer, measure, reach_of

MIB = 1 << 20
BYTES_OF = {"checkpointing": 1.0 * MIB, "deepspeed": 0.1 * MIB, "tiled": 0.06 * MIB}


class Machine:
    """Trains with so many bytes a token; a group counts another part than the resident set."""

    def __init__(self, counted: float) -> None:
        self.counted = counted
        self.runs: list[tuple[str, int, int | None, bool]] = []

    def __call__(self, way: str, tokens: int, limit_bytes: int | None) -> dict[str, Any] | None:
        resident_bytes = int(600 * MIB + tokens * BYTES_OF[way])
        killed = limit_bytes is not None and resident_bytes * self.counted > limit_bytes
        self.runs.append((way, tokens, limit_bytes, killed))
        return None if killed else {"device_bytes": resident_bytes, "step_s": [9.0, tokens / 1e3]}


@pytest.mark.parametrize("counted", [0.93, 1.0, 1.07])
def test_what_is_claimed_has_trained_and_a_step_more_was_killed(counted: float) -> None:
    train = Machine(counted)
    found = measure(1024, train)
    assert found["checkpointing_tokens"] == 1024 and found["speed_ratio_at_2s"] == 1.0
    limit_bytes = found["limit_bytes"]
    keys = {"deepspeed": "deepspeed_tokens", "tiled": "our_tokens"}
    for way, key in {"checkpointing": "checkpointing_tokens", **keys}.items():
        ended = {tokens: killed for w, tokens, limit, killed in train.runs if w == way and limit}
        assert ended[found[key]] is False and ended[longer(found[key])] is True
    bytes_of_one = (limit_bytes / counted - 600 * MIB) / BYTES_OF["tiled"]
    assert bytes_of_one / 1.15 < found["our_tokens"] <= bytes_of_one
    assert holds(found)


def test_a_limit_is_the_smallest_in_which_checkpointing_trains() -> None:
    train = Machine(1.05)
    limit_bytes, peak_bytes = limit_of(1024, train)
    assert peak_bytes == 1624 * MIB and limit_bytes == peak_bytes * 106 // 100
    assert reach_of("checkpointing", 1024, limit_bytes, peak_bytes, train) >= 1024


def test_no_limit_near_is_an_error() -> None:
    with pytest.raises(longest_in_a_cgroup.CheckError, match="in no limit near"):
        limit_of(1024, Machine(1.4))


@pytest.mark.parametrize(
    ("ours", "theirs", "ratio", "expected"),
    [
        (8192, 6000, 0.9, True),
        (8191, 6000, 1, False),
        (8192, 7000, 1, False),
        (8192, 6000, 0.8, False),
    ],
)
def test_the_verdict(ours: int, theirs: int, ratio: float, expected: bool) -> None:
    summary = {"our_tokens": ours, "deepspeed_tokens": theirs, "speed_ratio_at_2s": ratio}
    assert holds({"checkpointing_tokens": 1024, **summary}) is expected
