# SPDX-License-Identifier: Apache-2.0
"""Gradients while they are away: who looks at them, what drops them, and what goes wrong."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import (
    ConfigurationError,
    LayerMajor,
    offload_optimizer,
    offload_parameters,
)
from megatron.offload.errors import InterruptedStepError, LostStateError, OffloadError
from megatron.offload.integration.torch.parameter_offload import ParameterOffload
from megatron.offload.moving.bucket import Bucket
from megatron.offload.moving.storage import Where
from megatron.offload.parameters.gradients import Gradients
from megatron.offload.parameters.offloaded_gradient import OffloadedGradient, bucket_of
from megatron.offload.tiers.file import UnlinkedFile
from tests.behaviour.test_gradient_offload import batches_of, weights_leave_alone
from tests.behaviour.test_layer_major_steps import HIDDEN, LAYERS, Language
from tests.support.layer_major import failing_at
from tests.support.mounts import flip_a_bit
from tests.support.waiting import SOON_S, wait_until

__all__ = ["weights_leave_alone"]  # a fixture for all tests


class Session:
    """A model, what moves it, and its steps one by one."""

    def __init__(self, directory: Path, *, offloads_states: bool = False, **settings: Any) -> None:
        self.model = Language()
        settings = {"gradients": "on", **settings}
        self.handle: ParameterOffload = offload_parameters(self.model, directory, **settings)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        if offloads_states:
            sizes = {"bucket_bytes": 1 << 15, "window_bytes": 1 << 17}
            self.states = offload_optimizer(self.optimizer, directory, **sizes)
        self.layer_major = LayerMajor(self.model)
        torch.manual_seed(7)

    def passes(self, number: int = 0) -> None:
        self.layer_major.step(batches_of(number), self.model)

    @property
    def gradients(self) -> Gradients:
        assert self.handle.window is not None and self.handle.window.gradients is not None
        return self.handle.window.gradients

    @property
    def tier(self) -> Any:
        assert self.handle.window is not None
        return self.handle.window.tiers[0]

    def buckets(self) -> list[Bucket]:
        """Of all gradients, none of which is still written."""
        found = {id(p): p for one in self.model.parameters() if (p := bucket_of(one)) is not None}
        for bucket in found.values():
            bucket.wait_for_write()
        return list(found.values())

    @property
    def param(self) -> torch.nn.Parameter:
        """One whose gradient leaves."""
        return self.model.layers[2].up.weight


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    made = Session(tmp_path)
    yield made
    made.handle.close(restore=False)


@pytest.fixture(scope="module")
def of_one_step() -> Language:
    """A model with the gradients of one step."""
    model = Language()
    torch.manual_seed(7)
    LayerMajor(model).step(batches_of(0), model)
    return model


def test_waits_for_writes_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of one unit are being written when those of the next are complete."""
    session = Session(tmp_path, live_units=LAYERS)  # nothing else moves in the passes
    compute_waits, waited_s = threading.Event(), 0.0
    write, wait = UnlinkedFile.write, Bucket.wait_for_write

    def gated(file: UnlinkedFile, *args: Any) -> None:
        compute_waits.wait(SOON_S)
        write(file, *args)

    def noted(bucket: Bucket) -> None:
        nonlocal waited_s
        assert compute_waits.is_set() or bucket.where is Where.WRITING
        began = time.perf_counter()
        compute_waits.set()
        wait(bucket)
        waited_s += time.perf_counter() - began

    for unit in session.handle.window.units:
        unit.wait_for_write()
    monkeypatch.setattr(UnlinkedFile, "write", gated)
    monkeypatch.setattr(Bucket, "wait_for_write", noted)
    session.passes()
    assert compute_waits.is_set()
    assert session.handle.statistics["gradient_stall_s"] >= waited_s > 0
    session.handle.close(restore=False)


def in_list(gradient: torch.Tensor) -> Sequence[torch.Tensor]:
    return [gradient, torch.ones(2)]


