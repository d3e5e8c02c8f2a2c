# SPDX-License-Identifier: Apache-2.0
"""Trainings whose parameters wait on a tier, with gradients in memory or there too;
test_bucket_gradients.py starts it on two ranks. Prints what came of each.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.offload import OffloadConfig
from megatron.offload.errors import OffloadError
from megatron.offload.integration.megatron import (
    cpu_runtime,
    install,
    offload_model_parameters,
    offload_model_states,
)
from megatron.offload.integration.megatron.bucket_gradients import BucketGradients
from megatron.offload.integration.megatron.bucket_group import BucketState
from megatron.offload.layer_major.config import LayerMajorConfig
from megatron.offload.parameters.config import ParametersConfig
from megatron.offload.parameters.offloaded_gradient import OffloadedGradient
from megatron.offload.states.config import StatesConfig
from tests.megatron.distributed_parameters_ranks import DTYPES, window_of
from tests.megatron.model_states_ranks import Training, same
from tests.support.ranks import init_process_group, print_results

LAYERS, STEPS, BROUGHT = 8, 3, 1
LAYER = 12 * 32 * 32  # elements of a layer's weights
LAYER_MAJOR = LayerMajorConfig(units="auto")


class Trained:
    """A training of some steps, and one more behind the offload.

    Args:
        directory: for whatever moves; None: nothing does.
        name: of the case: type of parameters, which optimizer, what moves beside, or "tied", for an
            embedding that two units share.
        fills: from the second step on nothing is taken on one rank.
    """

    def __init__(self, directory: Path | None, name: str, *, fills: bool = False) -> None:
        dtype, optimizer, moved = name.split()
        is_sharded = optimizer == "sharded"
        self.training = Training(
            {"use_distributed_optimizer": is_sharded},
            DTYPES[dtype],
            LAYERS,
            # Some weights to a bucket, or one, which then has all of the bucket's memory.
            {"overlap_grad_reduce": True, "bucket_size": LAYER // 2 if is_sharded else 1},
            tied=moved == "tied",
        )
        self.buffers = [
            StorageWeakRef(buffer.grad_data.untyped_storage())
            for buffer in self.training.chunks[0].buffers
        ]
        states, parameters = StatesConfig(), ParametersConfig()
        if directory is not None:
            parameters = ParametersConfig(mode="ssd", directories=(directory,), gradients="on")
        if directory is not None and moved == "states":
            states = StatesConfig(
                mode="ssd", directories=(directory,), bucket_bytes=1 << 15, window_bytes=0
            )
        self.states = offload_model_states(states, self.training.optimizer)
        self.parameters = offload_model_parameters(
            parameters,
            self.training.chunks,
            self.training.optimizer,
            layer_major=LAYER_MAJOR,
            updates_by_units=states.enabled,
        )
        self.installed = install(
            OffloadConfig(), self.training.chunks, states=self.states, layer_major=LAYER_MAJOR
        )
        self.found: dict[str, Any] = {}
        for number in range(STEPS):
            if number == 1 and fills and dist.get_rank() == 1:
                self.fill_the_drive()
            self.look_before_the_step(brings=number == BROUGHT)
            with self.installed.step():
                self.training.step(number)
        if self.gradients is not None:
            self.found["forgotten"] = self.forget_zeros()
        self.expose()
        self.tensors = self.training.tensors()
        if self.gradients is not None:
            self.look()
        self.close()
        model_parallel_cuda_manual_seed(7)  # what was forgotten has drawn random numbers
        self.training.step(STEPS)
        self.tensors |= {f"{name} after": t for name, t in self.training.tensors().items()}

    @property
    def gradients(self) -> BucketGradients | None:
        window = window_of(self.parameters)
        found = None if window is None else window.gradients
        assert found is None or isinstance(found, BucketGradients)
        return found

    def expose(self) -> None:
        self.states.expose()
        self.parameters.expose()

    def close(self) -> None:
        vars(self.training.optimizer).pop("prepare_grads", None)
        self.installed.close()
        self.parameters.close()
        self.states.close()

    def look_before_the_step(self, *, brings: bool) -> None:
        """What is in the place of gradients when the optimizer's step begins; has them there."""
        optimizer, gradients = self.training.optimizer, self.gradients
        if gradients is None:
            return
        groups = gradients._groups
        vars(optimizer).pop("prepare_grads", None)
        prepare = optimizer.prepare_grads

        def count(kind: type) -> int:
            return [type(p.main_grad) for one in groups for p in one.places].count(kind)

        def look_and_prepare() -> Any:
            self.found["num_away"] = count(OffloadedGradient)
            self.found["are_away"] = all(one.state is BucketState.AWAY for one in groups)
            if brings:
                self.found["peak_bytes"] = gradients.peak_bytes
                self.parameters.bring_gradients()
                self.found["num_brought"] = count(torch.Tensor)
                self.found["num_places"] = sum(len(one.places) for one in groups)
            return prepare()

        optimizer.prepare_grads = look_and_prepare

    def look(self) -> None:
        assert self.gradients is not None
        places = [place for one in self.gradients._groups for place in one.places.values()]
        self.found |= {
            "norms": [norm for *_, norm, _, _ in self.training.found],
            "buffers": sum(not one.expired() for one in self.buffers),
            "num_groups": len(self.gradients._groups),
            "moving_bytes": sum(place.nbytes for place in places),
        }

    def fill_the_drive(self) -> None:
        window = window_of(self.parameters)
        if window is not None:
            for tier in window.tiers:
                tier.begin_write = lambda *_: None  # type: ignore[method-assign]

    def forget_zeros(self) -> str:
        """What a step says that begins with the gradients of the step before."""
        training = self.training
        training.chunks[0].zero_grad_buffer = lambda: None
        try:
            with self.installed.step():
                training.step(STEPS)
        except OffloadError as error:
            return str(error)
        finally:
            del training.chunks[0].zero_grad_buffer
        return ""


def main() -> None:
    """Trains each case with and without."""
    directory, names = Path(sys.argv[1]), sys.argv[2].split(",")
    init_process_group()
    cpu_runtime.activate()
    parallel_state.initialize_model_parallel()
    results: dict[str, Any] = {}
    for name in names:
        case = name.removesuffix(" full")
        off = Trained(None, case)
        on = Trained(directory, case, fills=name != case)
        results[name] = {
            "steps": on.training.found == off.training.found,
            "tensors": same(on.tensors, off.tensors),
            "num_tensors": len(off.tensors),
            "num_steps": len(off.training.found),
            **on.found,
        }
    print_results(results)


if __name__ == "__main__":
    main()
