# SPDX-License-Identifier: Apache-2.0
"""Trainings of a small model in fp16 with loss scaling, whose states stay in memory, or move;
test_model_states.py starts it on two ranks, which share the data.

In one step a gradient is infinite, and the step is skipped. Prints for each mode what is the same.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.offload import OffloadConfig
from megatron.offload.integration.megatron import cpu_runtime, install, offload_model_states
from megatron.offload.states.config import StatesConfig
from tests.support.ranks import init_process_group

VOCAB, LENGTH, BATCH, MICRO_BATCHES = 128, 16, 2, 2
STEPS, SKIPPED = 20, 7
CASES: dict[str, dict[str, Any]] = {  # of Megatron's `OptimizerConfig`
    "fp16": {},
    "fp16 distributed": {"use_distributed_optimizer": True},
    "fp16 sgd": {"optimizer": "sgd", "clip_grad": 0.0, "log_num_zeros_in_grad": True},
}


class Training:
    """A GPT with its optimizer, and what came of its steps.

    Args:
        settings: of Megatron's `OptimizerConfig`.
        dtype: of the model's parameters.
        num_layers: of the model.
        data_parallel: settings of Megatron's `DistributedDataParallelConfig`.
        tied: the output layer has the embedding's weight.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        dtype: torch.dtype = torch.float16,
        num_layers: int = 2,
        data_parallel: dict[str, Any] | None = None,
        *,
        tied: bool = False,
    ) -> None:
        torch.manual_seed(3)
        model_parallel_cuda_manual_seed(5)
        is_distributed = settings.get("use_distributed_optimizer", False)
        config = TransformerConfig(
            num_layers=num_layers,
            hidden_size=32,
            num_attention_heads=2,
            use_cpu_initialization=True,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            **_precision(dtype),
            gradient_accumulation_fusion=False,
            finalize_model_grads_func=finalize_model_grads,
        )
        model = GPTModel(
            config,
            get_gpt_layer_local_spec(),
            VOCAB,
            LENGTH,
            share_embeddings_and_output_weights=tied,
        )
        self.chunks = [
            DistributedDataParallel(
                config,
                DistributedDataParallelConfig(
                    grad_reduce_in_fp32=True,
                    use_distributed_optimizer=is_distributed,
                    **(data_parallel or {}),
                ),
                model if dtype is torch.float32 else Float16Module(config, model),
            )
        ]
        self.chunks[0].broadcast_params()
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                **{
                    "optimizer": "adam",
                    "lr": 1e-2,
                    "min_lr": 1e-3,
                    "weight_decay": 0.1,
                    "clip_grad": 0.5,
                    **_precision(dtype),
                    "params_dtype": dtype,
                    "initial_loss_scale": 2.0**8,
                    "loss_scale_window": 6,
                    "hysteresis": 1,
                    **settings,
                }
            ),
            self.chunks,
        )
        config.grad_scale_func = self.optimizer.scale_loss
        self.found: list[Any] = []

    def step(self, number: int) -> None:
        """One step; what it gave is added to `found`."""
        draw = torch.Generator().manual_seed(100 * number + parallel_state.get_data_parallel_rank())
        tokens = iter(
            torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=draw) for _ in range(MICRO_BATCHES)
        )
        self.chunks[0].zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=tokens,
            model=self.chunks[0],
            num_microbatches=MICRO_BATCHES,
            seq_length=LENGTH,
            micro_batch_size=BATCH,
            forward_only=False,
        )
        if number == SKIPPED:
            next(iter(self.chunks[0].parameters())).main_grad.fill_(float("inf"))
        updated, norm, zeros = self.optimizer.step()
        self.found.append(
            [
                *(float(loss["loss"]) for loss in losses),
                updated,
                None if norm is None else float(norm),
                zeros,
                float(self.optimizer.get_loss_scale()),
            ]
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """Copies of all weights, main weights and states."""
        found = {name: p.detach().clone() for name, p in self.chunks[0].named_parameters()}
        for index, part in enumerate(self.optimizer.chained_optimizers):
            params = [p for group in part.optimizer.param_groups for p in group["params"]]
            for number, param in enumerate(params):
                found[f"{index} {number} main"] = param.detach().clone()
                for key, value in part.optimizer.state[param].items():
                    found[f"{index} {number} {key}"] = torch.as_tensor(value).clone()
        return found


def _precision(dtype: torch.dtype) -> dict[str, bool]:
    """Megatron's settings for parameters of a type."""
    return {"fp16": dtype is torch.float16, "bf16": dtype is torch.bfloat16}


def forward_step(tokens: Any, model: torch.nn.Module) -> Any:
    """One micro-batch, as megatron-core's schedules call it."""
    batch = next(tokens)
    positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    losses = model(batch[:, :-1], positions, mask, labels=batch[:, 1:])

    def mean(output: torch.Tensor) -> Any:
        loss = output.float().mean()
        return loss, {"loss": loss.detach().clone()}

    return losses, mean


@dataclasses.dataclass(frozen=True)
class Result:
    """What a whole training came to."""

    steps: list[Any]
    shown: dict[str, torch.Tensor]  # while states are away
    restored: dict[str, torch.Tensor]  # after they are back
    counted: dict[str, int]


def run(settings: dict[str, Any], states_config: StatesConfig, offload: OffloadConfig) -> Result:
    """A whole training."""
    training = Training(settings)
    states = offload_model_states(states_config, training.optimizer)
    installed = install(offload, training.chunks, states=states)
    for number in range(STEPS):
        with installed.step():
            training.step(number)
    states.expose()
    shown, counted = training.tensors(), states.statistics
    installed.close()
    states.close()
    return Result(training.found, shown, training.tensors(), counted)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether two trainings ended with the same bits."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def main() -> None:
    """Trains one case three times."""
    directory, settings = Path(sys.argv[1]), CASES[sys.argv[2]]
    init_process_group()
    cpu_runtime.activate()
    parallel_state.initialize_model_parallel()
    off = run(settings, StatesConfig(), OffloadConfig())
    results: dict[str, Any] = {}
    for mode in ("ssd", "host"):
        config = StatesConfig(
            mode=mode, directories=(directory,), bucket_bytes=1 << 15, window_bytes=1 << 16
        )
        activations = OffloadConfig()  # they stay in one of the two
        if mode == "ssd":
            activations = OffloadConfig(mode="ssd", directories=(directory,), min_bytes=1)
        on = run(settings, config, activations)
        results[mode] = {
            "steps": on.steps == off.steps,
            "shown": same(on.shown, off.restored),
            "restored": same(on.restored, off.restored),
            "num_tensors": len(off.restored),
            "skipped": [n for n, step in enumerate(on.steps) if not step[MICRO_BATCHES]],
            **on.counted,
        }
    if int(os.environ["RANK"]) == 0:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
