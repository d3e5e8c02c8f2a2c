# SPDX-License-Identifier: Apache-2.0
"""Trains with DeepSpeed's engines; test_deepspeed.py starts it on each rank.

Prints, for each setting: whether all ranks have the same bits with and without the door, and bytes
that moved in each micro-batch.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import sys
import types
from pathlib import Path
from typing import Any, NoReturn

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

from megatron.offload import offload_activations
from tests.support.ranks import init_process_group
from tests.support.same_training import digest, train
from tests.support.text_models import checkpointed_llama, llama, text_batches
from tests.support.waiting import SOON_S

NUM_MICRO_BATCHES = 4
ZERO_3 = {
    "stage": 3,
    "stage3_param_persistence_threshold": 0,
    "stage3_prefetch_bucket_size": 0,
    "stage3_max_reuse_distance": 0,
}
ON_THE_HOST = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
PARAMETERS_TOO = {"offload_param": {"device": "cpu", "pin_memory": False}}


class DeepSpeedCheckpointed(torch.nn.Module):
    """A Llama's layers under DeepSpeed's own activation checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
            for _ in range(4)
        )

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        x = input_ids.float().unsqueeze(-1).expand(-1, -1, 64) / 100
        x = x * self.blocks[0][0].bias.sum().add(1.0)
        for block in self.blocks:
            x = deepspeed.checkpointing.checkpoint(block, x)
        return types.SimpleNamespace(loss=x.square().mean())


SETTINGS: dict[str, dict[str, Any]] = {
    "zero 1": {"zero": {"stage": 1}},
    "zero 2": {"zero": {"stage": 2}},
    "zero 2, accumulating": {"zero": {"stage": 2}, "accumulates": 2},
    "zero 3": {"zero": ZERO_3},
    "zero 3, weights copied": {"zero": {**ZERO_3, "memory_efficient_linear": False}},
    "zero 3, checkpointed": {"zero": ZERO_3, "make_model": checkpointed_llama},
    "zero 3, bf16": {"zero": ZERO_3, "bf16": True},
    "zero 3, optimizer on the host": {"zero": {**ZERO_3, **ON_THE_HOST}},
    "zero 3, parameters on the host": {"zero": {**ZERO_3, **ON_THE_HOST, **PARAMETERS_TOO}},
    "deepspeed's checkpointing": {"zero": {"stage": 1}, "make_model": DeepSpeedCheckpointed},
}


def config_of(setting: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": setting.get("accumulates", 1),
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"reduce_bucket_size": 200000, "overlap_comm": False},
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    made["zero_optimization"] |= setting["zero"]
    if setting.get("bf16"):
        made["bf16"] = {"enabled": True}
    return made


def trained(
    setting: dict[str, Any], directory: Path | None, *, on_engine: bool = True
) -> tuple[Any, list[dict[str, Any]]]:
    """Losses, gradients and weights; the door's statistics."""
    torch.manual_seed(5)
    model = setting.get("make_model", llama)()
    options: dict[str, Any] = {"min_bytes": "4KiB"} if directory is not None else {"mode": "off"}
    with contextlib.ExitStack() as stack:
        handle: Any = None
        if not on_engine:
            handle = stack.enter_context(offload_activations(model, directory, **options))
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config_of(setting)
        )
        if on_engine:
            handle = stack.enter_context(offload_activations(engine, directory, **options))
        losses, gradients, statistics = [], [], []
        for batch in text_batches(dist.get_rank(), NUM_MICRO_BATCHES):
            loss = engine(**batch).loss
            engine.backward(loss)
            losses.append(digest(loss))
            if engine.is_gradient_accumulation_boundary():  # else they are not there yet
                found = [safe_get_full_grad(p) for p in engine.module.parameters()]
                gradients.append([digest(one) if one is not None else None for one in found])
            statistics.append(handle.statistics)
            engine.step()
        if handle is not None and handle.engine is not None:
            del loss  # and its graph
            assert handle.engine.wait_for_writes(SOON_S)  # those too that a use has overtaken
            statistics[-1]["left"] = sum(t.used_bytes for t in handle.engine.tiers.values())
        full = [safe_get_full_fp32_param(p) for p in engine.module.parameters()]
        weights = [digest(one) if one is not None else None for one in full]
        engine.destroy()
    return (losses, gradients, weights), statistics


def left_memory(step: dict[str, Any]) -> int:
    """Bytes that a step moved or computed again."""
    return int(step["offloaded_bytes"] + step["replayed_bytes"])


def compared(setting: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What one setting showed."""
    expected, _ = trained(setting, None)
    after, of_after = trained(setting, folder)
    before, of_before = trained(setting, folder, on_engine=False)
    return {
        "identical": from_all([expected == after, expected == before]),
        "bytes": [[left_memory(one) for one in run] for run in (of_after, of_before)],
        "replayed": [run[-1]["replayed_bytes"] for run in (of_after, of_before)],
        "left": of_after[-1]["left"],
        "gradients": sum(one is not None for one in expected[1][-1]),
    }


def join() -> None:
    """Joins the other ranks, with DeepSpeed's collectives over gloo."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    init_process_group()
    # Its collectives in shared memory would be compiled first, which takes a minute; gloo will do.
    # As an attribute, `deepspeed.comm.torch` is torch.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    torch.set_num_threads(1)


def place_of(folder: Path, name: str) -> Path:
    """A new folder of this rank for a setting."""
    place = folder / str(dist.get_rank()) / "".join(c for c in name if c.isalnum())
    place.mkdir(parents=True)
    return place


def from_all(found: Any) -> list[Any]:
    """What each rank has found, in their order."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, found)
    return every


def end(found: Any) -> NoReturn:
    """Prints what was found and ends; DeepSpeed's threads need not end first."""
    dist.barrier()
    sys.stdout.flush()
    print("\n" + json.dumps(found), flush=True)
    os._exit(0)


def main(folder: Path, names: list[str]) -> None:
    join()
    found = {name: compared(SETTINGS[name], place_of(folder, name)) for name in names or SETTINGS}
    alone = train(llama, text_batches(dist.get_rank()), folder / str(dist.get_rank()))
    found["alone"] = {
        "bytes": [[left_memory(one) for one in alone.statistics]],
        "replayed": [alone.statistics[-1]["replayed_bytes"]],
    }
    end(found)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
