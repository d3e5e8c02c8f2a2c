# SPDX-License-Identifier: Apache-2.0
"""One rank of a GPT of megatron-core on the test accelerator, with random delays.

    gpt_ranks.py DIRECTORY MODE ...

As many pipeline stages as there are ranks. Trains without offload and without delays, then in each
mode; prints a line of JSON: for each mode the first difference of any rank, and what came back from
tiers in the last step, in which forward passes wait for their writes.
"""

from __future__ import annotations

import functools
import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.support.lag import load

lag = load()  # before anything looks which accelerator there is

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn import functional  # noqa: E402

from megatron.offload import OffloadConfig  # noqa: E402
from megatron.offload.device.platform import register_platform  # noqa: E402
from megatron.offload.sizes import MIB  # noqa: E402
from tests.support.lag.megatron_runtime import activate  # noqa: E402
from tests.support.lag.platform import LagPlatform  # noqa: E402
from tests.support.ranks import init_process_group  # noqa: E402
from tests.support.waiting import SOON_S  # noqa: E402

_NUM_LAYERS, _HIDDEN, _NUM_HEADS, _LENGTH, _MICRO_BATCH, _VOCAB = 4, 64, 2, 32, 2, 128
_NUM_STEPS, _NUM_MICRO_BATCHES = 2, 3
_LATE_S = 0.05
SETTINGS: dict[str, dict[str, Any]] = {
    "ssd": {"mode": "ssd", "pinned_bytes": 0},
    "ssd, pinned": {"mode": "ssd", "pinned_bytes": 64 * MIB},
    "host": {"mode": "host", "host_budget": 64 * MIB},
    "tiered": {"mode": "tiered", "host_budget": MIB, "pinned_bytes": MIB},
    "host, tiles": {"mode": "host", "host_budget": 64 * MIB, "tiled_mlp": 20},
}


class Stage:
    """This rank's stage of the model, under megatron-core's data parallelism and schedule."""

    def __init__(self, device: torch.device) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.transformer.transformer_config import TransformerConfig

        config = TransformerConfig(
            num_layers=_NUM_LAYERS,
            hidden_size=_HIDDEN,
            num_attention_heads=_NUM_HEADS,
            pipeline_model_parallel_size=dist.get_world_size(),
            pipeline_dtype=torch.float32,
            batch_p2p_comm=False,
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,
        )
        model = GPTModel(
            config,
            get_gpt_layer_local_spec(),
            vocab_size=_VOCAB,
            max_sequence_length=_LENGTH,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
        ).to(device)
        self._device = device
        self.after_forward: Callable[[], object] = lambda: None
        self.chunk = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
        self.chunk.train()
        config.finalize_model_grads_func = finalize_model_grads
        self._forward_backward = get_forward_backward_func()

    def step(self, seed: int) -> list[torch.Tensor]:
        """The losses, if this is the last stage, and all gradients, in host memory."""
        seed_everything(seed)
        self.chunk.zero_grad_buffer()
        reports = self._forward_backward(
            forward_step_func=self._forward_step,
            data_iterator=iter(range(_NUM_MICRO_BATCHES)),
            model=self.chunk,
            num_microbatches=_NUM_MICRO_BATCHES,
            seq_length=_LENGTH,
            micro_batch_size=_MICRO_BATCH,
            forward_only=False,
        )
        gradients = [parameter.main_grad for parameter in self.chunk.parameters()]
        return [one.cpu() for one in [*(report["loss"] for report in reports), *gradients]]

    def _forward_step(self, numbers: Iterator[int], chunk: torch.nn.Module) -> Any:
        generator = torch.Generator().manual_seed(next(numbers))
        shape = (2, _MICRO_BATCH, _LENGTH)
        tokens, labels = torch.randint(0, _VOCAB, shape, generator=generator).to(self._device)
        positions = torch.arange(_LENGTH, device=self._device).expand_as(tokens)
        output = chunk(tokens, positions, None, labels=labels)
        lag.late(lag.current_stream(), _LATE_S)
        self.after_forward()

        def loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            value = functional.softplus(output).mean()
            return value, {"loss": value.detach().clone()}

        return output, loss


def seed_everything(seed: int) -> None:
    """Weights and dropout masks follow from it."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def offloaded(stage: Stage, name: str, directory: Path) -> dict[str, Any]:
    """What differs on this rank, and how much came back."""
    from megatron.offload.integration.megatron import install

    settings = SETTINGS[name]
    lag.reset()
    alone = install(OffloadConfig(tiled_mlp=settings.get("tiled_mlp", "off")), [stage.chunk])
    expected = [stage.step(number) for number in range(_NUM_STEPS)]
    alone.close()
    config = OffloadConfig(directories=(directory,), min_bytes=1, **settings)
    lag.set_delays(100, 300, seed=10 * list(SETTINGS).index(name) + dist.get_rank())
    offload = install(config, [stage.chunk])
    differs, back, moved = "", 0, 0
    try:
        for number, theirs in enumerate(expected):
            lag.late(lag.current_stream(), _LATE_S)
            is_last = number == len(expected) - 1
            with offload.step():
                assert offload.engine is not None
                if is_last:  # else a slow disk may write little before its use
                    stage.after_forward = functools.partial(offload.engine.wait_for_writes, SOON_S)
                mine = stage.step(number)
                stage.after_forward = lambda: None
            equal = [torch.equal(one, other) for one, other in zip(mine, theirs, strict=True)]
            if not all(equal):
                differs = differs or f"step {number}, result {equal.index(False)}"
            if not is_last:
                continue
            counted = dict(offload.statistics)
            back += int(counted.get("read_bytes", 0) + counted.get("host_read_bytes", 0))
            moved += int(counted["offloaded_bytes"])
    finally:
        offload.close()
        lag.reset()
    return {"differs": differs, "read_bytes": back, "offloaded_bytes": moved}


def main() -> None:
    directory, *modes = sys.argv[1:]
    warnings.filterwarnings("ignore")
    logging.disable()
    torch.set_num_threads(1)
    init_process_group()
    device = activate(lag)
    register_platform("lag", LagPlatform(lag))
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=dist.get_world_size())
    seed_everything(1)
    stage = Stage(device)
    found = {mode: offloaded(stage, mode, Path(directory)) for mode in modes}
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, found)
    print(json.dumps(of_all))


if __name__ == "__main__":
    main()
