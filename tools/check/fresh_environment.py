#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a page says to install runs what the page shows: new environments, one for each extra.

    tools/check/fresh_environment.py --json fresh.json                 # about 6 minutes, 2 GB
    tools/check/fresh_environment.py --environments plain,auto

A wheel is built from a clone of this checkout. Each environment gets it with one extra and nothing
else; PyTorch of `tools/constraints.txt`, and what it depends on, is installed once for all of them.
No environment sees the clone. What an extra is for has to work there, and what is not in it has to
end with exit code 2 and a sentence that says what to install.

Exit code: 0 if everything was as it should be, 1 if not.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tabulate import tabulate
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
_LIMIT_S = 600.0
_MODEL = """
import sys, torch
place = sys.argv[1]
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.inner = torch.nn.LayerNorm(64), torch.nn.Linear(64, 64)
    def forward(self, x):
        return x + self.inner(self.norm(x)).relu()
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(4))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()
model = Model()
optimizer = torch.optim.AdamW(model.parameters())
def train(steps):
    for _ in range(steps):
        loss = model(torch.ones(64, 128, 64))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
_ALL_STREAMS = (
    _MODEL
    + """
from megatron.offload import offload
with offload(model, optimizer, place, parameters=True) as handle:
    train(3)
    moved = handle.statistics
assert moved["activations"]["offloaded_bytes"] > 0, moved
assert moved["parameters"]["read_bytes"] > 0, moved
"""
)
_LAYER_MAJOR = (
    _MODEL
    + """
from megatron.offload import LayerMajor, cache_frozen, offload_parameters, read_settings
with offload_parameters(model, place) as parameters:
    LayerMajor(model).step([torch.ones(8, 64)] * 2, model)
    assert parameters.statistics["read_bytes"] > 0
assert read_settings({"activations": "host"})["activations"] == {"mode": "host"}
model.layers[:2].requires_grad_(False)
with cache_frozen(model, place) as features:
    train(1)
    for _ in range(3):  # where rows are not apart, the second pass stores
        features.store.wait_for_writes()
        train(1)
    assert features.statistics["hit_rows"] >= 64, features.statistics
"""
)
_METRICS = (
    _MODEL
    + """
from megatron.offload import offload_activations
with offload_activations(model, place, metrics_file=place + "/metrics.jsonl"):
    train(3)
"""
)
_AUTO = (
    _MODEL
    + """
from megatron.offload import offload_activations
with offload_activations(model, place, mode="auto") as handle:
    train(8)
    assert "plan" in handle.report() or handle.plan is not None
"""
)
_SCRIPT = (
    _MODEL
    + """
from megatron.offload import offload_activations
handle = offload_activations(model, place)
train(200)  # commands end it when they have measured enough
"""
)
_TRAINER = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from megatron.offload import OffloadCallback
class Reporter(TrainerCallback):
    keys = set()
    def on_log(self, args, state, control, logs=None, **kwargs):
        self.keys |= set(logs)
config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, vocab_size=128,
                     num_attention_heads=4, num_key_value_heads=4)
rows = [{"input_ids": (ids := torch.randint(0, 128, (64,))), "labels": ids} for _ in range(8)]
arguments = TrainingArguments(output_dir=sys.argv[1], max_steps=3, logging_steps=1, use_cpu=True,
                              report_to=[], save_strategy="no")
trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=rows, callbacks=[Reporter()])
trainer.add_callback(OffloadCallback(sys.argv[1], optimizer_states=True))
trainer.train()
config.save_pretrained(sys.argv[1])  # for `estimate`
assert "offload/offloaded_gib" in Reporter.keys, Reporter.keys
"""
_PLAN = "plan --hardware a100 --num-layers 8 --hidden-size 1024 --num-attention-heads 16 --bf16"
_SIZES = " --micro-batch-size 2 --global-batch-size 2 --vocab-size 32000"
_LENGTH = " --seq-length 1024"


class Try(NamedTuple):
    """Something that a user runs.

    Args:
        name: in the table.
        command: flags of `megatron-offload`, in which DIR is a directory; or a Python script, which
            gets that directory.
        installs: what the sentence has to tell to install, if it cannot work; None: it has to work.
    """

    name: str
    command: str
    installs: str | None = None


