#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`LayerMajor.evaluate` beside a loop over the batches, parameters on an SSD that is too slow.

    tools/bench/evaluate.py --json evaluate.json                     # about 2 minutes

A frozen Llama of transformers, fp32, in evaluation mode, whose parameters are on the SSD: those of
two layers at a time are in memory. Reads take as long as on a drive of `--rate`. Both ways give the
losses of the same batches, in turns.

`evaluate_bytes_ratio`: bytes that `evaluate` reads for all batches, over those of a loop with one.
`evaluate_time_ratio`: its time over that of the loop with all batches, medians.
`peak_parameter_units`: most parameters in memory at any time, in units. `peak_tensor_bytes`: most
bytes of tensors that operations have made and that are alive, beside the parameters; `evaluate` may
add the boundaries to what the loop has: of each other batch, what waits between two units. Models
keep their defaults: the Llama keeps keys and values of each batch until its end, so these wait too.
Without them, with `use_cache=False`: the rows "no cache". `peak_bytes`: of the resident set, over
what it was before the first pass. Each batch runs in a thread, and on a CPU the libraries that
compute keep a few MiB for each thread, which are not tensors.

Exit code: 0 as promised (same bits, ratios of at most 1.05 and 0.2, two units, tensors of the loop
and boundaries), 1 not.
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from megatron.offload import LayerMajor, offload_parameters  # noqa: E402
from megatron.offload.commands.training_runs.machine import (  # noqa: E402
    in_a_line,
    machine_facts,
)
from megatron.offload.device.open import open_device  # noqa: E402
from megatron.offload.sizes import format_size, parse_rate  # noqa: E402
from megatron.offload.tiers.file import UnlinkedFile  # noqa: E402
from tests.support.computed_memory import ComputedMemory  # noqa: E402
from tools.check.train_on_slow_disk import SlowDisk  # noqa: E402

MOST_BYTES, MOST_TIME, MOST_UNITS = 1.05, 0.2, 2.01
VOCABULARY = 1024
WAYS = ("loop", "evaluate", "loop, no cache", "evaluate, no cache")

_LossOf = Callable[[Any, torch.Tensor], torch.Tensor]


def evaluate_part(
    directory: Path,
    *,
    layers: int = 8,
    hidden: int = 512,
    tokens: int = 32,
    batches: int = 8,
    rate: float = 50e6,
    rounds: int = 2,
) -> dict[str, Any]:
    """Measures both ways; the figures, as above.

    Args:
        directory: on the SSD.
        layers: of the model.
        hidden: its hidden size.
        tokens: of each batch, one sequence.
        batches: that are evaluated.
        rate: of the drive, in bytes a second.
        rounds: of both ways.
    """
    import transformers  # takes seconds

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden * 43 // 16,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
    )
    model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    given = torch.randint(VOCABULARY, (batches, 1, tokens)).unbind()
    device = open_device(torch.device("cpu"))
    peak = device.peak_reader()
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    with (
        mock.patch.object(UnlinkedFile, "read", UnlinkedFile.read),  # as it was, afterwards
        mock.patch.object(UnlinkedFile, "write", UnlinkedFile.write),
        offload_parameters(model, directory) as parameters,
    ):
        slow = SlowDisk()
        assert parameters.window is not None
        for unit in parameters.window.units:
            unit.wait_for_write()
        layer_major = LayerMajor(model)

        def measure(
            run: Callable[[_LossOf], list[torch.Tensor]], loss_of: _LossOf = _loss_of
        ) -> dict[str, Any]:
            before = parameters.statistics["read_bytes"]
            gc.collect()
            device.return_freed_memory()
            peak.reset()
            began_s = time.perf_counter()
            losses = run(loss_of)
            return {
                "seconds": time.perf_counter() - began_s,
                "read_bytes": parameters.statistics["read_bytes"] - before,
                "peak_bytes": peak.peak_bytes() - base_bytes,
                "losses": [float(one) for one in losses],
            }

        def tensors(run: Callable[[_LossOf], list[torch.Tensor]], loss_of: _LossOf) -> int:
            memory = ComputedMemory()

            def counted(model: Any, tokens: torch.Tensor) -> torch.Tensor:
                with memory:
                    return loss_of(model, tokens)

            run(counted)
            return memory.peak_bytes

        def in_a_loop(loss_of: _LossOf, number: int = batches) -> list[torch.Tensor]:
            with torch.no_grad():
                return [loss_of(model, one) for one in given[:number]]

        def evaluated(loss_of: _LossOf) -> list[torch.Tensor]:
            return layer_major.evaluate(given, loss_of)

        gc.collect()
        device.return_freed_memory()
        base_bytes = device.allocated_bytes()
        in_a_loop(_loss_of, 1)
        slow.slow_down(rate)
        one = measure(lambda loss_of: in_a_loop(loss_of, 1))
        for _ in range(rounds):
            runs["loop"].append(measure(in_a_loop))
            runs["evaluate"].append(measure(evaluated))
            runs["loop, no cache"].append(measure(in_a_loop, _loss_without_cache))
            runs["evaluate, no cache"].append(measure(evaluated, _loss_without_cache))
        slow.slow_down(1e12)
        statistics = parameters.statistics
        ways = {way: _figures(of_way) for way, of_way in runs.items()}
        for way, run, loss_of in zip(
            WAYS,
            (in_a_loop, evaluated) * 2,
            (_loss_of, _loss_of, _loss_without_cache, _loss_without_cache),
            strict=True,
        ):
            ways[way]["peak_tensor_bytes"] = tensors(run, loss_of)
    losses = {json.dumps(run["losses"]) for of_way in runs.values() for run in of_way}
    return {
        "identical": len(losses) == 1,
        "batches": batches,
        "rate_bytes_per_s": rate,
        "evaluate_bytes_ratio": ways["evaluate"]["read_bytes"] / one["read_bytes"],
        "evaluate_time_ratio": ways["evaluate"]["seconds"] / ways["loop"]["seconds"],
        "peak_parameter_units": statistics["peak_bytes"] * layers / statistics["parameter_bytes"],
        "unit_bytes": statistics["parameter_bytes"] / layers,
        **_waiting_bytes(config, tokens, batches),
        "ways": ways,
    }


