# SPDX-License-Identifier: Apache-2.0
"""Job: a training through one of the package's doors has the bits of the same training without.

`parts.py` lists it, once for each of `DOORS`. The training without runs twice: only if it repeats
itself is a difference the door's. Losses of each step and all weights at the end are compared.
"""

from __future__ import annotations

import contextlib
import gc
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from check.gpu.parity import deterministic, same_bits
from check.gpu_day.convolutions import make_convolutions
from check.gpu_day.job import Skip
from check.gpu_day.models import add_adapters, make_experts, make_model, make_tokens
from check.gpu_day.settings import Settings, Shape
from check.gpu_day.ways import start_process_group
from megatron.offload import LayerMajor, offload_activations, offload_optimizer, offload_parameters
from megatron.offload.machine import vector_math
from megatron.offload.parameters.weight_codec import CODECS
from megatron.offload.tiers.gds_status import gds_status

Note = Callable[[dict[str, Any]], None]
_NUM_STEPS, _MICRO_BATCHES = 3, 2
# Their backward passes repeat themselves where torch is told to; the others' add in any order.
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class Door:
    """What is switched on. Modes; None: not.

    Attributes:
        activations: of `offload_activations`.
        settings: more of them.
        states: of `offload_optimizer`.
        parameters: of `offload_parameters`.
        gradients: wait beside their parameters.
        layer_major: steps run unit by unit.
        trainer: transformers' Trainer trains, and `OffloadCallback` is the door.
        tiled: MLPs run over tiles of tokens, in the training without as well.
        codec: of `offload_parameters`; the training without rounds the same weights in memory.
        model: `compiled`, `reduce-overhead`, `checkpointing`, `ddp`, `fsdp2` or `adapters`; or
            convolutions, `channels first` or `channels last`, or `experts`, each of whose batches
            has another length: with the door and without.
    """

    activations: str | None = None
    settings: dict[str, Any] | None = None
    states: str | None = None
    parameters: str | None = None
    gradients: bool = False
    layer_major: bool = False
    trainer: bool = False
    tiled: bool = False
    codec: str = "off"
    model: str = ""

    @property
    def without(self) -> Door:
        """The same training with nothing switched on."""
        return replace(Door(), **{name: getattr(self, name) for name in _IN_BOTH})


_CONVOLUTIONS = ("channels first", "channels last")
_IN_BOTH = ("trainer", "tiled", "codec", "model")

DOORS: dict[str, Door] = {
    "activations on host": Door("host", {"replay": "off"}),
    "activations on ssd": Door("ssd", {"replay": "off"}),
    "activations on ssd by kvikio": Door("ssd", {"replay": "off", "io": "gds"}),
    "activations on both": Door("tiered", {"replay": "off"}),
    "replay": Door("keep"),
    "replay and activations on host": Door("host"),
    "replay of convolutions": Door("keep", model="channels first"),
    "replay of convolutions, channels last": Door("keep", model="channels last"),
    "replay of experts, in other lengths": Door("keep", model="experts"),
    "recomputed with inputs on host": Door(
        "host", {"recompute_layers": "all", "recompute_input": "host"}
    ),
    "tiles of MLPs and activations on host": Door("host", tiled=True),
    "states on host": Door(states="host"),
    "states on ssd": Door(states="ssd"),
    "parameters on host": Door(parameters="host"),
    "frozen layers on host": Door(parameters="host", model="adapters"),
    "frozen layers on host in int8": Door(parameters="host", codec="int8", model="adapters"),
    "frozen layers on ssd in nf4": Door(parameters="ssd", codec="nf4", model="adapters"),
    "everything on host": Door("host", states="host", parameters="host"),
    "everything on ssd in layer-major steps": Door(
        "ssd", states="ssd", parameters="ssd", layer_major=True
    ),
    "everything and gradients on host in layer-major steps": Door(
        "host", states="host", parameters="host", gradients=True, layer_major=True
    ),
    "Trainer": Door("host", states="host", trainer=True),
    "checkpointing and activations on host": Door("host", model="checkpointing"),
    "DDP and activations on host": Door("host", model="ddp"),
    "FSDP2 and activations on host": Door("host", model="fsdp2"),
    "torch.compile and activations on host": Door("host", {"replay": "off"}, model="compiled"),
    "activations on host inside of compiled graphs": Door(
        "host", {"replay": "off", "inside_graphs": True}, model="compiled"
    ),
    # Results of graphs stay in memory: the door is to leave them alone.
    "torch.compile with graphs and activations on host": Door(
        "host", {"replay": "off"}, model="reduce-overhead"
    ),
}