LOOKS: dict[str, Callable[[torch.Tensor], Any]] = {
    "add": lambda g: g + 1,
    "abs of a list": lambda g: torch._foreach_abs(in_list(g)),
    "an element": lambda g: g[0, 0].item(),
    "a copy": lambda g: g.clone(),
    "in place": lambda g: g.add_(1),
    "zeros": lambda g: g.zero_(),
    "another norm": lambda g: torch.linalg.vector_norm(g, 1.0),
    "a norm by rows": lambda g: torch.linalg.vector_norm(g, 2.0, dim=0),
    "scaled by rows": lambda g: g.mul_(torch.ones(HIDDEN)),
    "as a factor": lambda g: torch.ones(4 * HIDDEN, HIDDEN).mul_(g),
    "as a factor of a list": lambda g: torch._foreach_mul_([torch.ones(4)], g),
    "the norm of what is scaled": lambda g: torch.linalg.vector_norm(g.mul_(2.0)),
    "data": lambda g: g.data.abs(),
    "a part": lambda g: g.view(-1)[:2],
    "another shape": lambda g: g.view(HIDDEN, -1),
}


def test_whoever_looks_at_a_gradient_that_is_away_gets_an_error(session: Session) -> None:
    session.passes()
    gradient = session.param.grad
    assert gradient is not None and gradient.shape == session.param.shape
    for name, look in LOOKS.items():
        with pytest.raises(OffloadError) as raised:
            look(gradient)
        assert "of a gradient that is on a tier until the optimizer's step" in str(raised.value), (
            name
        )


def test_unscaling_and_clipping_by_value_are_errors(session: Session) -> None:
    session.passes()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(OffloadError, match="unscale"):
        scaler.unscale_(session.optimizer)
    with pytest.raises(OffloadError, match="clamp"):
        torch.nn.utils.clip_grad_value_(session.model.parameters(), 1.0)
    with pytest.raises(OffloadError, match="set_to_none=True"):
        session.optimizer.zero_grad(set_to_none=False)


def test_the_gradients_themselves_come_back_for_who_looks(
    session: Session, of_one_step: Language
) -> None:
    session.passes()
    factor = torch.tensor(0.25)
    torch._foreach_mul_([p.grad for p in session.model.parameters()], factor)
    factor.zero_()  # it has been used
    torch._foreach_mul_([p.grad for p in session.model.parameters()], 3.0)
    session.handle.bring_gradients()
    for ours, theirs in zip(session.model.parameters(), of_one_step.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad * torch.tensor(0.25) * 3.0)
    session.optimizer.step()


def test_the_norm_of_a_step_is_there_without_a_read(
    session: Session, of_one_step: Language
) -> None:
    session.passes()
    session.buckets()
    read_bytes = session.handle.statistics["read_bytes"]
    norm = torch.nn.utils.clip_grad_norm_(session.model.parameters(), 0.1)
    gradients = [p.grad for p in of_one_step.parameters() if p.grad is not None]
    assert torch.equal(norm, torch.nn.utils.get_total_norm(gradients))
    assert session.handle.statistics["read_bytes"] == read_bytes


def test_each_gradient_is_written_and_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: dict[str, list[int]] = {"begin_write": [], "begin_read": []}
    for name, sizes in moved.items():
        right = getattr(Bucket, name)

        def counted(self: Bucket, *args: Any, right: Any = right, sizes: Any = sizes) -> Any:
            is_read_for_nothing = sizes is moved["begin_read"] and self.where is not Where.ON_TIER
            if (0, "grad") in self.layout.slots and not is_read_for_nothing:  # type: ignore[union-attr]  # it has bytes
                sizes.append(self.num_bytes)
            return right(self, *args)

        monkeypatch.setattr(Bucket, name, counted)
    session = Session(tmp_path, offloads_states=True)
    session.passes()
    session.buckets()
    torch.nn.utils.clip_grad_norm_(session.model.parameters(), 0.1)
    session.optimizer.step()
    session.optimizer.zero_grad()
    assert sorted(moved["begin_write"]) == sorted(moved["begin_read"])
    num_bytes = sum(p.nbytes for p in session.model.layers.parameters())
    assert num_bytes <= sum(moved["begin_read"]) < 1.1 * num_bytes  # in whole pages
    session.states.close(restore=False)
    session.handle.close(restore=False)


def test_zero_grad_drops_them_with_their_space(session: Session) -> None:
    used_bytes = session.tier.used_bytes
    session.passes()
    assert session.buckets() and session.tier.used_bytes > used_bytes
    session.optimizer.zero_grad()
    # The I/O thread that ended a write lets go of the bucket a moment after it says so.
    wait_until(lambda: session.tier.used_bytes == used_bytes, "a gradient's space is kept")
    assert session.gradients.memory_bytes == 0


