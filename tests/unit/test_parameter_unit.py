# SPDX-License-Identifier: Apache-2.0
"""A unit of parameters on a device whose memory is its own, and whose tensors are like the CPU's.

So are CUDA's. What is asynchronous about a device is in `tests/lag`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megatron.offload.errors import PARAMETERS_PREFIX
from megatron.offload.moving.memory import open_staying_memory
from megatron.offload.moving.only_copy import OnlyCopy
from megatron.offload.moving.storage import Where
from megatron.offload.parameters.parameter_places import Part
from megatron.offload.parameters.unit import ParameterUnit, can_take_place
from megatron.offload.parameters.window import ParameterWindow
from megatron.offload.sizes import MIB
from megatron.offload.tiers.host import HostBlock, HostTier
from megatron.offload.tiers.transfer import Transfer
from tests.support.beneath import beneath
from tests.support.simulated_device import SimulatedDevice


@pytest.fixture
def tier() -> Iterator[HostTier]:
    tier = HostTier(4 * MIB)
    yield tier
    tier.close()


@pytest.fixture
def unit(tier: HostTier) -> ParameterUnit:
    params = [torch.nn.Parameter(torch.full((32, 16), float(n))) for n in range(3)]
    unit = ParameterUnit("layers", params, SimulatedDevice())
    assert unit.put_away(on(tier))
    unit.wait_for_write()
    assert unit.where is Where.ON_TIER
    return unit


def on(tier: HostTier) -> OnlyCopy:
    return OnlyCopy(PARAMETERS_PREFIX, [tier], SimulatedDevice(), [], lambda unit: unit.name)


def values(unit: ParameterUnit) -> list[float]:
    return [float(beneath(param).mean()) for param in unit.params]


def test_views_come_back_with_the_memory() -> None:
    memory = open_staying_memory(64, SimulatedDevice())
    view = torch.empty(0, dtype=torch.uint8).set_(memory.storage)[:8]
    view.fill_(3)
    memory.release()
    assert memory.storage.nbytes() == 0
    memory.for_read()
    assert view.untyped_storage()._cdata == memory.storage._cdata
    view.fill_(4)
    assert memory.storage[7] == 4


def test_what_is_away_takes_no_memory_and_is_shown_where_it_is(unit: ParameterUnit) -> None:
    assert unit._memory.storage.nbytes() == 0
    assert all(torch.tensor(values(unit)).isnan())
    unit.show()
    assert values(unit) == [0, 1, 2] and unit.where is Where.ON_TIER
    unit.hide()
    assert all(torch.tensor(values(unit)).isnan())


def test_what_was_changed_while_it_was_shown_comes_back_to_the_device(
    unit: ParameterUnit, tier: HostTier
) -> None:
    unit.show()
    with torch.no_grad():
        unit.params[1].fill_(7)
        unit.params[2] += 1
    unit.adopt()
    assert unit.where is Where.IN_MEMORY and values(unit) == [0, 7, 3]
    assert {p.untyped_storage()._cdata for p in unit.params} == {unit._memory.storage._cdata}
    assert unit.put_away(on(tier))
    unit.wait_for_write()
    unit.bring()
    assert values(unit) == [0, 7, 3]
    unit.give_back()
    assert unit._memory.storage._cdata not in {p.untyped_storage()._cdata for p in unit.params}


@pytest.fixture
def part(tier: HostTier) -> tuple[ParameterUnit, torch.Tensor]:
    """A unit that is away, and a tensor that is the second half of its second parameter."""
    params = [torch.nn.Parameter(torch.full((4, 4), float(n))) for n in range(3)]
    half = params[1].detach().view(-1)[8:]
    unit = ParameterUnit("layers", params, SimulatedDevice(), {params[1]: Part(half, 8, 16)})
    assert unit.put_away(on(tier))
    unit.wait_for_write()
    return unit, half


def test_a_part_is_where_its_parameter_is(part: tuple[ParameterUnit, torch.Tensor]) -> None:
    unit, half = part
    assert half.shape == (8,) and half.isnan().all()
    unit.show()
    assert half.tolist() == [1] * 8
    unit.hide()
    assert half.isnan().all()
    unit.bring()
    unit.params[1].detach()[3] = 5
    assert half.tolist() == [1] * 4 + [5] * 4


def test_a_part_that_was_replaced_is_taken_over(part: tuple[ParameterUnit, torch.Tensor]) -> None:
    unit, half = part
    unit.show()
    assert not unit.has_changed
    half.data = torch.full((8,), 9.0)
    assert unit.has_changed
    unit.adopt()
    assert unit.params[1].tolist() == [[1] * 4] * 2 + [[9] * 4] * 2
    assert half.untyped_storage()._cdata == unit._memory.storage._cdata


def test_what_is_not_read_is_nan_until_it_was_written(unit: ParameterUnit, tier: HostTier) -> None:
    """And its block is not its bytes any more."""
    unit.make_room()
    assert unit.where is Where.IN_MEMORY and unit.block is None
    assert all(torch.tensor(values(unit)).isnan())
    unit.bytes[unit.bytes_of(1, 0, 32 * 16)].view(torch.float32).fill_(6)
    unit.bring()
    assert values(unit)[1] == 6
    assert unit.put_away(on(tier))
    unit.wait_for_write()
    unit.bring()
    assert values(unit)[1] == 6


class Leaving(HostTier):
    """Has bytes on their way to another place, as with a pool in front of drives."""

    have_left = False

    def wait_for_writes(self, timeout_s: float | None = None) -> bool:
        self.have_left = True
        return super().wait_for_writes(timeout_s)

    def view(self, block: HostBlock) -> torch.UntypedStorage:
        assert self.have_left, "what is changed in the view does not come to the other place"
        return super().view(block)


def test_nothing_is_shown_on_its_way_to_a_drive() -> None:
    window = ParameterWindow([Leaving(4 * MIB)], SimulatedDevice(), live_units=1)
    for number in range(2):
        window.add(f"unit {number}", [torch.nn.Parameter(torch.full((32, 16), float(number)))])
    window.use(0, 1)
    window.use(1, 1)
    window.expose()
    assert [values(unit) for unit in window.units] == [[0], [1]]
    window.close()


class UnderWay(Transfer):
    """A read that ends when somebody waits for it."""

    def wait_until_done(self) -> None:
        self.run()
        super().wait_until_done()


def test_memory_is_not_let_go_while_it_is_read_into(
    unit: ParameterUnit, tier: HostTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, had_ended = UnderWay(lambda: None), []
    read.begin()
    monkeypatch.setattr(tier, "begin_read", lambda block, into: (into, read))
    monkeypatch.setattr(unit._memory, "release", lambda: had_ended.append(read.done()))
    unit.begin_read()
    assert unit.put_away(on(tier))
    assert unit.where is Where.ON_TIER and had_ended == [True]


class Interrupted(Transfer):
    """A read; the first wait for it is interrupted from the keyboard."""

    def __init__(self) -> None:
        super().__init__(lambda: None)
        self.begin()
        self.was_interrupted = False

    def wait_until_done(self) -> None:
        self._interrupt()
        super().wait_until_done()

    def wait(self) -> None:
        self._interrupt()
        super().wait()

    def _interrupt(self) -> None:
        if not self.was_interrupted:
            self.was_interrupted = True
            raise KeyboardInterrupt


@pytest.mark.parametrize("waits", ["bring", "put_away"])
def test_an_interrupt_leaves_memory_to_the_read_that_goes_on(
    waits: str, unit: ParameterUnit, tier: HostTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, had_ended, begin_read = Interrupted(), [], tier.begin_read
    release = unit._memory.release
    monkeypatch.setattr(tier, "begin_read", lambda block, into: (into, read))
    monkeypatch.setattr(unit._memory, "release", lambda: (had_ended.append(read.done()), release()))
    unit.begin_read()
    with pytest.raises(KeyboardInterrupt):
        unit.bring() if waits == "bring" else unit.put_away(on(tier))
    assert unit.where is Where.READING and not had_ended
    monkeypatch.setattr(tier, "begin_read", begin_read)
    read.run()
    assert unit.put_away(on(tier)) and had_ended == [True]
    unit.bring()
    assert values(unit) == [0, 1, 2]


def test_tensors_of_the_cpu_take_the_place_of_their_like() -> None:
    assert can_take_place("cpu", "cpu")
    assert not can_take_place("cpu", "meta")