def compare(settings: Settings, note: Note, *, door: str) -> dict[str, Any]:
    """Trains with and without a door.

    Raises:
        AssertionError: some bits differ.
        Skip: this machine cannot run it.
    """
    wanted = DOORS[door]
    if wanted.model == "reduce-overhead" and not settings.on_gpu:
        raise Skip("graphs that torch.compile captures need a GPU")
    if (wanted.settings or {}).get("io") == "gds":
        status = gds_status(has_gpu=settings.on_gpu)
        if not status.available:
            raise Skip(str(status))
    vector_math.first_call()
    shape = settings.shape("bits")
    with deterministic(), sdpa_kernel(ATTENTION):
        reference, _ = _train(wanted.without, shape, settings)
        again, _ = _train(wanted.without, shape, settings)
        repeats = first_difference(reference, again)
        if repeats is not None:
            raise AssertionError(f"the training without the door does not repeat itself: {repeats}")
        found, moved = _train(wanted, shape, settings)
    different = first_difference(reference, found)
    if different is not None:
        raise AssertionError(f"other bits with the door: {different}")
    return {"identical": True, "tensors": len(reference), "moved": moved}


def first_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> str | None:
    """The first of two trainings' tensors that differ in any bit; None: none does."""
    for name, tensor in one.items():
        if name not in other or not same_bits(tensor, other[name]):
            return name
    return None if one.keys() == other.keys() else "what there is"


