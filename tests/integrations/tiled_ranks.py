# SPDX-License-Identifier: Apache-2.0
"""Trains a Llama with and without tiles under DDP and FSDP, for test_tiled_mlp.py, on each rank.

Prints, for each wrapper: how far weights are apart after three steps, relative to how far they have
gone, and how often a parameter heard of its gradient.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron.offload import offload_activations
from tests.integrations.sharded import ddp, fsdp1, fsdp2
from tests.support.ranks import init_process_group, print_results
from tests.support.text_models import llama, text_batches

WRAPPERS: dict[str, Callable[[Any], torch.nn.Module]] = {
    "ddp": ddp,
    "fsdp2": fsdp2(),
    "fsdp1": fsdp1(use_orig_params=True),
    "fsdp1, flat parameters": fsdp1(use_orig_params=False),
}
TILE = 7


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([to_local(one).detach().flatten().double() for one in model.parameters()])


def to_local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[no-any-return]


def train(wrap: Callable[[Any], torch.nn.Module], tiled_mlp: str | int) -> dict[str, Any]:
    torch.manual_seed(5)
    model: Any = llama().train()
    # Before FSDP takes the parameters out of the layers, and with them what tells an MLP.
    offload = offload_activations(model, mode="off", tiled_mlp=tiled_mlp)
    model = wrap(model)
    began = weights(model)
    heard: collections.Counter[int] = collections.Counter()
    for one in model.parameters():
        if one.requires_grad and one.is_leaf:
            one.register_post_accumulate_grad_hook(lambda p: heard.update([id(p)]))
    calls = []
    for module in model.modules():
        if type(module).__name__ == "Linear" and module.out_features > module.in_features:  # type: ignore[operator]
            own = module.forward
            module.forward = lambda x, own=own: (calls.append(x.shape[1]), own(x))[1]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = text_batches()
    with offload:
        for step in range(3):
            model(**batches[(step + dist.get_rank()) % len(batches)]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return {
        "began": began,
        "ended": weights(model),
        "heard": sorted({count // 3 for count in heard.values()}),
        "shortest": min(calls),
    }


def main() -> None:
    init_process_group()
    found = {}
    for name, wrap in WRAPPERS.items():
        alone, tiles = train(wrap, "off"), train(wrap, TILE)
        went = (alone["ended"] - alone["began"]).norm()
        found[name] = {
            "off": float((tiles["ended"] - alone["ended"]).norm() / went),
            "heard": tiles["heard"],
            "is_tiled": tiles["shortest"] <= TILE < alone["shortest"],
        }
    print_results(found)


if __name__ == "__main__":
    main()
