# SPDX-License-Identifier: Apache-2.0
"""Runs the example trainer in several processes over gloo, and never hangs.

One process per rank, a free port, a deadline. When a rank fails, the others get a moment to notice
and are then killed; the outcome holds every exit code and what the ranks wrote. Ranks come from the
fork server (`fork_server.py`), or are new interpreters (`fresh`) where a test is about starting the
trainer, and where the environment has to be there before Python starts.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.support.fork_server import ForkedProcess, ForkServer
from tests.support.processes import ROOT, our_lines

SCRIPTS = {name: ROOT / "examples" / f"pretrain_{name}.py" for name in ("gpt", "bert", "t5")}
SCRIPTS["settled"] = ROOT / "tests" / "megatron" / "settled_ranks.py"

# Small enough that starting Python is the longest part of a test.
TINY_LAYERS = (
    "--hidden-size 64 --num-layers 4 --num-attention-heads 4 --seq-length 32 "
    "--micro-batch-size 1 --global-batch-size 4 --lr 1e-2 --eval-iters 0 --cpu-threads 1"
)
TINY = f"{TINY_LAYERS} --vocab-size 256 --mock-data"

_POLL_S = 0.05
_GRACE_S = 10.0  # a rank on a busy machine may come to the same error that much later


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    exit_codes: list[int]
    output: str  # of all ranks, `our_lines`
    errors: str  # standard error of rank 0, `our_lines`
    metrics: list[dict[str, Any]]

    def values(self, name: str) -> list[Any]:
        """One field of metrics.jsonl over all steps."""
        return [record[name] for record in self.metrics]

    @property
    def model(self) -> str:
        """Digest of the final weights."""
        return str(self.metrics[-1]["model"])


# Set in this process by an import of megatron-core and by the use of a tokenizer, at one test or
# another: they would tell the fork server's environment from ours.
_OF_IMPORTS = ("TORCHINDUCTOR_CACHE_DIR", "TOKENIZERS_PARALLELISM")


class Run:
    """A running trainer; leaving the context kills whatever is left of it.

    Args:
        lines: Command line of the script; each is split at spaces, later flags override.
        model: Which script, a key of `SCRIPTS`.
        world_size: Number of ranks.
        timeout_s: All ranks are killed after this time.
        environment: Added to the environment of every rank.
        of_rank: What is added to that of each.
        fresh: Start a new interpreter per rank even where forking would do.
    """

    def __init__(
        self,
        *lines: str,
        model: str = "gpt",
        world_size: int = 1,
        timeout_s: float = 150.0,
        environment: dict[str, str] | None = None,
        of_rank: Callable[[int], dict[str, str]] = lambda rank: {},
        fresh: bool = False,
    ) -> None:
        flags = [flag for line in lines for flag in shlex.split(line)]
        self._script = SCRIPTS[model]
        self._directory = tempfile.TemporaryDirectory(prefix="trainer-test-")
        self.metrics_path = Path(self._directory.name) / "metrics.jsonl"
        if "--metrics-file" in flags:
            self.metrics_path = Path(flags[flags.index("--metrics-file") + 1])
        else:
            flags = [*flags, "--metrics-file", str(self.metrics_path)]
        if "--mock-data" in flags and "--data-cache-path" not in flags:
            flags = [*flags, "--data-cache-path", _mock_indices().name]
        self._deadline = time.monotonic() + timeout_s
        ranks = {
            "MASTER_PORT": str(_free_port()),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            **(environment or {}),
        }
        self.processes = [
            self._start(
                flags,
                rank,
                {"RANK": str(rank), "LOCAL_RANK": str(rank), **ranks, **of_rank(rank)},
                fresh,
            )
            for rank in range(world_size)
        ]

    def _start(
        self, flags: list[str], rank: int, added: dict[str, str], fresh: bool
    ) -> ForkedProcess | subprocess.Popen[bytes]:
        argv, environment = [str(self._script), *flags], rank_environment(added)
        with (
            self._path(rank, "out").open("wb") as output,
            self._path(rank, "err").open("wb") as errors,
        ):
            if not fresh and server().suits(environment):
                return server().start(argv, environment, Path(output.name), Path(errors.name))
            return subprocess.Popen(
                [sys.executable, *argv], env=environment, stdout=output, stderr=errors
            )

    def _path(self, rank: int, stream: str) -> Path:
        return Path(self._directory.name) / f"rank{rank}.{stream}"

    def wait(self) -> Outcome:
        """Waits for all ranks.

        Raises:
            TimeoutError: The deadline passed; all ranks are dead and the message has their output.
        """
        failed_at: float | None = None
        while any(process.poll() is None for process in self.processes):
            now = time.monotonic()
            if failed_at is None and any(process.poll() for process in self.processes):
                failed_at = now
            if failed_at is not None and now > failed_at + _GRACE_S:
                self.kill()
            if now > self._deadline:
                self.kill()
                raise TimeoutError(f"the trainer did not end in time:\n{self._output()}")
            time.sleep(_POLL_S)
        return Outcome(
            exit_codes=[process.returncode for process in self.processes],
            output=self._output(),
            errors=our_lines(self._path(0, "err").read_text()),
            metrics=self.metrics(),
        )

    def metrics(self) -> list[dict[str, Any]]:
        """What metrics.jsonl holds by now."""
        if not self.metrics_path.is_file():
            return []
        lines = self.metrics_path.read_text().split("\n")
        return [json.loads(line) for line in lines[:-1]]

    def wait_for_step(self, step: int) -> None:
        """Waits until a step is in metrics.jsonl."""
        while len(self.metrics()) < step:
            if time.monotonic() > self._deadline:
                raise TimeoutError(f"step {step} did not come in time:\n{self._output()}")
            if any(process.poll() is not None for process in self.processes):
                raise RuntimeError(f"the trainer ended before step {step}:\n{self._output()}")
            time.sleep(_POLL_S)

    def kill(self) -> None:
        """Kills all ranks that still run."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        for process in self.processes:
            process.wait()

    def _output(self) -> str:
        parts = []
        for rank in range(len(self.processes)):
            for stream in ("out", "err"):
                text = our_lines(self._path(rank, stream).read_text(errors="replace"))
                parts.append(f"--- rank {rank} {stream}\n{text}")
        return "\n".join(parts)

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        self._directory.cleanup()


