# SPDX-License-Identifier: Apache-2.0
"""FSDP2 in layer-major steps, its parameters gathered once for all micro-batches: `ShardedUnits`.

Note [Gathered once for all micro-batches]
FSDP gathers a module's parameters before its forward and before its backward and frees them behind
each, and reduces its gradients behind backward. It has settings for all three, made for gradient
accumulation; here they change from pass to pass. Behind all passes of a unit but the last
one nothing is freed and nothing is reduced; behind the last one, what the user has set happens. In
the last unit backward follows forward at once, so between the two nothing is freed either, and
nothing is gathered ahead before its last pass.

FSDP's callback at the end of a backward pass frees and reduces what is left in the whole model. Of
units whose turn it is not that would be too early: the settings of those are off. Parameters that
no unit has for itself (a root's own, such as an embedding and an output layer) have gradients when
the first unit's last backward has ended: then the step calls that callback once itself.

Note [Where a forward pass stands]
FSDP notes in its modules which of them are in their forward, for one forward pass at a time. Here
those of all micro-batches are in the middle of the root's. So what is noted in modules around
layers is put aside when a forward pass pauses, and is back when it goes on.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from megatron.offload.integration.own_attributes import replaced
from megatron.offload.integration.process_groups import ProcessGroupConsensus
from megatron.offload.integration.torch.stationary import fsdp2_state, parameter_groups
from megatron.offload.layer_major.boundary import Boundary
from megatron.offload.layer_major.config import refusal
from megatron.offload.layer_major.unit_passes import UnitPasses


class ShardedUnits:
    """Tells FSDP2 of one layer-major step: a `layer_major.unit_passes.UnitPasses` around another.

    Args:
        model: with modules that `fully_shard` has sharded, or without any.
        units: of its layers, counted from 0.
    """

    def __init__(self, model: torch.nn.Module, units: Mapping[torch.nn.Module, int]) -> None:
        self._last_unit = max(units.values())
        self._sharded = _sharded_modules(model, units)
        self._of_unit: dict[int, list[_Sharded]] = {unit: [] for unit in units.values()}
        self._others: list[_Sharded] = []  # in no unit's layers, or in several units'
        for one in self._sharded:
            is_of_one = one.is_in_layers and len(one.units) == 1
            (self._of_unit[min(one.units)] if is_of_one else self._others).append(one)
        self._roots = list(dict.fromkeys(_outermost_states(model)))
        self._passes: UnitPasses
        self._unit: int | None = None  # whose forward pass is under way
        self._paused: dict[int, _Place] = {}  # of micro-batches
        self._is_lost = False  # what a step left that failed cannot be undone

    @property
    def device(self) -> torch.device | None:
        """Where parameters are gathered; None: there is nothing to gather."""
        device: torch.device | None = self._roots[0]._device if self._roots else None
        return device

    def check_not_lost(self) -> None:
        """Raises ConfigurationError if this step has failed and FSDP cannot go on behind it."""
        if self._is_lost:
            raise refusal(
                f"a step has failed, and FSDP of PyTorch {torch.__version__} cannot be reset: "
                "gradients of later steps would be wrong; start again from the last checkpoint, "
                "or use PyTorch 2.13, whose FSDP can"
            )

    def consensus(self) -> ProcessGroupConsensus | None:
        """Of the ranks that share these parameters; None: there are none."""
        device = self.device
        if device is None:
            return None
        meshes = dict.fromkeys(mesh for one in self._sharded for mesh in one.meshes())
        groups = dict.fromkeys(group for mesh in meshes for group in mesh.get_all_groups())
        return ProcessGroupConsensus(list(groups), device)

    @contextlib.contextmanager
    def step(self, passes: UnitPasses) -> Iterator[UnitPasses]:
        """Around a step; yields what is to be told of its passes. Gradients are complete after it.

        Args:
            passes: told as well, within.

        Raises:
            ConfigurationError: FSDP's root is not in the model.
        """
        if not self._roots:
            yield passes
            return
        self._passes = passes
        with contextlib.ExitStack() as contexts:
            self._begin(contexts)
            try:
                yield self
            except BaseException:
                self._abandon()
                raise
        with torch.no_grad():
            for root in self._roots:
                root._root_post_backward_final_callback()

    @property
    def boundary(self) -> Boundary | None:
        """See `UnitPasses`."""
        return self._passes.boundary

    @contextlib.contextmanager
    def forward(self, unit: int, micro_batch: int, *, is_last: bool) -> Iterator[None]:
        """See `UnitPasses`."""
        place = self._paused.pop(micro_batch, None)
        if place is not None:
            place.resume()
        self._unit = unit
        keeps = not is_last or unit == self._last_unit
        orders = [root._comm_ctx.post_forward_order for root in self._roots]
        lengths = [len(order) for order in orders]
        try:
            with contextlib.ExitStack() as contexts:
                contexts.enter_context(self._passes.forward(unit, micro_batch, is_last=is_last))
                for one in (*self._of_unit[unit], *self._others) if keeps else ():
                    one.stay_after_forward(contexts)
                yield
            if unit == self._last_unit and not is_last:
                for order, length in zip(orders, lengths, strict=True):
                    _forget(order, length)
        finally:
            self._unit = None
            self._paused[micro_batch] = _Place(self._roots, [one.state for one in self._others])

    def whole_forward(self) -> contextlib.AbstractContextManager[Callable[[], None]]:
        """See `UnitPasses`."""
        return self._passes.whole_forward()

    @contextlib.contextmanager
    def backward(self, unit: int, micro_batch: int, *, is_last: bool) -> Iterator[None]:
        """See `UnitPasses`."""
        with contextlib.ExitStack() as contexts:
            contexts.enter_context(self._passes.backward(unit, micro_batch, is_last=is_last))
            for one in (*self._of_unit[unit], *self._others) if is_last else ():
                if one.units == {unit}:
                    one.complete_in_backward(contexts)
            yield

    def prepare_backward(self, unit: int, micro_batch: int) -> None:
        """See `UnitPasses`."""
        self._passes.prepare_backward(unit, micro_batch)

    @contextlib.contextmanager
    def elsewhere(self, leaf: torch.Tensor) -> Iterator[Callable[[], torch.Tensor | None]]:
        """See `UnitPasses`: FSDP adds up in the type that it reduces in."""
        parameters = (p for one in self._sharded for g in one.groups for p in g.fsdp_params)
        own: Any = next((p for p in parameters if vars(p).get("_unsharded_param") is leaf), None)
        if own is None:
            with self._passes.elsewhere(leaf) as came:
                yield came
            return

        def came_to_fsdp() -> torch.Tensor | None:
            gradient: torch.Tensor | None = own.unsharded_accumulated_grad
            return None if gradient is None else gradient.to(leaf.dtype)  # which it was cast from

        with replaced(own, unsharded_accumulated_grad=None):
            yield came_to_fsdp

    def _begin(self, contexts: contextlib.ExitStack) -> None:
        for root in self._roots:
            root._lazy_init()  # as its first forward does: from here on its settings are final
            if not root._is_root:
                raise refusal(
                    "FSDP's root is a module around the model that LayerMajor was given; give it "
                    "the module that fully_shard was called with last"
                )
            contexts.enter_context(replaced(root._state_ctx, is_last_backward=False))
        for one in self._sharded:
            one.stay_after_backward(contexts)
        for one in self._others:
            for module in () if one.is_around_layers else one.state._modules:
                hook = module.register_forward_pre_hook(functools.partial(self._note, one))
                contexts.callback(hook.remove)

    def _note(self, sharded: _Sharded, *_: Any) -> None:
        """A module beside the layers is called: its gradients come in the same unit's backward."""
        if self._unit is not None:
            sharded.units.add(self._unit)

    def _abandon(self) -> None:
        """Leaves no trace of a step that has failed, but for gradients that are reduced already."""
        for root in self._roots:
            if hasattr(root, "_reset_iter_state"):
                root._reset_iter_state()
            else:  # torch 2.10, whose own steps go wrong behind one that failed
                self._is_lost = True
        for parameter in (p for one in self._sharded for g in one.groups for p in g.fsdp_params):
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


