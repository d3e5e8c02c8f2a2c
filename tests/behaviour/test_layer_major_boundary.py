# SPDX-License-Identifier: Apache-2.0
"""What waits between two units of a layer-major step waits on a tier, and changes no bit."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from bench import boundary

from megatron.offload import ConfigurationError, LayerMajor, StorageError, offload_activations
from megatron.offload.activations.capture.tensor_swapper import TensorSwapper
from megatron.offload.layer_major.boundary import AHEAD
from megatron.offload.tiers.file import UnlinkedFile
from tests.behaviour.test_layer_major_robustness import (
    ChangesInputs,
    Plain,
    Tuples,
    Twice,
    assert_same_bits,
    micro_batches,
)
from tests.behaviour.test_layer_major_steps import (
    Crossed,
    Language,
    Outcome,
    unit_by_unit,
    usual,
)
from tests.support.full_disk import one_warning_about
from tests.support.layer_major import failing_at, one_by_one, waiting_threads
from tests.support.models import settle
from tests.support.training import Stack
from tests.support.waiting import wait_until_empty

pytestmark = pytest.mark.usefixtures("one_thread_for_each_pass")


def moved(model: torch.nn.Module, directory: Path, **settings: Any) -> Any:
    """The model's activations, and what waits between units."""
    settings = {"mode": "ssd", "boundary": "ssd", "min_bytes": 1} | settings
    return offload_activations(model, directory, **settings)


RECOMPUTED = {"recompute_layers": "2-4", "recompute_input": "ssd"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"mode": "host", "boundary": "host"},
        {"mode": "host", "boundary": "ssd"},
        {"mode": "tiered", "boundary": "tiered"},
        RECOMPUTED,
        {"recompute_layers": "all"},
    ],
    ids=["ssd", "host", "both", "tiered", "recomputed, inputs move", "recomputed, inputs stay"],
)
def test_all_bits_are_the_same(settings: dict[str, str], tmp_path: Path) -> None:
    model = Language()
    with moved(model, tmp_path, **settings) as offload:
        Outcome(model, unit_by_unit(model, offload=offload)).assert_is(usual(Language))
        assert offload.engine is not None
        gc.collect()
        settle(offload.engine)
        wait_until_empty(offload.engine.tiers.values())


@pytest.mark.parametrize("kind", [Twice, ChangesInputs, Tuples])
def test_unusual_layers_have_the_same_bits(kind: type[Plain], tmp_path: Path) -> None:
    model = kind()
    with moved(model, tmp_path) as offload:
        assert_same_bits(model, kind(), LayerMajor(model, offload=offload))


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"alternates": True}], ids=["ascending", "alternating"])
def test_two_tensors_that_cross_have_the_bits_that_they_have_in_memory(
    settings: dict[str, bool], tmp_path: Path
) -> None:
    """An encoder's output crosses into every unit; its gradients add up as they do in memory."""

    def trained(where: str) -> Outcome:
        model = Crossed()
        with moved(model, tmp_path, boundary=where) as offload:
            return Outcome(model, unit_by_unit(model, None, offload=offload, **settings))

    trained("ssd").assert_is(trained("keep"))


@pytest.mark.slow
def test_a_few_micro_batches_are_in_memory_however_many_there_are(tmp_path: Path) -> None:
    shape, num_batches, one = (2, 64, 128), 10, 4 * 2 * 64 * 128
    assert one == boundary.MIN_BYTES
    kept = boundary.measure(tmp_path, "ssd", "keep", 4, 4, shape, num_batches)
    away = boundary.measure(tmp_path, "ssd", "ssd", 4, 4, shape, num_batches, inflight_bytes=one)
    few = AHEAD + 3  # those that are read ahead, two that hand over, one that is written
    assert kept.waiting.hidden_bytes >= num_batches * one
    assert kept.waiting.gradient_bytes >= num_batches * one
    assert 0 < away.waiting.hidden_bytes <= few * one
    assert 0 < away.waiting.gradient_bytes <= few * one
    for mine, theirs in zip(away.gradients, kept.gradients, strict=True):
        assert torch.equal(mine, theirs)


