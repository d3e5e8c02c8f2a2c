# SPDX-License-Identifier: Apache-2.0
"""Run by test_processes.py: ranks of DistributedDataParallel whose rows change places each epoch.

Arguments: a directory for features, shared by the ranks, or `none`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from megatron.offload import cache_frozen
from tests.support.frozen_training import BATCH, llama, rows_of_text
from tests.support.ranks import init_process_group, print_results


def main(directory: str) -> None:
    """Trains for three epochs and prints losses, hits of each epoch and a sum of the weights."""
    init_process_group()
    torch.set_num_threads(1)
    rows = rows_of_text(8 * BATCH)
    model = DistributedDataParallel(llama())
    features = None if directory == "none" else cache_frozen(model, Path(directory))
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], 1e-2)
    losses, hits = [], []
    for epoch in range(3):
        order = torch.randperm(8 * BATCH, generator=torch.Generator().manual_seed(epoch))
        for chosen in order[dist.get_rank() :: dist.get_world_size()].split(BATCH):
            loss = model(**{name: one[chosen] for name, one in rows.items()}).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if features is not None:
            features.store.wait_for_writes()
            hits.append(features.statistics["hit_rows"] - sum(hits))
        dist.barrier()
    weights = sum(one.double().sum().item() for one in model.parameters())
    print_results({"losses": losses, "hits": hits, "weights": weights})


if __name__ == "__main__":
    main(sys.argv[1])
