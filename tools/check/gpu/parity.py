# SPDX-License-Identifier: Apache-2.0
"""Section `parity`: losses and gradients are the same bits with offload off and on.

GPT, a Llama-like GPT, BERT and T5 of megatron-core in bf16 and fp32, dropout on, through `install`
and megatron-core's schedule. Each mode runs two steps of two micro-batches: in the first backward
comes at once, in the second it waits until every write has ended, so that every byte comes back
from its tier. Two runs with offload off are compared first: only if they agree is a difference the
offload's.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from check.gpu.models import BUILDERS, Trainee, seed_everything, start_megatron
from check.gpu.result import Section
from check.gpu.settings import Settings, Size, settle
from megatron.offload import OffloadConfig
from megatron.offload.integration.megatron import install
from megatron.offload.sizes import KIB, MIB, format_size

MODES = ("off", "ssd", "host", "tiered")
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_NUM_MICROBATCHES = 2
_NUM_STEPS = 2


@dataclass
class Outcome:
    """What a run computed, and what it moved on the way."""

    losses: list[torch.Tensor] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    moved: list[dict[str, int | float]] = field(default_factory=list)

    def first_difference(self, other: Outcome) -> str | None:
        """Where two runs differ in any bit; None: nowhere."""
        for step in range(_NUM_STEPS):
            if not same_bits(self.losses[step], other.losses[step]):
                return f"the losses of step {step + 1}"
            for name, gradient in self.gradients[step].items():
                if not same_bits(gradient, other.gradients[step][name]):
                    return f"the gradient of {name} in step {step + 1}"
        return None

    def bytes_of(self, *counters: str) -> int:
        """Sum of these counters over all steps."""
        return int(sum(step.get(counter, 0) for step in self.moved for counter in counters))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Unlike `torch.equal`, NaN equals NaN and 0.0 is not -0.0."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def run_mode(trainee: Trainee, mode: str, settings: Settings) -> Outcome:
    """Two steps of one mode, from the same seeds for every mode."""
    config = OffloadConfig(
        mode=mode,
        directories=(settings.directory,),
        min_bytes=4 * KIB,
        inflight_bytes=256 * MIB,
        host_budget=2048 * MIB if mode == "host" else 64 * MIB,
    )
    outcome = Outcome()
    offload = install(config, [trainee.chunk])
    try:
        for step in range(_NUM_STEPS):
            seed_everything(settings.seed + step)
            settled = step == _NUM_STEPS - 1
            engine = offload.engine if settled else None
            trainee.after_forward = functools.partial(settle, engine)
            batches = trainee.batches(_NUM_MICROBATCHES, settings.seed + step)
            with offload.step():
                losses = trainee.step(batches)
            outcome.losses.append(losses.cpu())
            outcome.gradients.append({name: g.clone() for name, g in trainee.gradients()})
            outcome.moved.append(dict(offload.statistics))
    finally:
        trainee.after_forward = lambda: None
        offload.close()
    return outcome


def check_model(kind: str, dtype: str, settings: Settings, section: Section) -> list[str]:
    """All modes of one model. The row of the table."""
    name = f"{kind} {dtype}"
    size = Size(1024, 2 if settings.quick else 4, 512, 2) if settings.on_gpu else Size(64, 2, 32, 2)
    seed_everything(settings.seed)
    vocab_size = 8192 if settings.on_gpu else 128
    trainee = Trainee(kind, size, _DTYPES[dtype], vocab_size, settings.device)
    reference = run_mode(trainee, "off", settings)
    difference = reference.first_difference(run_mode(trainee, "off", settings))
    found: dict[str, Any] = {"off": {"difference": difference}}
    section.data[name] = {"size": str(size), "parameters": trainee.num_parameters, "modes": found}
    if not section.check(
        f"{name}: off equals off",
        difference is None,
        "two runs without offload are the same bits"
        if difference is None
        else f"two runs without offload differ in {difference}: parity cannot be judged",
    ):
        return [name, str(size), "not repeatable", *[""] * 4]
    words, offloaded, read, forwarded = [], 0, 0, 0
    for mode in MODES[1:]:
        outcome = run_mode(trainee, mode, settings)
        difference = outcome.first_difference(reference)
        moved = outcome.bytes_of("offloaded_bytes")
        back = outcome.bytes_of("read_bytes", "host_read_bytes")
        found[mode] = {"difference": difference, "steps": outcome.moved}
        words.append("identical" if difference is None else "DIFFERENT")
        offloaded, read = offloaded + moved, read + back
        forwarded += outcome.bytes_of("forwarded_bytes")
        where = "losses and gradients are the same bits" if difference is None else difference
        section.check(
            f"{name}: {mode}",
            difference is None and back > 0,
            f"{where}; {format_size(moved)} offloaded, {format_size(back)} read back",
        )
    return [
        name,
        str(size),
        *words,
        format_size(offloaded),
        format_size(read),
        format_size(forwarded),
    ]


def run(settings: Settings, section: Section) -> None:
    """Runs the section: all models in turn."""
    try:
        start_megatron(settings.device, settings.seed)
    except ImportError as error:
        section.check("megatron-core", False, f"it cannot be imported: {error}")
        return
    dtypes = ["bf16"] if settings.quick else list(_DTYPES)
    cases = [(kind, dtype) for dtype in dtypes for kind in BUILDERS]
    headers = ["model", "hidden x layers x seq x batch", *MODES[1:]]
    headers += ["offloaded", "read back", "forwarded"]
    rows: list[list[str]] = []
    with deterministic():
        for kind, dtype in cases:
            try:
                rows.append(check_model(kind, dtype, settings, section))
            except Exception as error:  # the next model may work
                section.check(f"{kind} {dtype}", False, f"{type(error).__name__}: {error}")
            gc.collect()
            if settings.on_gpu:
                torch.cuda.empty_cache()
            title = "Losses and gradients against offload off, dropout 0.1"
            section.table(title, headers, rows)


@contextlib.contextmanager
def deterministic(*, strict: bool = True) -> Iterator[None]:
    """Torch's deterministic algorithms for as long as it lasts: else `off` need not equal itself.

    They also fill fresh memory with a pattern, which shows whoever reads it too early.

    Args:
        strict: an operation that has no deterministic algorithm is an error. Else `off` is left to
            show whether it repeats itself.
    """
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=not strict)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
