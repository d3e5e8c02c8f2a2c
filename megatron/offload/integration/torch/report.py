# SPDX-License-Identifier: Apache-2.0
"""What people should know about a model's offload: `report_of`, `warnings_of`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import indent

import torch

from megatron.offload.config import OffloadConfig
from megatron.offload.engine import OffloadEngine
from megatron.offload.integration.torch.module_hooks import is_compiled
from megatron.offload.sizes import format_size
from megatron.offload.stats.history import FOREIGN


def report_of(
    config: OffloadConfig,
    models: Sequence[torch.nn.Module],
    layers: Sequence[str],
    engine: OffloadEngine | None,
    plan: str,
    summary: str,
) -> str:
    """What was found in the models, where activations go and what stays, as lines of text."""
    lines = [f"activation offload of {' and '.join(type(model).__name__ for model in models)}"]
    if layers:
        ends = layers[0] if len(layers) == 1 else f"{layers[0]} to {layers[-1]}"
        lines.append(f"  layers      {len(layers)}: {ends}")
    else:
        lines.append("  layers      none that repeat; name them with layers=")
    lines.append(
        f"  placement   {config.mode}, storages of {format_size(config.min_bytes)} and more"
    )
    if engine is not None:
        lines.append(f"  tiers       {engine.where}")
        counted = engine.statistics
        if counted.unsupported:
            lines.append(
                f"  left alone  {counted.unsupported} saved tensors that are more than their bytes"
            )
        if counted.foreign_bytes:
            size = format_size(counted.foreign_bytes)
            lines.append(f"  left alone  {size} saved in memory that {FOREIGN}")
        lines += [f"  long-lived  {format_size(one.num_bytes)}: {one}" for one in engine.long_lived]
        lines += [f"  warning     {one}" for one in warnings_of(config, models, engine)]
    if plan:
        lines.append(indent(plan, "  "))
    if summary:
        lines.append(summary)
    return "\n".join(lines)


def warnings_of(
    config: OffloadConfig, models: Sequence[torch.nn.Module], engine: OffloadEngine
) -> Iterator[str]:
    """Sentences about what a user would not expect of the last step."""
    counted = engine.statistics
    if not counted.offloaded_storages and not counted.recomputed_layers and not config.plans:
        if counted.unsupported:
            yield (
                f"nothing was offloaded: {counted.unsupported} saved tensors are subclasses, "
                "sparse or nested, and only plain tensors move (with tensor parallelism, use "
                "local ones)"
            )
        elif counted.foreign_bytes:
            yield f"nothing was offloaded: all that was saved lies in memory that {FOREIGN}"
        else:
            yield (
                f"nothing was offloaded: no saved storage has {format_size(config.min_bytes)} or "
                "more; lower min_bytes if memory matters at this size"
            )
    for model in models:
        if _is_compiled_whole(model):
            yield (
                f"{type(model).__name__} is compiled as a whole, and its compiled backward pass "
                "holds what comes back until its end; memory falls where layers are compiled one "
                "by one: for layer in model.layers: layer.compile()"
            )
    devices = {p.device for model in models for p in model.parameters()}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        yield f"the model is on several devices ({names}); activations of one of them move"


def _is_compiled_whole(model: torch.nn.Module) -> bool:
    return any(
        is_compiled(one)
        for one in (model, *model.children())
        if not isinstance(one, torch.nn.ModuleList)
    )
