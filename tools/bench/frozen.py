#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Frozen parts computed once: epochs and steps with `cache_frozen` against the same without.

    tools/bench/frozen.py --json frozen.json    # 10 to 30 minutes
    tools/bench/frozen.py --parts prefix --orders shuffled --epochs 2 --tokens 128 --batches 16

Two trainings take turns step by step, one without and one with the cache, so that both see the same
load of the machine. An epoch's time is the sum of its steps; the ratio of a pair of epochs is
reported, of the later epochs the median. The same of processor time, of all threads, is beside it.

prefix      a Llama of 32 layers of hidden size 256, 256 tokens, batch size 4, fp32, transformers'
            defaults, LoRA of rank 8 on the last 8 layers, so that 24 are frozen. Once with the
            batches of each epoch the same (ordered), once with rows shuffled anew
tower       a frozen ViT (12 layers of 384, 224 pixels) in front of a trained Llama (4 layers of
            256; 49 image tokens and 64 of text), batch size 4
run again   the prefix once more on the files that are there: what its first step takes
evaluate    `LayerMajor.evaluate` beside a loop, of evaluate.py: bytes of parameters that it reads
            for 8 batches, over those that the loop reads for one

Exit code: 0 if losses and weights are the same and the targets are met, 1 if not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from tabulate import tabulate
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from megatron.offload import cache_frozen  # noqa: E402
from megatron.offload.commands.training_runs.machine import in_a_line, machine_facts  # noqa: E402
from megatron.offload.machine import vector_math  # noqa: E402
from tools.bench.evaluate import evaluate_part  # noqa: E402

_VOCABULARY, _TEXT = 2048, 64
# Keys of the summary: a name, and whether a value meets the target.
TARGETS: dict[str, Callable[[Any], bool]] = {
    "identical": lambda value: value is True,
    "epoch_speedup": lambda value: value >= 2.0,
    "first_epoch_ratio": lambda value: value <= 1.03,
    "tower_step_ratio": lambda value: value <= 0.6,
    "evaluate_bytes_ratio": lambda value: value <= 1.05,
}


class Task(NamedTuple):
    """A training: how its model is made, and its rows."""

    make: Callable[[], torch.nn.Module]
    rows: dict[str, torch.Tensor]
    shuffled: bool


class Step(NamedTuple):
    """One step: seconds of the clock and of processors, loss, and rows that were found so far."""

    seconds: float
    cpu_seconds: float
    loss: float
    hit_rows: int


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="default: %(default)s")
    parser.add_argument("--orders", default="ordered,shuffled", help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=256, help="of a row; default: %(default)s")
    parser.add_argument("--batches", type=int, default=32, help="of an epoch; %(default)s")
    parser.add_argument("--epochs", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--layers", type=int, default=32, help="of the Llama; %(default)s")
    parser.add_argument("--frozen", type=int, default=24, help="of these; default: %(default)s")
    parser.add_argument("--directory", type=Path, help="on the SSD; default: a temporary one")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser


def _llama(layers: int) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2048,
    )
    return transformers.LlamaForCausalLM(config)


