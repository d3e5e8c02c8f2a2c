# SPDX-License-Identifier: Apache-2.0
"""Trains a small Llama with DeepSpeed's ZeRO 3, its activations on the SSD.

    examples/deepspeed/train.sh                          # two processes on a CPU

What is ours is one line: `offload_activations(engine, ...)`.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
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
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--directory", type=Path, default=ROOT / "runs/offload", help="on an SSD")
    parser.add_argument("--mode", default="ssd", help="off, ssd, host or tiered")
    parser.add_argument("--deepspeed-config", default=Path(__file__).with_name("ds_config.json"))
    args = parser.parse_args()
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # DeepSpeed calls functions of torch.distributed by names that are going away.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo", verbose=False)
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
    )
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=str(args.deepspeed_config)
    )
    offload = offload_activations(engine, args.directory, mode=args.mode)

    rank, batch = dist.get_rank(), engine.train_micro_batch_size_per_gpu()
    rows = rows_of_text(args.steps * batch * dist.get_world_size(), args.tokens)
    own = rows[rank :: dist.get_world_size()].to(engine.device)
    for step, tokens in enumerate(own.split(batch)[: args.steps]):
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
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
