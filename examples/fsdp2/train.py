# SPDX-License-Identifier: Apache-2.0
"""Trains a small Llama that FSDP2 divides among ranks, its activations on the SSD.

    examples/fsdp2/train.sh                              # two processes on a CPU

What is ours is one line: `offload_activations(model, ...)`.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from megatron.offload import offload_activations

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

from text import NUM_WORDS, rows_of_text  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512, help="of a row")
    parser.add_argument("--batch", type=int, default=2, help="rows of a rank in a step")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--directory", type=Path, default=ROOT / "runs/offload", help="on an SSD")
    parser.add_argument("--mode", default="ssd", help="off, ssd, host or tiered")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if device.type != "cpu":
        torch.accelerator.set_device_index(rank % torch.accelerator.device_count())
    args.directory.mkdir(parents=True, exist_ok=True)

    torch.manual_seed(1)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=args.hidden,
            intermediate_size=8 * args.hidden // 3,
            num_hidden_layers=args.layers,
            num_attention_heads=args.hidden // 64,
            vocab_size=NUM_WORDS,
        )
    ).to(device)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    offload = offload_activations(model, args.directory, mode=args.mode)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    rows = rows_of_text(args.steps * args.batch * world_size, args.tokens)
    own = rows[rank::world_size].to(device)
    for step, tokens in enumerate(own.split(args.batch)):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            moved = offload.statistics.get("offloaded_bytes", 0) / (1 << 20)
            print(f"step {step + 1:3}  loss {loss.item():.4f}  offloaded {moved:.1f} MiB")
    if rank == 0:
        print(offload.summary())
    dist.barrier()
    offload.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