class _TwoTowers(torch.nn.Module):
    """A frozen ViT, a projection and a Llama."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.ViTConfig(
            hidden_size=384, intermediate_size=1536, num_hidden_layers=12, num_attention_heads=6
        )
        self.vision = transformers.ViTModel(config, add_pooling_layer=False)
        self.vision.requires_grad_(False)
        self.projection = torch.nn.Linear(384 * 4, 256)
        self.language = _llama(4)

    def forward(self, pixel_values: torch.Tensor, input_ids: torch.Tensor) -> Any:
        """The output with the loss of the text."""
        seen = self.vision(pixel_values).last_hidden_state[:, 1:]  # [batch, 196, 384]
        seen = self.projection(seen.reshape(len(seen), -1, 384 * 4))  # four patches a token
        text = self.language.get_input_embeddings()(input_ids)
        unlabelled = torch.full(seen.shape[:2], -100)
        return self.language(
            inputs_embeds=torch.cat([seen, text], 1),
            labels=torch.cat([unlabelled, input_ids], 1),
        )


def _prefix_task(args: argparse.Namespace, *, shuffled: bool) -> Task:
    from peft import LoraConfig, get_peft_model

    def make() -> torch.nn.Module:
        torch.manual_seed(0)
        config = LoraConfig(
            r=8,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
            layers_to_transform=list(range(args.frozen, args.layers)),
        )
        return get_peft_model(_llama(args.layers), config)

    torch.manual_seed(1)
    tokens = torch.randint(0, _VOCABULARY, (4 * args.batches, args.tokens))
    return Task(make, {"input_ids": tokens, "labels": tokens}, shuffled)


def _tower_task(args: argparse.Namespace) -> Task:
    def make() -> torch.nn.Module:
        torch.manual_seed(0)
        return _TwoTowers()

    torch.manual_seed(1)
    rows = 4 * max(args.batches // 4, 2)
    pixels = torch.randn(rows, 3, 224, 224)
    return Task(
        make,
        {"pixel_values": pixels, "input_ids": torch.randint(0, _VOCABULARY, (rows, _TEXT))},
        shuffled=True,
    )


def _training(
    task: Task, epochs: int, directory: Path | None
) -> Iterator[list[Step] | torch.Tensor]:
    """Yields a list after each step, empty but at the end of an epoch; at the end the weights."""
    model = task.make().train()
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    num_rows = len(next(iter(task.rows.values())))
    features = cache_frozen(model, directory) if directory is not None else None
    for epoch in range(epochs):
        steps = []
        generator = torch.Generator().manual_seed(epoch if task.shuffled else 0)
        order = torch.randperm(num_rows, generator=generator)
        batches = ({k: v[chosen] for k, v in task.rows.items()} for chosen in order.split(4))
        for batch in batches if features is None else features.ahead(batches):
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            cpu_s = time.process_time() - began_cpu_s
            hits = 0 if features is None else features.statistics["hit_rows"]
            steps.append(Step(time.perf_counter() - began_s, cpu_s, loss.item(), hits))
            yield []
        if features is not None:
            features.store.wait_for_writes()
        yield steps
    if features is not None:
        features.close()
    yield torch.cat([one.detach().flatten() for one in trained])


def compare(task: Task, epochs: int, directory: Path, name: str) -> dict[str, Any]:
    """Both trainings in turns: seconds of each epoch, and whether their results are the same."""
    ways = [_training(task, epochs, None), _training(task, epochs, directory)]
    found: list[list[list[Step]]] = [[], []]
    weights = []
    with tqdm(desc=name, unit="step", mininterval=10) as bar:
        for both in zip(*ways, strict=True):
            bar.update()
            for way, one in enumerate(both):
                if isinstance(one, torch.Tensor):
                    weights.append(one)
                elif one:
                    found[way].append(one)
    seconds = [[sum(step.seconds for step in epoch) for epoch in way] for way in found]
    cpu_seconds = [[sum(step.cpu_seconds for step in epoch) for epoch in way] for way in found]
    ratios = [with_s / without_s for without_s, with_s in zip(*seconds, strict=True)]
    cpu_ratios = [with_s / without_s for without_s, with_s in zip(*cpu_seconds, strict=True)]
    losses = [[step.loss for epoch in way for step in epoch] for way in found]
    return {
        "identical": losses[0] == losses[1] and torch.equal(*weights),
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "ratios": ratios,
        "cpu_ratios": cpu_ratios,
        "later_ratio": statistics.median(ratios[1:] or ratios),
        "hit_rows": [epoch[-1].hit_rows for epoch in found[1]],
        "first_step_hits": found[1][0][0].hit_rows,
    }


def prefix(args: argparse.Namespace, directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """A frozen prefix of layers: what the summary says, and all of it."""
    found = {}
    for name in args.orders.split(","):
        (folder := directory / name).mkdir(exist_ok=True)
        task = _prefix_task(args, shuffled=name != "ordered")
        found[name] = compare(task, args.epochs, folder, f"prefix, {name}")
    pairs = list(found.values())
    found["again"] = compare(task, 1, folder, "prefix, run again")
    return {
        "identical": all(one["identical"] for one in found.values())
        and found["again"]["first_step_hits"] == 4,
        "epoch_speedup": 1 / statistics.mean(one["later_ratio"] for one in pairs),
        "first_epoch_ratio": statistics.mean(one["ratios"][0] for one in pairs),
    }, found


def tower(args: argparse.Namespace, directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """A frozen vision tower: the same."""
    found = compare(_tower_task(args), args.epochs + 1, directory, "tower")
    summary = {"identical": found["identical"], "tower_step_ratio": found["later_ratio"]}
    return summary, {"tower": found}


def evaluate(args: argparse.Namespace, directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Forward passes alone; of evaluate.py, which has its times and its memory."""
    found = evaluate_part(directory)
    return {name: found[name] for name in ("identical", "evaluate_bytes_ratio")}, {}


PARTS: dict[str, Callable[..., tuple[dict[str, Any], dict[str, Any]]]] = {
    "prefix": prefix,
    "tower": tower,
    "evaluate": evaluate,
}


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    args = make_parser().parse_args(argv)
    vector_math.first_call()
    transformers.logging.set_verbosity_error()
    summary: dict[str, Any] = {"identical": True}
    details: dict[str, Any] = {}
    for name in args.parts.split(","):
        with tempfile.TemporaryDirectory(dir=args.directory) as directory:
            of_part, detail = PARTS[name](args, Path(directory))
        summary |= of_part | {"identical": summary["identical"] and of_part["identical"]}
        details |= detail
    met = {key: TARGETS[key](value) for key, value in summary.items() if key in TARGETS}
    print(in_a_line(machine_facts(args.directory or Path(tempfile.gettempdir()))))
    rows = [
        [f"{name}, {what}", *(f"{one:.3f}" for one in detail[key]), str(detail["identical"])]
        for name, detail in details.items()
        for what, key in (("time", "ratios"), ("processors", "cpu_ratios"))
    ]
    print("epochs with the cache / without, and whether results are the same")
    print(tabulate(rows))
    print(tabulate([[key, str(value), met.get(key)] for key, value in summary.items()]))
    if args.json is not None:
        command = " ".join(["tools/bench/frozen.py", *(sys.argv[1:] if argv is None else argv)])
        found = {"command": command, "summary": summary, "details": details}
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0 if all(met.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
