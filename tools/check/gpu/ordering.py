# SPDX-License-Identifier: Apache-2.0
"""Section `ordering`: whether every byte comes back while all streams lag behind at random.

Storages of many sizes are saved by an autograd node each, their memory is given up and scribbled
over at once, and in backward, in autograd's own thread, every byte is compared. How often backward
asks before the write has ended, how deep the window is and how many threads there are changes from
pass to pass. A device that forgets to wait shows that the stress would notice.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from check.gpu.delays import CarelessDevice, Delays
from check.gpu.result import Section
from check.gpu.settings import Settings, settle
from megatron.offload import ConfigurationError, OffloadConfig, OffloadEngine, Scope
from megatron.offload.device.device import Device
from megatron.offload.device.open import open_device
from megatron.offload.sizes import MIB, format_size
from megatron.offload.tiers.gds_status import gds_status

_SIZES = (2, 510, 4094, 4096, 4098, 65_538, MIB, 3 * MIB + 18, 8 * MIB, 24 * MIB + 6)
_SCRIBBLE = 0xDB
_REOPEN_S = 4.0  # an engine's window and threads stay for so long

MODES: dict[str, dict[str, Any]] = {
    "ssd direct": {"mode": "ssd", "io": "direct"},
    "ssd buffered": {"mode": "ssd", "io": "buffered"},
    "host": {"mode": "host", "host_budget": 1024 * MIB},
    "tiered": {"mode": "tiered", "host_budget": 64 * MIB},
    "gds": {"mode": "ssd", "io": "gds"},
}


@dataclass
class Tally:
    """What one mode went through, and what came back wrong."""

    passes: int = 0
    storages: int = 0
    compared_bytes: int = 0
    wrong: list[str] = field(default_factory=list)
    offloaded_bytes: int = 0
    forwarded_bytes: int = 0
    rejected_bytes: int = 0


@dataclass(frozen=True)
class Payload:
    """Bytes that a seed determines, so that nobody has to keep them for the comparison."""

    seed: int
    num_bytes: int
    form: str  # of the view that is saved

    def make(self, device: torch.device) -> torch.Tensor:
        """The view of these bytes, the only owner of its storage."""
        generator = torch.Generator(device).manual_seed(self.seed)
        whole = torch.randint(
            0, 256, (self.num_bytes,), dtype=torch.uint8, device=device, generator=generator
        )
        if self.form == "transposed":
            return whole.view(torch.int16).view(2, -1).t() if self.num_bytes % 4 == 0 else whole
        if self.form == "most of it":
            return whole[self.num_bytes // 4 :]
        return whole[self.num_bytes // 2 : self.num_bytes // 2 + 1 + self.num_bytes // 8]

    @classmethod
    def draw(cls, chance: random.Random) -> Payload:
        """A payload of a random size and form."""
        form = chance.choice(("transposed", "most of it", "a small part"))
        return cls(chance.randrange(1 << 30), chance.choice(_SIZES), form)


class _Carry(torch.autograd.Function):
    """Saves a payload on the way forward and hands what comes back to `check`."""

    @staticmethod
    def forward(
        ctx: Any,
        link: torch.Tensor,
        payload: torch.Tensor,
        check: Callable[[torch.Tensor], None],
    ) -> torch.Tensor:
        ctx.save_for_backward(payload)
        ctx.check = check
        return link.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (payload,) = ctx.saved_tensors
        ctx.check(payload)
        return grads[0], None, None


class Stress:
    """An engine that is put under stress, pass by pass."""

    def __init__(self, engine: OffloadEngine, device: Device, seed: int, careless: bool) -> None:
        self._engine = engine
        self._device = device.device
        self._chance = random.Random(seed)
        self._delays = Delays(device, self._chance)
        self._careless = careless  # then every producer is late and every write has to end

    def one_pass(self, tally: Tally) -> None:
        """Two micro-batches, forward and backward in one of the orders that schedules have."""
        chance, engine = self._chance, self._engine
        payloads = [[Payload.draw(chance) for _ in range(chance.randint(6, 14))] for _ in range(2)]
        counts = [
            torch.zeros(len(each), dtype=torch.int64, device=self._device) for each in payloads
        ]
        interleaved = chance.random() < 0.5
        with engine.step():
            waiting = []
            for index in range(2):
                waiting.append(self._forward(payloads[index], counts[index], index, tally))
                if not interleaved:
                    self._backward(*waiting.pop())
            while waiting:
                self._backward(*waiting.pop(0))
        statistics = engine.statistics
        tally.passes += 1
        tally.offloaded_bytes += statistics.offloaded_bytes
        tally.forwarded_bytes += statistics.forwarded_bytes
        tally.rejected_bytes += statistics.rejected_bytes
        for index, each in enumerate(payloads):
            for payload, num_wrong in zip(each, counts[index].tolist(), strict=True):
                if num_wrong:
                    tally.wrong.append(f"{num_wrong} bytes of {payload}")

    def _forward(
        self, payloads: list[Payload], counts: torch.Tensor, index: int, tally: Tally
    ) -> tuple[Any, torch.Tensor]:
        engine, delays = self._engine, self._delays
        link = torch.ones(1, device=self._device, requires_grad=True)
        with engine.forward(Scope(micro_batch=index)) as save_order, engine.saved_tensors_hooks():
            for place, payload in enumerate(payloads):
                delays.compute(at_least=0.5 if self._careless else 0.0)
                saved = payload.make(self._device)
                delays.copies()
                link = _Carry.apply(link, saved, self._comparison(payload, counts[place], tally))
                del saved
                self._scribble(payload.num_bytes)
        return save_order, link

    def _backward(self, save_order: Any, link: torch.Tensor) -> None:
        engine, chance = self._engine, self._chance
        if self._careless or chance.random() < 0.7:
            settle(engine)  # everything reaches its tier, else much is needed before it has
        kind = chance.random()
        if kind < 0.05 and not self._careless:
            return  # the graph is dropped
        with engine.backward(save_order):
            link.sum().backward(retain_graph=kind > 0.9)
        if kind > 0.9:
            with engine.backward(save_order):
                link.sum().backward()

    def _comparison(
        self, payload: Payload, count: torch.Tensor, tally: Tally
    ) -> Callable[[torch.Tensor], None]:
        """What backward calls with the restored view: in autograd's thread, without a wait."""

        def compare(restored: torch.Tensor) -> None:
            tally.storages += 1
            tally.compared_bytes += restored.nbytes
            self._delays.compute()
            expected = payload.make(self._device)
            if restored.shape != expected.shape or restored.stride() != expected.stride():
                count.add_(restored.numel())
                return
            count.add_((restored != expected).sum() * restored.element_size())
            self._delays.copies()

        return compare

    def _scribble(self, num_bytes: int) -> None:
        """Takes memory of that size, very likely the one that was just given up."""
        torch.full((num_bytes,), _SCRIBBLE, dtype=torch.uint8, device=self._device)


