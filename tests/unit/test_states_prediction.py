# SPDX-License-Identifier: Apache-2.0
"""What a step with states on a tier is predicted to take, beside closed forms and real steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.offload import offload_optimizer
from megatron.offload.sizes import MIB
from megatron.offload.states.measured import profile_of
from megatron.offload.states.prediction import StatesProfile, best_window, predict

GB = 10**9


def profile(**changes):
    """Ten buckets of 100 MB: a read or a write takes 0.1 s, the update of all together 0.1 s."""
    values = {
        "bucket_bytes": (100_000_000,) * 10,
        "read_bytes_per_s": 1.0 * GB,
        "write_bytes_per_s": 1.0 * GB,
        "update_s_per_byte": 1e-10,
        "between_s": 2.0,
    }
    return StatesProfile(**{**values, **changes})


def test_states_that_fit_into_the_window_move_nowhere():
    found = predict(profile(), 1100_000_000)
    assert found.moved_bytes == 0 and found.wait_s == 0
    assert found.optimizer_s == pytest.approx(0.1)
    assert found.step_s == pytest.approx(2.1)


def test_a_step_moves_what_does_not_fit_into_the_window():
    found = predict(profile(), 400_000_000)  # three stay, one comes beside
    assert found.moved_bytes == 700_000_000
    assert found.peak_bytes == 400_000_000


def test_the_slowest_of_reading_updating_and_writing_sets_the_pace():
    slow_reads = predict(profile(read_bytes_per_s=0.5 * GB), 600_000_000)
    assert slow_reads.optimizer_s == pytest.approx(5 * 0.2, rel=0.1)  # five come from the tier
    slow_update = predict(profile(update_s_per_byte=5e-9), 600_000_000)
    assert slow_update.optimizer_s == pytest.approx(10 * 0.5, rel=0.02)


def test_a_window_of_two_buckets_reads_updates_and_writes_in_turn():
    found = predict(profile(), 200_000_000)
    together = predict(profile(), 400_000_000)
    assert found.optimizer_s > together.optimizer_s + 0.2


def test_writes_that_have_not_ended_by_the_next_step_are_taken_back():
    hidden = predict(profile(write_bytes_per_s=0.1 * GB), 600_000_000)
    short = predict(profile(write_bytes_per_s=0.1 * GB, between_s=0.1), 600_000_000)
    assert hidden.moved_bytes == 500_000_000
    assert short.moved_bytes == 400_000_000


def test_reads_that_begin_before_the_step_are_not_waited_for():
    late = predict(profile(write_bytes_per_s=10 * GB), 400_000_000)
    early = predict(profile(write_bytes_per_s=10 * GB, prefetch_s=1.0), 400_000_000)
    assert early.wait_s <= late.wait_s - 0.05
    assert early.between_bytes == 400_000_000 and late.between_bytes == 300_000_000


def test_a_write_limit_holds_up_all_writes_but_the_first():
    free = predict(profile(between_s=0.0), 300_000_000)
    limited = predict(profile(between_s=0.0, write_limit_bytes_per_s=0.1 * GB), 300_000_000)
    assert limited.step_s > free.step_s + 4.0


def test_the_best_window_is_the_smallest_that_hides_as_much():
    size, found = best_window(profile(), 2 * GB)
    assert found.step_s <= predict(profile(), 2 * GB).step_s * 1.01
    assert predict(profile(), size - 100_000_000).step_s > found.step_s
    hidden, _ = best_window(profile(update_s_per_byte=5e-9), 2 * GB)
    assert hidden <= 400_000_000  # reads and writes hide behind updates
    tight, _ = best_window(profile(), 0)
    assert tight == 200_000_000  # two buckets at least


def test_real_steps_move_as_many_bytes_and_take_as_much_memory_as_predicted(tmp_path: Path):
    params = [torch.nn.Parameter(torch.randn(256, 512)) for _ in range(12)]
    optimizer = torch.optim.AdamW(params)
    settings = {"bucket_bytes": MIB, "window_bytes": 4 * MIB}
    with offload_optimizer(optimizer, tmp_path, **settings) as handle:
        assert handle.states is not None
        for _ in range(5):
            for param in params:
                param.grad = torch.ones_like(param)
            handle.states.wait_for_writes()
            optimizer.step()
        measured = profile_of(handle.states)
        assert measured is not None
        step = handle.states.meter.settled()[-1]
    assert len(measured.bucket_bytes) == 12
    # Writes have ended before each step: what is left is what the window decides.
    found = predict(StatesProfile(measured.bucket_bytes, GB, GB, 1e-12, between_s=1000.0), 4 * MIB)
    assert (step.read_bytes, step.peak_bytes) == (found.moved_bytes, found.peak_bytes)
    assert step.updated_bytes == 12 * MIB
    assert 0 <= step.wait_s <= step.step_s and 0 < step.update_s <= step.step_s