def _train(
    door: Door, shape: Shape, settings: Settings
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Losses and weights by name, in host memory, and what moved."""
    gc.collect()
    if settings.on_gpu:
        torch.cuda.empty_cache()
    train = _with_trainer if door.trainer else _with_loop
    return train(door, shape, settings)


def _with_loop(
    door: Door, shape: Shape, settings: Settings
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    plain = _plain(door, shape, settings)
    if door.model == "adapters":
        plain = add_adapters(plain, shape)
    if door.codec != "off" and door.parameters is None:
        _round_frozen(plain, door.codec)
    found: dict[str, torch.Tensor] = {}
    moved: dict[str, Any] = {}
    has_graphs = door.model == "reduce-overhead"
    with contextlib.ExitStack() as handles:
        model = _wrapped(plain, door.model, settings)
        activations = None
        if door.activations is not None or door.tiled:
            activations = offload_activations(
                model,
                **_where(door.activations or "off", settings),
                **(door.settings or {}),
                min_bytes=settings.min_bytes,
                tiled_mlp=settings.few(600, 10) if door.tiled else "off",
            )
            handles.enter_context(activations)
        parameters = None
        if door.parameters is not None:
            where = _where(door.parameters, settings)
            gradients: Literal["off", "on"] = "on" if door.gradients else "off"
            parameters = offload_parameters(plain, codec=door.codec, gradients=gradients, **where)
            handles.enter_context(parameters)
        trained = [param for param in model.parameters() if param.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)
        if door.states is not None:
            handles.enter_context(offload_optimizer(optimizer, **_where(door.states, settings)))
        layer_major = LayerMajor(model, offload=activations) if door.layer_major else None
        # Of other lengths there are as many as recipes are compared in, and some more.
        num_steps = _NUM_STEPS * (2 if door.model == "experts" else 1)
        tokens = make_tokens(shape, num_steps * _MICRO_BATCHES, settings.device)
        if door.model == "experts":
            tokens = [one[:, number:] for number, one in enumerate(tokens)]

        def loss_of(batch: torch.Tensor) -> torch.Tensor:
            if has_graphs:  # else the results of the graph before are in use
                torch.compiler.cudagraph_mark_step_begin()
            loss: torch.Tensor = model(input_ids=batch, labels=batch).loss / _MICRO_BATCHES
            return loss

        for param in model.parameters() if has_graphs else ():
            param.grad = torch.zeros_like(param)  # not one of a graph's results, which do not stay
        for step in range(num_steps):
            batches = tokens[step * _MICRO_BATCHES :][:_MICRO_BATCHES]
            losses = _step(batches, loss_of, layer_major)
            for number, loss in enumerate(losses):
                found[f"loss {number + 1} of step {step + 1}"] = loss.detach().reshape(1).cpu()
            optimizer.step()
            optimizer.zero_grad(set_to_none=not has_graphs)
        for name, handle in (("activations", activations), ("parameters", parameters)):
            if handle is not None:
                moved[name] = dict(handle.statistics)
        if layer_major is not None:
            layer_major.close()
    for name, param in plain.named_parameters():
        whole = param.full_tensor() if hasattr(param, "full_tensor") else param
        found[name] = whole.detach().cpu()
    _check_moved(door, moved)
    return found, moved


def _plain(door: Door, shape: Shape, settings: Settings) -> Any:
    """The model of a door, without the door."""
    if door.model in _CONVOLUTIONS:
        is_last = door.model == "channels last"
        return make_convolutions(shape, settings.device, channels_last=is_last)
    make = make_experts if door.model == "experts" else make_model
    return make(shape, settings.device)


def _step(
    batches: list[torch.Tensor],
    loss_of: Callable[[torch.Tensor], torch.Tensor],
    layer_major: LayerMajor | None,
) -> list[torch.Tensor]:
    if layer_major is not None:
        return layer_major.step(batches, loss_of)
    losses = []
    for batch in batches:
        loss = loss_of(batch)
        loss.backward()
        losses.append(loss)
    return losses


def _check_moved(door: Door, moved: dict[str, Any]) -> None:
    """Equal bits of a training in which nothing moved would show nothing."""
    counted = moved.get("activations", {})
    if door.activations is not None and door.model == "reduce-overhead":
        if not counted.get("foreign_bytes"):
            raise AssertionError(f"no result of a graph was left alone: {counted}")
        return
    if door.activations not in (None, "keep") and not counted.get("offloaded_bytes"):
        raise AssertionError(f"no activation moved: {counted}")
    replays = door.activations is not None and (door.settings or {}).get("replay") != "off"
    if replays and not counted.get("replayed_bytes"):
        raise AssertionError(f"nothing was computed again: {counted}")
    if door.parameters is not None and not moved["parameters"].get("read_bytes"):
        raise AssertionError(f"no parameter moved: {moved['parameters']}")


def _wrapped(model: Any, name: str, settings: Settings) -> Any:
    if name == "checkpointing":
        model.gradient_checkpointing_enable()
    elif name == "ddp":
        start_process_group(settings)
        return torch.nn.parallel.DistributedDataParallel(model)
    elif name == "fsdp2":
        start_process_group(settings)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(settings.device.type, (1,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif name == "reduce-overhead":
        return torch.compile(model, mode="reduce-overhead")
    elif name == "compiled":
        return torch.compile(model, backend=settings.compiler)
    return model


def _round_frozen(model: Any, codec: str) -> None:
    """What a codec makes of the frozen matrices of layers, in memory."""
    for name, param in model.named_parameters():
        if param.requires_grad or param.dim() < 2 or ".layers." not in name:
            continue
        room = CODECS[codec].encoded_bytes(param.numel(), param.dtype)
        encoded = torch.empty(room, dtype=torch.uint8, device=param.device)
        values = param.detach().view(-1)
        CODECS[codec].encode(values, encoded)
        CODECS[codec].decode(encoded, values)


def _where(mode: str, settings: Settings) -> dict[str, Any]:
    """Settings of a door: the mode and what it needs."""
    where: dict[str, Any] = {"mode": mode}
    if mode in ("ssd", "tiered"):
        where["directory"] = settings.directory
    if mode in ("host", "tiered"):
        where["host_budget"] = settings.few(settings.states_budget_bytes, 64 << 20)
    if mode == "tiered":
        where["host_budget"] = settings.few(256 << 20, 64 << 10)
    return where


def _with_trainer(
    door: Door, shape: Shape, settings: Settings
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """With transformers' Trainer and its own settings."""
    import transformers

    from megatron.offload import OffloadCallback

    model = make_model(replace(shape, batch=1), settings.device)
    rows = make_tokens(replace(shape, batch=1), _NUM_STEPS, torch.device("cpu"))
    callbacks: list[Any] = []
    if door.activations is not None:
        where = _where(door.activations, settings)
        states = {"mode": door.states, "host_budget": where["host_budget"]}
        callbacks = [
            OffloadCallback(min_bytes=settings.min_bytes, optimizer_states=states, **where)
        ]
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=_NUM_STEPS,
            logging_steps=1,
            report_to="none",
            per_device_train_batch_size=1,
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(
            model=model,
            args=arguments,
            train_dataset=[{"input_ids": row[0], "labels": row[0]} for row in rows],
            callbacks=callbacks,
        )
        trainer.train()
    history = trainer.state.log_history
    found = {
        f"loss of step {line['step']}": torch.tensor([line["loss"]], dtype=torch.float64)
        for line in history
        if "loss" in line
    }
    found |= {name: param.detach().cpu() for name, param in model.named_parameters()}
    moved = {k: v for line in history for k, v in line.items() if k.startswith("offload/")}
    if callbacks and not moved.get("offload/offloaded_gib"):
        raise AssertionError(f"no activation moved: {moved}")
    return found, {"activations": moved} if moved else {}
