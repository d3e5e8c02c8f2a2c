# SPDX-License-Identifier: Apache-2.0
"""Runs of Megatron-LM's own scripts, as they are in a checkout: `run_script`, `Run`.

The checkout is where MEGATRON_LM_PATH says; without it the tests skip (`needs_a_checkout`).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron.offload.machine.allocator import allocator_environment
from tests.support.processes import ROOT

CHECKOUT = Path(os.environ.get("MEGATRON_LM_PATH", ""))

needs_a_checkout = [
    pytest.mark.skipif(
        "MEGATRON_LM_PATH" not in os.environ,
        reason="MEGATRON_LM_PATH names no checkout of Megatron-LM to run",
    ),
    pytest.mark.timeout(1000),  # four runs
]

# Every tensor of each checkpoint, in one digest: weights, optimizer, random generators.
DIGESTS = """
import hashlib, pathlib, sys, torch
def leaves(value, path):
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            if not str(key).startswith(("args", "rerun")):
                yield from leaves(value[key], f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}/{index}")
for directory in map(pathlib.Path, sys.argv[1:]):
    digest, number = hashlib.sha256(), 0
    for file in sorted(directory.glob("*/*.pt")):
        state = torch.load(file, map_location="cpu", weights_only=False)
        for path, tensor in leaves(state, str(file.relative_to(directory))):
            digest.update(path.encode())
            digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
            number += 1
    assert number > 50, (directory, number)
    print(directory.name, digest.hexdigest())
"""


@dataclass(frozen=True)
class Run:
    """What a script printed, and where its checkpoints are."""

    output: str
    save: Path

    def losses(self) -> list[str]:
        """Of the log lines and of the evaluations, in order, with all digits that are shown."""
        return re.findall(r"lm loss(?: value)?: (\S+)", self.output)

    def peak_mib(self) -> float:
        """The largest peak of activations after the first step, over all ranks."""
        peaks = re.findall(r"peak activations: ([\d.]+) MiB", self.output)
        return max(map(float, peaks[1:]))

    def offloaded(self) -> list[str]:
        """What the log lines say of it."""
        return re.findall(r"offloaded: ([\d.]+ \S+) \|", self.output)

    def checkpoints(self) -> dict[str, str]:
        """Digests of all tensors of each checkpoint, by its directory's name."""
        directories = sorted(map(str, self.save.glob("iter_*")))
        loaded = subprocess.run(
            [sys.executable, "-c", DIGESTS, *directories],
            env={**environment(), "PYTHONPATH": f"{CHECKOUT}{os.pathsep}{search_path()}"},
            capture_output=True,
            text=True,
        )
        assert loaded.returncode == 0, loaded.stderr
        return dict(line.split() for line in loaded.stdout.splitlines())


def search_path() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def environment() -> dict[str, str]:
    """What a run starts with. Its Makefile asks python3 and python3-config on PATH."""
    programs = [Path(sys.executable).parent, Path(sys.base_prefix) / "bin"]
    return {
        **os.environ,
        **allocator_environment(),
        "PATH": os.pathsep.join([*map(str, programs), os.environ["PATH"]]),
        "PYTHONPATH": search_path(),
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }


def run_script(
    script: Path, num_ranks: int, directory: Path, *flags: str, succeeds: bool = True
) -> Run:
    """Runs a script of the checkout through the launcher, to its end."""
    beside = [] if script.parent == CHECKOUT else [str(CHECKOUT)]  # else found without PYTHONPATH
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    ranks = ["--nproc-per-node", str(num_ranks), "-m", "megatron.offload.launch"]
    result = subprocess.run(
        [*launcher, *ranks, str(script), *flags],
        cwd=directory,
        env={**environment(), "PYTHONPATH": os.pathsep.join([search_path(), *beside])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert (result.returncode == 0) == succeeds, result.stdout[-10000:]
    return Run(result.stdout, directory)


def offload(mode: str, directory: Path) -> list[str]:
    """The flags for it."""
    flags = f"--activation-offload {mode} --activation-offload-dir {directory}"
    bounds = "--activation-offload-min-bytes 64KiB --activation-offload-inflight 8MiB"
    goal = ""
    if mode == "auto":  # as little memory as it can, and where its plan goes
        goal = "--activation-offload-max-slowdown 1 --activation-offload-plan "
        goal += str(directory / "plan.json")
    return [*flags.split(), *bounds.split(), *goal.split()]
