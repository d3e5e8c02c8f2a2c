# SPDX-License-Identifier: Apache-2.0
"""Starts the trainer to measure it: `Trainer`, and the flags that such trainings share.

Each training is a process of its own, so that trainings share no memory and no allocator. It is
read through its metrics.jsonl while it goes on, and ended as soon as it has shown enough.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.offload.commands.training_runs.run import RunError
from megatron.offload.commands.training_runs.start import LAUNCHER, Start
from megatron.offload.documents import from_json, reading
from megatron.offload.machine.allocator import allocator_environment
from megatron.offload.machine.kernel_text import kernel_text
from megatron.offload.machine.memory_limit import memory_limit
from megatron.offload.sizes import format_size

# The checkout that this file is part of; the trainer is no part of the installed package.
CHECKOUT = Path(__file__).resolve().parents[4]
TRAINER = CHECKOUT / "examples" / "pretrain_gpt.py"
# The folder of `runs/`; where the package is installed from a wheel there is no checkout.
OUTPUT = CHECKOUT if TRAINER.is_file() else Path()

_EVERY_LAYER_AGAIN = (
    *("--recompute-granularity", "full"),
    *("--recompute-method", "uniform"),
    *("--recompute-num-layers", "1"),
)
PLACEMENT_FLAGS: dict[str, list[str]] = {
    "off": ["--activation-offload", "off"],
    "recompute": ["--activation-offload", "off", *_EVERY_LAYER_AGAIN],
    # The same, with the layers' inputs on the SSD.
    "recompute-ssd": ["--activation-offload", "ssd", *_EVERY_LAYER_AGAIN],
    "selective": ["--activation-offload", "off", "--recompute-granularity", "selective"],
    "ssd": ["--activation-offload", "ssd"],
    "ssd-no-replay": ["--activation-offload", "ssd", "--activation-replay", "off"],
    # The same as `ssd`, and a loss that is not bit-identical.
    "ssd-chunked": ["--activation-offload", "ssd", "--activation-chunked-loss", "auto"],
    "host": ["--activation-offload", "host"],
    "tiered": ["--activation-offload", "tiered"],
    # Everything is hooked and nothing moves: what the hooks cost.
    "keep": [
        *("--activation-offload", "ssd"),
        *("--activation-offload-min-bytes", "1TiB"),
        *("--activation-offload-inflight", "1TiB"),
    ],
}
# Their results are those of the others within rounding, and bit for bit those of each other.
WITHIN_ROUNDING = ("ssd-chunked",)
# Without offload: on a CPU they run with either allocator.
WITHOUT_OFFLOAD = ("off", "recompute", "selective")

METRICS = "metrics.jsonl"  # of a run, in its folder

_POLL_S = 0.1
_TAIL_LINES = 15
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

Steps = list[dict[str, Any]]


def allocators_of(placement: str, *, both: bool) -> list[str]:
    """The allocators that a placement is measured with.

    Args:
        placement: key of `PLACEMENT_FLAGS`, or another one with offload.
        both: there are two to choose from: on a CPU. Offload runs with its own there.
    """
    if not both:
        return ["default"]
    return ["default", "offload"] if placement in WITHOUT_OFFLOAD else ["offload"]


def read_metrics(path: Path) -> Steps:
    """Reads the lines of a metrics.jsonl, but for a last one that is still being written."""
    if not path.exists():
        return []
    whole = path.read_bytes().split(b"\n")[:-1]
    advice = "the training writes what is no metrics.jsonl there; give another folder"
    steps: Steps = []
    for number, line in enumerate(whole, 1):
        with reading(f"{path} cannot be read: line {number}", advice):
            steps.append(dict(from_json(line)))
    return steps


@dataclass(frozen=True)
class Trainer:
    """Starts a training again and again, with other flags each time.

    Attributes:
        script: of the trainer.
        flags: that all trainings share.
        offload_dir: for activations.
        launch: how it is started; figures are those of the first rank.
        patience_s: without a step for so long, a training has failed.
    """

    script: Path
    flags: Sequence[str]
    offload_dir: Path
    launch: Start = field(default_factory=Start)
    patience_s: float = 600.0

    def train(
        self,
        name: str,
        flags: Sequence[str],
        allocator: str,
        folder: Path,
        *,
        on_steps: Callable[[int], object] = lambda number: None,
        enough: Callable[[Steps], bool] = lambda steps: False,
    ) -> Steps:
        """Runs one training to its end, or until it has shown enough; its steps.

        Args:
            name: for people.
            flags: beside those that all share.
            allocator: see `Variant`.
            folder: made for its output.
            on_steps: is told how many steps there are, now and then.
            enough: whether the training may end before its last step.

        Raises:
            RunError: it failed, or did nothing for too long.
        """
        with self.start(name, flags, allocator, folder) as training:
            training.run(on_steps, enough)
        return training.steps

    def start(
        self,
        name: str,
        flags: Sequence[str],
        allocator: str,
        folder: Path,
        *,
        in_turns: bool = False,
    ) -> Training:
        """Starts a training; see `train`.

        Args:
            in_turns: it takes a step only when `Training.step` says so.
        """
        folder.mkdir(parents=True)
        arguments, variables = self.how_to_run(flags, folder / METRICS, in_turns=in_turns)
        command = self.launch.command(self.script, arguments)
        with (folder / "output.log").open("wb") as output:
            output.write((shlex.join(command) + "\n").encode())
            output.flush()
            process = subprocess.Popen(
                command,
                env=_environment(allocator) | self.launch.environment() | variables,
                stdin=subprocess.PIPE if in_turns else subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=_die_with_parent if in_turns else None,
            )
        return Training(name, process, folder, self.patience_s)

    def how_to_run(
        self, flags: Sequence[str], metrics: Path, *, in_turns: bool
    ) -> tuple[list[str], dict[str, str]]:
        """The arguments of the script for one training, and the variables of its environment."""
        arguments = [
            *self.flags,
            *flags,
            *("--activation-offload-dir", str(self.offload_dir)),
            *("--metrics-file", str(metrics)),
            *(["--wait-for-input"] if in_turns else []),
        ]
        return arguments, {}


class CommandTrainer(Trainer):
    """Starts the command that a user trains with; the directories in it are its own."""

    def how_to_run(
        self, flags: Sequence[str], metrics: Path, *, in_turns: bool
    ) -> tuple[list[str], dict[str, str]]:
        """See `Trainer`."""
        turns = ["--wait-for-input"] if in_turns else []
        return [*self.flags, *flags, "--metrics-file", str(metrics), *turns], {}


class Training:
    """A training that a `Trainer` has started; as a context, it is ended with it."""

    def __init__(
        self, name: str, process: subprocess.Popen[bytes], folder: Path, patience_s: float
    ) -> None:
        self.steps: Steps = []  # taken so far
        self._name = name
        self._process = process
        self._metrics, self._log = folder / METRICS, folder / "output.log"
        self._patience_s = patience_s

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()

    def run(
        self,
        on_steps: Callable[[int], object] = lambda number: None,
        enough: Callable[[Steps], bool] = lambda steps: False,
    ) -> None:
        """Waits until the training ends or has shown enough; see `Trainer.train`."""
        while not enough(self.steps) and self.step():
            on_steps(len(self.steps))
        on_steps(len(self.steps))

    def step(self) -> bool:
        """Waits for another step, which a training `in_turns` takes now; False: it has ended.

        Raises:
            RunError: it failed, or did nothing for too long.
        """
        if self._process.stdin is not None:
            self._process.send_signal(signal.SIGCONT)
            with contextlib.suppress(BrokenPipeError):  # it has ended, well or badly
                self._process.stdin.write(b"\n")
                self._process.stdin.flush()
        goes_on = self._wait_for_steps()
        if self._process.stdin is not None:
            # Gloo's threads, some twenty in a process, look around a hundred times a second each.
            self._process.send_signal(signal.SIGSTOP)
        return goes_on

    def _wait_for_steps(self) -> bool:
        """Until there are more; False: it has ended well. See `step`."""
        since_s, known_size = time.monotonic(), -1
        while True:
            has_ended, size = self._process.poll() is not None, self._size()
            # Not read until it has grown: the training needs the processor.
            if size != known_size and self._read():
                return True
            known_size = size
            if has_ended:
                code = self._process.returncode
                if code:
                    raise self._error(f"ended with exit code {code}")
                return False
            if time.monotonic() - since_s > self._patience_s:
                raise self._error(f"did nothing for {self._patience_s:.0f} s")
            time.sleep(_POLL_S)

    def end(self) -> None:
        """Ends the training's processes, unless they have ended by themselves."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        if self._process.poll() is None:
            self._process.terminate()
            self._process.send_signal(signal.SIGCONT)
            self._process.wait()
        self._read()

    @property
    def resident_bytes(self) -> int:
        """Bytes of the process's resident set now; 0 if it has ended."""
        try:
            pages = kernel_text(Path(f"/proc/{self._process.pid}/statm")).split()[1]
        except OSError:
            return 0
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def _size(self) -> int:
        return self._metrics.stat().st_size if self._metrics.exists() else 0

    def _read(self) -> bool:
        """Whether there are more steps now."""
        before, self.steps = len(self.steps), read_metrics(self._metrics)
        return len(self.steps) > before

    def _error(self, ending: str) -> RunError:
        lines = self._log.read_text(errors="replace").splitlines()
        tail = "\n".join(lines[-_TAIL_LINES:])
        advice = ""
        if any("unrecognized arguments: " in one and "--metrics-file" in one for one in lines[1:]):
            advice = (
                "; the script does not know --metrics-file: start one of Megatron-LM through "
                f"-m {LAUNCHER}, in others call offload_activations and use --script"
            )
        return RunError(
            f"{self._name} {ending} after {len(self.steps)} steps{advice}; the end of "
            f"{self._log}:\n{tail}"
        )


