# SPDX-License-Identifier: Apache-2.0
"""The rooms of model states: layouts, slices of an optimizer, buckets, mapped files."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload.device.cpu import CpuDevice
from megatron.offload.errors import ConfigurationError
from megatron.offload.moving.bucket import Bucket
from megatron.offload.moving.layout import Layout
from megatron.offload.moving.storage import Where
from megatron.offload.states.config import StatesConfig
from megatron.offload.states.optimizer_slice import OptimizerSlice
from megatron.offload.states.optimizer_states import OptimizerStates
from megatron.offload.tiers.host import HostTier
from megatron.offload.tiers.mapped import FileRange, map_ranges
from megatron.offload.tiers.ssd import SsdTier
from megatron.offload.tiers.tier import Tier
from megatron.offload.tiers.transfer import Transfer

PAGE = mmap.PAGESIZE


# -- Layouts --------------------------------------------------------------------------------------


def test_tensors_of_a_bucket_come_back_as_they_were() -> None:
    tensors = {
        (0, "exp_avg"): torch.randn(3, 5),
        (0, "exp_avg_sq"): torch.randn(3, 5).t().contiguous().t(),
        (1, "mask"): torch.ones(7, dtype=torch.bool),
    }
    layout = Layout(tensors)
    storage = layout.new_storage(torch.device("cpu"))
    layout.store(tensors.items(), storage)
    views = layout.views(storage)
    for name, tensor in tensors.items():
        assert torch.equal(views[name], tensor)
        assert views[name].stride() == tensor.stride() and views[name].dtype == tensor.dtype


def test_a_bucket_is_whole_pages_so_that_it_can_be_mapped() -> None:
    layout = Layout({(0, "exp_avg"): torch.zeros(5)})
    storage = layout.new_storage(torch.device("cpu"))
    assert layout.num_bytes == storage.nbytes() == PAGE
    assert storage.data_ptr() % PAGE == 0
    assert Layout({(0, "exp_avg"): torch.zeros(PAGE // 4 + 5)}).num_bytes == 2 * PAGE


def test_a_layout_fits_tensors_of_the_same_kind_only() -> None:
    layout = Layout({(0, "exp_avg"): torch.zeros(5)})
    assert layout.fits({(0, "exp_avg"): torch.ones(5)})
    assert not layout.fits({(0, "exp_avg"): torch.ones(6)})
    assert not layout.fits({(0, "exp_avg"): torch.ones(5, dtype=torch.float64)})
    assert not layout.fits({})


# -- Slices of an optimizer -----------------------------------------------------------------------


def _params(number: int = 3) -> list[torch.nn.Parameter]:
    params = [torch.nn.Parameter(torch.full((4,), float(i + 1))) for i in range(number)]
    for param in params:
        param.grad = torch.ones(4)
    return params


def test_slices_together_are_the_optimizers_step() -> None:
    whole, parts = _params(), _params()
    optimizer = torch.optim.AdamW(whole, lr=0.1)
    sliced = torch.optim.AdamW(parts, lr=0.1)
    one_by_one = OptimizerSlice(sliced)
    states: dict[torch.Tensor, dict[str, Any]] = {}
    for _ in range(3):
        optimizer.step()
        for param in parts:
            states |= one_by_one.step([param], {p: s for p, s in states.items() if p is param})
        one_by_one.end_step()
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))
    assert not sliced.state and sliced.param_groups[0]["params"] == parts


class CountsInGroups(torch.optim.SGD):
    """Counts its steps in its groups, as some fused optimizers do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return super().step(closure)


def test_what_a_step_writes_into_groups_is_written_once() -> None:
    params = _params()
    optimizer = CountsInGroups(params, lr=0.1)
    slices = OptimizerSlice(optimizer)
    for param in params:
        slices.step([param], {})
    slices.end_step()
    assert optimizer.param_groups[0]["count"] == 1
    assert optimizer.param_groups[0]["params"] == params


