# SPDX-License-Identifier: Apache-2.0
"""How long drives last: the projection, its warning and its lines in the summary."""

from __future__ import annotations

import pytest

from megatron.offload.stats.endurance import YEAR_S, Endurance


def after_steps(rated_bytes, written_bytes, *, num_steps=10, seconds=10.0, num_local_ranks=1):
    endurance = Endurance(rated_bytes, num_local_ranks)
    for _ in range(num_steps):
        endurance.add_step(written_bytes, seconds)
    return endurance


def test_life_is_rated_bytes_over_the_rate_of_writing():
    # 1 GB/s for 600 TB: 600 000 s.
    endurance = after_steps(600 * 10**12, {"/ssd": 10 * 10**9})
    assert endurance.life_years("/ssd") == pytest.approx(600_000 / YEAR_S)


def test_all_ranks_of_the_machine_wear_its_drives():
    one = after_steps(10**15, {"/ssd": 10**9}).life_years("/ssd")
    eight = after_steps(10**15, {"/ssd": 10**9}, num_local_ranks=8).life_years("/ssd")
    assert one == pytest.approx(8 * eight)


def test_under_a_year_warns_once_and_says_what_to_do():
    endurance = after_steps(600 * 10**12, {"/fast": 10 * 10**9, "/slow": 10**6})
    sentence = endurance.warning()
    assert "/fast" in sentence and "after 7 days" in sentence and "write-limit" in sentence
    assert endurance.warning() is None


@pytest.mark.parametrize(
    "endurance",
    [
        after_steps(None, {"/ssd": 10**12}),  # no rating
        after_steps(600 * 10**12, {"/ssd": 10**6}),  # lasts for ages
        after_steps(600 * 10**12, {"/ssd": 10**12}, num_steps=3, seconds=100),  # too early to say
        after_steps(600 * 10**12, {"/ssd": 10**12}, seconds=1),
        after_steps(600 * 10**12, {}),
        after_steps(600 * 10**12, {"/ssd": 0}),
    ],
)
def test_no_warning_without_reason(endurance):
    assert endurance.warning() is None


def test_the_summary_has_a_line_for_each_drive():
    lines = after_steps(600 * 10**12, {"/fast": 10 * 10**9, "/slow": 10**6}).lines()
    assert len(lines) == 2
    assert "93.13 GiB in this run to the drive of /fast" in lines[0]
    assert "953.7 MiB/s on average; lasts 7 days of training" in lines[0]
    assert "lasts 190 years" in lines[1]
    assert "lasts" not in after_steps(None, {"/ssd": 1}).lines()[0]
