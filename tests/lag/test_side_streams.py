# SPDX-License-Identifier: Apache-2.0
"""Operations on streams beside the current one, by scripts that never call `record_stream`.

Autograd holds what it saved until backward, and such scripts are right by that. Offload and replay
free it sooner. Each script is also run without offload: it is right there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron.offload import OffloadConfig, OffloadEngine, Scope, offload_activations
from megatron.offload.activations.saved.storage_reference import StorageReference
from megatron.offload.activations.transfer import write_batch
from megatron.offload.device.accelerator import AcceleratorDevice
from megatron.offload.integration.torch.offload import ActivationOffload
from tests.support.accelerators import assert_equal
from tests.support.lag.module import LagModule
from tests.support.lag.platform import LagPlatform
from tests.support.waiting import wait_until

DEVICE = "lag"
HIDDEN, TOKENS, STEPS, SEEDS = 64, 128, 4, 12
KERNELS_LATE, COPIES_LATE = (1500, 50), (50, 1500)  # by microseconds, at most
SETTINGS: dict[str, dict[str, Any]] = {
    "ssd": {"mode": "ssd", "replay": "off"},
    "host": {"mode": "host", "replay": "off"},
    "ssd and replay": {"mode": "ssd"},
    "host and replay": {"mode": "host"},
}
pytestmark = pytest.mark.usefixtures("accelerator")


class Streams:
    """The streams of a script.

    Attributes:
        main: the one that the script begins on.
        sides: two more; with `beside` False the same one.
        holds: whether a stream is held while the script says so.
        handle: of the offload, if there is one.
    """

    def __init__(self, lag: LagModule, *, beside: bool = True) -> None:
        self.lag = lag
        self.beside = beside
        self.main = lag.current_stream(DEVICE)
        self.sides = [lag.Stream(DEVICE) if beside else self.main for _ in range(2)]
        self.holds = False
        self.handle: ActivationOffload | None = None
        self.saved: StorageReference | None = None  # what one stream saves and another one uses

    @contextlib.contextmanager
    def held(self, stream: torch.Stream) -> Iterator[None]:
        """What is queued on a stream in this context runs after it, and after offload has let the
        memory go that the stream uses."""
        with self.lag.held(stream) if self.holds and self.beside else contextlib.nullcontext():
            yield
            if self.holds and self.handle is not None:
                assert self.saved is not None
                wait_until(self.saved.expired, "offload holds what it has to move")


class Script(torch.nn.Module):
    """A part of its forward pass is on another stream."""

    def __init__(self, streams: Streams) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.streams = streams
        self.first, self.second, self.third = (torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.norm = torch.nn.LayerNorm(HIDDEN)
        self.alive: list[torch.Tensor] = []  # small results, until the streams have met

    def activations(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What another stream uses, which its own operation saves too, and a part of the loss."""
        h = self.first(x)
        loss = h.square().mean()  # saves what the rest is a function of
        act = h.tanh()
        self.streams.saved = StorageReference(act.untyped_storage())
        return act, loss


class MadeOnMain(Script):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        side, main = self.streams.sides[0], self.streams.main
        act, loss = self.activations(x)
        side.wait_stream(main)
        with self.streams.held(side):
            with side:
                one = self.second(act).sum()
            del act
            loss = loss + self.third(x).sin().sum()  # in memory that is free
        main.wait_stream(side)
        self.alive = [one]
        return loss + one


class MadeAside(Script):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        side, main = self.streams.sides[0], self.streams.main
        side.wait_stream(main)
        with side:
            act, loss = self.activations(x)
        main.wait_stream(side)
        with self.streams.held(main):
            one = self.second(act).sum()
            del act
            with side:
                more = self.third(x).sin().sum()
        main.wait_stream(side)
        self.alive = [loss, more]
        return loss + one + more


class TwoAside(Script):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (one_side, other), main = self.streams.sides, self.streams.main
        one_side.wait_stream(main)
        with one_side:
            act, loss = self.activations(x)
        other.wait_stream(one_side)
        with self.streams.held(other):
            with other:
                one = self.second(act).sum()
            del act
            with one_side:
                more = self.third(x).sin().sum()
        main.wait_stream(one_side)
        main.wait_stream(other)
        self.alive = [loss, more, one]
        return loss + one + more


