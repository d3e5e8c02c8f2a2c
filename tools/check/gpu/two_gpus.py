# SPDX-License-Identifier: Apache-2.0
"""Section `two_gpus`: no GPU is taken for another, where a machine has several.

The stress of the section `ordering` runs on two GPUs in turn, from one process, while both engines
are open: whoever forgets which GPU he works for reads, writes or waits on the wrong one. Before
that, work on the last GPU alone, as of a rank, must not touch any other: a thread that takes the
current device for granted makes a context on the first one, which costs some 0.5 GB there.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from check.gpu.ordering import MODES, Stress, Tally, stress
from check.gpu.result import Section
from check.gpu.settings import Settings
from megatron.offload import ConfigurationError, OffloadConfig, OffloadEngine
from megatron.offload.device.open import open_device
from megatron.offload.sizes import MIB

_MODES = ("ssd direct", "host")
_NUM_PASSES = 20  # of each engine


def run(settings: Settings, section: Section) -> None:
    """Runs the section: work on one GPU, then on two in turn."""
    num_gpus = torch.cuda.device_count() if settings.on_gpu else 0
    if num_gpus < 2:
        section.skip("engines of two GPUs", f"needs two GPUs, there are {num_gpus}")
        return
    for mode in MODES:
        name = f"{mode}: no other GPU is touched"
        try:
            stress(settings, mode, 1.0)
        except ConfigurationError as error:
            section.skip(name, str(error))
            continue
        others = _other_contexts(settings.device)
        section.check(
            name,
            not others,
            f"a rank on {settings.device} has a context on {others or 'no other GPU'}",
        )
    neighbour = torch.device("cuda", ((settings.device.index or 0) + 1) % num_gpus)
    for mode in _MODES:
        tallies = in_turn([settings.device, neighbour], mode, settings.directory, settings.seed)
        section.data[mode] = [asdict(tally) for tally in tallies]
        wrong = [one for tally in tallies for one in tally.wrong]
        section.check(
            f"{mode} on two GPUs in turn",
            not wrong and all(tally.offloaded_bytes for tally in tallies),
            f"{len(wrong)} of {sum(tally.storages for tally in tallies)} storages wrong",
        )


def in_turn(devices: Sequence[torch.device], mode: str, directory: Path, seed: int) -> list[Tally]:
    """Passes of a mode with an engine for each device, all open at the same time.

    Args:
        devices: that the passes go to in turn.
        mode: a key of `ordering.MODES`.
        directory: on the SSD.
        seed: of payloads and delays.

    Returns:
        What each device's engine went through.
    """
    config = OffloadConfig(
        directories=(directory,), min_bytes=1, inflight_bytes=64 * MIB, **MODES[mode]
    )
    with contextlib.ExitStack() as opened:
        stresses = []
        for number, torch_device in enumerate(devices):
            device = open_device(torch_device)
            engine = OffloadEngine(config, device)
            opened.callback(engine.close)
            chance = random.Random(f"{seed} {mode} {number}")
            stresses.append(Stress(engine, device, chance.randrange(1 << 30), careless=False))
        tallies = [Tally() for _ in devices]
        for _ in range(_NUM_PASSES):
            for one, tally in zip(stresses, tallies, strict=True):
                one.one_pass(tally)
    return tallies


def _other_contexts(device: torch.device) -> list[int]:
    """The GPUs that this process has a context on, but for its own."""
    has_context: Callable[[int], bool] = getattr(torch._C, "_cuda_hasPrimaryContext")  # noqa: B009
    return [n for n in range(torch.cuda.device_count()) if n != device.index and has_context(n)]