def check_room(waiting: Iterable[Training], advice: str) -> None:
    """Makes sure that another training has room beside those that wait for their turns.

    Args:
        waiting: all of them are in memory.
        advice: what to do, the end of the sentence.

    Raises:
        RunError: it has none.
    """
    largest = max((one.resident_bytes for one in waiting), default=0)
    available = memory_limit().available_bytes
    if available < largest:
        raise RunError(
            f"{format_size(available)} of memory are left, and trainings that take turns need up "
            f"to {format_size(largest)} each, all at once; give --no-turns{advice}"
        )


def _die_with_parent() -> None:
    """A stopped training (SIGSTOP) would not notice that its parent died and cannot wake it."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _environment(allocator: str) -> dict[str, str]:
    ours = allocator_environment(keeps_for_reuse=allocator != "tight")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    return environment if allocator == "default" else environment | ours


# ------------------------------------------------------------------ flags


def add_training_arguments(parser: argparse.ArgumentParser, **defaults: Any) -> Any:
    """Adds the trainer's own flags to a parser; the group, for more of them.

    Args:
        defaults: of `num_layers`, `seq_length` and `vocab_size`.
    """
    group = parser.add_argument_group("training")
    shown = "default: %(default)s"
    group.add_argument("--num-layers", type=int, help=shown)
    group.add_argument("--hidden-size", type=int, default=512, help=shown)
    group.add_argument("--num-attention-heads", type=int, default=8, help=shown)
    group.add_argument("--seq-length", type=int, help=shown)
    group.add_argument("--vocab-size", type=int, help=f"words of the vocabulary; {shown}")
    group.add_argument("--data-path", nargs="+", help="prefix of .bin/.idx files")
    group.add_argument("--tokenizer-model", help="tokenizer.json that belongs to --data-path")
    group.add_argument("--extra-args", default="", help="more flags for the trainer, in one string")
    group.add_argument("--trainer", type=Path, default=TRAINER, help="script to run")
    parser.set_defaults(**defaults)
    return group


_SHAPE = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")


def training_flags(args: argparse.Namespace) -> list[str]:
    """The trainer's flags for what `add_training_arguments` has read, `extra_args` last."""
    return [
        *(part for name in _SHAPE for part in (_flag_of(name), str(getattr(args, name)))),
        *("--lr", "6e-4", "--lr-warmup-iters", "2", "--log-interval", "1", "--eval-iters", "0"),
        *("--attention-dropout", "0", "--hidden-dropout", "0"),
        *_data_flags(args),
        *shlex.split(args.extra_args),
    ]


def _data_flags(args: argparse.Namespace) -> list[str]:
    """Builds the quickstart's corpus if it is wanted and absent."""
    if args.mock_data:
        return ["--mock-data", "--vocab-size", str(args.vocab_size)]
    if args.data_path:
        tokenizer = ["--tokenizer-model", args.tokenizer_model] if args.tokenizer_model else []
        return ["--data-path", *args.data_path, *tokenizer]
    name = "stdlib" if args.vocab_size == 8192 else f"stdlib-{args.vocab_size}"
    folder = CHECKOUT / "data" / name
    if not (folder / "corpus_text_document.idx").exists():
        command = [sys.executable, str(CHECKOUT / "tools/preprocess_data.py"), "--stdlib"]
        command += ["--append-eod", "--vocab-size", str(args.vocab_size)]
        done = subprocess.run([*command, "--output-prefix", str(folder / "corpus")], check=False)
        if done.returncode != 0:
            raise RunError("the quickstart's corpus could not be built")
    return [
        *("--data-path", str(folder / "corpus_text_document")),
        *("--tokenizer-model", str(folder / "tokenizer.json")),
    ]


def _flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")