class ViewAside(Script):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        side, main = self.streams.sides[0], self.streams.main
        act, loss = self.activations(x)
        side.wait_stream(main)
        with self.streams.held(side):
            with side:
                one = (act.view(TOKENS // 2, 2, HIDDEN).transpose(0, 1)[:, :, 1:] * 3).square()
                part = F.linear(act[: TOKENS // 4], self.second.weight).sum()
                one = one.sum() + part
            del act, part
            loss = loss + self.third(x).sin().sum()
        main.wait_stream(side)
        self.alive = [one]
        return loss + one


class UsedTwiceAside(Script):
    """The second use is after the writes have begun, and saves what the first one has saved."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        side, main = self.streams.sides[0], self.streams.main
        act, loss = self.activations(x)
        side.wait_stream(main)
        with side:
            one = self.second(act).sum()
        with self.streams.held(side):
            with side:
                two = self.third(act).sum()
            del act
            loss = loss + self.norm(x).sin().sum()
        main.wait_stream(side)
        self.alive = [one, two]
        return loss + one + two


SCRIPTS: list[type[Script]] = [MadeOnMain, MadeAside, TwoAside, ViewAside, UsedTwiceAside]


def noise(seed: int) -> torch.Tensor:
    drawn = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(seed))
    return drawn.to(DEVICE).requires_grad_()


def train(
    kind: type[Script],
    streams: Streams,
    directory: Path | None = None,
    **settings: Any,
) -> list[torch.Tensor]:
    """Losses and gradients of some steps, of which the last holds streams."""
    script, found = kind(streams).to(DEVICE), []
    if settings:
        streams.handle = offload_activations(script, directory, min_bytes=4096, **settings)
    for step in range(STEPS):
        x = noise(step)
        streams.lag.synchronize()
        streams.holds = step == STEPS - 1
        loss = script(x)
        loss.backward()
        found += [loss.detach().cpu(), x.grad.cpu()]
        found += [one.grad.cpu() for one in script.parameters() if one.grad is not None]
        script.zero_grad()
    if streams.handle is not None:
        assert streams.handle.statistics["offloaded_bytes"] > 0
        assert bool(streams.handle.statistics["num_replays"]) is ("replay" not in settings)
        streams.handle.close()
    return found


@pytest.fixture
def handed_over_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where activations are large."""
    monkeypatch.setattr(write_batch, "_ENOUGH_BYTES", 1)


@pytest.mark.parametrize("kind", SCRIPTS)
def test_scripts_are_right_without_offload(kind: type[Script], lag: LagModule) -> None:
    expected = train(kind, Streams(lag, beside=False))
    for seed in range(SEEDS):
        lag.set_delays(*(KERNELS_LATE, COPIES_LATE)[seed % 2], seed=seed)
        assert_equal(train(kind, Streams(lag)), expected)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("kind", SCRIPTS)
def test_what_another_stream_is_still_to_use_is_not_overwritten(
    kind: type[Script],
    settings: dict[str, Any],
    lag: LagModule,
    handed_over_at_once: None,
    tmp_path: Path,
) -> None:
    expected = train(kind, Streams(lag, beside=False))
    assert_equal(train(kind, Streams(lag), tmp_path, **settings), expected)


class SavedAside(Script):
    """Only the side stream saves what the main one has made."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        side, main = self.streams.sides[0], self.streams.main
        act = F.silu(self.first(x))
        side.wait_stream(main)
        with side:
            one = self.second(act)
            self.alive = [one]
        main.wait_stream(side)
        return one.sum() + (self.third(act) * 2).sum()


class LossAside(SavedAside):
    """The loss is on another stream, and backward begins there."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = super().forward(x)
        self.streams.sides[1].wait_stream(self.streams.main)
        with self.streams.sides[1]:
            more = loss * 3
        self.alive += [loss, more]
        return more


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("kind", [SavedAside, LossAside])
def test_backward_on_another_stream_has_what_was_saved(
    kind: type[Script], settings: dict[str, Any], lag: LagModule, tmp_path: Path
) -> None:
    """Autograd alone lets memory go as soon as that stream's last use is queued; it is reused at
    once if the main stream makes a tensor then."""
    expected = train(kind, Streams(lag, beside=False))
    for seed in range(SEEDS):
        lag.set_delays(*(KERNELS_LATE, COPIES_LATE)[seed % 2], seed=seed)
        assert_equal(train(kind, Streams(lag), tmp_path, **settings), expected)


def test_copies_of_parameters_are_made_before_another_stream_computes_with_them(
    lag: LagModule, tmp_path: Path
) -> None:
    """The main stream, which copies them, is held from after the streams have met."""

    def run(**settings: Any) -> list[torch.Tensor]:
        streams, found = Streams(lag), []
        script = Script(streams).to(DEVICE)
        main, side = streams.main, streams.sides[0]
        if settings:
            streams.handle = offload_activations(script, tmp_path, min_bytes=4096, **settings)

        def forward(x: torch.Tensor) -> torch.Tensor:
            normed = script.norm(script.first(x))
            side.wait_stream(main)
            with lag.held(main) if step == STEPS - 1 else contextlib.nullcontext():
                two = script.third(normed).sum()
                with side:
                    one = script.second(normed).sum()
                    del normed
                    found.extend(torch.autograd.grad(one, script.second.weight, retain_graph=True))
            main.wait_stream(side)
            return two

        script.forward = forward
        for step in range(STEPS):
            script(noise(step)).backward()
            lag.synchronize()
        if streams.handle is not None:
            assert streams.handle.statistics["num_replays"] > 0
            streams.handle.close()
        return [one.cpu() for one in found]

    assert_equal(run(mode="ssd"), run())


def test_operands_that_stay_are_kept_for_the_stream_that_computes_with_them(
    lag: LagModule, tmp_path: Path
) -> None:
    def run(*, beside: bool, **settings: Any) -> list[torch.Tensor]:
        streams, found = Streams(lag, beside=beside), []
        script = Script(streams).to(DEVICE)
        main, side = streams.main, streams.sides[0]
        if settings:
            streams.handle = offload_activations(script, min_bytes=4096, **settings)

        def forward(x: torch.Tensor) -> torch.Tensor:
            h = script.first(x)
            twice = h * 2
            loss = h.square().sum()  # it is the last to hold what the other stream computes with
            side.wait_stream(main)
            with side:
                one = script.second(twice).sum()
            main.wait_stream(side)
            script.alive = [one]
            return loss + one

        script.forward = forward
        for step in range(STEPS):
            loss = script(noise(step))
            holds = beside and step == STEPS - 1 and bool(settings)
            with lag.held(side) if holds else contextlib.nullcontext():
                loss.backward()
            lag.synchronize()
            found += [one.grad.cpu() for one in script.parameters() if one.grad is not None]
            script.zero_grad()
        if streams.handle is not None:
            assert streams.handle.statistics["num_replays"] > 0
            streams.handle.close()
        return found

    assert_equal(run(beside=True, mode="keep"), run(beside=False))


def test_a_copy_of_a_weight_is_kept_for_another_stream(lag: LagModule, tmp_path: Path) -> None:
    """Autograd would hold the copy; with offload it is made again in backward."""

    def run(**settings: Any) -> torch.Tensor:
        streams = Streams(lag)
        script = Script(streams).cpu()
        main, side = streams.main, streams.sides[0]
        handle = None
        if settings:
            handle = streams.handle = offload_activations(script, min_bytes=4096, **settings)

        def forward(x: torch.Tensor) -> torch.Tensor:
            x = x * 2
            weight = script.second.weight.to(DEVICE)
            streams.saved = StorageReference(weight.untyped_storage())
            side.wait_stream(main)
            with streams.held(side):
                with side:
                    one = (x @ weight).sum()
                del weight
                more = x.sin().sum()
            main.wait_stream(side)
            script.alive = [one]
            return one + more

        script.forward = forward
        streams.holds = True
        loss = script(noise(0))
        loss.backward()
        if handle is not None:
            assert handle.statistics["recast_bytes"] > 0
            handle.close()
        return loss.detach().cpu()

    assert torch.equal(run(mode="host"), run())


class OverwrittenOnMain(Script):
    """Backward of the side stream comes first, and then the main one overwrites all memory of that
    size that is free."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        side, main = self.streams.sides[0], self.streams.main
        self.has_overwritten: list[torch.Event] = []

        def overwrite(gradient: torch.Tensor) -> None:
            kept = [torch.full_like(gradient, float("nan")) for _ in range(100)]
            self.has_overwritten.append(main.record_event())
            del kept

        act = self.first(x)
        more = self.third(x.detach())
        more.register_hook(overwrite)
        side.wait_stream(main)
        with side:
            one = self.second(act).sum()
        main.wait_stream(side)
        self.alive = [one]
        return more.sin().sum() + one


def test_what_a_layer_saved_beside_is_kept_for_the_stream_of_its_backward(lag: LagModule) -> None:
    """The layer is captured on the main stream, and backward comes before the writes begin.

    That is more than autograd does, which lets memory go as soon as the use is queued.
    """
    expected = train(OverwrittenOnMain, Streams(lag, beside=False))[-7:]
    device = AcceleratorDevice(torch.device(DEVICE), LagPlatform(lag))
    streams, x = Streams(lag), noise(STEPS - 1)
    script = OverwrittenOnMain(streams).to(DEVICE)
    engine = OffloadEngine(OffloadConfig(mode="host", min_bytes=4096), device)
    engine.exclude(script.parameters())
    lag.synchronize()
    batch = write_batch.WriteBatch(engine.writer)
    with engine.step():
        with engine.forward(Scope()) as save_order:
            loss = script(x)
            engine.capture(Scope(layer="0"), outputs=[loss], inputs=[x], batch=batch)
        with engine.backward(save_order), lag.held(streams.sides[0]):
            loss.backward()
            (event,) = script.has_overwritten
            event.synchronize()
        batch.submit()
    assert engine.statistics.forwarded_bytes > 0
    found = [x.grad, *(one.grad for one in script.parameters())]
    assert_equal([one.cpu() for one in found if one is not None], expected)
    engine.close()
