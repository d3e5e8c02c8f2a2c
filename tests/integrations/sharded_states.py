# SPDX-License-Identifier: Apache-2.0
"""Optimizer states under DDP and FSDP; test_sharded_states.py starts it on each rank.

Prints, for each setting, whether all ranks have the same bits with and without offload: weights,
states, and what comes of a checkpoint that each has written.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from megatron.offload import offload_optimizer
from tests.support.ranks import init_process_group

Model = torch.nn.Module
WIDTH = 63  # which two ranks do not divide evenly


def ddp(model: Any) -> Model:
    return torch.nn.parallel.DistributedDataParallel(model)


def fsdp2(model: Any) -> Model:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp1(model: Any) -> Model:
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


def trained(wrap: Callable[[Any], Model], folder: Path, name: str, offloads: bool) -> Any:
    """Weights and states after six steps, of which the last two begin at a checkpoint."""
    torch.manual_seed(1)
    model = wrap(torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(6)]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    handle = None
    if offloads:
        settings = {"bucket_bytes": 30000, "window_bytes": 80000}
        handle = offload_optimizer(optimizer, folder, **settings)
    inputs = torch.Generator().manual_seed(3 + dist.get_rank())
    for step in range(6):
        model(torch.randn(4, WIDTH, generator=inputs)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 3:
            at = folder / name
            state = get_optimizer_state_dict(model, optimizer)
            dcp.save({"optimizer": state}, checkpoint_id=at)
            lost = next(one for one in optimizer.state.values() if "exp_avg" in one)
            lost["exp_avg"].mul_(0)
            dcp.load({"optimizer": state}, checkpoint_id=at)
            set_optimizer_state_dict(model, optimizer, state)
    weights = [own(param) for param in model.parameters()]
    states = optimizer.state_dict()["state"].values()
    moments = [own(state[key]) for state in states for key in ("exp_avg", "exp_avg_sq")]
    if handle is not None:
        handle.close()
    return [*weights, *moments]


def own(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of this rank's part."""
    return getattr(tensor, "_local_tensor", tensor).detach().clone()


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    init_process_group()
    found = {}
    for wrap in (ddp, fsdp2, fsdp1):
        results = [trained(wrap, folder, f"{wrap.__name__}-{on}", on) for on in (False, True)]
        same = [torch.equal(a, b) for a, b in zip(*results, strict=True)]
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, (len(same), all(same)))
        found[wrap.__name__] = told
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