class _Sharded:
    """A module whose parameters are gathered together, or several that were wrapped as one.

    Attributes:
        state: FSDP's of it.
        groups: FSDP's of its parameters.
        units: of whose layers it is a part; beside the layers, in whose forward it was called.
        is_in_layers: it is a part of layers, or is one.
        is_around_layers: it holds layers.
    """

    def __init__(self, state: Any) -> None:
        self.state = state
        self.groups = parameter_groups(state)
        self.units: set[int] = set()
        self.is_in_layers = True
        self.is_around_layers = False
        self._of_user = [(g, g.reduce_grads, g.reshard_after_backward) for g in self.groups]

    def meshes(self) -> Iterator[Any]:
        """Of the processes that its parameters are spread over."""
        for parameter in (one for group in self.groups for one in group.fsdp_params):
            yield parameter.sharded_param.device_mesh

    def stay_after_forward(self, contexts: contextlib.ExitStack) -> None:
        """Keeps parameters gathered behind forward while these contexts are open."""
        for group in self.groups:
            contexts.enter_context(replaced(group, post_forward_mesh_info=None))

    def stay_after_backward(self, contexts: contextlib.ExitStack) -> None:
        """The same behind backward, and keeps gradients as they are."""
        for group in self.groups:
            change = replaced(group, reduce_grads=False, reshard_after_backward=False)
            contexts.enter_context(change)

    def complete_in_backward(self, contexts: contextlib.ExitStack) -> None:
        """Does behind backward what the user has set, while these contexts are open."""
        for group, reduces, reshards in self._of_user:
            change = replaced(group, reduce_grads=reduces, reshard_after_backward=reshards)
            contexts.enter_context(change)


