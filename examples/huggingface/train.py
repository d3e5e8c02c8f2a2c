# SPDX-License-Identifier: Apache-2.0
"""Trains a small Llama or Qwen with transformers' Trainer, its activations on the SSD.

    examples/huggingface/train.sh                        # installs what is missing
    examples/huggingface/train.sh --lora --family qwen3 --steps 40
    examples/huggingface/train.sh --everything           # optimizer states and parameters too
    examples/huggingface/train.sh --mode auto --budget 100MiB --steps 30

What is ours is one line: `callbacks=[OffloadCallback(...)]`.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

from megatron.offload import OffloadCallback

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

from text import NUM_WORDS, rows_of_text  # noqa: E402


def make_model(args: argparse.Namespace) -> torch.nn.Module:
    """A new model, or adapters on one that stays as it is."""
    heads = args.hidden // 64
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            args.family,
            hidden_size=args.hidden,
            intermediate_size=8 * args.hidden // 3,
            num_hidden_layers=args.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            head_dim=64,
            vocab_size=args.vocabulary,
            max_position_embeddings=max(args.tokens, 2048),
        )
    )
    if args.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", default="llama", help="llama, qwen3, ... of transformers")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=NUM_WORDS)
    parser.add_argument("--tokens", type=int, default=512, help="of a row")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lora", action="store_true", help="train adapters only")
    parser.add_argument("--directory", type=Path, default=ROOT / "runs/offload", help="on an SSD")
    parser.add_argument("--mode", default="ssd", help="off, ssd, host, tiered or auto")
    parser.add_argument(
        "--everything", action="store_true", help="optimizer states and parameters move too"
    )
    parser.add_argument("--budget", help="of auto: the most memory of activations")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)

    torch.manual_seed(1)
    rows = [{"input_ids": row, "labels": row} for row in rows_of_text(4096, args.tokens)]
    args.directory.mkdir(parents=True, exist_ok=True)
    settings = {"memory_budget_bytes": args.budget} if args.budget else {}
    if args.everything:
        settings |= {"optimizer_states": True, "parameters": True}
    trainer = Trainer(
        make_model(args),
        TrainingArguments(
            output_dir=str(ROOT / "runs/huggingface"),
            per_device_train_batch_size=args.batch,
            max_steps=args.steps,
            learning_rate=1e-3,
            logging_steps=5,
            save_strategy="no",
            report_to=[],
        ),
        train_dataset=rows,
        callbacks=[OffloadCallback(args.directory, mode=args.mode, **settings)],
    )
    trainer.train()


if __name__ == "__main__":
    main()
