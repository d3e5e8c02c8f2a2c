# SPDX-License-Identifier: Apache-2.0
"""Random trainings have the same bits with what they keep on tiers, or end with a refusal.

A seed gives a model, an optimizer, settings of offload and events of a training loop: passes,
steps, checkpoints, errors, hooks, changes of the model (`tests/support/drawn_trainings.py`). After
each event losses, gradients, buffers and random numbers are compared, and after some of them
parameters and states. RANDOM_TRAININGS=5000 runs that many, other ones every time; else the suite
runs the same ones.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.drawn_trainings import difference, draw_program, run, smallest
from tests.support.random_trainings import Program
from tests.support.waiting import wait_until
from tests.support.watchdog import Watchdog

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch, on odd trainings

ASKED = os.environ.get("RANDOM_TRAININGS")
NUM_TOGETHER = 20
NUM_QUICK, NUM_SLOW = 120, 200
FIRST = random.randrange(10**9) if ASKED else 0

# Which limits of the documentation a program may meet: docs/limits.md names the pages.
REFUSALS = (
    "those of LBFGS cannot be offloaded",
    "a layer-major step needs models that run their layers in one order",
    "a backward pass with create_graph=True",
    "no plan fits into",
    "the first steps could not be measured",
    r"had type torch\.\w+ when it was offloaded",
    "of a layer that is to be recomputed was changed in place",
    "runs a transform of torch.func",
    "checkpoints with use_reentrant=True",
    "is used in it beside",  # layer-major: what an earlier unit has made, as an attribute
)


@pytest.fixture(autouse=True)
def quiet(one_compute_thread: None) -> Iterator[None]:
    """Of warnings that our log gives of them."""
    log = logging.getLogger("megatron.offload")
    log.setLevel(logging.ERROR)
    yield
    log.setLevel(logging.NOTSET)


@pytest.fixture
def patient() -> Iterator[Watchdog]:
    """For what `auto` solves in a process of its own."""
    one = Watchdog(hang_s=300.0)
    yield one
    one.close()


def open_files(directory: Path) -> int:
    """Files in a directory that this process has open, with names and without."""
    links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
    return sum(
        str(link.resolve()).startswith(str(directory)) for link in links if link.is_symlink()
    )


def fault_of(program: Program, directory: Path) -> str | None:
    """What is wrong with a program's offload, in words; None: nothing is."""
    plain, ours = run(program, None), run(program, directory)
    found, refusal = difference(ours, plain, program), str(ours.refusal or "")
    if found is None and refusal and not any(re.search(one, refusal) for one in REFUSALS):
        found = f"refused: {refusal}"
    if found is None and not refusal and len(ours.records) != len(plain.records):
        found = "it has ended early"
    del plain, ours
    if found is None and open_files(directory):
        gc.collect()
        wait_until(lambda: not open_files(directory), f"files are left open by {program}")
    return found or ("files are left" if os.listdir(directory) else None)


def _first_seeds() -> Iterator[object]:
    num = int(ASKED or NUM_SLOW)
    for first in range(0, num, NUM_TOGETHER):
        marks = [] if ASKED or first < NUM_QUICK else [pytest.mark.slow]
        yield pytest.param(FIRST + first, marks=marks)


@pytest.mark.parametrize("first", list(_first_seeds()))
def test_all_bits_are_the_same(first: int, tmp_path: Path, patient: Watchdog) -> None:
    for seed in range(first, first + NUM_TOGETHER):
        program = draw_program(seed)
        with patient.watch(str(program)):
            fault = fault_of(program, tmp_path)
        if fault is not None:
            small = smallest(program, lambda one: bool(fault_of(one, tmp_path)), within_s=30)
            pytest.fail(f"seed {seed}: {fault}\nsmaller: {small}\n{fault_of(small, tmp_path)}")