class _Place:
    """Where FSDP stands in a forward pass that pauses; for FSDP there is none under way then."""

    def __init__(self, roots: Iterable[Any], states: Iterable[Any]) -> None:
        self._roots = [(root._state_ctx, root._state_ctx.iter_forward_root) for root in roots]
        self._modules_to_run = [
            (state._modules_to_run_forward, set(state._modules_to_run_forward)) for state in states
        ]
        self._training = [
            (one, one._training_state)
            for state in states
            for one in (state, *parameter_groups(state))
        ]
        for context, _ in self._roots:
            context.iter_forward_root = None
        for modules, _ in self._modules_to_run:
            modules.clear()
        for one, training_state in self._training:
            one._training_state = type(training_state).IDLE

    def resume(self) -> None:
        """It goes on."""
        for context, root in self._roots:
            context.iter_forward_root = root
        for modules, left in self._modules_to_run:
            modules.update(left)
        for one, training_state in self._training:
            one._training_state = training_state


def _sharded_modules(
    model: torch.nn.Module, units: Mapping[torch.nn.Module, int]
) -> list[_Sharded]:
    """All that FSDP2 has sharded, and which units it belongs to."""
    unit_of = {module: unit for layer, unit in units.items() for module in layer.modules()}
    around = {
        name[:end]
        for name, module in model.named_modules()
        if module in units
        for end in (0, *(i for i, letter in enumerate(name) if letter == "."))
    }
    found: dict[Any, _Sharded] = {}
    for name, module in model.named_modules():
        state = fsdp2_state(module)
        if state is not None:
            one = found.setdefault(state, _Sharded(state))
            if module in unit_of:
                one.units.add(unit_of[module])
            else:
                one.is_in_layers = False
                one.is_around_layers |= name in around
    return list(found.values())


def _forget(order: list[Any], length: int) -> None:
    """Takes back what FSDP has noted of a forward pass to gather ahead in backward by.

    Within a unit there is nothing to gather, and its last backward pass alone leads to another one.
    """
    for group in order[length:]:
        group._post_forward_indices.pop()
    del order[length:]


def _outermost_states(module: torch.nn.Module) -> Iterator[Any]:
    """FSDP's states of modules that are in no other sharded one."""
    state = fsdp2_state(module)
    if state is not None:
        yield state
        return
    for child in module.children():
        yield from _outermost_states(child)