def offloaded(directory: Path, where: str) -> tuple[int, int]:
    """Bytes that a step hands to the tier, and those of one micro-batch's hidden states."""
    model = Plain()
    with moved(model, directory, boundary=where) as offload:
        step = LayerMajor(model, 4, offload=offload)
        for number in range(2):
            step.step(micro_batches(number), model)
        return offload.statistics["offloaded_bytes"], micro_batches(0)[0].nbytes


def test_hidden_states_that_a_layer_saves_are_written_once(tmp_path: Path) -> None:
    """What is moved in addition are gradients: of three boundaries and four micro-batches."""
    (kept, _), (away, one) = offloaded(tmp_path, "keep"), offloaded(tmp_path, "ssd")
    assert away - kept == 3 * 4 * one


# -- Faults ---------------------------------------------------------------------------------------

SHAPE = (2, 64, 64)  # more than the file's granules: what is smaller may be all edges, in memory


def large_batches(step: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    return [torch.randn(*SHAPE, generator=draw) for _ in range(4)]


def blocks() -> torch.nn.Module:
    torch.manual_seed(3)
    return boundary.Stack(4, SHAPE[-1])


def assert_steps_are_right(model: torch.nn.Module, step: LayerMajor, *numbers: int) -> None:
    bare = blocks()
    for number in numbers:
        torch.manual_seed(number)
        theirs = one_by_one(bare, large_batches(number))
        torch.manual_seed(number)
        assert step.step(large_batches(number), model) == theirs
        for mine, other in zip(model.parameters(), bare.parameters(), strict=True):
            assert mine.grad is not None and other.grad is not None
            assert torch.equal(mine.grad, other.grad)
            mine.grad = other.grad = None


def wait_after_each_layer(model: torch.nn.Module, offload: Any) -> None:
    """What it saved is on the tier, or refused: on a busy machine most is used before."""
    for layer in model.layers:  # type: ignore[union-attr]
        layer.register_forward_hook(lambda *_: settle(offload.engine))


def test_a_full_disk_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    model = blocks()
    with moved(model, tmp_path) as offload:
        monkeypatch.setattr(os, "posix_fallocate", full)
        wait_after_each_layer(model, offload)
        assert_steps_are_right(model, LayerMajor(model, offload=offload), 0, 1, 2)
        assert offload.statistics["rejected_bytes"] > 0
        one_warning_about("is full", caplog)


def test_writes_that_fail_in_mid_step_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, write, written = blocks(), UnlinkedFile.write, []

    def failing(self: UnlinkedFile, body: memoryview, offset: int) -> None:
        written.append(offset)
        if len(written) > 40:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        write(self, body, offset)

    with moved(model, tmp_path) as offload:
        monkeypatch.setattr(UnlinkedFile, "write", failing)
        wait_after_each_layer(model, offload)
        assert_steps_are_right(model, LayerMajor(model, offload=offload), 0, 1, 2)
        assert len(written) > 40
        one_warning_about("nothing is lost", caplog)


@pytest.mark.parametrize("backward", [False, True], ids=["hidden states", "gradients"])
def test_a_read_that_fails_ends_the_step_with_a_sentence(
    backward: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All threads end, nothing is left on the tier, and the next step has its bits."""
    read, take, fails = UnlinkedFile.read, TensorSwapper.take, False

    def failing(self: UnlinkedFile, body: memoryview, offset: int) -> None:
        if fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        read(self, body, offset)

    def fail(*_: Any) -> None:
        nonlocal fails
        settle(engine)
        fails = True

    def failing_take(self: TensorSwapper, waiting: Any) -> torch.Tensor:
        fail()
        return take(self, waiting)

    model = blocks()
    with moved(model, tmp_path) as offload:
        step = LayerMajor(model, offload=offload)
        step.step(large_batches(0), model)
        assert offload.engine is not None
        engine = offload.engine
        with monkeypatch.context() as patch:
            patch.setattr(UnlinkedFile, "read", failing)
            if backward:
                patch.setattr(TensorSwapper, "read_ahead", lambda *_: None)
                patch.setattr(TensorSwapper, "take", failing_take)
            else:
                hook = model.layers[0].register_forward_hook(fail)  # type: ignore[index, union-attr]
            with pytest.raises(StorageError, match=r"rank 0 .* chunk \d micro-batch 0 back .*file"):
                step.step(large_batches(1), model)
        assert not waiting_threads()
        if not backward:
            hook.remove()
        model.zero_grad()
        assert_steps_are_right(model, step, 2, 3)
        gc.collect()
        settle(engine)
        wait_until_empty(engine.tiers.values())


def test_other_bytes_than_were_written_end_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With checksums, as of activations: a hidden state alone is read, and a bit of it flips."""
    read = UnlinkedFile.read

    def flipping(self: UnlinkedFile, body: memoryview, offset: int) -> None:
        read(self, body, offset)
        body[len(body) // 2] ^= 1

    model = blocks()
    with moved(model, tmp_path, verify="checksum") as offload:
        step = LayerMajor(model, offload=offload)
        step.step(large_batches(0), model)
        engine = offload.engine
        assert engine is not None
        wait = model.layers[0].register_forward_hook(  # type: ignore[index, union-attr]
            lambda *_: settle(engine)
        )
        with monkeypatch.context() as patch:
            patch.setattr(UnlinkedFile, "read", flipping)
            with pytest.raises(StorageError, match="checksum"):
                step.step(large_batches(1), model)
        wait.remove()


@pytest.mark.parametrize("where", [0, 1, 3])
def test_a_step_after_an_error_in_a_layer(where: int, tmp_path: Path) -> None:
    """And an evaluation between them, which has nothing to do with units."""
    model = blocks()
    with moved(model, tmp_path) as offload:
        step = LayerMajor(model, offload=offload)
        step.step(large_batches(0), model)
        fail = failing_at(3, ZeroDivisionError("in a layer"))
        hook = model.layers[where].register_forward_hook(fail)  # type: ignore[index, union-attr]
        with pytest.raises(ZeroDivisionError, match="in a layer"):
            step.step(large_batches(1), model)
        hook.remove()
        model.zero_grad()
        bare = blocks()
        with torch.no_grad():
            torch.manual_seed(1)
            mine = model(large_batches(2)[0])
            torch.manual_seed(1)
            assert torch.equal(mine, bare(large_batches(2)[0]))
        assert_steps_are_right(model, step, 2, 3)


# -- What is refused ------------------------------------------------------------------------------


class Shared(Stack):
    """Its layers take a tensor that all micro-batches have in common, with a graph."""

    def __init__(self) -> None:
        super().__init__(16, 4, layer=lambda _: Adding())
        self.common = torch.nn.Parameter(torch.ones(2, 8, 16))
        self.now: torch.Tensor | None = None

    def run(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return layer(x, self.now)  # type: ignore[no-any-return]


class Adding(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x + other)


def test_a_tensor_that_micro_batches_share_is_refused(tmp_path: Path) -> None:
    model = Shared()
    with moved(model, tmp_path) as offload:
        step = LayerMajor(model, None, offload=offload)
        with pytest.raises(ConfigurationError, match="another micro-batch has as well"):
            for number in range(2):
                model.now = model.common.clone()
                step.step(micro_batches(number), model)


@pytest.mark.parametrize("mode", ["off", "auto"])
def test_it_needs_a_tier(mode: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="boundary ssd needs mode ssd, host or tiered"):
        offload_activations(Plain(), tmp_path, mode=mode, boundary="ssd")
