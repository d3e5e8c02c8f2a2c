# SPDX-License-Identifier: Apache-2.0
"""Runs a script in several processes that train together over gloo: `run_ranks`. Never hangs.

For tests of frameworks: processes of their own, which meet through a file. They come from a fork
server (`fork_server.py`), which has imported the frameworks. What the script prints last on rank 0
is a line of JSON, which the test gets.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.offload.integration import gloo
from tests.support.fork_server import ForkedProcess, ForkServer
from tests.support.processes import ROOT

_PATIENCE_S = 280.0
_NOTICE_S = 5.0  # that the other ranks get to notice that one has failed
_ALIKE = {
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
# What scripts import; deepspeed is not among them, since others ask whether it was imported.
_PRELOADED = (
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.offload",
    "transformers.models.llama.modeling_llama",
)

if "RANKS_MEET_AT" in os.environ:  # one of the ranks
    atexit.register(gloo.wait_until_idle)


def init_process_group() -> None:
    """In a script: joins the other ranks."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{os.environ['RANKS_MEET_AT']}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )


def print_results(results: Any) -> None:
    """In a script: prints what all ranks found, a list in their order."""
    everybodys: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybodys, results)
    if dist.get_rank() == 0:
        print(json.dumps(everybodys))


def run_ranks(
    script: Path,
    folder: Path,
    *arguments: str,
    num_ranks: int = 2,
    patience_s: float = _PATIENCE_S,
    fresh: bool = False,
) -> Any:
    """Runs a script on each rank, and gives what the first one prints last.

    Args:
        script: calls `init_process_group`, or finds what torchrun would have set.
        folder: of its own, for what the processes write.
        arguments: of the script.
        num_ranks: processes, all on this machine.
        patience_s: how long they may take.
        fresh: in new interpreters, which have imported nothing.
    """
    logs = [folder / f"rank{rank}.log" for rank in range(num_ranks)]
    world = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    shared = {**os.environ, **_ALIKE, **world, "RANKS_MEET_AT": str(folder / "meet")}
    processes: list[ForkedProcess | subprocess.Popen[bytes]] = []
    for rank, log in enumerate(logs):
        argv = [str(script), *arguments]
        environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with log.open("w") as output:
            if not fresh and Path.cwd() == ROOT and _server().suits(environment):
                processes.append(_server().start(argv, environment, log, log))
                continue
            processes.append(
                subprocess.Popen(
                    [sys.executable, *argv],
                    cwd=ROOT,
                    env=environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        _wait(processes, patience_s)
        still_running = [rank for rank, one in enumerate(processes) if one.poll() is None]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    codes = [process.returncode for process in processes]
    if any(codes):
        failed = [rank for rank, code in enumerate(codes) if code and rank not in still_running]
        shown = (failed or still_running)[0]
        what = f"ranks ended with {codes}"
        if not failed:
            what = f"ranks {still_running} had not ended after {patience_s:g} s and were killed"
        lines = logs[shown].read_text(errors="replace").splitlines()[-40:]
        said = next((line for line in reversed(lines) if line.strip()), "")
        tail = "\n".join(lines)
        # A summary of many tests shows the first line alone.
        raise AssertionError(f"{what}: {said}; the end of rank {shown}:\n{tail}")
    return json.loads(logs[0].read_text().splitlines()[-1])


@functools.cache
def _server() -> ForkServer:
    """Of all ranks of this pytest session that import what others do."""
    found = [one for one in _PRELOADED if importlib.util.find_spec(one.partition(".")[0])]
    # Beside the scripts; in the folder above, tests/megatron would become part of that namespace.
    beside = ROOT / "tests" / "integrations" / "sharded.py"
    started = ForkServer(beside, found, {**os.environ, **_ALIKE})
    atexit.register(started.close)
    return started


def _wait(processes: list[ForkedProcess | subprocess.Popen[bytes]], patience_s: float) -> None:
    """Until all have ended, one has failed, or too much time has passed."""
    deadline_s = time.monotonic() + patience_s
    while None in (codes := [process.poll() for process in processes]):
        if any(codes):
            deadline_s = min(deadline_s, time.monotonic() + _NOTICE_S)
        if time.monotonic() > deadline_s:
            return
        time.sleep(0.05)
