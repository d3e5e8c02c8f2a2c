#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Whether `megatron-offload estimate` says what trainings take: peaks of small runs on this CPU.

    tools/check/estimate_against_runs.py --json estimate.json            # about 20 minutes
    tools/check/estimate_against_runs.py --models gpt2 --ways plain,activations

Models of transformers with their default settings, each way a process of its own. A step's peak is
what tensors have in memory before it, plus the growth of the resident set within it; the allocator
gives back at once what is freed. The median of the steady steps counts: what is read ahead depends
on how long reads have taken. Optimizer states have a window of --window.

Exit code: 0 if each estimate is within --tolerance of what ran; 1 if one is not; 2 if a training
failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[2]
sys.path[1:1] = [str(ROOT), str(ROOT / "tools")]

from megatron.offload.commands.estimate.model import Adapters, Architecture  # noqa: E402
from megatron.offload.commands.estimate.step import step_bytes  # noqa: E402
from megatron.offload.commands.estimate.ways import WAYS, Training, need_of  # noqa: E402
from megatron.offload.commands.training_runs.machine import machine_facts  # noqa: E402
from megatron.offload.machine.allocator import allocator_environment  # noqa: E402
from megatron.offload.sizes import MIB, format_size, parse_size  # noqa: E402

MODELS = ("gpt2", "llama", "mixtral", "llama-lora")
MEASURED = ("plain", "replay", "activations", "states", "both", "parameters")
ALSO = ("least", "gradients")  # ways that are measured where --ways names them
_LORA_RANK = 8
_SETTLED = 2  # first steps that do not count


