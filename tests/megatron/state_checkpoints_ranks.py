# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a distributed optimizer in each of Megatron's formats, from trainings whose states
stay in memory, or move, and resumed by the other; test_model_state_checkpoints.py starts it.

Prints for each case what differs from a training that was not interrupted.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state

from megatron.offload.integration.megatron import (
    ModelStates,
    cpu_runtime,
    offload_model_states,
)
from megatron.offload.states.config import StatesConfig
from tests.megatron.model_states_ranks import Training
from tests.support.ranks import init_process_group

SETTINGS = {"use_distributed_optimizer": True}
# Its `fully_sharded_model_space` megatron-core 0.16.1 no longer saves.
FORMATS = ("torch", "dp_reshardable", "fully_reshardable", "dp_zero_gather_scatter")
_LOADERS = {
    "dp_reshardable": "load_parameter_state_from_dp_reshardable",
    "fully_reshardable": "load_parameter_state_from_fully_reshardable",
    "dp_zero_gather_scatter": "load_parameter_state_from_dp_zero",
}


class Run:
    """A training whose states may move."""

    def __init__(self, config: StatesConfig) -> None:
        self.training = Training(SETTINGS)
        self.states: ModelStates = offload_model_states(config, self.training.optimizer)
        (self.part,) = self.training.optimizer.chained_optimizers

    def train(self, first: int, last: int) -> Run:
        for number in range(first, last):
            self.training.step(number)
        return self

    def save(self, directory: Path, kind: str) -> Run:
        with self.states.checkpointing():
            if kind == "torch":
                if dist.get_rank() == 0:
                    directory.mkdir()
                dist.barrier()
                model = self.training.chunks[0].state_dict()
                torch.save(model, directory / f"model{dist.get_rank()}.pt")
                torch.save(self.part.state_dict(), directory / f"optimizer{dist.get_rank()}.pt")
                self.part.save_parameter_state(str(directory / "states.pt"))
            else:
                if dist.get_rank() == 0:
                    directory.mkdir()
                dist.barrier()
                dist_checkpointing.save(self._content(kind, False), str(directory))
        dist.barrier()
        return self

    def load(self, directory: Path, kind: str) -> Run:
        with self.states.checkpointing():
            if kind == "torch":
                path = directory / f"model{dist.get_rank()}.pt"
                self.training.chunks[0].load_state_dict(torch.load(path, weights_only=False))
                content = torch.load(
                    directory / f"optimizer{dist.get_rank()}.pt", weights_only=False
                )
                self._load(
                    content, lambda: self.part.load_parameter_state(str(directory / "states.pt"))
                )
            else:
                self._make_states()
                loaded = dist_checkpointing.load(self._content(kind, True), str(directory))
                self.training.chunks[0].module.module.load_state_dict(loaded["model"])
                content = loaded["optimizer"]
                states = content.pop("param_state")
                content.pop("param_state_sharding_type")
                self._load(content, lambda: getattr(self.part, _LOADERS[kind])(states))
        return self

    def _make_states(self) -> None:
        def make(adam: torch.optim.Optimizer) -> None:
            for group in adam.param_groups:
                for param in group["params"]:
                    adam.state[param] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(param.data),
                        "exp_avg_sq": torch.zeros_like(param.data),
                    }

        if self.states.parts:
            self.states.make_states(make)
        else:
            make(self.part.optimizer)

    def _load(self, content: Any, load_states: Any) -> None:
        # See `load_optimizer_state` of the example trainer.
        self.part.load_state_dict(content)
        counters = {p: s.pop("step").clone() for p, s in self.part.optimizer.state.items()}
        load_states()
        for param, counter in counters.items():
            self.part.optimizer.state[param]["step"] = counter

    def _content(self, kind: str, is_loading: bool) -> dict[str, Any]:
        metadata = {
            "distrib_optim_sharding_type": kind,
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }
        model = self.training.chunks[0].module.module.sharded_state_dict(metadata=metadata)
        optimizer = self.training.optimizer.sharded_state_dict(
            model, is_loading=is_loading, metadata=metadata
        )
        return {"model": model, "optimizer": optimizer}

    def result(self) -> tuple[list[Any], dict[str, torch.Tensor]]:
        """What each step gave, and all tensors."""
        self.states.expose()
        found = self.training.tensors()
        self.states.close(restore=False)
        return self.training.found, found


def same(one: Any, other: Any) -> bool:
    """Whether two trainings ended with the same bits."""
    steps, tensors = one
    other_steps, others = other
    return (
        steps == other_steps[-len(steps) :]
        and tensors.keys() == others.keys()
        and all(torch.equal(tensors[name], others[name]) for name in tensors)
    )


def main() -> None:
    """Each format, both ways."""
    directory = Path(sys.argv[1])
    init_process_group()
    cpu_runtime.activate()
    parallel_state.initialize_model_parallel(create_gloo_process_groups=True)
    off = StatesConfig()
    ssd = StatesConfig(
        mode="ssd", directories=(directory,), bucket_bytes=1 << 15, window_bytes=1 << 16
    )
    whole = Run(off).train(0, 4).result()
    results: dict[str, list[bool]] = {}
    for kind in FORMATS:
        results[kind] = []
        for before, after in ((off, off), (off, ssd), (ssd, off), (ssd, ssd)):
            saved = directory / "saved"
            begun = Run(before).train(0, 2).save(saved, kind).train(2, 4).result()
            resumed = Run(after).load(saved, kind).train(2, 4).result()
            results[kind].append(same(begun, whole) and same(resumed, whole))
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(saved)
            dist.barrier()
    if int(os.environ["RANK"]) == 0:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
