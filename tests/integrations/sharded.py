# SPDX-License-Identifier: Apache-2.0
"""Trains under DDP, FSDP and tensor parallelism; test_sharded.py starts it on each rank.

Prints, for each setting: whether all ranks have the same bits with and without the door, bytes
that moved in each step, and what stayed.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from megatron.offload.activations.placement.plan import Plan, PlannedPart
from megatron.offload.activations.placement.plan_file import save_plans
from megatron.offload.activations.placement.policy import Placement
from tests.support.ranks import init_process_group
from tests.support.same_training import Training, train
from tests.support.text_models import LAYERS, checkpointed_llama, llama, text_batches

Wrap = Callable[[torch.nn.Module], torch.nn.Module]


class ViewOfData(torch.nn.Linear):
    """A linear layer that saves a view of its weight that does not know its base."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.data.t() + (self.weight.sum() - self.weight.sum().detach())


def llama_with_views() -> torch.nn.Module:
    model: Any = llama()
    for layer in model.model.layers:
        old = layer.mlp.gate_proj
        layer.mlp.gate_proj = ViewOfData(old.in_features, old.out_features, bias=False)
        layer.mlp.gate_proj.load_state_dict(old.state_dict())
    return model


def ddp(model: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.parallel.DistributedDataParallel(model)


def fsdp2(**settings: Any) -> Wrap:
    def wrap(model: Any) -> torch.nn.Module:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, **settings)
        fully_shard(model, mesh=mesh, **settings)
        return model

    return wrap


def fsdp1(use_orig_params: bool) -> Wrap:
    def wrap(model: Any) -> torch.nn.Module:
        layers = ModuleWrapPolicy({type(model.model.layers[0])})
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=layers,
            use_orig_params=use_orig_params,
            device_id=torch.device("cpu"),
        )

    return wrap


def tensor_parallel(model: Any) -> torch.nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        plan = {
            "mlp.gate_proj": ColwiseParallel(),
            "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(),
        }
        parallelize_module(layer, mesh, plan)
    return model


def accumulating(model: Any, batch: Any) -> torch.Tensor:
    """A step of two micro-batches, of which the first reduces nothing."""
    with model.no_sync():
        model(**batch).loss.backward()
    return model(**batch).loss


def autocasting(model: Any, batch: Any) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(**batch).loss


RECOMPUTED = {"recompute_layers": "all", "recompute_input": "ssd"}
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SETTINGS: dict[str, dict[str, Any]] = {
    "ddp": {"wrap": ddp},
    "ddp, accumulating": {"wrap": ddp, "call": accumulating},
    "ddp, autocast": {"wrap": ddp, "call": autocasting},
    "fsdp2, autocast": {"wrap": fsdp2(), "call": autocasting},
    "fsdp2": {"wrap": fsdp2()},
    "fsdp2, not resharded": {"wrap": fsdp2(reshard_after_forward=False)},
    "fsdp2, bf16": {"wrap": fsdp2(mp_policy=BF16)},
    "fsdp2, parameters on the host": {
        "wrap": fsdp2(offload_policy=CPUOffloadPolicy(pin_memory=False))
    },
    "fsdp2, checkpointed": {"wrap": fsdp2(), "make_model": checkpointed_llama},
    "fsdp2, views of data": {"wrap": fsdp2(), "make_model": llama_with_views},
    # Each write takes longer than a layer: what is resharded would still be on its way.
    "fsdp2, views of data, slow disk": {
        "wrap": fsdp2(),
        "make_model": llama_with_views,
        "write_bytes_per_s": "5MB/s",
        "verify": "checksum",
    },
    "fsdp2, auto": {"wrap": fsdp2(), "mode": "auto"},
    "fsdp1": {"wrap": fsdp1(use_orig_params=True)},
    "fsdp1, flat parameters": {"wrap": fsdp1(use_orig_params=False)},
    "fsdp1, recomputed": {"wrap": fsdp1(use_orig_params=True), **RECOMPUTED},
    "fsdp1, flat parameters, recomputed": {"wrap": fsdp1(use_orig_params=False), **RECOMPUTED},
    "fsdp2, recomputed": {"wrap": fsdp2(), **RECOMPUTED},
    "tensor parallel": {"wrap": tensor_parallel},
}


def trained(folder: Path | None, *, wraps_first: bool = True, **setting: Any) -> Training:
    make_model = setting.pop("make_model", llama)
    rank = 0 if setting["wrap"] is tensor_parallel else dist.get_rank()
    if folder is None:
        setting = {key: value for key, value in setting.items() if key in ("wrap", "call")}
    return train(make_model, text_batches(rank), folder, wraps_first=wraps_first, **setting)


def compared(name: str, folder: Path, setting: dict[str, Any]) -> dict[str, Any]:
    """What one setting showed."""
    if setting.get("mode") == "auto":
        setting = {**setting, "plan_file": folder / "plan.json"}
        ways = [Placement.RECOMPUTE, Placement.SSD, Placement.RECOMPUTE, Placement.KEEP]
        named = [f"model.layers.{number}" for number in range(LAYERS)]
        parts = [
            PlannedPart(0, layer, "layer", way, 1) for layer, way in zip(named, ways, strict=True)
        ]
        if dist.get_rank() == 0:
            save_plans(setting["plan_file"], [Plan(tuple(parts))])
        dist.barrier()
    expected = trained(None, **copy.copy(setting))
    after = trained(folder, **copy.copy(setting))
    before = trained(folder, wraps_first=False, **copy.copy(setting))
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, [expected == after, expected == before])
    return {
        "identical": every,
        "bytes": [[one["offloaded_bytes"] for one in run.statistics] for run in (after, before)],
        "recast": after.statistics[-1]["recast_bytes"],
        "unsupported": after.statistics[-1]["unsupported"],
        "recomputed": after.statistics[-1]["recomputed_layers"],
        "left": after.left_bytes,
    }


def main(folder: Path, names: list[str]) -> None:
    init_process_group()
    torch.set_num_threads(1)
    own = folder / str(dist.get_rank())
    found = {}
    for name in names or SETTINGS:
        place = own / name.replace(" ", "-").replace(",", "")
        place.mkdir(parents=True)
        if SETTINGS[name].get("mode") == "auto":  # a plan file is shared
            place = folder / "shared"
            place.mkdir(exist_ok=True)
        found[name] = compared(name, place, SETTINGS[name])
    alone = train(llama, text_batches(dist.get_rank()), own)
    found["alone"] = {"bytes": [[one["offloaded_bytes"] for one in alone.statistics]]}
    alone = train(llama_with_views, text_batches(dist.get_rank()), own)
    found["alone, views of data"] = {
        "bytes": [[one["offloaded_bytes"] for one in alone.statistics]]
    }
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