_EVERYWHERE = (
    Try("--version", "--version"),
    Try("activations, states, parameters", _ALL_STREAMS),
    Try("layer-major steps, frozen cache, settings", _LAYER_MAJOR),
    Try("metrics_file", _METRICS),
    Try("report", "report DIR/metrics.jsonl"),
    Try("doctor --script", "doctor --no-bandwidth --script SCRIPT --script-args DIR"),
    Try("bench --quick", "bench --quick --tiers ssd --seconds 0.2 --pairs 1 --directory DIR"),
)
TRIES: dict[str, tuple[str, tuple[Try, ...]]] = {
    "plain": (
        "",
        (
            *_EVERYWHERE,
            Try("mode auto", _AUTO, "scipy"),
            Try("plan", _PLAN + _SIZES + _LENGTH, "scipy"),
            Try("estimate", "estimate DIR", "transformers"),
            Try("rok --script", "rok --script SCRIPT --script-args DIR", "matplotlib"),
            Try("tune", "tune --output DIR -- SCRIPT", "tqdm"),
            Try("OffloadCallback", "from megatron.offload import OffloadCallback", "transformers"),
        ),
    ),
    "auto": (
        "auto",
        (*_EVERYWHERE, Try("mode auto", _AUTO), Try("plan", _PLAN + _SIZES + _LENGTH)),
    ),
    "commands": (
        "commands",
        (
            *_EVERYWHERE,
            Try("mode auto", _AUTO),
            Try("report --html", "report DIR --html DIR/report.html"),
            Try("plan, picture", f"{_PLAN}{_SIZES}{_LENGTH} --rok DIR/plan.png"),
            Try(
                "rok --script",
                "rok --script SCRIPT --script-args DIR --strategies off,ssd --rounds 1 --steps 2 "
                "--skip-steps 1 --output DIR/rok",
            ),
            Try(
                "longest",
                f"longest --hardware h100 {_PLAN.partition('a100')[2]}{_SIZES} --ways none,ssd",
            ),
        ),
    ),
    "huggingface": (
        "auto,huggingface",
        (
            *_EVERYWHERE,
            Try("Trainer, a reporter", _TRAINER),
            Try("estimate", "estimate DIR --hardware rtx-4090 --sequence 128 --batch 2 --lora 8"),
        ),
    ),
}


class Outcome(NamedTuple):
    """How a try went. `problem`: empty if it was as it should be."""

    environment: str
    name: str
    seconds: float
    problem: str


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--environments", default=",".join(TRIES), help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser


def run(words: Sequence[str | Path], **options: Any) -> subprocess.CompletedProcess[str]:
    """A process without what this one has set for Python and pip's build."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    return subprocess.run(
        [str(word) for word in words],
        capture_output=True,
        text=True,
        env=environment,
        timeout=_LIMIT_S,
        **options,
    )


def _checked(words: Sequence[str | Path]) -> None:
    done = run(words)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, words))}: {done.stderr[-2000:]}")


def build(work: Path) -> tuple[Path, Path]:
    """The wheel of a clone, and a folder with PyTorch alone."""
    _checked(["git", "clone", "--quiet", ROOT, work / "clone"])
    pip = [sys.executable, "-m", "pip"]
    _checked([*pip, "wheel", "--quiet", "--no-deps", "-w", work, work / "clone"])
    (wheel,) = work.glob("megatron_offload-*.whl")
    constraints = (ROOT / "tools" / "constraints.txt").read_text()
    (torch,) = re.findall(r"^torch==\S+", constraints, re.M)
    _checked([*pip, "install", "--quiet", "--target", work / "torch", torch])
    return wheel, work / "torch"


def make_environment(folder: Path, wheel: Path, with_torch: Path, extra: str) -> float:
    """A virtual environment with the wheel; the seconds that it took."""
    began_s = time.perf_counter()
    venv.create(folder, with_pip=True, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "torch_alone.pth").write_text(f"{with_torch}\n")
    wanted = f"{wheel}[{extra}]" if extra else str(wheel)
    _checked([folder / "bin" / "python", "-m", "pip", "install", "--quiet", wanted])
    return time.perf_counter() - began_s


def try_out(one: Try, environment: Path, place: Path) -> str:
    """Runs it; what was wrong, or nothing."""
    script = place / "script.py"
    script.write_text(_SCRIPT)
    if "import" in one.command:
        (own := place / "own.py").write_text(one.command)
        words = [environment / "bin" / "python", own, place]
    else:
        command = one.command.replace("DIR", str(place)).replace("SCRIPT", str(script))
        words = [environment / "bin" / "megatron-offload", *command.split()]
    done = run(words, cwd=place)
    said = f"{done.stdout}\n{done.stderr}".strip()
    last = said.splitlines()[-1] if said else ""
    if one.installs is None:
        return "" if not done.returncode else f"exit code {done.returncode}: {last}"
    if not done.returncode:
        return "works without what it should need"
    if one.installs not in last or "pip install" not in said:
        return f"does not say what to install: {last}"
    return ""


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    args = make_parser().parse_args(argv)
    names = args.environments.split(",")
    outcomes = []
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        wheel, with_torch = build(work)
        for name in names:
            extra, tries = TRIES[name]
            environment, place = work / name, work / f"in-{name}"
            place.mkdir()
            seconds = make_environment(environment, wheel, with_torch, extra)
            outcomes.append(Outcome(name, "pip install", seconds, ""))
            for one in tqdm(tries, desc=name, unit="try", leave=False):
                began_s = time.perf_counter()
                problem = try_out(one, environment, place)
                seconds = time.perf_counter() - began_s
                outcomes.append(Outcome(name, one.name, seconds, problem))
    rows = [
        (one.environment, one.name, f"{one.seconds:.1f}", one.problem or "as it should be")
        for one in outcomes
    ]
    headers = ["environment", "what", "s", "outcome"]
    print(tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True))
    if args.json is not None:
        found = [one._asdict() for one in outcomes]
        args.json.write_text(json.dumps({"outcomes": found}, indent=1) + "\n")
    return 1 if any(one.problem for one in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
