# SPDX-License-Identifier: Apache-2.0
"""Jobs that run other tools of this repository: gpu_check, the device tests, two benches.

`parts.py` lists them. A tool's own JSON is what was found; its exit code decides, except where a
bench only says by it that a promise made for CPUs is not kept.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from check.gpu_day.job import Skip
from check.gpu_day.settings import Settings

Note = Callable[[dict[str, Any]], None]
ROOT = Path(__file__).resolve().parents[3]
_DEVICE_TESTS = (
    "lag/test_accelerator_device.py",
    "lag/test_transfers_on_an_accelerator.py",
    "integrations/test_cuda_graphs.py",
)
_TRIED = 1  # exit code of a bench that ran and whose promise was not kept


def gpu_check(settings: Settings, note: Note, *, section: str) -> dict[str, Any]:
    """A section of `gpu_check.py --quick`.

    Raises:
        Skip: this machine cannot run it.
    """
    if settings.on_gpu and section == "two_gpus" and torch.cuda.device_count() < 2:
        raise Skip("needs two GPUs")
    has_engine = importlib.util.find_spec("transformer_engine") is not None
    if settings.on_gpu and section == "transformer_engine" and not has_engine:
        raise Skip("needs transformer_engine")
    flags = ["--quick", "--directory", str(settings.directory), "--only", section]
    flags += [] if settings.on_gpu else ["--dry-run-cpu"]
    found = _tool("tools/gpu_check.py", flags)
    found_by_section = found["sections"]
    return {
        "sections": {
            name: {"checks": section["checks"], "seconds": section["seconds"]}
            for name, section in found_by_section.items()
        },
        "warnings": {
            name: section["data"]["warnings"]
            for name, section in found_by_section.items()
            if section["data"].get("warnings")
        },
    }


def codec_rates(settings: Settings, note: Note) -> dict[str, Any]:
    """GB of values a second that codecs encode and decode, by gpu_check's section."""
    flags = ["--directory", str(settings.directory), "--only", "codecs"]
    flags += [] if settings.on_gpu else ["--dry-run-cpu"]
    (table,) = _tool("tools/gpu_check.py", flags)["sections"]["codecs"]["tables"]
    return {row[0]: dict(zip(table["headers"][1:], row[1:], strict=True)) for row in table["rows"]}


def device_tests(settings: Settings, note: Note) -> dict[str, Any]:
    """The tests that run on a GPU where there is one.

    In a dry run they are only collected: elsewhere they run on the test accelerator.
    """
    tests = [f"tests/{name}" for name in _DEVICE_TESTS]
    flags = ["-q", "-p", "no:cacheprovider", "-W", "ignore", "--show-capture=no", "--tb=short"]
    command = [sys.executable, "-m", "pytest", *flags, *tests]
    if not settings.on_gpu:
        command.append("--collect-only")
    text = _output(command, allowed=(0,))
    return {"last_line": text.strip().splitlines()[-1]}


def launch_bench(settings: Settings, note: Note) -> dict[str, Any]:
    """`tools/bench/launch.py`: Python microseconds a storage, in all threads."""
    flags = ["--ways", "door", "--mode", "host", "--device", settings.device.type]
    flags += ["--dir", str(settings.directory)]
    if settings.is_tiny:
        flags += ["--steps", "2", "--layers", "2"]
    return _tool("tools/bench/launch.py", flags, allowed=(0, _TRIED))


def loss_bench(settings: Settings, note: Note) -> dict[str, Any]:
    """`tools/bench/loss.py` at Llama-3's vocabulary: eager, chunked, Liger's."""
    flags = ["--ways", "eager,chunked-mean,liger", "--rounds", str(settings.few(5, 1))]
    if settings.is_tiny:
        flags += ["--tokens", "64", "--hidden-size", "32", "--vocab-size", "256"]
    else:
        flags += ["--tokens", "4096", "--hidden-size", "4096", "--vocab-size", "128256"]
        flags += ["--dtype", "bf16"]
    return _tool("tools/bench/loss.py", flags, allowed=(0, _TRIED))


def compile_planner(settings: Settings, note: Note) -> dict[str, Any]:
    """Makes a plan of nothing, so that the planner's simulation is compiled before it is timed."""
    flags = "--num-layers 2 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024"
    flags += " --micro-batch-size 1 --global-batch-size 2 --activation-memory-budget 1GiB"
    command = [sys.executable, "-m", "megatron.offload.cli", "plan", "--hardware", "h100"]
    _output([*command, *flags.split()], allowed=(0,))
    return {}


def _tool(script: str, flags: list[str], allowed: tuple[int, ...] = (0,)) -> dict[str, Any]:
    """What a tool wrote as JSON, and whether it kept what it promises."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        command = [sys.executable, script, *flags, "--json", str(path)]
        _output(command, allowed)
        found: dict[str, Any] = json.loads(path.read_text())
    for name in ("machine", "command"):  # the job `facts/machine` has it; its file is gone
        found.pop(name, None)
    return found


def _output(command: list[str], allowed: tuple[int, ...]) -> str:
    """What a command printed; it has this process's environment, and its group, so it ends with it.

    Raises:
        RuntimeError: its exit code is not among those allowed.
    """
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    print(done.stdout, flush=True)
    if done.returncode not in allowed:
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        raise RuntimeError(
            f"{Path(command[1]).name if command[1][0] != '-' else command[2]} ended with exit code "
            f"{done.returncode}: {' / '.join(lines[-2:])[-200:]}"
        )
    return done.stdout
