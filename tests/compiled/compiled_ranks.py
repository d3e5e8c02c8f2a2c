# SPDX-License-Identifier: Apache-2.0
"""Trains a compiled model on two ranks, with activations that move in its graphs and without.

test_compiled_graphs_at_work.py starts it on each rank. Prints, for each way to share the model:
whether this rank has the same bits in all steps, and how many storages moved in the last one.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from megatron.offload import offload_activations
from tests.support.compiled import STEPS, Stack, batch
from tests.support.ranks import init_process_group, print_results

SMALL = 1 << 14  # bytes of a bucket, smaller than a block's gradients


def replicated(model: Stack) -> torch.nn.Module:
    """By DDP, of several buckets: torch.compile divides the graph at each."""
    dist._DEFAULT_FIRST_BUCKET_BYTES = SMALL  # type: ignore[attr-defined]
    return DistributedDataParallel(model, bucket_cap_mb=2 * SMALL / 2**20)


def sharded(model: Stack) -> torch.nn.Module:
    """By FSDP2."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train(share: Callable[[Stack], torch.nn.Module], directory: Path | None) -> Any:
    """Losses and gradients, and what moved in the last step."""
    torch.compiler.reset()
    model = share(Stack().eval())
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found, moved = [], 0
    with contextlib.ExitStack() as stack:
        offload = None
        if directory is not None:
            settings: dict[str, Any] = {"min_bytes": 1024, "inside_graphs": True}
            offload = stack.enter_context(offload_activations(model, directory, **settings))
        for step in range(STEPS):
            loss = compiled(batch(10 * step + dist.get_rank()))
            loss.backward()
            gradients = [one.grad for one in model.parameters() if one.grad is not None]
            whole = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in gradients]
            found += [one.detach().clone() for one in (loss, *whole)]
            optimizer.step()
            optimizer.zero_grad()
            if offload is not None:
                moved = int(offload.statistics["offloaded_storages"])
    return found, moved


def main() -> None:
    init_process_group()
    results = {}
    for share in (replicated, sharded):
        expected, _ = train(share, None)
        found, moved = train(share, Path(sys.argv[1]))
        is_same = len(found) == len(expected) and all(map(torch.equal, found, expected))
        results[share.__name__] = {"identical": is_same, "moved": moved}
    print_results(results)


if __name__ == "__main__":
    main()
