# SPDX-License-Identifier: Apache-2.0
"""Parameters of an accelerator's layers that wait on tiers, while its streams are late."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import (
    ConfigurationError,
    offload_optimizer,
    offload_parameters,
)
from megatron.offload.device.open import open_device
from megatron.offload.errors import LostStateError
from megatron.offload.integration.torch.parameter_offload import ParameterOffload
from megatron.offload.moving.memory import open_staying_memory
from megatron.offload.moving.storage import Where
from megatron.offload.parameters.unit import ParameterUnit
from megatron.offload.sizes import MIB
from megatron.offload.tiers.drive import Drive
from tests.support.accelerators import Lag, assert_equal
from tests.support.beneath import beneath
from tests.support.lag.module import LagModule
from tests.support.training import Stack, moving
from tests.support.waiting import SOON_S

DEVICE = "lag:1"  # new threads stand on another one
HIDDEN, LAYERS, MICRO_BATCHES, STEPS = 32, 5, 3, 3
DELAYS = ((60, 300), (600, 10), (300, 300))  # of a kernel and of a copy at most, in microseconds
MODES: dict[str, dict[str, Any]] = {
    "ssd": {"mode": "ssd"},
    "host": {"mode": "host", "host_budget": 16 * MIB},
    "tiered": {"mode": "tiered", "host_budget": 1 << 16},
}


pytestmark = pytest.mark.usefixtures("accelerator")


def stack() -> Stack:
    return Stack(HIDDEN, LAYERS, MICRO_BATCHES)


def micro_batches(step: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    return [torch.randn(2, 16, HIDDEN, generator=draw).to(DEVICE) for _ in range(MICRO_BATCHES)]


def train(
    lag: LagModule,
    directory: Path,
    *offloaded: str,
    units: int | None = None,
    **settings: Any,
) -> list[torch.Tensor]:
    """Losses, gradients and weights, in host memory."""
    model, found = stack().to(DEVICE), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(7)
    with moving(offloaded, model, optimizer, directory, parameters=settings) as moved:
        step = moved.steps(model, units)
        for number in range(STEPS):
            lag.set_delays(*DELAYS[number], seed=number)
            found += [one.detach() for one in step(micro_batches(number))]
            found += [p.grad.cpu() for p in model.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
        if moved.parameters is not None:
            assert moved.parameters.statistics["read_bytes"] > 0
            assert {p.device for p in model.parameters()} == {torch.device(DEVICE)}
        found += [one.cpu().clone() for one in model.state_dict().values()]
    lag.reset()
    found += [one.detach().cpu() for one in model.parameters()]
    return [one.cpu() for one in found]


@pytest.fixture(scope="module")
def expected(accelerator: Lag, tmp_path_factory: pytest.TempPathFactory) -> list[torch.Tensor]:
    """Of the same training with everything in device memory."""
    return train(accelerator.module, tmp_path_factory.mktemp("none"))


@pytest.mark.parametrize("units", [None, 3], ids=["one by one", "layer-major"])
@pytest.mark.parametrize("mode", MODES)
def test_all_bits_are_the_same(
    lag: LagModule, mode: str, units: int | None, expected: list[torch.Tensor], tmp_path: Path
) -> None:
    assert_equal(train(lag, tmp_path, "parameters", units=units, **MODES[mode]), expected)


@pytest.mark.slow(but="one by one")
@pytest.mark.parametrize("units", [None, 5], ids=["one by one", "layer-major"])
def test_all_bits_are_the_same_with_all_that_moves(
    lag: LagModule, units: int | None, expected: list[torch.Tensor], tmp_path: Path
) -> None:
    moves = ("parameters", "states", "activations")
    assert_equal(train(lag, tmp_path, *moves, units=units, live_units=3), expected)


class Wide:
    """Layers of which each has `layer_bytes` of weights."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        layers = [torch.nn.Linear(512, 512, bias=False) for _ in range(8)]
        self.model = torch.nn.Sequential(*layers).to(DEVICE)
        self.handle: ParameterOffload = offload_parameters(
            self.model, directory, layers=[torch.nn.Linear], **settings
        )
        assert self.handle.window is not None
        self.units: list[ParameterUnit] = self.handle.window.units
        self.layer_bytes = self.units[0].num_bytes

    def settle(self) -> None:
        for unit in self.units:
            unit.wait_for_write()


def test_device_memory_holds_no_more_than_what_may_live(lag: LagModule, tmp_path: Path) -> None:
    """Also while the host could run far ahead of kernels that take long."""
    x = torch.ones(1, 512).to(DEVICE)
    lag.empty_cache()
    before = lag.memory_reserved(DEVICE)
    wide = Wide(tmp_path)
    wide.settle()
    lag.empty_cache()
    assert lag.memory_reserved(DEVICE) - before <= 2 * wide.layer_bytes
    lag.set_delays(30_000, 100, seed=1)
    with torch.no_grad():
        for _ in range(2):
            wide.model(x)
    # Of what has just left, the allocator may not know yet that its stream is done with it.
    assert lag.memory_reserved(DEVICE) - before <= 4 * wide.layer_bytes
    lag.reset()
    wide.handle.close()


