# SPDX-License-Identifier: Apache-2.0
"""What people should know about a model's offload: `opening_of`, `report_of`, `warnings_of`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import indent

import torch

from megatron.offload.activations.engine import OffloadEngine
from megatron.offload.config import OffloadConfig
from megatron.offload.integration.torch.layers import find_layers
from megatron.offload.integration.torch.module_hooks import is_compiled
from megatron.offload.sizes import format_size
from megatron.offload.stats.history import LEFT_ALONE

_MOST_LINES = 8  # about storages that live on


def opening_of(
    config: OffloadConfig, models: Sequence[torch.nn.Module], layers: Sequence[str]
) -> str:
    """One line for the beginning of a run: what was found, and where its activations will go."""
    if not config.enabled:
        return f"{_heading(models)}: off, they stay in memory"
    found = f"{len(layers)} layers ({_ends(layers)})" if layers else "no layers that repeat"
    where = ", ".join(str(one) for one in config.directories if config.uses_ssd)
    return f"{_heading(models)}: {found}, {_placement(config)}{where and f', in {where}'}"


def report_of(
    config: OffloadConfig,
    models: Sequence[torch.nn.Module],
    layers: Sequence[str],
    engine: OffloadEngine | None,
    plan: str,
    summary: str,
    *,
    holds_again: bool = False,
    inside_graphs: bool = False,
) -> str:
    """What was found in the models, where activations go and what stays, as lines of text."""
    lines = [_heading(models)]
    if layers:
        lines.append(f"  layers      {len(layers)}: {_ends(layers)}")
    else:
        lines.append("  layers      none that repeat; name them with layers=")
    lines.append(f"  placement   {_placement(config)}")
    if engine is not None:
        lines.append(f"  tiers       {engine.where}")
        lines += [
            f"  left alone  {format_size(num_bytes)} saved {reason}"
            for name, reason in LEFT_ALONE.items()
            if (num_bytes := getattr(engine.statistics, name))
        ]
        largest = sorted(engine.long_lived, key=lambda one: -one.num_bytes)
        lines += [
            f"  long-lived  {format_size(one.num_bytes)}: {one}" for one in largest[:_MOST_LINES]
        ]
        if rest := sum(one.num_bytes for one in largest[_MOST_LINES:]):
            lines.append(f"  long-lived  {format_size(rest)} in others")
        if holds_again:
            lines.append(f"  warning     {held_again(engine)}")
        lines += [
            f"  warning     {one}" for one in warnings_of(config, models, engine, inside_graphs)
        ]
    if plan:
        lines.append(indent(plan, "  "))
    if summary:
        lines.append(summary)
    return "\n".join(lines)


def _heading(models: Sequence[torch.nn.Module]) -> str:
    return f"activation offload of {' and '.join(type(model).__name__ for model in models)}"


def _ends(layers: Sequence[str]) -> str:
    return layers[0] if len(layers) == 1 else f"{layers[0]} to {layers[-1]}"


def _placement(config: OffloadConfig) -> str:
    return f"{config.mode}, storages of {format_size(config.min_bytes)} and more"


def held_again(engine: OffloadEngine) -> str:
    """What to know where each step moves new tensors that outlive it."""
    size = format_size(engine.statistics.long_lived_bytes)
    largest = max(engine.long_lived, key=lambda one: one.num_bytes, default=None)
    example = "" if largest is None else f" ({largest})"
    return (
        f"{size} of what each step moves stay in memory all the same{example}: something holds "
        "these tensors until the backward pass has ended, most likely the model's output (keep "
        "its loss alone, and set use_cache=False where a model returns its cache of keys and "
        "values) or an attribute of a module (as of torch.nn.utils.weight_norm and prune)"
    )


def warnings_of(
    config: OffloadConfig,
    models: Sequence[torch.nn.Module],
    engine: OffloadEngine,
    inside_graphs: bool = False,
) -> Iterator[str]:
    """Sentences about what a user would not expect of the last step."""
    counted = engine.statistics
    moves = config.mode != "keep" and not config.plans
    if moves and not counted.offloaded_storages and not counted.recomputed_layers:
        yield _why_nothing(config, engine)
    elif counted.other_device_bytes:
        yield f"{_on_other_devices(engine)}; move the model to one device to have it offloaded"
    for model in models:
        if not inside_graphs and _is_compiled_whole(model):
            yield (
                f"{type(model).__name__} is compiled as a whole, and its compiled backward pass "
                "holds what comes back until its end; give inside_graphs=True (PyTorch 2.11 or "
                "newer), or compile layers one by one: for layer in model.layers: layer.compile()"
            )


def _why_nothing(config: OffloadConfig, engine: OffloadEngine) -> str:
    """Why nothing was offloaded in the last step: the reason of most bytes, and what to do."""
    counted, min_bytes = engine.statistics, format_size(config.min_bytes)
    reasons = {name: getattr(counted, name) for name in LEFT_ALONE}
    name = max(reasons, key=lambda one: int(reasons[one]))
    size = format_size(reasons[name])
    if not reasons[name]:
        why = (
            "the model saved nothing that could move (with parameters that are frozen, "
            "checkpoints around all of it, or compiled as a whole, that may be right)"
        )
    elif name == "small_bytes":
        why = (
            f"no saved storage has {min_bytes} or more; lower min_bytes if memory matters at this "
            f"size ({size} are saved in smaller ones)"
        )
    elif name == "kept_bytes":
        why = f"{size} are saved in layers that the settings keep in memory; see offload_layers"
    elif name == "other_device_bytes":
        why = f"{_on_other_devices(engine)}; move the model to one device"
    elif name == "unsupported_bytes":
        why = (
            f"{counted.unsupported} saved tensors ({size}) are subclasses, sparse or nested, and "
            "only plain tensors move (with tensor parallelism, use local ones)"
        )
    elif name == "held_bytes":
        why = f"{size} are saved {LEFT_ALONE[name]}: moving them would free nothing"
    else:
        why = f"all that was saved lies {LEFT_ALONE[name]} ({size})"
    return f"nothing was offloaded: {why}"


def _on_other_devices(engine: OffloadEngine) -> str:
    others = engine.other_devices
    names = ", ".join(sorted(map(str, others)))
    size = format_size(sum(others.values()))
    return f"{size} are saved on {names}, and only activations on {engine.device} move"


def _is_compiled_whole(model: torch.nn.Module) -> bool:
    layers = find_layers([model])  # of a Sequential they are its children
    return any(is_compiled(one) for one in (model, *model.children()) if one not in layers)
