# SPDX-License-Identifier: Apache-2.0
"""The GPT trainer with routers that keep something from one micro-batch to the next; run by
test_layer_major_experts.py.

Auxiliary losses over the global batch and over a micro-batch, a z-loss, a bias of each expert; on
one rank inputs with noise too. In its second step rank 1 draws a number more than before, which no
layer uses. Validation computes with gradients: that no backward follows, `forward_only` says alone.
With `auto` ranks do not measure the same either (`uneven_ranks.py`).

Each rank prints what its routers have counted in a step, and after validation whether gradients
have changed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT / "examples") not in sys.path:
    sys.path.insert(0, str(ROOT / "examples"))

RANK = int(os.environ.get("RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
MICRO_BATCHES = 4
NOTED = ("local_tokens_per_expert", "global_tokens_per_expert", "ga_steps")


class _WithGradients:
    """Torch in which nothing switches gradients off."""

    no_grad = contextlib.nullcontext

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def note(*values: Any) -> None:
    print("NOTED", RANK, *values, flush=True)


def watch() -> None:
    """Has the trainer print what its routers count, and validate with gradients."""
    from trainer import model, training

    finalize, validate = model.finalize_model_grads, training._Run._validate

    def noting_finalize(chunks: Any, *args: Any, **kwargs: Any) -> None:
        routers = [m for chunk in chunks for m in chunk.modules() if hasattr(m, "expert_bias")]
        for router in routers:
            note(*(getattr(router, name).tolist() for name in NOTED), router.expert_bias.tolist())
        finalize(chunks, *args, **kwargs)

    def noting_validate(run: training._Run) -> float | None:
        buffers = [buffer.grad_data for chunk in run.chunks for buffer in chunk.buffers]
        before = [buffer.clone() for buffer in buffers]
        loss = validate(run)
        is_same = all(map(torch.equal, before, buffers))
        note(loss, "gradients are the same" if is_same else "gradients have changed")
        return loss

    model.finalize_model_grads = noting_finalize  # type: ignore[assignment]
    training._Run._validate = noting_validate  # type: ignore[method-assign]
    training.torch = _WithGradients()  # type: ignore[assignment]


def make_task() -> Any:
    """Imports megatron-core, which `start` has checked by then."""
    from trainer.gpt import GPT

    class Balanced(GPT):
        """With settings that the trainer has no flags for."""

        num_passes = 0

        def transformer_config(self, args: argparse.Namespace) -> Any:
            config = super().transformer_config(args)
            config.moe_router_load_balancing_type = ["aux_loss", "global_aux_loss"]
            config.moe_aux_loss_coeff = [0.1, 0.5]
            config.moe_z_loss_coeff = 0.1
            config.moe_router_enable_expert_bias = True
            config.moe_router_score_function = "sigmoid"
            if WORLD_SIZE == 1:
                config.moe_input_jitter_eps = 0.1
            return config

        def forward_step(self, iterator: Any, model: torch.nn.Module) -> Any:
            self.num_passes += 1
            if RANK == 1 and self.num_passes == MICRO_BATCHES + 2:
                torch.rand(1)
            return super().forward_step(iterator, model)

    watch()
    return Balanced()


if __name__ == "__main__":
    from trainer.start import start

    if "auto" in sys.argv:
        from tests.megatron.uneven_ranks import connect

        connect()
    sys.exit(start(make_task))
