# SPDX-License-Identifier: Apache-2.0
"""The ways to train the same model: ours, and what else a user of PyTorch can pick: `prepare`.

none            everything stays in memory
checkpointing   gradient_checkpointing_enable(), transformers' own
compiled        torch.compile of the whole model; compiled_host, compiled_auto: with
                inside_graphs=True, to host, or by the planner; compiled_checkpointing: with
                transformers' own
keep            every hook of ours, and nothing moves: what our Python costs
replay          nothing moves; what is a cheap function of other saved bytes is computed again
host, ssd       everything goes to host memory, or to the drive
tiered          to both; host memory for a third of it
recompute_host  every layer again in backward, its input in host memory
chunked_host    the same, and the loss over chunks of tokens
tiled_host      the same, and MLPs over tiles of tokens
half            the first half of the layers to host memory, the others stay
auto            the planner, within a budget
host_replay, auto_replay   the same with replay
replay_int8, host_int8, auto_int8   the same with replay and codec="int8"; replay_int4 ... likewise
save_on_cpu     torch.autograd.graph.save_on_cpu, pageable; save_on_cpu_pinned: page-locked
trl             trl.models.activation_offloading.OffloadActivations
fsdp2_cpu       FSDP2 with CPUOffloadPolicy, one rank: parameters, gradients, states on the host
fsdp2_cpu_checkpointing   the same and checkpointing

`training.py` calls it. A way that cannot run here raises `Skip` with what it needs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from check.gpu_day.job import Skip
from check.gpu_day.settings import Settings, Shape
from megatron.offload import offload_activations, offload_optimizer, offload_parameters

AGAIN = ("recompute_host", "chunked_host", "tiled_host")  # each with one thing more
OURS = ("keep", "replay", "host", "tiered", "ssd", *AGAIN, "half", "auto")
_WITH_REPLAY = "_replay"  # behind the name of a way of ours
_WITH_CODEC = ("_int8", "_int4")  # likewise
_INSIDE = {"compiled_host": "host", "compiled_auto": "auto"}  # of compiled graphs
COMPILED = ("compiled", "compiled_checkpointing", *_INSIDE)
PEERS = ("save_on_cpu", "save_on_cpu_pinned", "trl", "fsdp2_cpu")
_TIERED_SHARE = 3  # of what is saved, one part in so many goes to host memory
_NEVER_BYTES = 1 << 40

Context = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass
class Way:
    """How a model is trained.

    Attributes:
        context: of each forward pass.
        handle: ours; None: of another.
        compiled: is called in the model's place; None: the model itself.
    """

    context: Context = contextlib.nullcontext
    handle: Any = None
    compiled: Any = None


def prepare(
    name: str, model: Any, shape: Shape, settings: Settings, budget_bytes: int | None = None
) -> Way:
    """Has a model train in a way; to be called before its optimizer is made.

    Args:
        name: one of those above.
        model: of transformers.
        shape: of it.
        settings: of the run.
        budget_bytes: of `auto`.

    Raises:
        Skip: the way needs what is not here.
    """
    if _split(name)[0] in OURS:
        return Way(handle=_ours(name, model, shape, settings, budget_bytes))
    if name in COMPILED:
        if name == "compiled_checkpointing":
            model.gradient_checkpointing_enable()
        compiled = torch.compile(model, backend=settings.compiler)
        handle = None
        if name in _INSIDE:
            handle = _ours(_INSIDE[name], model, shape, settings, budget_bytes, inside_graphs=True)
        return Way(handle=handle, compiled=compiled)
    if name in ("checkpointing", "fsdp2_cpu_checkpointing"):
        model.gradient_checkpointing_enable()
    if name.startswith("fsdp2_cpu"):
        _shard(model, settings)
    if name in ("none", "checkpointing", "fsdp2_cpu", "fsdp2_cpu_checkpointing"):
        return Way()
    if name.startswith("save_on_cpu"):
        is_pinned = name == "save_on_cpu_pinned"
        if is_pinned and not settings.on_gpu:
            raise Skip("page-locked memory needs a GPU")
        return Way(lambda: torch.autograd.graph.save_on_cpu(pin_memory=is_pinned))
    if name == "trl":
        return Way(_trl(settings))
    raise ValueError(f"there is no way {name!r}")


def move_states(name: str, optimizer: torch.optim.Optimizer, settings: Settings) -> Any:
    """Puts an optimizer's states where `name` says: `device` (nothing moves), `host` or `cpu`.

    With `cpu` the step is computed there too.
    """
    if name == "device":
        return None
    step_on = {"host": "device", "cpu": "cpu"}[name]
    budget = settings.states_budget_bytes
    return offload_optimizer(optimizer, mode="host", step_on=step_on, host_budget=budget)


def move_frozen(where: str, model: Any, settings: Settings) -> Any:
    """Puts frozen layers where `where` says: `device` (nothing moves), `host`, `host int8` ..."""
    mode, _, codec = where.partition(" ")
    if mode == "device":
        return None
    budget = settings.states_budget_bytes
    return offload_parameters(model, mode=mode, codec=codec or "off", host_budget=budget)


def _split(name: str) -> tuple[str, str, str]:
    """A way of ours without what stands behind its name; replay; the codec."""
    if name.endswith(_WITH_CODEC):
        name, _, codec = name.rpartition("_")
        return name, "on", codec
    if name.endswith(_WITH_REPLAY):
        return name.removesuffix(_WITH_REPLAY), "on", "off"
    return name, "on" if name == "replay" else "off", "off"


def _ours(
    name: str,
    model: Any,
    shape: Shape,
    settings: Settings,
    budget_bytes: int | None,
    **more: Any,
) -> Any:
    name, replay, codec = _split(name)
    common: dict[str, Any] = {"min_bytes": settings.min_bytes, "replay": replay, "codec": codec}
    common |= more
    if name == "replay":
        return offload_activations(model, mode="keep", **common)
    host = {**common, "host_budget": settings.host_budget_bytes}
    if name == "keep":
        return offload_activations(model, mode="host", **{**host, "min_bytes": _NEVER_BYTES})
    if name == "host":
        return offload_activations(model, mode="host", **host)
    if name == "ssd":
        return offload_activations(model, settings.directory, mode="ssd", **common)
    if name == "tiered":
        host["host_budget"] = shape.layers * shape.layer_bytes // _TIERED_SHARE
        return offload_activations(model, settings.directory, mode="tiered", **host)
    if name in AGAIN:
        host |= {"recompute_layers": "all", "recompute_input": "host"}
        if name != "recompute_host":
            host["chunked_loss"] = "auto"
        if name == "tiled_host":
            host["tiled_mlp"] = 10 if settings.is_tiny else "auto"
        return offload_activations(model, mode="host", **host)
    if name == "half":
        layers = f"0-{shape.layers // 2 - 1}"
        return offload_activations(model, mode="host", offload_layers=layers, **host)
    return offload_activations(model, mode="auto", memory_budget_bytes=budget_bytes, **host)


def _trl(settings: Settings) -> Context:
    from trl.models.activation_offloading import OffloadActivations

    if not settings.on_gpu:
        raise Skip("OffloadActivations needs an accelerator")
    offloading = OffloadActivations()  # one for all steps, as trl's trainers have it
    return lambda: offloading


def _shard(model: Any, settings: Settings) -> None:
    """FSDP2 on one rank, with everything on the host between uses."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    start_process_group(settings)
    mesh = init_device_mesh(settings.device.type, (1,))
    policy = CPUOffloadPolicy(pin_memory=settings.on_gpu)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)


def start_process_group(settings: Settings) -> None:
    """A group of this process alone, once."""
    import torch.distributed as dist

    if not dist.is_initialized():
        backend = "cuda:nccl,cpu:gloo" if settings.on_gpu else "gloo"
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
