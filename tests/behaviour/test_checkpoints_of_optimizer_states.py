# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of states on tiers: the same as without offload, from where the states are."""

from __future__ import annotations

import copy
import io
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from megatron.offload import offload_optimizer, offload_parameters
from megatron.offload.errors import LostStateError, OffloadError
from megatron.offload.moving.storage import Where
from megatron.offload.states.optimizer_states import OptimizerStates
from megatron.offload.tiers.ssd import SsdBlock, SsdTier
from tests.behaviour.test_optimizer_states_stay_bit_identical import OPTIMIZERS, Trained, same
from tests.support.mounts import flip_a_bit
from tests.support.processes import finish, start_python


@pytest.fixture(params=["ssd", "host"])
def offload(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    return {"mode": "host"} if request.param == "host" else {"directory": tmp_path}


@pytest.fixture
def on_ssd(tmp_path: Path) -> dict[str, Any]:
    return {"directory": tmp_path}


def _states(trained: Trained) -> OptimizerStates:
    assert trained.handle is not None and trained.handle.states is not None
    return trained.handle.states


def _saved(state_dict: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return file


def test_a_file_is_as_large_and_has_as_many_parts_as_without(offload: dict[str, Any]) -> None:
    plain, moved = (Trained(OPTIMIZERS["adamw"], **one).train(3) for one in ({}, offload))
    of_plain, of_moved = (_saved(one.optimizer.state_dict()) for one in (plain, moved))
    assert of_moved.getbuffer().nbytes == of_plain.getbuffer().nbytes
    storages = {
        value.untyped_storage().data_ptr()
        for state in torch.load(of_moved)["state"].values()
        for value in state.values()
    }
    assert len(storages) == 3 * 14  # each tensor has its own, as without


def test_a_run_goes_on_in_the_middle(offload: dict[str, Any], tmp_path: Path) -> None:
    """From offload to none and back, with the file mapped as it is loaded."""
    expected = Trained(OPTIMIZERS["adamw"]).train(6)
    trained = Trained(OPTIMIZERS["adamw"], **offload).train(2)
    for index, kind in enumerate(({}, offload, offload, {})):
        path = tmp_path / f"{index}.pt"
        torch.save(trained.optimizer.state_dict(), path)
        resumed = Trained(OPTIMIZERS["adamw"], **kind)
        resumed.model.load_state_dict(trained.model.state_dict())
        resumed.optimizer.load_state_dict(torch.load(path, mmap=True))
        resumed._generator, resumed.losses = trained._generator, trained.losses
        trained = resumed.train(1)
    assert same(trained.result, expected.result)


def test_loaded_states_are_on_their_tier_before_the_next_step(offload: dict[str, Any]) -> None:
    states = Trained(OPTIMIZERS["adamw"]).train(1).optimizer.state_dict()
    fresh = Trained(OPTIMIZERS["adamw"], **offload)
    fresh.optimizer.load_state_dict(states)
    _states(fresh).wait_for_writes()
    assert _states(fresh).memory_bytes <= _states(fresh).window_bytes < _states(fresh).num_bytes


def test_loaded_states_get_the_type_of_their_parameters(offload: dict[str, Any]) -> None:
    source = Trained(OPTIMIZERS["adamw"]).train(1).optimizer.state_dict()
    for state in source["state"].values():
        state["exp_avg"] = state["exp_avg"].double()
    plain, moved = (Trained(OPTIMIZERS["adamw"], **one) for one in ({}, offload))
    plain.optimizer.load_state_dict(source)
    moved.optimizer.load_state_dict(source)
    assert same(moved.optimizer.state_dict(), plain.optimizer.state_dict())


def test_hooks_of_loading_see_tensors(offload: dict[str, Any]) -> None:
    source = Trained(OPTIMIZERS["adamw"]).train(1).optimizer.state_dict()
    moved = Trained(OPTIMIZERS["adamw"], **offload)

    def double(optimizer: torch.optim.Optimizer) -> None:
        for state in optimizer.state.values():
            state["exp_avg"] = state["exp_avg"] * 2

    moved.optimizer.register_load_state_dict_post_hook(double)
    moved.optimizer.load_state_dict(source)
    for number, state in moved.optimizer.state_dict()["state"].items():
        assert torch.equal(state["exp_avg"], source["state"][number]["exp_avg"] * 2)


def test_what_is_refused_when_loading_changes_nothing(offload: dict[str, Any]) -> None:
    expected = Trained(OPTIMIZERS["adamw"]).train(4)
    trained = Trained(OPTIMIZERS["adamw"], **offload).train(2)
    broken = trained.optimizer.state_dict()
    broken["param_groups"] = []
    with pytest.raises(ValueError, match="different number of parameter groups"):
        trained.optimizer.load_state_dict(broken)
    assert same(trained.train(2).result, expected.result)


@pytest.mark.parametrize("kind", [{}, {"io": "buffered"}, {"mode": "tiered"}], ids=str)
def test_rounds_of_looking_changing_and_stepping_stay_the_same(
    kind: dict[str, Any], on_ssd: dict[str, Any]
) -> None:
    """Stale pages of a reused place on the drive would show, and changes that do not come there."""

    def change(trained: Trained, seen: list[Any]) -> Callable[[int], None]:
        def after(step: int) -> None:
            state_dict = trained.optimizer.state_dict()
            seen.append(copy.deepcopy(state_dict))
            for number, state in state_dict["state"].items():
                if (number + step) % 3 == 0:
                    state["exp_avg"].mul_(0.5)
            if step % 2:
                seen.append(copy.deepcopy(trained.optimizer.state_dict()))

        return after

    expected = Trained(OPTIMIZERS["adamw"])
    trained = Trained(OPTIMIZERS["adamw"], **on_ssd, **kind)
    of_expected: list[Any] = []
    of_trained: list[Any] = []
    expected.train(8, change(expected, of_expected))
    trained.train(8, change(trained, of_trained))
    assert same(of_trained, of_expected)
    assert same(trained.result, expected.result)


def test_states_are_shown_loaded_and_given_back_in_inference_mode(offload: dict[str, Any]) -> None:
    """As where a callback of an evaluation writes the checkpoint."""
    expected = Trained(OPTIMIZERS["adamw"]).train(2)
    trained = Trained(OPTIMIZERS["adamw"], **offload).train(2)
    with torch.inference_mode():
        saved = trained.optimizer.state_dict()
        _states(trained).conceal()
        _states(trained).adopt()
        assert same(trained.optimizer.state_dict(), expected.optimizer.state_dict())
    assert not any(one.is_inference() for one in saved["state"][0].values())
    assert same(trained.train(2).result, expected.train(2).result)
    assert trained.handle is not None
    with torch.inference_mode():
        trained.handle.close()
    assert same(trained.train(2).result, expected.train(2).result)


def test_states_are_made_in_inference_mode(offload: dict[str, Any]) -> None:
    def make(optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for param in group["params"]:
                optimizer.state[param] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(param, memory_format=torch.preserve_format),
                    "exp_avg_sq": torch.zeros_like(param, memory_format=torch.preserve_format),
                }

    trained = Trained(OPTIMIZERS["adamw"], **offload)
    with torch.inference_mode():
        _states(trained).make_states(make)
    assert same(trained.train(2).result, Trained(OPTIMIZERS["adamw"]).train(2).result)


@pytest.mark.parametrize("way", ["data", "numpy"])
def test_what_is_changed_through_data_while_it_is_shown_stays_so(
    way: str, offload: dict[str, Any]
) -> None:
    """Autograd counts no such change."""

    def train(**offload: Any) -> Any:
        trained = Trained(OPTIMIZERS["adamw"], **offload).train(2)
        if offload:
            _states(trained).wait_for_writes()
        for state in trained.optimizer.state_dict()["state"].values():
            state["exp_avg"].data.mul_(0.5) if way == "data" else state["exp_avg"].numpy().fill(0)
        return trained.train(2).result

    assert same(train(**offload), train())


def test_what_is_not_needed_any_more_is_not_read(
    on_ssd: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last checkpoint of a run is large, and nobody comes back to what is on the drives."""
    trained = Trained(OPTIMIZERS["adamw"], **on_ssd).train(2)
    trained.optimizer.state_dict()
    calls: list[Any] = []
    monkeypatch.setattr(SsdTier, "renew", lambda self, block: calls.append(block))
    assert trained.handle is not None
    trained.handle.close(restore=False)
    assert not calls


def test_an_assigned_state_is_used(offload: dict[str, Any]) -> None:
    def assign(trained: Trained) -> Trained:
        for param in trained.model.parameters():
            trained.optimizer.state[param]["exp_avg"] = torch.full_like(param, 1e-3)
        return trained

    expected = assign(Trained(OPTIMIZERS["adamw"]).train(2)).train(2)
    trained = assign(Trained(OPTIMIZERS["adamw"], **offload).train(2)).train(2)
    assert same(trained.result, expected.result)


def test_an_assigned_state_is_in_the_next_checkpoint(offload: dict[str, Any]) -> None:
    """Though it was assigned while what was there before was away."""

    def train(**offload: Any) -> Any:
        trained = Trained(OPTIMIZERS["adamw"], **offload).train(2)
        for param in list(trained.model.parameters())[::2]:
            trained.optimizer.state[param]["exp_avg"] = torch.full_like(param, 1e-3)
        saved = copy.deepcopy(trained.optimizer.state_dict())
        return saved, trained.train(2).result

    assert same(train(**offload), train())


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state["exp_avg"].zero_(),
        lambda state: state["exp_avg"].data.zero_(),
        lambda state: state.update(exp_avg=torch.zeros_like(state["exp_avg"])),
        lambda state: state.update(exp_avg=state["exp_avg"] * 0.5),
        lambda state: state["exp_avg"].clone(),
        lambda state: torch._foreach_mul_([state["exp_avg"]], 0.5),
        lambda state: torch.zeros(48, 48).copy_(state["exp_avg"]),
    ],
    ids=["in place", "data", "zeros_like", "product", "clone", "foreach", "source"],
)
def test_whoever_uses_what_stands_for_a_state_gets_an_error(
    change: Callable[[dict[str, Any]], Any], offload: dict[str, Any]
) -> None:
    expected = Trained(OPTIMIZERS["adamw"]).train(3)
    trained = Trained(OPTIMIZERS["adamw"], **offload).train(2)
    with pytest.raises(OffloadError, match=r"asked for of a state that is on a tier.*expose\(\)"):
        change(trained.optimizer.state[next(trained.model.parameters())])
    assert same(trained.train(1).result, expected.result)


@pytest.mark.parametrize(
    "move",
    [
        lambda value, param: value.to(param.device),
        lambda value, param: value.to("cpu", non_blocking=True),
        lambda value, param: value.to(param),
        lambda value, param: value.cpu(),
        lambda value, param: value.to(value.device),
    ],
    ids=["device", "text", "parameter", "cpu", "its own"],
)
def test_states_may_be_moved_to_where_they_belong(
    move: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], offload: dict[str, Any]
) -> None:
    """As scripts and trainers do behind `load_state_dict`; what is away stays away."""

    def resumed(**offload: Any) -> Any:
        saved = Trained(OPTIMIZERS["adamw"]).train(2).optimizer.state_dict()
        trained = Trained(OPTIMIZERS["adamw"], **offload)
        trained.optimizer.load_state_dict(saved)
        for param, state in trained.optimizer.state.items():
            for key, value in state.items():
                state[key] = move(value, param)
        is_away = [one["exp_avg"].device.type == "meta" for one in trained.optimizer.state.values()]
        return any(is_away), trained.train(2).result

    (is_away, found), (_, expected) = resumed(**offload), resumed()
    assert is_away and same(found, expected)


@pytest.mark.parametrize(
    "move",
    [
        lambda value: value.to(torch.float64),
        lambda value: value.to("cpu", torch.bfloat16),
        lambda value: value.to("cpu", memory_format=torch.contiguous_format),
    ],
)
def test_states_that_are_away_cannot_be_moved_elsewhere(
    move: Callable[[torch.Tensor], torch.Tensor], on_ssd: dict[str, Any]
) -> None:
    trained = Trained(OPTIMIZERS["adamw"], **on_ssd).train(2)
    with pytest.raises(OffloadError, match=r"asked for of a state that is on a tier"):
        move(trained.optimizer.state[next(trained.model.parameters())]["exp_avg"])


@pytest.mark.parametrize("is_shown", [False, True])
def test_what_has_no_values_is_not_taken_for_a_state(
    is_shown: bool, on_ssd: dict[str, Any]
) -> None:
    expected = Trained(OPTIMIZERS["adamw"]).train(3)
    trained = Trained(OPTIMIZERS["adamw"], **on_ssd).train(2)
    params = list(trained.model.parameters())
    first, third = (trained.optimizer.state[params[index]] for index in (0, 2))
    others = [torch.empty(48, 48, device="meta"), first["exp_avg_sq"], third["exp_avg"]]
    if is_shown:
        trained.optimizer.state_dict()
    own = first["exp_avg"]
    for other in others:
        first["exp_avg"] = other
        with pytest.raises(OffloadError, match="put in the place of a state"):
            trained.optimizer.step() if is_shown else trained.optimizer.state_dict()
    first["exp_avg"] = own
    assert same(trained.train(1).result, expected.result)


def test_a_step_does_not_take_the_stand_in_of_another_state(on_ssd: dict[str, Any]) -> None:
    trained = Trained(OPTIMIZERS["adamw"], **on_ssd).train(2)
    state = trained.optimizer.state[next(trained.model.parameters())]
    state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"]
    with pytest.raises(OffloadError, match="put in the place of a state"):
        trained.train(1)


@pytest.mark.parametrize("make_copy", [copy.deepcopy, pickle.dumps, _saved])
def test_what_stands_for_a_state_is_not_saved(
    make_copy: Callable[[Any], Any], on_ssd: dict[str, Any]
) -> None:
    trained = Trained(OPTIMIZERS["adamw"], **on_ssd).train(2)
    with pytest.raises(OffloadError, match=r"a copy.* was asked for of a state that is on a tier"):
        make_copy(dict(trained.optimizer.state))


@pytest.mark.parametrize(
    "make_copy",
    [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))],
    ids=["copy", "pickle"],
)
def test_a_copy_of_an_optimizer_has_its_states(
    make_copy: Callable[[Any], Any], offload: dict[str, Any]
) -> None:
    expected = Trained(OPTIMIZERS["adamw"]).train(4)
    trained = Trained(OPTIMIZERS["adamw"], **offload).train(2)
    copied = make_copy(trained.optimizer)
    assert same(copied.state_dict(), trained.optimizer.state_dict())
    assert same(trained.train(2).result, expected.result)
    # The copy is an ordinary optimizer.
    for param in copied.param_groups[0]["params"]:
        param.grad = torch.zeros_like(param)
    copied.step()


def test_tensors_of_a_state_dict_outlive_the_next_steps(on_ssd: dict[str, Any]) -> None:
    """What was on the drive stays as it was, though its place would be written again."""
    trained = Trained(OPTIMIZERS["adamw"], **on_ssd).train(2)
    states = _states(trained)
    states.wait_for_writes()
    held, expected = [], []
    trained.optimizer.state_dict()
    for bucket in states.buckets:
        if bucket.where is Where.ON_TIER:
            for param in bucket.params:
                held.append(trained.optimizer.state[param]["exp_avg"])
                expected.append(held[-1].clone())
    assert held
    trained.train(3)
    assert same(held, expected)


def test_a_forked_process_sees_states(offload: dict[str, Any]) -> None:
    """Writers of checkpoints are forked."""
    trained = Trained(OPTIMIZERS["adamw"], **offload).train(2)
    state_dict = trained.optimizer.state_dict()
    total = sum(float(one["exp_avg"].sum()) for one in state_dict["state"].values())
    child = os.fork()
    if not child:
        seen = sum(float(one["exp_avg"].sum()) for one in state_dict["state"].values())
        os._exit(0 if seen == total else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_forked_process_sees_them_for_as_long_as_this_one_keeps_them(
    offload: dict[str, Any],
) -> None:
    """As Megatron-Core's queue of asynchronous saves does, while further steps are taken."""
    trained = Trained(OPTIMIZERS["adamw"], **offload).train(2)
    kept = trained.optimizer.state_dict()
    expected = copy.deepcopy(kept)
    ends, starts = os.pipe()
    child = os.fork()
    if not child:
        os.read(ends, 1)
        os._exit(0 if same(kept, expected) else 1)
    trained.train(3)
    os.write(starts, b"go")
    assert os.waitpid(child, 0)[1] == 0
    os.close(ends)
    os.close(starts)
    assert not same(trained.optimizer.state_dict(), expected)


def test_a_host_tier_is_not_copied_to_forked_processes_after_the_next_step() -> None:
    trained = Trained(OPTIMIZERS["adamw"], mode="host").train(2)
    assert _kept_from_forks() > 0
    before = _kept_from_forks()
    trained.optimizer.state_dict()
    assert _kept_from_forks() < before
    trained.train(1)
    assert _kept_from_forks() == before


def _kept_from_forks() -> int:
    """Bytes of mappings that a forked process does not get."""
    total = size = 0
    with open("/proc/self/smaps") as lines:
        for line in lines:
            if line.startswith("Size:"):
                size = int(line.split()[1])
            elif line.startswith("VmFlags:") and " dc" in line:
                total += size
    return total


@pytest.fixture
def damaged(on_ssd: dict[str, Any]) -> Iterator[Trained]:
    """After two steps, with a bit of a bucket that is away flipped on the drive."""
    trained = Trained(OPTIMIZERS["adamw"], **on_ssd).train(2)
    states = _states(trained)
    states.wait_for_writes()
    blocks = [one.block for one in states.buckets if one.where is Where.ON_TIER]
    (extent, *_) = (e for b in blocks if isinstance(b, SsdBlock) for e in b.extents)
    flip_a_bit(extent, 100)
    yield trained
    assert trained.handle is not None
    trained.handle.close(restore=False)


def test_a_flipped_bit_does_not_get_into_a_checkpoint(damaged: Trained) -> None:
    for _ in range(2):  # nor when somebody tries again
        with pytest.raises(LostStateError, match="checksum mismatch"):
            damaged.optimizer.state_dict()


def test_damage_of_the_page_cache_alone_is_no_loss(
    on_ssd: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Trained(OPTIMIZERS["adamw"]).train(4)
    trained = Trained(OPTIMIZERS["adamw"], **on_ssd).train(2)

    def refuse(self: SsdTier, block: Any) -> Any:
        raise OSError("no mapping here")

    monkeypatch.setattr(SsdTier, "view", refuse)
    plain = Trained(OPTIMIZERS["adamw"]).train(2)
    assert same(trained.optimizer.state_dict(), plain.optimizer.state_dict())
    assert same(trained.train(2).result, expected.result)


def test_a_place_that_cannot_be_renewed_is_left(
    on_ssd: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(**offload: Any) -> Any:
        trained = Trained(OPTIMIZERS["adamw"], **offload).train(2)
        for state in trained.optimizer.state_dict()["state"].values():
            state["exp_avg"].mul_(0.5)
        return trained.train(2).result

    expected = train()

    def fail(self: SsdTier, block: Any) -> None:
        raise OSError("the drive failed")

    monkeypatch.setattr(SsdTier, "renew", fail)
    assert same(train(**on_ssd), expected)


@pytest.mark.parametrize("flat", [False, True])
def test_distributed_checkpoints_are_the_same(
    flat: bool, offload: dict[str, Any], tmp_path: Path
) -> None:
    """Saved and loaded in place, from one to the other and back."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    expected = Trained(OPTIMIZERS["adamw"]).train(6)
    trained = Trained(OPTIMIZERS["adamw"]).train(2)
    for index, kind in enumerate((offload, {})):
        found = get_optimizer_state_dict(trained.model, trained.optimizer, options=options)
        dcp.save({"optimizer": found}, checkpoint_id=tmp_path / str(index), no_dist=True)
        resumed = Trained(OPTIMIZERS["adamw"], **kind)
        target = get_optimizer_state_dict(resumed.model, resumed.optimizer, options=options)
        dcp.load({"optimizer": target}, checkpoint_id=tmp_path / str(index), no_dist=True)
        set_optimizer_state_dict(resumed.model, resumed.optimizer, target, options=options)
        resumed.model.load_state_dict(trained.model.state_dict())
        resumed._generator, resumed.losses = trained._generator, trained.losses
        trained = resumed.train(2)
    assert same(trained.result, expected.result)


def test_states_loaded_in_place_take_no_second_place(on_ssd: dict[str, Any]) -> None:
    trained = Trained(OPTIMIZERS["adamw"], **on_ssd).train(2)
    states = _states(trained)
    states.wait_for_writes()
    (tier,) = states.tiers
    used, held = tier.used_bytes, trained.optimizer.state_dict()
    for state in held["state"].values():
        state["exp_avg"].data.copy_(torch.ones_like(state["exp_avg"]))
    trained.optimizer.load_state_dict(held)
    assert tier.used_bytes == used
    states.prefetch()
    for state in trained.optimizer.state_dict()["state"].values():
        assert state["exp_avg"].eq(1).all()


_MEMORY = """
import copy, resource, sys, torch, threading
from pathlib import Path
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import *
from megatron.offload import offload_optimizer

MIB = 1 << 20
folder, way = Path(sys.argv[1]), sys.argv[2]

def anonymous():
    text = Path("/proc/self/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) << 10

class Peak(threading.Thread):
    def run(self):
        while not self.ended.wait(0.001):
            self.bytes = max(self.bytes, anonymous())
    def __enter__(self):
        self.ended, self.before = threading.Event(), anonymous()
        self.bytes = self.before
        self.start()
        return self
    def __exit__(self, *error):
        self.bytes = max(self.bytes, anonymous())
        self.ended.set()
        self.join()

def make(**kind):
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(13)])
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    handle = offload_optimizer(
        optimizer, folder, window_bytes=16 * MIB, bucket_bytes=8 * MIB, threads=2)
    return model, optimizer, handle

def step(model, optimizer):
    for param in model.parameters():
        param.grad = torch.full_like(param, 0.5)
    optimizer.step()
    optimizer.zero_grad()

model, optimizer, handle = make()
step(model, optimizer)
handle.states.wait_for_writes()
assert handle.states.num_bytes > 100 * MIB
parts = []
with Peak() as saving:
    if way == "torch":
        torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    else:
        found = get_optimizer_state_dict(model, optimizer)
        dcp.save(found, checkpoint_id=folder / "dcp", no_dist=True)
handle.close(restore=False)
del optimizer
model, optimizer, handle = make()
if way != "torch":
    step(model, optimizer)  # DCP would do it, with gradients of all
    handle.states.wait_for_writes()
with Peak() as loading:
    if way == "torch":
        optimizer.load_state_dict(torch.load(folder / "optimizer.pt", mmap=True))
    else:
        found = get_optimizer_state_dict(model, optimizer)
        dcp.load(found, checkpoint_id=folder / "dcp", no_dist=True)
        set_optimizer_state_dict(model, optimizer, found)
handle.close(restore=False)
print(*[(one.bytes - one.before) // MIB for one in (saving, loading)])
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["torch", "dcp"])
def test_there_is_no_second_copy_in_memory(way: str, tmp_path: Path) -> None:
    """100 MiB of states, 16 MiB of window: what saving and loading add is about a window."""
    code, output, errors = finish(start_python(_MEMORY, tmp_path, way))
    assert code == 0, errors
    saving, loading = map(int, output.split())
    assert saving < 40 and loading < 60


class KeepsFloats(torch.optim.SGD):
    """Has momenta in fp32 whatever its parameters are, also after a load, which casts them."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for own in self.state.values():
            for key, value in own.items():
                if torch.is_tensor(value):
                    own[key] = value.float()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                momentum = state.setdefault("momentum", torch.zeros_like(param).float())
                param.sub_(momentum.mul_(0.9).add_(param.grad), alpha=0.1)


def test_a_class_that_changes_what_was_loaded_finds_tensors(offload: dict[str, Any]) -> None:
    found = []
    for settings in ({}, offload):
        one = Trained(lambda params: KeepsFloats(params), **settings)
        one.model.bfloat16()
        for number in range(4):
            if number == 2:
                one.optimizer.load_state_dict(copy.deepcopy(one.optimizer.state_dict()))
            for param in one.model.parameters():
                param.grad = torch.full_like(param, 0.3 + number)
            one.optimizer.step()
        found.append(one.result)
    assert same(*found)
    assert all(one["momentum"].dtype == torch.float32 for one in found[1][2]["state"].values())


def test_a_checkpoint_of_states_reads_no_parameters(tmp_path: Path) -> None:
    """Where these wait on a tier too."""
    trained = Trained(OPTIMIZERS["adamw"])
    with (
        offload_parameters(trained.model, tmp_path, layers=["Linear"]) as parameters,
        offload_optimizer(
            trained.optimizer, tmp_path, bucket_bytes=30000, window_bytes=0
        ) as states,
    ):
        trained.train(2)
        _wait(states, parameters)
        before = parameters.statistics["read_bytes"]
        trained.optimizer.state_dict()
        assert parameters.statistics["read_bytes"] == before
        written = states.statistics["written_bytes"]
        trained.model(torch.ones(2, 48))
        states.states.conceal()
        _wait(states, parameters)
        assert states.statistics["written_bytes"] == written


def _wait(*handles: Any) -> None:
    states, parameters = handles
    states.states.wait_for_writes()
    parameters.window.copies.wait_for_writes()
