# SPDX-License-Identifier: Apache-2.0
"""The ways to place activations that are compared: `Variant` and `applied`.

Each is put on one and the same model and taken off again, so that weights, gradients and everything
else in memory are equal for all.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from gpu_sections.models import Trainee
from megatron.offload import OffloadConfig
from megatron.offload.config import MIB
from megatron.offload.integration.megatron import MegatronOffload, install
from megatron.offload.integration.megatron.estimate import layer_bytes


@dataclass(frozen=True)
class Variant:
    """One row of the comparison.

    Args:
        mode: of activation offload.
        recomputes: `full`, or the modules that are recomputed.
        saves_on_cpu: torch's own hooks, which copy every saved tensor, parameters included.
    """

    name: str
    mode: str = "off"
    recomputes: tuple[str, ...] = ()
    saves_on_cpu: bool = False


KEEP = Variant("keep")
VARIANTS = (
    KEEP,
    Variant("recompute full", recomputes=("full",)),
    Variant("recompute attention", recomputes=("core_attn",)),
    Variant("recompute attention, mlp", recomputes=("core_attn", "mlp")),
    Variant("save_on_cpu", saves_on_cpu=True),
    Variant("host", mode="host"),
    Variant("ssd", mode="ssd"),
    Variant("tiered", mode="tiered"),
)


def activation_bytes(trainee: Trainee) -> int:
    """What all layers save for one micro-batch, estimated."""
    size = trainee.size
    return size.num_layers * layer_bytes(trainee.config, size.tokens)


def offload_config(variant: Variant, trainee: Trainee, directory: Path) -> OffloadConfig:
    """Bytes in flight: a layer's, else the forward pass waits for copies before it goes on."""
    one_layer = activation_bytes(trainee) // trainee.size.num_layers
    host_bytes = int(1.3 * activation_bytes(trainee)) + 64 * MIB
    return OffloadConfig(
        mode=variant.mode,
        directories=(directory,),
        min_bytes=min(MIB, max(one_layer // 64, 1)),
        inflight_bytes=max(one_layer * 5 // 4, 64 * MIB),
        host_budget=host_bytes // (2 if variant.mode == "tiered" else 1),
    )


@contextlib.contextmanager
def applied(variant: Variant, trainee: Trainee, directory: Path) -> Iterator[MegatronOffload]:
    """The model under a variant; the result's `step` goes around each step."""
    offload = install(offload_config(variant, trainee, directory), [trainee.chunk])
    if variant.saves_on_cpu:
        trainee.around_forward = functools.partial(
            torch.autograd.graph.save_on_cpu, pin_memory=True
        )
    _set_recompute(trainee, variant.recomputes)
    try:
        yield offload
    finally:
        _set_recompute(trainee, ())
        trainee.around_forward = contextlib.nullcontext
        offload.close()
        if variant.saves_on_cpu:
            # Torch keeps the pinned memory that it had. The call is not in every release.
            getattr(torch._C, "_host_emptyCache", lambda: None)()


def _set_recompute(trainee: Trainee, modules: tuple[str, ...]) -> None:
    """Sets what megatron-core's layers read at each forward pass."""
    full = modules == ("full",)
    config = trainee.config
    config.recompute_granularity = "full" if full else None
    config.recompute_method = "uniform" if full else None
    config.recompute_num_layers = 1 if full else None
    for layer in trainee.model.decoder.layers:
        layer.self_attention.checkpoint_core_attention = "core_attn" in modules
        layer.recompute_mlp = "mlp" in modules
