# SPDX-License-Identifier: Apache-2.0
"""Small random trainings, as data: `Program`, and `run`, which carries one out.

A program is a model and a list of events of a training loop with small numbers as operands, each
taken modulo what there is, so that every shorter list is a program too (`smaller`). Results depend
on nothing but the program. `test_random_trainings.py` compares it with and without `Offloads`.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten_with_path

from megatron.offload import (
    LayerMajor,
    OffloadError,
    offload,
    offload_activations,
    offload_optimizer,
    offload_parameters,
)
from tests.support.random_models import VOCABULARY, Block, Critic, Net
from tests.support.waiting import SOON_S

Tensor = torch.Tensor
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Offloads:
    """What is offloaded; None: it stays in memory.

    Attributes:
        activations, states, parameters: settings of their doors.
        layer_major: steps run unit by unit.
        together: through one handle, where the program has one model.
    """

    activations: Settings | None = None
    states: Settings | None = None
    parameters: Settings | None = None
    layer_major: bool = False
    together: bool = False


@dataclass(frozen=True)
class Program:
    """A training, and what is offloaded of it.

    Attributes:
        kinds: of layers.
        optimizer: a key of `OPTIMIZERS`.
        events: names of events with two numbers each.
        first, then: what is offloaded, before and after each event `reopen`.
        num_groups: of parameters.
        dtype: of the parameters.
        critic: a second model, with an optimizer of its own, is trained too.
        settles: waits for writes of activations before a backward pass, so that they are read.
    """

    kinds: tuple[str, ...]
    optimizer: str
    events: tuple[tuple[str, int, int], ...]
    first: Offloads
    then: Offloads
    num_groups: int = 1
    tied: bool = False
    calls_again: bool = False
    critic: bool = False
    dtype: torch.dtype = torch.float32
    settles: bool = False

    @property
    def moves_gradients(self) -> bool:
        """Whether gradients wait on a tier, now or then."""
        both = self.first, self.then
        return any((one.parameters or {}).get("gradients") == "on" for one in both)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1),
    "adam, foreach": lambda groups: torch.optim.Adam(groups, lr=1e-2, foreach=True),
    "adamw, fused": lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=True, amsgrad=True),
    "adam, tensor lr": lambda groups: torch.optim.Adam(
        groups, lr=torch.tensor(1e-2), foreach=False, maximize=True
    ),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, nesterov=True),
    "sgd, foreach": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, foreach=True),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=1e-2),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-3, momentum=0.5, centered=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=1e-2),
    "radam": lambda groups: torch.optim.RAdam(groups, lr=1e-2, foreach=True),
    "asgd": lambda groups: torch.optim.ASGD(groups, lr=1e-2),
    "rprop": lambda groups: torch.optim.Rprop(groups, lr=1e-3),
    "adadelta": lambda groups: torch.optim.Adadelta(groups),
    "lbfgs": lambda groups: torch.optim.LBFGS(
        [one for group in groups for one in group["params"]], lr=0.1, max_iter=2, history_size=2
    ),
}

NOT_COMPLEX = ("adamw, fused", "adafactor", "radam")  # their steps raise for such parameters


class Injected(ArithmeticError):
    """An error of the script, at a place where one may be."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C there, in a notebook that goes on."""


def digest(tensor: Tensor) -> str:
    """A few characters that differ if any bit does."""
    tensor = tensor.detach()
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1))
    content = flat.view(torch.uint8).numpy().tobytes()
    kind = f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}"
    return f"{kind} {hashlib.sha1(content).hexdigest()[:10]}"


def digests(tree: Any) -> dict[str, str]:
    """Of all leaves of a tree."""
    leaves, _ = tree_flatten_with_path(tree)
    return {
        "".join(map(str, path)): digest(one) if isinstance(one, Tensor) else repr(one)
        for path, one in leaves
    }