def run_trainer(
    *lines: str,
    model: str = "gpt",
    world_size: int = 1,
    timeout_s: float = 150.0,
    environment: dict[str, str] | None = None,
    fresh: bool = False,
) -> Outcome:
    """Runs the trainer to its end, whatever that is; see `Run`."""
    with Run(
        *lines,
        model=model,
        world_size=world_size,
        timeout_s=timeout_s,
        environment=environment,
        fresh=fresh,
    ) as run:
        return run.wait()


def train(
    *lines: str,
    tiny: str = TINY,
    model: str = "gpt",
    world_size: int = 1,
    timeout_s: float = 150.0,
    fresh: bool = False,
) -> Outcome:
    """Trains a tiny model; later flags override. Fails unless every rank ends well."""
    outcome = run_trainer(
        tiny, *lines, model=model, world_size=world_size, timeout_s=timeout_s, fresh=fresh
    )
    assert outcome.exit_codes == [0] * world_size, outcome.output
    return outcome


def train_once(*lines: str, world_size: int = 1) -> Outcome:
    """Like `train`, but the same flags train only once a session: what others compare with."""
    return _trained_once(tuple(flag for line in lines for flag in shlex.split(line)), world_size)


@functools.cache
def _trained_once(flags: tuple[str, ...], world_size: int) -> Outcome:
    return train(shlex.join(flags), world_size=world_size)


def assert_same_bits(one: Outcome, other: Outcome, num_steps: int) -> None:
    """Every loss and gradient norm of so many steps, and the final weights."""
    assert len(other.metrics) == num_steps
    for name in ("step", "loss", "grad_norm", "losses", "model"):
        assert [record.get(name) for record in one.metrics] == [
            record.get(name) for record in other.metrics
        ], name


def assert_auto_changes_no_bit(flags: str, directory: Path) -> None:
    """A training with these flags, with a plan in it and without."""
    without = train_once("--train-iters 8", flags)
    planned = train(
        "--train-iters 8",
        flags,
        f"--activation-offload auto --activation-offload-dir {directory}",
        "--activation-offload-min-bytes 1KiB --activation-offload-max-slowdown 1",
    )
    assert_same_bits(planned, without, 8)
    assert planned.values("offload")[-1]["predicted_peak_bytes"] > 0


def nothing_leaks(steps: list[dict[str, Any]]) -> bool:
    """Whether tiers were empty after each step, but for writes that their use has overtaken.

    Such a write may still run when the step ends. It is gone in the next, a leak would stay. It
    takes no more room than what was forwarded: the least storage, of a KiB, has a block of four.
    """
    return min(step["tier_used_bytes"] for step in steps) == 0 and all(
        step["tier_used_bytes"] <= 4 * step["forwarded_bytes"] for step in steps
    )


def rank_environment(added: dict[str, str]) -> dict[str, str]:
    """What a rank starts with: this process's, no GPU, loopback, this checkout's modules."""
    search = [added.get("PYTHONPATH"), str(ROOT), os.environ.get("PYTHONPATH")]
    inherited = {name: os.environ[name] for name in os.environ if name not in _OF_IMPORTS}
    return {
        **inherited,
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1",
        "TORCHDYNAMO_DISABLE": "1",  # as the trainer has it; it is read during the imports
        **added,
        "PYTHONPATH": os.pathsep.join(path for path in search if path),
    }


@functools.cache
def server() -> ForkServer:
    """The one fork server of this pytest session; it starts with the first launch."""
    modules = ("trainer.gpt", "trainer.bert", "trainer.t5", "trainer.training")
    started = ForkServer(SCRIPTS["gpt"], modules, rank_environment({}))
    atexit.register(started.close)
    return started


@functools.cache
def _mock_indices() -> tempfile.TemporaryDirectory[str]:
    """Where core keeps in which order it draws the samples of its mock data.

    There are millions of short ones, which every rank would put in that same order again.
    """
    return tempfile.TemporaryDirectory(prefix="mock-data-")


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])
