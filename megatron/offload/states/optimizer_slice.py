# SPDX-License-Identifier: Apache-2.0
"""An optimizer's own step, for some of its parameters: `OptimizerSlice`.

The library updates: with the kernel that it chooses (fused, foreach, a loop), and its weight decay,
schedule and parameter groups. The bits are the same for every optimizer that updates each parameter
by that parameter's gradient and state alone. A step that changes anything else raises
(`unsliced_state.py`).

Note [Places in a group]
Some optimizers number parameters by their places in a group: those of bitsandbytes find so which
ones keep 32-bit states. So a slice's groups are as long as the optimizer's, with an empty parameter
in place of every one that is not in the slice: it has no gradient, and optimizers pass over it. For
one that does not, as the trial shows, a slice's groups have its own parameters only.
"""

from __future__ import annotations

import collections
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from megatron.offload.moving.bucket import Bucket
from megatron.offload.states.trial import Trial, has_gradient
from megatron.offload.states.unsliced_state import UnslicedState, check_groups, check_state_keys

State = dict[str, Any]  # of a parameter, by the optimizer's keys


class OptimizerSlice:
    """Runs steps of an optimizer for a few parameters at a time.

    The optimizer's own groups and states are not changed while it runs, so an exception leaves
    them as they are. What a step writes into its groups (some optimizers count steps there) is
    copied to them when the last slice of the step has run.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, keeps_places: bool = True) -> None:
        self._optimizer = optimizer
        self._groups_after: dict[int, dict[str, Any]] = {}  # by their number
        self._num_tried = 0  # groups whose parameters were part of a trial
        self._keeps_places = keeps_places  # Note [Places in a group]
        self._updates_all: bool | None = None  # parameters without a gradient too; None: not tried

    def begin_step(self, slices: Iterable[Sequence[torch.Tensor]]) -> None:
        """A step begins; its slices have these parameters, in this order.

        Raises:
            ConfigurationError: the optimizer's state has a key that is no parameter, or its step
                cannot run in slices.
        """
        self._groups_after = {}  # may be left from a step that an error ended
        check_state_keys(self._optimizer)
        slices, num_groups = list(slices), len(self._optimizer.param_groups)
        if len(slices) > 1 and num_groups != self._num_tried:
            trial = Trial(self._optimizer, _step_in_slices)
            self._keeps_places = trial.keeps_places(p for own in slices for p in own)
            self._num_tried = num_groups

    def to_visit(self, buckets: Sequence[Bucket]) -> list[Bucket]:
        """Those of which a parameter has a gradient; all, if the step updates others as well."""
        wanting = [one for one in buckets if any(map(has_gradient, one.params))]
        # Whatever has gradients, for all ranks alike: a step may have them meet.
        if len(buckets) > 1 and self._updates_all is None:
            trial = Trial(self._optimizer, _step_in_slices)
            params = (param for one in buckets for param in one.params)
            self._updates_all = trial.updates_without_gradients(params)
        return list(buckets) if self._updates_all else wanting

    def step(
        self, params: Sequence[torch.Tensor], states: Mapping[torch.Tensor, State]
    ) -> dict[torch.Tensor, State]:
        """Updates some parameters; returns their states after it.

        Args:
            params: of the optimizer's groups.
            states: of these parameters; a parameter without states gets what the optimizer makes.

        Raises:
            OffloadError: the step has changed what no slice may change; see `unsliced_state.py`.
        """
        return self._run({param: param for param in params}, states)

    def _run(
        self,
        twins: Mapping[torch.Tensor, torch.Tensor],
        states: Mapping[torch.Tensor, State],
    ) -> dict[torch.Tensor, State]:
        """`step`, with other tensors in place of the parameters."""
        part = self._twin(twins, keeps_places=self._keeps_places)
        part.state.update({twins[param]: dict(state) for param, state in states.items()})
        self._prepare(part)
        unsliced = UnslicedState(part)
        _own_step(type(part))(part)
        unsliced.check(part, twins.values())
        self._finish(part)
        for index, own in enumerate(self._optimizer.param_groups):
            after = part.param_groups[index]
            # Some optimizers count no step of a group without parameters; a slice has few groups.
            if not own["params"] or not twins.keys().isdisjoint(own["params"]):
                check_groups(part, self._groups_after.setdefault(index, after), after)
        return {p: part.state[one] for p, one in twins.items() if one in part.state}

    def fill(
        self, params: Sequence[torch.Tensor], make: Callable[[torch.optim.Optimizer], None]
    ) -> dict[torch.Tensor, State]:
        """The states that a function makes for some parameters, in a twin with only these."""
        part = self._twin({param: param for param in params}, keeps_places=False)
        make(part)
        return dict(part.state)

    def _twin(
        self, twins: Mapping[torch.Tensor, torch.Tensor], *, keeps_places: bool
    ) -> torch.optim.Optimizer:
        """The optimizer with these tensors as its parameters, and no states."""
        optimizer = self._optimizer
        part: torch.optim.Optimizer = object.__new__(type(optimizer))
        part.__dict__.update(optimizer.__dict__)
        part.__dict__.pop("step", None)  # an attribute of the instance: a scheduler's, or ours
        device = next((one.device for one in twins.values()), None)
        other = torch.nn.Parameter(torch.empty(0, device=device)) if keeps_places else None
        part.param_groups = []
        for group in optimizer.param_groups:
            own = [twins.get(param, other) for param in group["params"]]
            part.param_groups.append({**group, "params": [one for one in own if one is not None]})
        part.state = collections.defaultdict(dict)
        return part

    def _prepare(self, part: torch.optim.Optimizer) -> None:
        """For subclasses: changes the twin before it takes the step."""

    def _finish(self, part: torch.optim.Optimizer) -> None:
        """For subclasses: undoes `_prepare` before the groups of the twin are taken over."""

    def close(self) -> None:
        """Releases memory, if the class has any."""

    def end_step(self) -> None:
        """All slices of a step have run: copies what it has changed in the groups."""
        self._visit_others()
        for index, after in self._groups_after.items():
            group = self._optimizer.param_groups[index]
            group.update({key: value for key, value in after.items() if key != "params"})
        self._groups_after = {}

    def _visit_others(self) -> None:
        """Runs the step for groups without gradients: some optimizers count their steps too."""
        groups = self._optimizer.param_groups
        others = [
            group["params"][0]
            for index, group in enumerate(groups)
            if group["params"] and index not in self._groups_after
        ]
        if others or not self._groups_after:
            state = self._optimizer.state
            own = {param: state[param] for param in others if state.get(param)}
            self._run({param: param for param in others}, own)


def _step_in_slices(
    optimizer: torch.optim.Optimizer,
    slices: Sequence[Sequence[torch.Tensor]],
    keeps_places: bool,
) -> None:
    """A whole step of an optimizer, all of whose parameters are in these slices."""
    step = OptimizerSlice(optimizer, keeps_places=keeps_places)
    for params in slices:
        own = {param: optimizer.state[param] for param in params if optimizer.state.get(param)}
        optimizer.state.update(step.step(params, own))
    step.end_step()


def without_hooks(step: Any) -> Any:
    """The step of a class as it is written, which torch has wrapped to call hooks."""
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step


def _own_step(kind: type[torch.optim.Optimizer]) -> Any:
    """The step of a class without its hooks and its closure, which belong to a whole step."""
    step = without_hooks(kind.step)
    closure = inspect.signature(step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        return functools.partial(step, closure=None)
    return step