def _loss_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return model(input_ids=tokens, labels=tokens).loss


def _loss_without_cache(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def _waiting_bytes(config: Any, tokens: int, batches: int) -> dict[str, int]:
    """What waits between two units, of all batches but the one that runs; in bytes, of fp32.

    `boundary_bytes`: hidden states, the embeddings that the model's forward still has, cosines and
    sines of the positions, and their numbers. `key_value_bytes`: of all layers.
    """
    head = config.hidden_size // config.num_attention_heads
    boundary = tokens * ((2 * config.hidden_size + 2 * head) * 4 + 8)
    key_value = config.num_hidden_layers * 2 * tokens * config.hidden_size * 4
    others = batches - 1
    return {"boundary_bytes": others * boundary, "key_value_bytes": others * key_value}


def _figures(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "seconds": median(one["seconds"] for one in runs),
        "read_bytes": median(one["read_bytes"] for one in runs),
        "peak_bytes": max(one["peak_bytes"] for one in runs),
    }


def is_as_promised(found: dict[str, Any]) -> bool:
    """Whether the figures of `evaluate_part` are what the exit code says."""
    return bool(
        found["identical"]
        and found["evaluate_bytes_ratio"] <= MOST_BYTES
        and found["evaluate_time_ratio"] <= MOST_TIME
        and found["peak_parameter_units"] <= MOST_UNITS
        and _grown_bytes(found, "") <= found["boundary_bytes"] + found["key_value_bytes"]
        and _grown_bytes(found, ", no cache") <= found["boundary_bytes"]
    )


def _grown_bytes(found: dict[str, Any], kind: str) -> int:
    """By how much the tensors of `evaluate`, beside losses, are more than the loop's."""
    of_evaluate, of_loop = (found["ways"][way + kind] for way in ("evaluate", "loop"))
    losses = 4 * found["batches"]  # that the loop has at its peak, and evaluate too
    return of_evaluate["peak_tensor_bytes"] - of_loop["peak_tensor_bytes"] - losses


def table(found: dict[str, Any]) -> str:
    """A row for each way."""
    rows = []
    for way, one in found["ways"].items():
        sizes = [format_size(one[key]) for key in ("read_bytes", "peak_tensor_bytes", "peak_bytes")]
        rows.append((way, f"{one['seconds']:.2f}", *sizes))
    columns = [f"{found['batches']} batches", "s", "parameters read", "tensors", "resident"]
    return tabulate(rows, headers=columns, tablefmt="github", disable_numparse=True)


def main() -> int:
    """Measures, prints and writes; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "default: %(default)s"
    parser.add_argument("--layers", type=int, default=8, help=default)
    parser.add_argument("--hidden", type=int, default=512, help=default)
    parser.add_argument("--tokens", type=int, default=32, help=f"of a batch; {default}")
    parser.add_argument("--batches", type=int, default=8, help=default)
    parser.add_argument("--rate", type=parse_rate, default=50e6, help="of the drive")
    parser.add_argument("--rounds", type=int, default=2, help=default)
    parser.add_argument("--directory", type=Path, help="on the SSD; default: a temporary one")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    args = parser.parse_args()
    names = ("layers", "hidden", "tokens", "batches", "rate", "rounds")
    sizes = {name: getattr(args, name) for name in names}
    with tempfile.TemporaryDirectory() as temporary:
        directory = args.directory or Path(temporary)
        facts = machine_facts(directory)
        print(in_a_line(facts))
        found = evaluate_part(directory, **sizes)
    print(table(found))
    if args.json is not None:
        command = shlex.join(["tools/bench/evaluate.py", *sys.argv[1:]]).replace(f"{ROOT}/", "")
        result = {"machine": facts, "command": command, "summary": found}
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    print("\n" + json.dumps({name: one for name, one in found.items() if name != "ways"}))
    return 0 if is_as_promised(found) else 1


if __name__ == "__main__":
    sys.exit(main())