def test_a_step_that_nobody_zeroed_the_gradients_before_is_an_error(session: Session) -> None:
    session.passes()
    session.optimizer.step()
    gradient = session.param.grad
    assert isinstance(gradient, OffloadedGradient)
    with pytest.raises(OffloadError, match="after the optimizer's step, which has used this"):
        gradient.sum()
    with pytest.raises(OffloadError, match=r"call zero_grad\(\) after the step"):
        session.passes()
    with pytest.raises(OffloadError, match="which has used this gradient and dropped it"):
        session.optimizer.step()
    session.optimizer.zero_grad()
    session.passes()


def test_a_backward_pass_beside_layer_major_steps_is_an_error(session: Session) -> None:
    with pytest.raises(OffloadError, match="ran outside of a layer-major step"):
        session.model(batches_of(0)[0]).backward()


def test_a_gradient_that_is_a_view_of_others_stays(session: Session) -> None:
    """Somebody keeps all of them in one buffer, which would not be freed with it."""
    buffer = torch.zeros(2, *session.param.shape)
    session.param.grad = buffer[1]
    session.passes()
    assert session.param.grad is not None and session.param.grad.data_ptr() == buffer[1].data_ptr()
    assert buffer[1].any()
    session.optimizer.step()
    assert session.param.grad.data_ptr() == buffer[1].data_ptr()


def test_after_closing_gradients_are_where_they_were(tmp_path: Path, of_one_step: Language) -> None:
    session = Session(tmp_path)
    session.passes()
    session.handle.close()
    for ours, theirs in zip(session.model.parameters(), of_one_step.parameters(), strict=True):
        assert type(ours.grad) is torch.Tensor and theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)


def test_without_a_place_they_cannot_leave(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"gradients on needs a place .* give mode"):
        offload_parameters(Language(), tmp_path, mode="off", gradients="on")


# -- What goes wrong ------------------------------------------------------------------------------


class Full:
    """A tier without room."""

    def begin_write(self, *_: Any) -> None:
        return None


def test_what_no_tier_takes_stays_in_memory(
    session: Session, of_one_step: Language, caplog: pytest.LogCaptureFixture
) -> None:
    session.gradients.copies.tiers = [Full()]  # type: ignore[list-item]
    with caplog.at_level(logging.WARNING):
        session.passes()
    assert caplog.text.count("gradients: no tier takes ") == 1
    assert all(bucket.where is Where.IN_MEMORY for bucket in session.buckets())
    session.handle.bring_gradients()
    gradient = of_one_step.layers[2].up.weight.grad
    assert gradient is not None and session.param.grad is not None
    assert torch.equal(session.param.grad, gradient)
    session.optimizer.step()
    assert isinstance(session.param.grad, OffloadedGradient)


def test_a_flipped_bit_ends_the_training_and_no_step_goes_on(tmp_path: Path) -> None:
    session = Session(tmp_path, offloads_states=True)
    session.passes()
    session.buckets()
    bucket = bucket_of(session.param)
    assert bucket is not None and bucket.where is Where.ON_TIER
    flip_a_bit(bucket.block.extents[0], 5)
    sentence = r"^gradients: those of unit 3 of 6 .* checksum mismatch.* no other copy"
    with pytest.raises(LostStateError, match=sentence):
        session.optimizer.step()
    with pytest.raises(InterruptedStepError):
        session.optimizer.step()
    session.states.close(restore=False)
    with pytest.raises(LostStateError):
        session.handle.close()


def test_after_an_error_in_a_step_training_goes_on(tmp_path: Path) -> None:
    """With the weights of a training that had the same error."""
    ours, theirs = Session(tmp_path), Language()
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    layer_major = LayerMajor(theirs)
    for model, steps_by, run in (
        (ours.model, ours.optimizer, ours.layer_major),
        (theirs, optimizer, layer_major),
    ):
        torch.manual_seed(7)
        for number in range(3):
            if number == 1:
                fail = failing_at(3, RuntimeError("an error of the user's"))
                hook = model.layers[2].up.weight.register_hook(fail)
                with pytest.raises(RuntimeError, match="of the user's"):
                    run.step(batches_of(9), model)
                hook.remove()
                torch.manual_seed(8)
                steps_by.zero_grad()
            run.step(batches_of(number), model)
            steps_by.step()
            steps_by.zero_grad()
    ours.handle.close()
    for one, other in zip(ours.model.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)