def test_hooks_of_a_step_do_not_run_for_each_slice() -> None:
    params = _params()
    optimizer = torch.optim.SGD(params, lr=0.1)
    calls: list[int] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    OptimizerSlice(optimizer).step(params[:1], {})
    assert not calls


# -- Buckets --------------------------------------------------------------------------------------


@pytest.fixture(params=["host", "ssd"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
    made: Tier = HostTier(1 << 26) if request.param == "host" else SsdTier([tmp_path], verify=True)
    yield made
    made.close()


def _filled() -> tuple[Bucket, torch.Tensor]:
    value = torch.arange(1000.0)
    layout = Layout({(0, "exp_avg"): value})
    bucket = Bucket([torch.zeros(1000)], CpuDevice())
    storage = layout.new_storage(torch.device("cpu"))
    layout.store([((0, "exp_avg"), value)], storage)
    bucket.fill(layout, storage)
    return bucket, value


def test_memory_of_a_bucket_is_let_go_once_it_is_written(tier: Tier) -> None:
    bucket, value = _filled()
    assert bucket.begin_write(tier, None)
    bucket.wait_for_write()
    assert bucket.where is Where.ON_TIER and bucket.storage is None and not bucket.memory_bytes
    bucket.bring()
    assert bucket.where is Where.IN_MEMORY and bucket.storage is not None
    assert bucket.layout is not None
    assert torch.equal(bucket.layout.views(bucket.storage)[0, "exp_avg"], value)
    assert bucket.block is None


def test_a_bucket_taken_back_keeps_its_memory(tier: Tier) -> None:
    bucket, value = _filled()
    assert bucket.begin_write(tier, None)
    bucket.take_back()
    assert bucket.where is Where.IN_MEMORY and bucket.storage is not None
    assert bucket.layout is not None
    assert torch.equal(bucket.layout.views(bucket.storage)[0, "exp_avg"], value)


def test_a_block_is_seen_in_its_place_and_changed_there(tier: Tier) -> None:
    bucket, value = _filled()
    assert bucket.begin_write(tier, None)
    bucket.wait_for_write()
    assert bucket.layout is not None
    seen = bucket.layout.views(tier.view(bucket.block))[0, "exp_avg"]
    assert torch.equal(seen, value)
    seen.add_(1)
    bucket.renew()
    again = bucket.layout.views(tier.view(bucket.block))[0, "exp_avg"]
    assert torch.equal(again, value + 1)


def test_several_drives_are_mapped_one_behind_the_other(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    tier = SsdTier(folders)
    try:
        value = torch.arange(6 << 20, dtype=torch.int32)
        layout = Layout({(0, "exp_avg"): value})
        storage = layout.new_storage(torch.device("cpu"))
        layout.store([((0, "exp_avg"), value)], storage)
        started = tier.begin_write(storage)
        assert started is not None
        block, transfer = started
        transfer.wait()
        assert len(block.extents) == 2
        assert torch.equal(layout.views(tier.view(block))[0, "exp_avg"], value)
    finally:
        tier.close()


def test_what_is_in_no_whole_page_is_not_mapped(tmp_path: Path) -> None:
    tier = SsdTier([tmp_path])
    try:
        started = tier.begin_write(torch.zeros(5000, dtype=torch.uint8).untyped_storage())
        assert started is not None
        block, transfer = started
        transfer.wait()
        with pytest.raises(OSError, match="whole pages"):
            tier.view(block)
    finally:
        tier.close()


def test_a_mapping_keeps_its_owner_and_is_unmapped_without_it(tmp_path: Path) -> None:
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        os.write(file, b"x" * 2 * PAGE)
        storage = map_ranges(
            [FileRange(file, PAGE, PAGE), FileRange(file, 0, PAGE)], "owner", "these"
        )
        address = storage.data_ptr()
        assert bytes(storage[:4]) == b"xxxx"
        assert f"{address:x}-" in Path("/proc/self/maps").read_text()
        del storage
        assert f"{address:x}-" not in Path("/proc/self/maps").read_text()
    finally:
        os.close(file)


# -- The window -----------------------------------------------------------------------------------


def _states(tier: Tier, window: int, number: int = 8) -> tuple[OptimizerStates, Any]:
    params = [torch.nn.Parameter(torch.zeros(PAGE // 8)) for _ in range(number)]
    optimizer = torch.optim.Adam(params)
    return (
        OptimizerStates(
            optimizer, [tier], CpuDevice(), bucket_bytes=PAGE, window_bytes=window * PAGE
        ),
        optimizer,
    )


def _step(states: OptimizerStates, optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    with torch.no_grad():
        states.step()


def test_no_more_than_the_window_is_in_memory_between_steps(tier: Tier) -> None:
    states, optimizer = _states(tier, window=3)
    for _ in range(3):
        _step(states, optimizer)
        states.wait_for_writes()
        assert len(states.buckets) == 8 and states.num_bytes == 8 * PAGE
        assert states.memory_bytes == 2 * PAGE


def _in_memory(states: OptimizerStates) -> list[int]:
    states.wait_for_writes()
    return [i for i, one in enumerate(states.buckets) if one.where is Where.IN_MEMORY]


def test_the_last_buckets_of_a_step_are_the_first_of_the_next_one(tier: Tier) -> None:
    states, optimizer = _states(tier, window=3)
    _step(states, optimizer)
    assert _in_memory(states) == [6, 7]
    _step(states, optimizer)
    assert _in_memory(states) == [0, 1]


def test_a_step_moves_what_does_not_fit_the_window(tier: Tier) -> None:
    states, optimizer = _states(tier, window=3)
    _step(states, optimizer)
    _step(states, optimizer)
    states.wait_for_writes()
    before = tier.statistics.writes.total_bytes, tier.statistics.reads.total_bytes
    _step(states, optimizer)
    states.wait_for_writes()
    after = tier.statistics.writes.total_bytes, tier.statistics.reads.total_bytes
    assert [b - a for a, b in zip(before, after, strict=True)] == [6 * PAGE, 6 * PAGE]


def test_nothing_moves_where_all_states_fit_the_window(tier: Tier) -> None:
    states, optimizer = _states(tier, window=10)
    for _ in range(3):
        _step(states, optimizer)
    assert tier.statistics.writes.total_bytes == tier.statistics.reads.total_bytes == 0


def test_a_window_smaller_than_a_bucket_lets_one_bucket_through(tier: Tier) -> None:
    states, optimizer = _states(tier, window=0)
    for _ in range(3):
        _step(states, optimizer)
        states.wait_for_writes()
        assert states.memory_bytes == 0


def test_what_is_away_cannot_be_taken_for_a_state(tier: Tier) -> None:
    states, optimizer = _states(tier, window=1)
    _step(states, optimizer)
    params = optimizer.param_groups[0]["params"]
    away = [optimizer.state[param]["exp_avg"] for param in params]
    assert {one.device.type for one in away} == {"meta"}
    assert {one.shape for one in away} == {params[0].shape}
    states.expose()
    shown = [optimizer.state[param]["exp_avg"] for param in params]
    assert all(torch.allclose(one, torch.full_like(one, 0.1)) for one in shown)


def test_what_is_read_ahead_is_shown_whole(tier: Tier) -> None:
    states, optimizer = _states(tier, window=3)
    _step(states, optimizer)
    states.wait_for_writes()
    states.prefetch()
    assert any(one.where is Where.READING for one in states.buckets)
    states.expose()
    for state in optimizer.state.values():
        assert torch.allclose(state["exp_avg"], torch.full((PAGE // 8,), 0.1))


def test_states_are_back_in_memory_after_close(tier: Tier) -> None:
    states, optimizer = _states(tier, window=1)
    _step(states, optimizer)
    states.close()
    for state in optimizer.state.values():
        assert torch.allclose(state["exp_avg"], torch.full((PAGE // 8,), 0.1))


def test_parameters_that_move_are_shown_and_hidden_in_inference_mode(tier: Tier) -> None:
    params = [torch.nn.Parameter(torch.zeros(PAGE // 4)) for _ in range(3)]
    optimizer = torch.optim.Adam(params)
    with torch.inference_mode():
        states = OptimizerStates(
            optimizer,
            [tier],
            CpuDevice(),
            bucket_bytes=PAGE,
            window_bytes=0,
            moves_param=lambda param: True,
        )
    for expected in (-1e-3, -2e-3):
        assert not any(param.is_inference() for param in params)
        _step(states, optimizer)
        with torch.inference_mode():
            states.expose()
            states.conceal()
            assert not any(param.is_inference() for param in params)
            states.expose()
        for param in params:
            assert torch.allclose(param, torch.full_like(param, expected))


# -- Settings -------------------------------------------------------------------------------------


def test_states_on_an_ssd_need_a_directory() -> None:
    with pytest.raises(ConfigurationError, match="--optimizer-state-dir DIR"):
        StatesConfig(mode="ssd")


def test_a_directory_is_named_once() -> None:
    with pytest.raises(ConfigurationError, match="twice"):
        StatesConfig(mode="ssd", directories=(Path("/a"), Path("/a")))


def test_a_bucket_has_bytes() -> None:
    with pytest.raises(ConfigurationError, match="--optimizer-state-bucket"):
        StatesConfig(mode="host", bucket_bytes=0)


def test_modes_are_named_where_another_is_asked_for() -> None:
    with pytest.raises(ConfigurationError, match="choose one of off, host, ssd, tiered, auto"):
        StatesConfig(mode="nvme")


class _Watched(Transfer):
    """Runs when it is told to; says when somebody has asked for it."""

    def __init__(self, *pieces: Callable[[], None]) -> None:
        super().__init__(*pieces)
        self.is_awaited = threading.Event()

    def done(self) -> bool:
        self.is_awaited.set()
        return super().done()

    def wait(self) -> None:
        self.is_awaited.set()
        super().wait()


def test_a_write_that_ends_while_a_read_is_awaited_makes_room_for_the_next_read(
    tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    states, optimizer = _states(tier, window=3, number=4)
    _step(states, optimizer)  # the last two stay
    states.wait_for_writes()
    begin_write, begin_read = tier.begin_write, tier.begin_read
    writes: list[Transfer] = []
    reads: list[_Watched] = []
    have_begun = [threading.Event(), threading.Event()]

    def held_write(source: torch.UntypedStorage, after: Any = None) -> Any:
        block, transfer = begin_write(source, after) or pytest.fail("no room")
        writes.append(Transfer(transfer.wait))
        return block, writes[-1]

    def held_read(block: Any, deadline: float = 0.0, into: Any = None) -> Any:
        target, transfer = begin_read(block, deadline, into)
        reads.append(_Watched(transfer.wait))
        have_begun[len(reads) - 1].set()
        return target, reads[-1]

    monkeypatch.setattr(tier, "begin_write", held_write)
    monkeypatch.setattr(tier, "begin_read", held_read)
    begun_meanwhile: list[bool] = []

    def drive() -> None:
        have_begun[0].wait(5)
        reads[0].is_awaited.wait(5)
        writes[0].run()
        begun_meanwhile.append(have_begun[1].wait(2))
        reads[0].run()
        have_begun[1].wait(5)
        reads[1].run()
        writes[1].run()

    thread = threading.Thread(target=drive, daemon=True)
    thread.start()
    _step(states, optimizer)
    thread.join(10)
    assert begun_meanwhile == [True]