def test_the_host_runs_ahead_and_memory_is_filled_when_layers_have_used_it(
    lag: LagModule, tmp_path: Path
) -> None:
    """All layers are launched before the first one runs, in the memory of three of them."""
    wide, main = Wide(tmp_path, mode="host"), lag.current_stream(DEVICE)
    weights = [unit.params[0] for unit in wide.units]
    twin = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(8)))
    wide.handle.expose()
    for layer, weight in zip(twin, weights, strict=True):
        layer.weight.data.copy_(weight)
    x = torch.ones(1, 512)
    with torch.no_grad():
        expected = twin(x)
        for _ in range(2):  # everything has been somewhere
            assert torch.equal(wide.model(x.to(DEVICE)).cpu(), expected)
    lag.synchronize(DEVICE)
    lag.empty_cache()
    most = lag.memory_reserved(DEVICE) + wide.layer_bytes
    on_device, found = x.to(DEVICE), []

    def launch() -> None:
        with torch.no_grad():
            found.append(wide.model(on_device))

    with lag.held(main):
        thread = threading.Thread(target=launch)
        thread.start()
        thread.join(SOON_S)
        assert found, "the host waited for the device"
        assert lag.memory_reserved(DEVICE) <= most
    assert torch.equal(found[0].cpu(), expected)
    thread.join()
    wide.handle.close()


def test_what_comes_next_waits_for_nothing_that_was_queued_since_a_unit_left(
    lag: LagModule, tmp_path: Path
) -> None:
    """A unit that has changed is let go when its write has ended, in a thread of the tier."""
    wide, main = Wide(tmp_path, mode="host"), lag.current_stream(DEVICE)
    wide.settle()
    assert wide.handle.window is not None
    window = wide.handle.window
    window.use(0, 1)
    with window.changing([wide.units[0].params[0]]), torch.no_grad():
        wide.units[0].params[0].fill_(1)
    with contextlib.ExitStack() as later:
        with lag.held(window.device._store):  # so its write does not end
            window.use(4, 1)
            main.synchronize()
            later.enter_context(lag.held(main))
        wide.units[0].wait_for_write()
        event = window.device.record_event(window.device._load)
        thread = threading.Thread(target=event.synchronize)
        thread.start()
        thread.join(SOON_S)
        assert not thread.is_alive(), "copies wait for what was queued since"
    wide.handle.close()


def test_memory_that_is_dropped_is_kept_for_those_that_use_it(
    lag: LagModule, tmp_path: Path
) -> None:
    main = lag.current_stream(DEVICE)
    memory = open_staying_memory(512 * 512 * 4, open_device(torch.device(DEVICE)))
    device = open_device(torch.device(DEVICE))
    memory.use_after(device, [device.restored_is_free()])
    ones = torch.empty(0, device=DEVICE).set_(memory.storage).fill_(1)
    place = ones.data_ptr()
    with lag.held(main):
        total = ones.sum()
        del ones, memory
        other = device.new_restored(512 * 512 * 4).data_ptr()
    assert other != place
    assert total.item() == 512 * 512


def test_half_of_what_the_layers_take_is_enough(lag: LagModule, tmp_path: Path) -> None:
    """While the host is far ahead of slow kernels, and copies are slow too."""
    wide = Wide(tmp_path)
    weights = {name: weight.cpu() for name, weight in wide.model.state_dict().items()}
    wide.model(torch.ones(1, 512).to(DEVICE))  # they leave again
    lag.empty_cache()
    lag.limit_memory(lag.memory_reserved(DEVICE) + 4 * wide.layer_bytes, DEVICE)
    twin = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(8)))
    twin.load_state_dict(weights)
    x = torch.ones(1, 512)
    lag.set_delays(2000, 2000, seed=1)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(wide.model(x.to(DEVICE)).cpu(), twin(x))
    lag.reset()
    wide.handle.close()


def test_what_is_away_reads_as_nan_until_it_is_shown(lag: LagModule, tmp_path: Path) -> None:
    wide = Wide(tmp_path, mode="host")
    wide.settle()
    unit = wide.units[-1]
    assert unit.where is Where.ON_TIER and beneath(unit.params[0]).isnan().all()
    wide.handle.expose()
    assert not beneath(unit.params[0]).isnan().any()
    wide.model(torch.ones(1, 512).to(DEVICE))
    assert unit.where is not Where.ON_TIER and wide.units[0].where is Where.ON_TIER
    wide.handle.close()


def test_what_is_loaded_while_they_are_shown_is_used(lag: LagModule, tmp_path: Path) -> None:
    wide = Wide(tmp_path)
    wide.model.load_state_dict({k: torch.eye(512) for k in wide.model.state_dict()})
    x = torch.randn(2, 512)
    assert torch.equal(wide.model(x.to(DEVICE)).cpu(), x)
    wide.handle.close()
    assert all(torch.equal(p.cpu(), torch.eye(512)) for p in wide.model.parameters())


