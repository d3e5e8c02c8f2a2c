# SPDX-License-Identifier: Apache-2.0
"""A Megatron-LM in miniature for tests without a checkout: `FakeMegatronLm`.

Its modules, functions and signatures are those that the launcher relies on; they do no more than a
test looks at. The real one runs in `tests/megatron/test_unmodified_megatron_lm.py`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch


class FakeMegatronLm:
    """What a test sets and reads; `flags` is what `get_args` answers."""

    def __init__(self) -> None:
        self.flags = argparse.Namespace(
            skip_train=False,
            load=None,
            tensorboard_log_interval=1,
            micro_batch_size=2,
            data_parallel_size=1,
            global_batch_size=4,
            seq_length=8,
        )
        self.printed: list[str] = []
        self.tensorboard: Any = None
        self.wandb: Any = None
        self.settings: Any = None
        self.model: list[torch.nn.Module] = [torch.nn.Linear(2, 2)]
        self.events: list[str] = []
        self.arguments = ModuleType("megatron.training.arguments")
        self.training = ModuleType("megatron.training.training")
        self.global_vars = ModuleType("megatron.training.global_vars")
        vars(self.arguments).update(
            add_megatron_arguments=self._add_megatron_arguments,
            core_transformer_config_from_args=lambda args, config_class=None: self.settings,
        )
        vars(self.global_vars).update(
            get_args=lambda: self.flags,
            get_tensorboard_writer=lambda: self.tensorboard,
            get_wandb_writer=lambda: self.wandb,
        )
        vars(self.training).update(
            setup_model_and_optimizer=self._setup_model_and_optimizer,
            load_checkpoint=self._load_checkpoint,
            save_checkpoint=self._save_checkpoint,
            train_step=self._train_step,
            training_log=self._training_log,
            print_rank_last=lambda message: self.printed.append(message),
        )

    def put(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where imports find it, until the test ends."""
        package = ModuleType("megatron.training")
        for module in (package, self.arguments, self.training, self.global_vars):
            monkeypatch.setitem(sys.modules, module.__name__, module)

    @staticmethod
    def _add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--micro-batch-size", type=int)
        return parser

    def _setup_model_and_optimizer(
        self, model_provider_func: Any, model_type: Any, checkpointing_context: Any = None
    ) -> Any:
        self.events.append("build")
        if self.flags.load is not None:
            self.training.load_checkpoint(self.model, "optimizer", "scheduler")
        return self.model, "optimizer", "scheduler"

    def _load_checkpoint(self, ddp_model: Any, optimizer: Any, opt_param_scheduler: Any) -> Any:
        self.events.append("load")
        return 1, 0

    def _save_checkpoint(
        self, iteration: int, model: Any, optimizer: Any, opt_param_scheduler: Any
    ) -> None:
        self.events.append("save")

    def _train_step(
        self,
        forward_step_func: Any,
        data_iterator: Any,
        model: Any,
        optimizer: Any,
        opt_param_scheduler: Any,
        config: Any,
        forward_backward_func: Callable[..., Any],
        iteration: int | None = None,
    ) -> Any:
        losses = forward_backward_func(model=model, num_microbatches=2, forward_only=False)
        self.events.append("optimizer")
        return losses

    def _training_log(
        self,
        loss_dict: Any,
        learning_rate: float | None,
        iteration: int,
        grad_norm: float | None,
        is_first_iteration: bool = False,
    ) -> str:
        self.training.print_rank_last(f" iteration {iteration} |")
        return "report memory"

    def train(self, iteration: int = 1, **losses: float) -> Any:
        """A step and its log line, as Megatron-LM's `train` does them; the last stage's losses."""

        def schedule(**kwargs: Any) -> str:
            self.events.append("forward and backward")
            return "losses"

        result = self.training.train_step(
            None, None, self.model, None, None, None, schedule, iteration=iteration
        )
        loss_dict = {name: torch.tensor([value]) for name, value in losses.items()}
        self.training.training_log(loss_dict, 0.125, iteration, grad_norm=2.5)
        return result


class Scalars:
    """A writer that remembers: TensorBoard's `add_scalar` and wandb's `log`."""

    def __init__(self) -> None:
        self.values: dict[str, tuple[float, int]] = {}

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.values[name] = (value, step)

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self.add_scalar(name, value, step)


def settings(**changes: Any) -> SimpleNamespace:
    """What `check` and the estimate read of a TransformerConfig."""
    values = {
        "num_layers": 2,
        "hidden_size": 16,
        "ffn_hidden_size": 64,
        "num_attention_heads": 2,
        "num_query_groups": 2,
        "kv_channels": 8,
        "gated_linear_unit": False,
        "bf16": False,
        "fp16": False,
        "hidden_dropout": 0.0,
        "sequence_parallel": False,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "microbatch_group_size_per_vp_stage": None,
        "pipeline_model_parallel_layout": None,
        "num_layers_in_first_pipeline_stage": None,
        "num_layers_in_last_pipeline_stage": None,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
    }
    return SimpleNamespace(**{**values, **changes})
