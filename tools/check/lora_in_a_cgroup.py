#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Whether adapters are trained on a model of twice the memory, and what is read for it.

    tools/check/lora_in_a_cgroup.py --json lora.json            # some 10 minutes on 2 cores
    tools/check/lora_in_a_cgroup.py --layers 8 --hidden 512     # smaller

A Llama in bf16 is saved as safetensors files. LoRA on it is trained in processes of their own: with
the model in memory, as `from_pretrained` loads it, and as much of it as there is; in a control
group with less memory than half of the weights' bytes beside what an empty process takes; and there
with the layers on the SSD: read where the files are (`in_place=True`), and filled from them and
written, without a codec and with each. It needs root, or a control group in which others may be
made.

On a CPU `from_pretrained` maps the files, and the system takes that memory back when it needs it;
so the run in memory copies the weights, as a GPU has them.

`read` and `written` are what a step reads of the layers and what is written of them in all, as
parts of their bytes in bf16. A step reads each layer twice but for those that are in memory.

Exit code: 0 in the group the run in memory was killed, the others ended, and without a codec losses
and adapters have the bits of the run in memory; 1 one of these does not hold; 2 no such group can
be made, or a training failed otherwise.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from tabulate import tabulate
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
sys.path[1:1] = [str(ROOT), str(ROOT / "tools")]

from check.memory_group import CheckError, PeakMemory, memory_group, run_in_group  # noqa: E402
from megatron.offload.commands.training_runs.machine import machine_facts  # noqa: E402
from megatron.offload.sizes import format_size  # noqa: E402

IN_MEMORY, EMPTY, IN_PLACE = "memory", "empty", "in place"
CODECS = ("off", "int8", "nf4")
_VOCABULARY, _TOKENS = 1024, 128


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        way: the layers are in memory, read in place, or on the SSD with this codec.
        limit_bytes: of its control group; None: none.
        killed: it was, because the group's memory was used up.
        peak_bytes: most memory that was its own at a time; 0: it was killed.
        step_s: the median of its steps.
        read: of the layers in a step, as a part of their bytes in bf16.
        written: of the layers in all, likewise.
        losses: of its steps.
        adapters: a digest of their bits at the end.
    """

    way: str
    limit_bytes: int | None
    killed: bool
    peak_bytes: int = 0
    step_s: float = 0.0
    read: float = 0.0
    written: float = 0.0
    losses: list[float] = field(default_factory=list)
    adapters: str = ""


def config_of(args: argparse.Namespace) -> Any:
    """Of the model."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=args.hidden,
        intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=args.hidden // 64,
        dtype="bfloat16",
    )


def save(args: argparse.Namespace) -> None:
    """Writes the model's files: one for each layer, and one for the rest."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaForCausalLM

    config = config_of(args)
    with torch.device("meta"):
        shapes = {name: one.shape for name, one in LlamaForCausalLM(config).named_parameters()}
    file_of = {name: f"{'-'.join(name.split('.')[1:3])}.safetensors" for name in shapes}
    draw = torch.Generator().manual_seed(1)
    for file in tqdm(sorted(set(file_of.values())), desc="the model's files", leave=False):
        tensors = {}
        for name, shape in shapes.items():
            if file_of[name] == file:
                value = torch.ones(shape)
                if len(shape) > 1:
                    value.normal_(std=config.initializer_range, generator=draw)
                tensors[name] = value.bfloat16()
        save_file(tensors, args.model / file)
    index = {"metadata": {}, "weight_map": file_of}
    (args.model / "model.safetensors.index.json").write_text(json.dumps(index))
    config.save_pretrained(args.model)


def train(args: argparse.Namespace) -> None:
    """Trains in this process and prints its result as JSON."""
    import torch
    from accelerate import init_empty_weights
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    from megatron.offload import offload_parameters

    found: dict[str, Any] = {}
    with PeakMemory() as memory:
        if args.way == EMPTY:
            time.sleep(0.1)
            print(json.dumps({"peak_bytes": memory.peak_bytes}))
            return
        if args.way == IN_MEMORY:
            model = AutoModelForCausalLM.from_pretrained(args.model)
            for param in model.parameters():
                param.data = param.data.clone()
        else:
            config = AutoConfig.from_pretrained(args.model)
            with init_empty_weights():
                model = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
        model.requires_grad_(False)
        settings: dict[str, Any] = {"mode": "off"}
        if args.way != IN_MEMORY:
            settings = {"weights": args.model, "in_place": args.way == IN_PLACE}
            settings["codec"] = "off" if args.way == IN_PLACE else args.way
        offloaded = offload_parameters(model, args.dir, **settings)
        torch.manual_seed(5)
        settings = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
        model = get_peft_model(model, settings)
        trained = [one for one in model.parameters() if one.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-3)
        steps_s, losses, read_bytes = [], [], 0
        for number in range(args.steps):
            before = offloaded.statistics.get("read_bytes", 0)
            began = time.perf_counter()
            draw = torch.Generator().manual_seed(number)
            tokens = torch.randint(_VOCABULARY, (1, _TOKENS), generator=draw)
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            steps_s.append(time.perf_counter() - began)
            read_bytes = offloaded.statistics.get("read_bytes", 0) - before
        statistics = offloaded.statistics
        layers_bytes = statistics.get("parameter_bytes", 1)
        found["read"] = read_bytes / layers_bytes
        found["written"] = statistics.get("written_bytes", 0) / layers_bytes
    digest = hashlib.sha256()
    for weight in trained:
        digest.update(weight.detach().view(torch.uint8).numpy().data)
    found |= {
        "peak_bytes": memory.peak_bytes,
        "step_s": median(steps_s[1:] or steps_s),
        "losses": losses,
        "adapters": digest.hexdigest()[:16],
    }
    print(json.dumps(found))


def run(way: str, limit_bytes: int | None, args: argparse.Namespace) -> Run:
    """Trains in a process of its own.

    Raises:
        CheckError: it failed otherwise than for memory.
    """
    command = [sys.executable, str(Path(__file__).resolve()), "--train", "--way", way]
    for name in ("hidden", "layers", "steps", "dir", "model"):
        command += [f"--{name}", str(getattr(args, name))]
    try:
        found = run_in_group(command, limit_bytes)
    except CheckError as error:
        raise CheckError(f"{way}: {error}") from None
    return Run(way, limit_bytes, killed=found is None, **(found or {}))


# -- The verdict ----------------------------------------------------------------------------------


def weights_bytes(args: argparse.Namespace) -> int:
    """Of the model's files."""
    return sum(one.stat().st_size for one in args.model.glob("*.safetensors"))


