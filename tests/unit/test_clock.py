# SPDX-License-Identifier: Apache-2.0
"""When seconds of compute are told, on a device that comes to its moments when the test says so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron.offload.activations.stats.compute_waits import ComputeWaits
from megatron.offload.activations.stats.standstill import Standstill
from megatron.offload.device.clock import Clock
from megatron.offload.device.cpu import CpuDevice
from megatron.offload.stats.statistics import StepStatistics
from tests.support.behind import DeviceBehind


@pytest.fixture
def device() -> DeviceBehind:
    return DeviceBehind()


@pytest.fixture
def clock(device: DeviceBehind) -> Clock:
    return Clock(device)


def test_seconds_are_told_in_order_when_the_device_has_passed(
    clock: Clock, device: DeviceBehind
) -> None:
    told: list[tuple[str, float]] = []
    for name, seconds in (("first", 2.0), ("second", 3.0)):
        with clock.timed(lambda took_s, name=name: told.append((name, took_s))):
            device.queue(seconds)
    clock.read()
    assert told == [] and device.num_waits == 0
    device.run(1)
    clock.read()
    assert told == [("first", 2.0)]
    clock.wait()
    assert told == [("first", 2.0), ("second", 3.0)] and device.num_waits == 1
    clock.wait()
    assert len(told) == 2, "each once"


def test_on_a_cpu_they_are_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds: Iterator[float] = iter((5.0, 7.5))
    monkeypatch.setattr(CpuDevice, "timestamp", lambda _: next(seconds))
    told: list[float] = []
    with Clock(CpuDevice()).timed(told.append):
        assert told == []
    assert told == [2.5]


def test_what_raises_is_timed_too(clock: Clock, device: DeviceBehind) -> None:
    told: list[float] = []
    with pytest.raises(ArithmeticError), clock.timed(told.append):
        device.queue(1.0)
        raise ArithmeticError
    clock.wait()
    assert told == [1.0]


# -- Waits ----------------------------------------------------------------------------------------


@pytest.fixture
def waits(clock: Clock) -> ComputeWaits:
    return ComputeWaits(clock, StepStatistics(), is_host=False)


def take_step(
    waits: ComputeWaits,
    device: DeviceBehind,
    read_s: float,
    room_s: float = 0.0,
    *,
    in_detail: bool = False,
) -> StepStatistics:
    counted = StepStatistics()
    waits.begin_step(counted, in_detail=in_detail)
    with waits.for_read("bytes"):
        device.queue(read_s)
    device.queue(10.0)
    with waits.for_room():
        device.queue(room_s)
    waits.end_step()
    return counted


def test_counters_are_those_of_the_last_step_that_is_known(
    waits: ComputeWaits, device: DeviceBehind
) -> None:
    first = take_step(waits, device, 1.0, 2.0)
    second = take_step(waits, device, 3.0, 4.0)
    assert (first.stall_s, first.write_wait_s) == (second.stall_s, second.write_wait_s) == (0, 0)
    assert waits.last is None and device.num_waits == 0
    device.run()
    third = take_step(waits, device, 5.0)
    assert (first.stall_s, first.write_wait_s) == (1.0, 2.0)
    assert (second.stall_s, second.write_wait_s) == (3.0, 4.0)
    assert (third.stall_s, third.write_wait_s) == (3.0, 4.0), "it is not known itself"
    waits.clock.wait()
    assert (third.stall_s, third.write_wait_s) == (5.0, 0.0)


def test_waits_of_few_later_steps_are_timed_two_in_a_row(
    waits: ComputeWaits, device: DeviceBehind
) -> None:
    timed, counted = [], []
    for number in range(1, 65):
        counted.append(take_step(waits, device, float(number)))
        device.run()
        if waits.step is not None:
            timed.append(number)
    waits.clock.read()
    assert timed == [*range(1, 18), 32, 33, 48, 49, 64]
    assert [one.stall_s for one in counted[16:34]] == [*[17.0] * 15, 32.0, 33.0, 33.0]


def test_a_step_that_a_profile_is_made_of_is_timed_and_its_waits_are_kept(
    waits: ComputeWaits, device: DeviceBehind
) -> None:
    for _ in range(20):
        take_step(waits, device, 1.0)
    assert waits.number == 0
    take_step(waits, device, 2.0, 3.0, in_detail=True)
    assert waits.number == 2
    waits.clock.wait()
    assert waits.seconds == [2.0, 3.0]
    waits.forget()
    assert waits.number == 0 and waits.seconds == []


def test_hooks_of_a_step_in_detail_are_timed_with_the_waits_in_them(
    waits: ComputeWaits, device: DeviceBehind
) -> None:
    def hook(seconds: float, room_s: float) -> None:
        with waits.for_hook():
            device.queue(seconds)
            with waits.for_room():
                device.queue(room_s)

    waits.begin_step(StepStatistics(), in_detail=False)
    assert not waits.times_hooks
    hook(1.0, 2.0)
    waits.end_step()
    waits.begin_step(StepStatistics(), in_detail=True)
    assert waits.times_hooks
    hook(3.0, 4.0)
    with waits.for_read("bytes"):
        device.queue(5.0)
    hook(6.0, 7.0)
    waits.end_step()
    assert not waits.times_hooks and waits.number == 3
    waits.clock.wait()
    assert waits.seconds == [7.0, 5.0, 13.0]
    step = waits.last
    assert step is not None
    assert (step.hook_s, step.write_wait_s, step.stall_s) == (9.0, 11.0, 5.0)


def test_a_step_that_is_not_timed_records_nothing(
    waits: ComputeWaits, device: DeviceBehind
) -> None:
    for _ in range(19):
        take_step(waits, device, 1.0)
    num_moments = device.num_moments
    take_step(waits, device, 1.0)
    assert device.num_moments == num_moments


# -- A sentence -----------------------------------------------------------------------------------


def sentences(waits: ComputeWaits, device: DeviceBehind, shares: list[float]) -> list[str]:
    """What is said when steps of ten seconds and these shares of waiting are taken."""
    standstill, said = Standstill(waits, "the device"), []
    for share in [*shares, 0.0]:  # the last one only begins
        standstill.begin_step()
        said.append(standstill.sentence())
        take_step(waits, device, 10.0 * share / (1 - share))
        device.run()
        waits.clock.read()
    return [one for one in said if one is not None]


def test_copies_that_do_not_hide_are_told_of_once_with_the_number(
    waits: ComputeWaits, device: DeviceBehind
) -> None:
    (said,) = sentences(waits, device, [0.9, 0.9, *[0.2] * 9])
    assert "the device stood still 20% of the step for transfers (2.500 s of 12.500 s)" in said
    assert "use auto, which moves what hides, or offload fewer layers" in said


def test_copies_that_hide_are_not_told_of(waits: ComputeWaits, device: DeviceBehind) -> None:
    assert sentences(waits, device, [0.9, 0.9, *[0.05] * 9]) == [], "the first steps are not judged"


def test_what_follows_a_pause_is_no_step_to_judge(
    waits: ComputeWaits, device: DeviceBehind
) -> None:
    standstill = Standstill(waits, "the device")
    for _ in range(12):
        standstill.begin_step()
        assert standstill.sentence() is None
        take_step(waits, device, 5.0)
        standstill.pause()
        device.queue(100.0)  # evaluation
        device.run()
        waits.clock.read()