def config_of(name: str, args: argparse.Namespace) -> Any:
    """A configuration of transformers, all but its sizes as it is by default."""
    import transformers

    sizes = {"hidden_size": args.hidden, "num_hidden_layers": args.layers}
    sizes |= {"num_attention_heads": args.hidden // 64, "vocab_size": args.vocabulary}
    if name == "gpt2":
        return transformers.GPT2Config(
            n_layer=args.layers,
            n_embd=args.hidden,
            n_head=args.hidden // 64,
            n_positions=args.sequence,
            vocab_size=args.vocabulary,
        )
    if name == "mixtral":
        return transformers.MixtralConfig(
            **sizes,
            intermediate_size=2 * args.hidden,
            num_key_value_heads=args.hidden // 64,
            num_local_experts=4,
        )
    return transformers.LlamaConfig(**sizes, intermediate_size=8 * args.hidden // 3 // 64 * 64)


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Some steps in one way; the median peak of the steady ones. Runs in a process of its own."""
    import torch
    import transformers

    from megatron.offload import offload
    from megatron.offload.device.open import open_device

    torch.manual_seed(0)
    config = config_of(args.model, args)
    model: Any = transformers.AutoModelForCausalLM.from_config(config).train()
    if args.model == "llama-lora":
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=_LORA_RANK))
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-4)
    way = WAYS[args.train]
    states = {"window_bytes": args.window, "bucket_bytes": args.window // 4}
    activations: Any = {"keep": False, "replay": {"mode": "keep"}, "move": True}[way.how.treatment]
    if way.how.checkpoints:
        activations = {"recompute_layers": "all", "recompute_input": "ssd", "chunked_loss": "auto"}
    handle = offload(
        model,
        optimizer,
        args.directory,
        activations=activations,
        optimizer_states=states if way.states_move else False,
        parameters=way.parameters_move,
        gradients=way.gradients_move,
        layer_major=way.gradients_move,
    )

    def loss_of(one: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=one, labels=one).loss
        return loss

    tokens = torch.randint(0, args.vocabulary, (args.batch, args.sequence))
    device = open_device(torch.device("cpu"))
    peak, peaks = device.peak_reader(), []
    for _ in range(args.steps):
        device.return_freed_memory()
        held_bytes = _held_bytes(model, optimizer, handle)
        base_bytes = device.allocated_bytes() - held_bytes
        peak.reset()
        if way.gradients_move:
            handle.step([tokens], loss_of)
        else:
            loss_of(tokens).backward()
        in_passes = peak.peak_bytes() - base_bytes
        optimizer.step()
        optimizer.zero_grad()
        peaks.append((peak.peak_bytes() - base_bytes, in_passes, held_bytes))
    handle.close()
    steady = sorted(peaks[_SETTLED:])
    names = "peak_bytes", "passes_bytes", "held_bytes"
    found = dict(zip(names, steady[(len(steady) - 1) // 2], strict=True))
    return found | {"least_bytes": steady[0][0], "most_bytes": steady[-1][0]}


def _held_bytes(model: Any, optimizer: Any, handle: Any) -> int:
    """What parameters, buffers and optimizer states have in memory between two steps."""
    import torch

    from megatron.offload.integration.memory_by_tier import state_bytes

    window = None if handle.parameters is None else handle.parameters.window
    with torch._C.DisableTorchFunctionSubclass():  # else parameters that are away are read
        storages = {
            one.untyped_storage()._cdata: one.untyped_storage().nbytes()
            for one in (*model.parameters(), *model.buffers())
            if window is None or window.number_of(one) is None
        }
    held_bytes = sum(storages.values()) + (0 if window is None else window.memory_bytes)
    if handle.optimizer_states is None:
        return held_bytes + state_bytes([optimizer])
    states = handle.optimizer_states.states
    states.wait_for_writes()
    return held_bytes + int(states.memory_bytes)


def measured(args: argparse.Namespace, argv: list[str], model: str, way: str) -> dict[str, Any]:
    """The same from outside.

    Raises:
        RuntimeError: the process ended with an error; has its last line.
    """
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        command = [sys.executable, __file__, *argv, "--train", way, "--model", model]
        command += ["--directory", folder]
        here = {"PYTHONPATH": os.pathsep.join((str(ROOT / "tools"), str(ROOT)))}
        environment = {**os.environ, **allocator_environment(keeps_for_reuse=False), **here}
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        )
    if ended.returncode:
        last = (ended.stderr.strip() or "no word").splitlines()[-1]
        raise RuntimeError(f"{model}, {way}: {last}")
    return json.loads(ended.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def estimated(args: argparse.Namespace, model: str, way: str) -> dict[str, Any]:
    """What the command would say."""
    adapters = Adapters(_LORA_RANK) if model == "llama-lora" else None
    architecture = Architecture(config_of(model, args), "fp32", adapters)
    how = WAYS[way]
    step = step_bytes(architecture, args.batch, args.sequence, how.how, on_cpu=True)
    training = Training(on_cpu=True, window_bytes=args.window, bucket_bytes=args.window // 4)
    need = need_of(how, step, training)
    kinds = {kind.value: round(value) for kind, value in need.kinds.items()}
    return {"device_bytes": round(need.device), "phase": need.phase, "kinds": kinds}


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS), help="default: %(default)s")
    others = f"default: %(default)s; others are {' and '.join(ALSO)}"
    parser.add_argument("--ways", default=",".join(MEASURED), help=others)
    parser.add_argument("--layers", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--hidden", type=int, default=512, help="default: %(default)s")
    parser.add_argument("--sequence", type=int, default=512, help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--vocabulary", type=int, default=8192, help="default: %(default)s")
    parser.add_argument("--window", type=parse_size, default=64 * MIB, help="default: 64MiB")
    parser.add_argument("--steps", type=int, default=7, help="the first two count for nothing; 7")
    parser.add_argument("--tolerance", type=float, default=0.1, help="default: %(default)s")
    parser.add_argument("--directory", type=Path, help="on an SSD; default: a temporary one")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--train", metavar="WAY", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    return parser


def main() -> int:
    """Trains, estimates, prints and writes; the exit code."""
    argv = sys.argv[1:]
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.train:
        print(json.dumps(train(args)))
        return 0
    models, ways = args.models.split(","), args.ways.split(",")
    if unknown := (set(models) - set(MODELS)) | (set(ways) - {*MEASURED, *ALSO}):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    found, rows, is_near = [], [], True
    for model in models:
        for way in ways:
            try:
                ran = measured(args, argv, model, way)
            except RuntimeError as error:
                print(f"estimate_against_runs.py: error: {error}", file=sys.stderr)
                return 2
            said = estimated(args, model, way)
            error = said["device_bytes"] / ran["peak_bytes"] - 1
            is_near = is_near and abs(error) <= args.tolerance
            found.append({"model": model, "way": way, **ran, **said, "error": error})
            shown = (said["device_bytes"], ran["peak_bytes"], ran["least_bytes"], ran["most_bytes"])
            sizes = [format_size(one) for one in shown]
            rows.append([model, way, *sizes, f"{error:+.1%}", said["phase"]])
            print(*rows[-1], sep="  ", flush=True)
    heads = ["model", "way", "estimated", "ran", "least", "most", "error", "peak in"]
    print(tabulate(rows, heads, tablefmt="github"))
    if args.json is not None:
        names = ("layers", "hidden", "sequence", "batch", "vocabulary", "window")
        sizes = {name: getattr(args, name) for name in names}
        facts = machine_facts(args.directory or Path(tempfile.gettempdir()))
        args.json.write_text(
            json.dumps({"machine": facts, **sizes, "runs": found}, indent=1) + "\n"
        )
    return 0 if is_near else 1


if __name__ == "__main__":
    sys.exit(main())