def all_runs(args: argparse.Namespace) -> list[Run]:
    """In memory without a limit; then with one."""
    empty_bytes = run(EMPTY, None, args).peak_bytes
    limit_bytes = empty_bytes + weights_bytes(args) // 2
    ways = [(IN_MEMORY, None), *((one, limit_bytes) for one in (IN_MEMORY, IN_PLACE, *CODECS))]
    return [run(*way, args) for way in tqdm(ways, desc="trainings", leave=False)]


def holds(runs: Sequence[Run]) -> bool:
    """Whether only the run in memory was killed, and the exact ones have the same bits."""
    killed = [(one.way, one.limit_bytes is not None) for one in runs if one.killed]
    exact = {
        (tuple(one.losses), one.adapters)
        for one in runs
        if not one.killed and one.way in (IN_MEMORY, IN_PLACE, "off")
    }
    return killed == [(IN_MEMORY, True)] and len(exact) == 1


def table(runs: Sequence[Run]) -> str:
    """A row for each run."""
    rows = [
        [
            f"ssd, codec {one.way}" if one.way in CODECS else one.way,
            "none" if one.limit_bytes is None else format_size(one.limit_bytes),
            *(
                ["killed for memory"]
                if one.killed
                else [
                    "trained",
                    format_size(one.peak_bytes),
                    f"{one.step_s:.2f}",
                    f"{one.read:.3f}",
                    f"{one.written:.3f}",
                    f"{one.losses[-1]:.6f}",
                    one.adapters,
                ]
            ),
        ]
        for one in runs
    ]
    heads = ["layers in", "limit", "end", "peak memory", "step (s)"]
    heads += ["read/step", "written", "last loss", "adapters"]
    return tabulate(rows, heads, tablefmt="github", disable_numparse=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Trains in each way, prints the table and the verdict; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--hidden", type=int, default=2048, help="width of the layers (2048)")
    parser.add_argument("--layers", type=int, default=24, help="(24)")
    parser.add_argument("--steps", type=int, default=3, help="of each training (3)")
    parser.add_argument("--dir", type=Path, default=ROOT / "runs" / "offload", help="on the SSD")
    parser.add_argument(
        "--model", type=Path, default=ROOT / "runs" / "model", help="a folder for its files"
    )
    # Of one training, not for people.
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.dir.mkdir(parents=True, exist_ok=True)
    if args.train:
        train(args)
        return 0
    if args.model.exists() and any(args.model.iterdir()):
        print(f"lora_in_a_cgroup.py: error: {args.model} is not empty", file=sys.stderr)
        return 2
    args.model.mkdir(parents=True, exist_ok=True)
    try:
        with memory_group(1 << 40):  # whether one can be made, before minutes are spent
            pass
        save(args)
        size = weights_bytes(args)
        runs = all_runs(args)
    except (CheckError, subprocess.TimeoutExpired) as error:
        print(f"lora_in_a_cgroup.py: error: {error}", file=sys.stderr)
        return 2
    finally:
        shutil.rmtree(args.model)
    verdict = "holds" if holds(runs) else "DOES NOT HOLD"
    print(f"{format_size(size)} of weights in bf16, LoRA, {_TOKENS} tokens a step")
    print(f"\n{table(runs)}\n\n{verdict}: with layers on the SSD it trains where it was killed")
    if args.json is not None:
        values = {
            "date": datetime.date.today().isoformat(),
            "command": shlex.join(["tools/check/lora_in_a_cgroup.py", *(argv or sys.argv[1:])]),
            "machine": machine_facts(args.dir),
            "holds": holds(runs),
            "weights_bytes": size,
            "runs": [asdict(one) for one in runs],
        }
        args.json.write_text(json.dumps(values, indent=1).replace(f"{ROOT}/", "") + "\n")
    return 0 if holds(runs) else 1


if __name__ == "__main__":
    sys.exit(main())