def test_what_is_beside_a_parameter_that_was_swapped_has_come_before_it_is_copied(
    lag: LagModule, tmp_path: Path
) -> None:
    model = stack().to(DEVICE)
    layer = model.layers[2]
    own, *others = layer.parameters()
    expected = [one.detach().cpu() for one in others]
    with offload_parameters(model, tmp_path):
        lag.set_delays(10, 3000, seed=1)
        other = torch.nn.Parameter(torch.ones(own.shape, device=DEVICE))
        torch.utils.swap_tensors(own, other)  # which shows no values of the unit
        found = [one.detach().cpu() for one in others]
    assert all(map(torch.equal, found, expected))


def test_a_stream_beside_the_one_that_had_it_brought_waits_for_it_too(
    lag: LagModule, tmp_path: Path
) -> None:
    wide, side = Wide(tmp_path, mode="host"), lag.Stream(DEVICE)
    wide.settle()
    x = torch.ones(1, 512).to(DEVICE)
    lag.synchronize(DEVICE)
    assert wide.handle.window is not None
    lag.late(wide.handle.window.device._load, 0, unasked_seconds=20)
    wide.handle.window.use(0, 1)
    with lag.stream(side):
        wide.handle.window.use(0, 1)
        found = wide.model[0](x)
    side.synchronize()  # which does not ask for the copy
    lag.synchronize(DEVICE)
    assert torch.equal(found.cpu(), wide.model[0](x).cpu())
    wide.handle.close()


@pytest.mark.parametrize("who", ["who makes room", "a new unit"])
def test_memory_that_a_copy_is_still_to_fill_is_filled_after_that(
    lag: LagModule, who: str, tmp_path: Path
) -> None:
    """A read that nobody wants any more has ended for the host, and the device has yet to make its
    copy; whoever is given that memory meanwhile keeps what he writes there."""
    wide = Wide(tmp_path, mode="host")
    wide.settle()
    assert wide.handle.window is not None
    first, device = wide.units[0], wide.handle.window.device
    others = torch.full((512, 512), 7.0).to(DEVICE)
    lag.synchronize(DEVICE)
    lag.late(device._load, 0.1)
    first.begin_read()
    place = first._memory.storage.data_ptr()
    assert first.put_away(wide.handle.window.copies) and first.where is Where.ON_TIER
    if who == "a new unit":
        taker = ParameterUnit("another", [torch.nn.Parameter(others)], device)
    else:
        taker = first
        taker.make_room()
        taker.bytes.view(torch.float32).fill_(7)
    assert taker._memory.storage.data_ptr() == place
    taker.bring()
    lag.synchronize(DEVICE)
    assert taker.params[0].unique().cpu().tolist() == [7]
    wide.handle.close(restore=False)


def test_a_read_that_fails_ends_the_training(
    lag: LagModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = Wide(tmp_path)
    wide.settle()
    right, reads = Drive.begin_read, []

    def broken(self: Drive, *args: Any) -> Any:
        reads.append(args)
        if len(reads) < 3:
            raise OSError(5, "Input/output error")
        return right(self, *args)

    monkeypatch.setattr(Drive, "begin_read", broken)
    assert wide.handle.window is not None
    with pytest.raises(LostStateError, match=r"^parameters: those of unit 1 of 8 .* no other copy"):
        wide.handle.window.use(0, 1)
    before = lag.memory_allocated(DEVICE)
    wide.handle.window.use(0, 1)  # the drive is well again, and nothing was lost
    assert round((lag.memory_allocated(DEVICE) - before) / wide.layer_bytes) == 2
    wide.handle.close()
    assert not any(beneath(p).isnan().any() for p in wide.model.parameters())


def test_layers_on_several_devices_are_refused(lag: LagModule, tmp_path: Path) -> None:
    model = stack().to(DEVICE)
    model.layers[2].to("cpu")
    with pytest.raises(ConfigurationError, match=r"layers are on cpu and lag:1; give device"):
        offload_parameters(model, tmp_path)
    with pytest.raises(ConfigurationError, match=r"on cpu and cannot be moved to lag:1 one by one"):
        offload_parameters(stack(), tmp_path, device=DEVICE)


def test_a_step_on_the_host_is_refused(lag: LagModule, tmp_path: Path) -> None:
    """It would copy parameters that are away, and train with NaN."""
    wide = Wide(tmp_path)
    optimizer = torch.optim.SGD(wide.model.parameters(), lr=0.1)
    states = offload_optimizer(optimizer, tmp_path, step_on="cpu")
    wide.model(torch.ones(1, 512).to(DEVICE)).sum().backward()
    with pytest.raises(ConfigurationError, match=r"^parameters: a step on the host \(step_on"):
        optimizer.step()
    states.close(restore=False)
    wide.handle.close()