class Run:
    """One training under way.

    Attributes:
        records: what each event has shown, by its number, name and a name each.
        refusal: the error with which offload has ended it; None: it came to its end.
    """

    def __init__(self, program: Program, directory: Path | None) -> None:
        self.records: list[dict[str, str]] = []
        self.refusal: OffloadError | None = None
        self.program = program
        self._directory = directory
        self.open_of = program.first
        self.shown: dict[str, Any] = {}
        self.num_batches = 0
        self.shape = (2, 5)
        self.is_training = True
        self.added = 0
        self.hooks: list[Any] = []
        self.called: list[str] = []  # by hooks
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        self.scheduler: Any = None
        self.checkpoint: dict[str, Any] = {}
        self.average: dict[str, Tensor] = {}
        torch.manual_seed(1)
        self.models: list[nn.Module] = self.new_models()
        self.optimizers = [self.new_optimizer(model) for model in self.models]
        self.handles: list[Any] = []
        self.layer_major: Any = None

    # -- What it is made of -----------------------------------------------------------------------

    def new_models(self) -> list[nn.Module]:
        program = self.program
        net = Net(program.kinds, tied=program.tied, calls_again=program.calls_again)
        models: list[nn.Module] = [net]
        if program.critic:
            models.append(Critic(tuple(reversed(program.kinds))[:2] * 2))
        for model in models if program.dtype is not torch.float32 else ():
            model.to(program.dtype)
        return models

    def new_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        params = list(model.parameters())
        num = self.program.num_groups
        groups = [{"params": params[number::num]} for number in range(num)]
        return OPTIMIZERS[self.program.optimizer](groups)

    @property
    def net(self) -> Any:
        return self.models[0]

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.optimizers[0]

    def open(self) -> None:
        """Opens the doors, if this is the run with offload."""
        if self._directory is None:
            return
        asked, where = self.open_of, self._directory

        def of(settings: Settings) -> dict[str, Any]:
            needs_directory = settings["mode"] in ("ssd", "tiered", "auto")
            needs_directory = needs_directory or settings.get("boundary") == "ssd"
            return {**settings, **({"directory": where} if needs_directory else {})}

        if asked.together and not self.program.critic:
            handle = offload(
                self.net,
                self.optimizer,
                activations=of(asked.activations) if asked.activations else False,
                optimizer_states=of(asked.states) if asked.states else False,
                parameters=of(asked.parameters) if asked.parameters else False,
                layer_major=asked.layer_major,
            )
            self.handles.append(handle)
            self.layer_major = handle.layer_major
            return
        activations = None
        if asked.parameters:
            for model in self.models:
                self.handles.append(offload_parameters(model, **of(asked.parameters)))
        if asked.activations:
            activations = offload_activations(self.models, **of(asked.activations))
            self.handles.append(activations)
        if asked.states:
            for optimizer in self.optimizers:
                self.handles.append(offload_optimizer(optimizer, **of(asked.states)))
        if asked.layer_major:
            self.layer_major = LayerMajor(self.net, offload=activations)
            self.handles.append(self.layer_major)

    def close(self) -> None:
        """Closes what is open."""
        self.layer_major = None
        with contextlib.ExitStack() as closing:
            for handle in self.handles:
                closing.callback(handle.close)
            self.handles = []

    # -- What is compared -------------------------------------------------------------------------

    def show(self, name: str, what: Any) -> None:
        """Puts something into the record of this event."""
        self.shown.update({f"{name}{key}": one for key, one in digests(what).items()})

    def show_all(self) -> None:
        """Parameters, buffers and states: what is away comes for it."""
        for number, model in enumerate(self.models):
            self.show(f"parameters {number} ", dict(model.named_parameters()))
        for number, optimizer in enumerate(self.optimizers):
            self.show(f"states {number} ", optimizer.state_dict())

    def _show_always(self) -> None:
        for number, model in enumerate(self.models):
            grads = {k: p.grad for k, p in model.named_parameters() if p.grad is not None}
            if not self.program.moves_gradients:  # else to look at them is an error
                self.show(f"gradients {number} ", grads)
            self.show(f"buffers {number} ", dict(model.named_buffers()))
        self.show("random numbers", torch.get_rng_state())
        self.show("hooks", list(self.called))

    def carry_out(self, event: Event, a: int, b: int) -> None:
        """One event, and its record."""
        self.shown, self.called = {}, []
        try:
            event(self, a, b)
        except OffloadError as error:
            if self._directory is None:
                raise
            self.refusal = error
            return
        except (Exception, Interrupted) as error:
            said = re.sub(r"\d+", "#", str(error))[:80]
            self.shown["error"] = f"{type(error).__name__} {said}"
        if self.refusal is None:
            try:
                self._show_always()
            except OffloadError as error:
                self.refusal = error
                return
        self.records.append(self.shown)

    # -- Parts of events --------------------------------------------------------------------------

    def batch(self) -> Tensor:
        self.num_batches += 1
        generator = torch.Generator().manual_seed(self.num_batches)
        return torch.randint(VOCABULARY, self.shape, generator=generator)

    def loss(self) -> Tensor:
        loss = self.net(self.batch())
        self.show(f"loss {self.num_batches}", loss)
        self.settle()
        return loss

    def settle(self) -> None:
        for handle in self.handles if self.program.settles else ():
            engine = getattr(getattr(handle, "activations", handle), "engine", None)
            if engine is not None:
                assert engine.wait_for_writes(SOON_S)

    def block(self, a: int) -> Any:
        return self.net.blocks[a % len(self.net.blocks)]

    def new_block(self, a: int) -> Block:
        """One that is not the model's yet."""
        return Block(self.program.kinds[a % len(self.program.kinds)]).to(self.program.dtype)

    def param(self, a: int, b: int) -> nn.Parameter:
        params = list(self.block(a).parameters())
        return params[b % len(params)]

    def trained(self) -> list[nn.Parameter]:
        return [p for p in self.net.parameters() if p.requires_grad]

    def step(self) -> None:
        if isinstance(self.optimizer, torch.optim.LBFGS):
            self.optimizer.step(self._closure)
        else:
            self.optimizer.step()

    def _closure(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        return loss


Event = Callable[[Run, int, int], None]


class Events(dict[str, Callable[[Run, int, int], None]]):
    """Events of a training loop by their names: functions of a run and two small numbers.

    Attributes:
        weights: how often each is drawn, relative to the others.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weights: dict[str, int] = {}

    def event(self, weight: int = 2) -> Callable[[Event], Event]:
        """Decorates one."""

        def add(function: Event) -> Event:
            self[function.__name__] = function
            self.weights[function.__name__] = weight
            return function

        return add