def stress(settings: Settings, name: str, seconds: float, careless: bool = False) -> Tally:
    """Passes of one mode until the time is up, with a new engine every few seconds.

    Raises:
        ConfigurationError: the mode cannot work here.
    """
    tally, chance = Tally(), random.Random(f"{settings.seed} {name}")
    end_s = time.monotonic() + seconds
    while not tally.passes or time.monotonic() < end_s:
        config = OffloadConfig(
            directories=(settings.directory,),
            min_bytes=1,
            inflight_bytes=chance.choice((MIB, 16 * MIB, 64 * MIB, 512 * MIB)),
            threads=chance.choice((1, 2, 4, 8)),
            **MODES[name],
        )
        device = CarelessDevice(settings.device) if careless else open_device(settings.device)
        engine = OffloadEngine(config, device)
        try:
            reopen_s = min(time.monotonic() + _REOPEN_S, end_s)
            test = Stress(engine, device, chance.randrange(1 << 30), careless)
            while True:
                test.one_pass(tally)
                if time.monotonic() >= reopen_s:
                    break
        finally:
            engine.close()
            gc.collect()
    return tally


def run(settings: Settings, section: Section) -> None:
    """Runs the section: all modes in turn, then the control."""
    seconds = settings.stress_s / len(MODES)
    rows: list[list[str]] = []
    section.data["modes"] = {}
    for name in MODES:
        if name == "gds":
            status = gds_status(has_gpu=settings.on_gpu)
            if not status.available:
                section.skip(name, str(status))
                continue
        try:
            tally = stress(settings, name, seconds)
        except ConfigurationError as error:
            section.skip(name, str(error))
            continue
        section.data["modes"][name] = asdict(tally)
        rows.append(
            [
                name,
                str(tally.passes),
                str(tally.storages),
                format_size(tally.compared_bytes),
                format_size(tally.offloaded_bytes),
                format_size(tally.forwarded_bytes),
                str(len(tally.wrong)),
            ]
        )
        headers = ["mode", "passes", "storages", "compared", "offloaded", "forwarded"]
        headers.append("wrong")
        section.table("Storages whose every byte was compared", headers, rows)
        wrong = f"; the first: {tally.wrong[0]}" if tally.wrong else ""
        section.check(
            f"{name} gives every byte back",
            not tally.wrong and tally.offloaded_bytes > tally.forwarded_bytes,
            f"{len(tally.wrong)} of {tally.storages} storages wrong in {tally.passes} passes "
            f"(seed {settings.seed}){wrong}",
        )
    _control(settings, section)


def _control(settings: Settings, section: Section) -> None:
    """Without waits the same stress must find wrong bytes, else it proves nothing."""
    name = "the stress notices a missing wait"
    if not settings.on_gpu:
        section.skip(name, "on a CPU nothing is queued that could be missed")
        return
    tally = stress(settings, "host", 1.0, careless=True)
    section.data["without waits"] = asdict(tally)
    section.check(
        name,
        bool(tally.wrong),
        f"with copies that wait for nothing, {len(tally.wrong)} of {tally.storages} storages wrong",
    )
