# SPDX-License-Identifier: Apache-2.0
"""The summary of a run: medians without the first step, drive writes with it."""

from __future__ import annotations

from megatron.offload.stats.endurance import Endurance
from megatron.offload.stats.history import StepHistory
from megatron.offload.stats.statistics import StepStatistics, add_up


def test_medians_leave_the_first_step_out_and_drive_writes_do_not():
    history = StepHistory(Endurance(None))
    assert history.last() == {} and history.summary("/ssd") == ""
    for mebibytes in (1024, 1, 3, 2):
        history.add(StepStatistics(written_bytes=mebibytes << 20, stall_s=mebibytes / 8))
        history.endurance.add_step({"/ssd": mebibytes << 20}, seconds=1.0)
    assert history.last()["written_bytes"] == 2 << 20
    lines = history.summary("/ssd").splitlines()
    assert "/ssd" in lines[0] and "3 steps" in lines[0]
    assert any(line.split()[:4] == ["to", "SSD", "2", "MiB"] for line in lines)
    assert any("0.250 s waiting" in line for line in lines)
    assert lines[-1].split()[:3] == ["drive", "1.006", "GiB"]


def test_tiers_that_were_not_used_are_not_mentioned():
    history = StepHistory(Endurance(None))
    history.add(StepStatistics(host_written_bytes=1 << 20))
    summary = history.summary("host memory")
    assert "to host" in summary and "SSD" not in summary and "drive" not in summary


def test_what_masks_spared_is_mentioned_where_there_were_any():
    for spared, words in ((0, "(0 B more were duplicates)"), (3 << 20, "3 MiB spared by moving")):
        history = StepHistory(Endurance(None))
        history.add(StepStatistics(bit_packed_bytes=spared))
        assert words in history.summary("/ssd")


def test_what_replay_spared_is_mentioned_where_there_was_any():
    for spared, words in (
        (0, "(0 B more were duplicates)"),
        (3 << 20, "3 MiB spared by comp"),
    ):
        history = StepHistory(Endurance(None))
        history.add(StepStatistics(replayed_bytes=spared))
        assert words in history.summary("/ssd")


def test_what_is_not_computed_again_is_named_by_what_made_it():
    history = StepHistory(Endurance(None))
    history.add(StepStatistics(unreplayed_bytes=1 << 20, unreplayed_by_operation={"Add": 1 << 20}))
    assert "computed again" not in history.summary("/ssd")  # without replay
    made = {"Add": 1 << 20, "Addmm": 4 << 20, "Bmm": 2 << 20, "Div": 3 << 20, "Exp": 0}
    for _ in range(2):
        history.add(
            StepStatistics(
                replayed_bytes=5 << 20,
                unreplayed_bytes=10 << 20,
                unreplayed_by_operation=made,
            )
        )
    wanted = "5 MiB of 15 MiB computed again; most of the rest: 4 MiB of Addmm, 3 MiB of Div, 2 MiB"
    assert wanted in history.summary("/ssd")
    assert "unreplayed_by_operation" not in history.last()  # loggers take numbers only
    assert history.last()["unreplayed_bytes"] == 10 << 20


def test_what_stayed_because_of_its_memory_is_mentioned_where_there_was_any():
    for stayed, is_mentioned in ((0, False), (3 << 20, True)):
        history = StepHistory(Endurance(None))
        history.add(StepStatistics(foreign_bytes=stayed))
        assert ("left alone  3 MiB (in memory" in history.summary("/ssd")) is is_mentioned


def test_what_an_allocator_reserves_is_mentioned_where_it_says():
    history = StepHistory(Endurance(None))
    history.add(StepStatistics(reserved_bytes=9 << 30, fragmented_bytes=2 << 30))
    wanted = "reserved    9 GiB of device memory, 2 GiB of it more than tensors took at the peak"
    assert wanted in history.summary("/ssd")
    history.add(StepStatistics())
    assert "reserved" not in history.summary("/ssd")


def test_memory_does_not_grow_with_the_run():
    history = StepHistory(Endurance(None))
    for _ in range(3000):
        history.add(StepStatistics())
    assert "median of 1000 steps" in history.summary("/ssd")


def test_the_counters_of_micro_batches_add_up_but_for_rates_levels_and_peaks():
    first = StepStatistics(
        offloaded_bytes=3, stall_s=0.5, read_bytes_per_s=7.0, tier_used_bytes=9, reserved_bytes=40
    )
    second = StepStatistics(offloaded_bytes=4, stall_s=0.25, read_bytes_per_s=5.0, reserved_bytes=8)
    before = {"plans": 0, "predicted_step_s": 0.0, "measured_step_s": 2.0}
    after = {"plans": 1, "predicted_step_s": 1.5, "measured_step_s": 1.0}
    total = add_up([first.as_dict() | before, second.as_dict() | after])
    expected = StepStatistics(
        offloaded_bytes=7, stall_s=0.75, read_bytes_per_s=5.0, reserved_bytes=40
    )
    of_plans = {"plans": 1, "predicted_step_s": 0.0, "measured_step_s": 3.0}
    assert total == expected.as_dict() | of_plans
    assert add_up([second.as_dict()]) == second.as_dict() and add_up([]) == {}
