# SPDX-License-Identifier: Apache-2.0
"""What happens around the forward of a layer: `LayerCalls`.

It names what the layer saves, tells a profiler of it, and recomputes it in backward, by torch's own
checkpoint, where the policy says so.

Note [As it was before]
A forward that runs again computes the same if it finds the same: arguments, parameters, buffers,
attributes, hooks, random numbers, the kernels of attention that `sdpa_kernel` allows. The
checkpoint sees to torch's own random numbers and autocast alone. The rest is noted before
the first run; what that has changed is as it was while the layer runs again, and what the caller,
the model and later passes see is what the first run has left.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from megatron.offload.activations.capture.context import others_take_what_is_saved
from megatron.offload.activations.engine import OffloadEngine
from megatron.offload.activations.placement.policy import WHOLE_LAYER, Placement
from megatron.offload.activations.saved.scope import (
    Scope,
    layer_of,
    name_after,
    name_of_call,
)
from megatron.offload.errors import ChangedInPlaceError, ConfigurationError
from megatron.offload.integration.open_parameters import brought
from megatron.offload.integration.own_attributes import replaced
from megatron.offload.integration.replaced_forwards import InPlaceOf
from megatron.offload.integration.torch.argument_snapshot import ArgumentSnapshot
from megatron.offload.integration.torch.attribute_snapshot import AttributeSnapshot
from megatron.offload.integration.torch.buffer_snapshot import BufferSnapshot
from megatron.offload.integration.torch.module_hooks import is_compiled
from megatron.offload.integration.torch.noted_tensor import Changes
from megatron.offload.integration.torch.parameter_snapshot import ParameterSnapshot, Written
from megatron.offload.integration.torch.passes import Passes, computed_in, tensors_in
from megatron.offload.integration.torch.surroundings import (
    attention_kernels,
    computed_weights,
    in_forward_mode,
    modes,
)
from megatron.offload.layer_major.other_numbers import OtherNumbers
from megatron.offload.planner.profile.profiler import Profiler
from megatron.offload.planner.profile.timings import LayerTimings

logger = logging.getLogger(__name__)

_MOST_CALLS = 32  # of a layer that are looked up in a plan before a first pass has shown how many
_Context = contextlib.AbstractContextManager[Any]


class LayerCalls:
    """Is told of each call of a layer.

    Attributes:
        num_calls: of layers in forward passes that backward follows.
        units: of layers, in layer-major steps: a plan's chunks. A paused layer's `forward` was
            looked up while the previous unit ran, so replacement is decided before the pause.
    """

    def __init__(self, names: Mapping[torch.nn.Module, str]) -> None:
        self.num_calls = 0
        self.units: Mapping[torch.nn.Module, int] = {}
        self._names = names
        self._passes: Passes | None = None
        self._engine: OffloadEngine | None = None
        self._profiler: Profiler | None = None
        self._calls: collections.Counter[torch.nn.Module] = collections.Counter()  # in this pass
        self._most_calls: collections.Counter[torch.nn.Module] = collections.Counter()  # in any
        self._replaced: set[torch.nn.Module] = set()  # they may be recomputed in this pass
        self._layer: torch.nn.Module | None = None  # whose forward is under way
        self._early: torch.nn.Module | None = None  # the same, before there is an engine
        self._in_graph: dict[str, None] = {}  # layers of this pass that graphs have saved for
        self._recomputes = False  # whether it is to be recomputed
        self._has_warned = False  # of hooks that are around one
        self._has_warned_of: set[torch.nn.Module] = set()  # why they are not recomputed
        self._timings: LayerTimings | None = None  # of it
        self._watched: ArgumentSnapshot | None = None  # its arguments, where it is measured
        self._watched_attributes: AttributeSnapshot | None = None
        self._changes: collections.defaultdict[torch.nn.Module, Changes]
        self._changes = collections.defaultdict(functools.partial(Changes, "argument"))
        self._changed: collections.defaultdict[torch.nn.Module, Changes]
        self._changed = collections.defaultdict(functools.partial(Changes, "attribute"))
        self._written: collections.defaultdict[torch.nn.Module, Written]
        self._written = collections.defaultdict(Written)
        self._contexts = contextlib.ExitStack()  # around it, or around what runs after it

    def connect(self, passes: Passes, engine: OffloadEngine, profiler: Profiler | None) -> None:
        """From now on these are told of layers.

        Args:
            passes: knows which calls are part of a forward pass that backward will follow.
            engine: of the model.
            profiler: is told of layers; None: nothing measures them.
        """
        self._passes, self._engine, self._profiler = passes, engine, profiler

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Around a forward pass: names what is saved in it, recomputes what the policy says."""
        engine = self._engine
        assert engine is not None
        if self._layer is not None:  # interrupted in an earlier pass: no hook has told us
            self._end(None)
        self._calls.clear()
        self._in_graph.clear()
        early, self._early = self._early, None  # the engine was opened within it
        self._enter(engine, name_after("") if early is None else self._names[early])
        self._replaced = {
            layer
            for layer, name in self._names.items()
            if any(
                self._is_recomputed(engine, layer, name_of_call(name, number + 1))
                for number in range(self._most_calls[layer] or _MOST_CALLS)
            )
        }
        try:
            with contextlib.ExitStack() as stack:
                for one in self._replaced:  # a module looks it up before its hooks run
                    if not is_compiled(one):  # else its call is all that is ours
                        run = functools.partial(self.run, one.forward)
                        stack.enter_context(replaced(one, forward=InPlaceOf(one, run)))
                yield
        finally:
            self._contexts.close()
            self._most_calls |= self._calls

    def begin(self, layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A layer is called."""
        if layer not in self._names:  # Note [Copied attributes] in `module_hooks.py`
            return
        engine = self._engine
        if engine is None:
            self._early = layer
            return
        if self._passes is None or not self._passes.is_in_forward:
            return
        if self._layer is not None:  # within itself
            return
        self._layer = layer
        self.num_calls += 1
        self._calls[layer] += 1
        # A plan has a line for each call of a layer; settings name layers.
        number = self._calls[layer] if engine.divides_layers else 1
        scope = self._enter(engine, name_of_call(self._names[layer], number))
        engine.begin_layer()
        is_replaced = layer in self._replaced
        is_asked_for = is_replaced or self._profiler is not None
        inputs = list(tensors_in((args, kwargs))) if is_asked_for else []
        # Without an input that wants a gradient, nothing would ask for the recomputation.
        self._recomputes = (
            is_replaced
            and self._is_recomputed(engine, layer, scope.layer)
            and any(one.requires_grad for one in inputs)
            and not in_forward_mode()  # it would run again without tangents
        )
        if self._profiler is not None:
            self._timings = self._profiler.begin_layer(scope, inputs, recomputes=self._recomputes)
            if self._timings is not None and not self._recomputes:
                self._watched = self._noted(layer, args, kwargs, copies=False)
                self._watched_attributes = AttributeSnapshot(
                    layer, self._changed[layer], tree_leaves((args, kwargs)), copies=False
                )

    def end(self, layer: torch.nn.Module, result: Any) -> None:
        """The call of a layer has ended, with its result or None."""
        if self._layer is layer:
            self._end(result)
        elif self._early is layer:
            self._early = None

    def _end(self, result: Any) -> None:
        assert self._engine is not None
        if self._watched is not None and self._layer is not None and self._timings is not None:
            assert self._watched_attributes is not None
            self._watched.end(())
            self._watched_attributes.keep_changed()
            self._learn(self._layer, self._timings)
        self._layer = self._timings = self._watched = self._watched_attributes = None
        if self._profiler is not None:
            self._profiler.end_layer(list(tensors_in(result)))
        self._enter(self._engine, name_after(self._engine.scope.layer))

    def save_in_graph(self, name: str) -> OffloadEngine:
        """A compiled graph is about to save for a layer's call; empty: for none that it knows.

        Calls within a graph are not seen: all that shows them is what they save.
        """
        engine = self._engine
        assert engine is not None
        if self._layer is not None:  # the graph is a part of this one
            return engine
        if not engine.divides_layers:  # see `begin`
            name = layer_of(name)
        if name and name not in self._in_graph:
            self._in_graph[name] = None
            self.num_calls += 1
            engine.begin_layer()
        if self._in_graph:
            wanted = name or name_after(next(reversed(self._in_graph)))
            scope = engine.scope
            if scope.layer != wanted:
                scope = self._enter(engine, wanted)
            if self._profiler is not None:
                self._profiler.reach_layer(scope, is_layer=bool(name))
        return engine

    def note_sizes(self, inputs: Sequence[torch.Tensor]) -> None:
        """What goes into a model some of whose layers are in compiled graphs."""
        if self._profiler is not None:
            self._profiler.note_sizes(inputs)

    def use_in_graph(self, scope: Scope) -> None:
        """The backward of a compiled graph uses what was saved at a place."""
        if self._profiler is not None:
            self._profiler.reach_backward(scope)

    def _noted(
        self, layer: torch.nn.Module, args: Any, kwargs: dict[str, Any], *, copies: bool
    ) -> ArgumentSnapshot:
        try:
            names = list(inspect.signature(type(layer).forward).parameters)[1:]
        except (TypeError, ValueError):
            names = []
        return ArgumentSnapshot(args, kwargs, names, self._changes[layer], copies=copies)

    def _learn(self, layer: torch.nn.Module, timings: LayerTimings) -> None:
        """A measured layer has run: plans do not recompute what would not run as before."""
        reason = self._changes[layer].sentence or self._changed[layer].sentence
        if reason or others_take_what_is_saved() or _is_scripted(layer):
            timings.can_be_recomputed = False
        if reason and layer not in self._has_warned_of:
            self._has_warned_of.add(layer)
            logger.warning(
                "activation offload: %s %s, so it is not planned to be recomputed; have it change "
                "a copy to have it recomputed",
                self._names[layer],
                reason,
            )

    def _is_recomputed(self, engine: OffloadEngine, layer: torch.nn.Module, name: str) -> bool:
        chunk = self.units.get(layer, engine.scope.chunk)
        scope = dataclasses.replace(engine.scope, chunk=chunk, layer=name)
        return engine.place_layer(scope) is Placement.RECOMPUTE

    def _is_within_hooks(self, name: str) -> bool:
        """Whether the model has entered hooks around a layer; see Note [Hooks of others].

        When those hooks run the layer again, our pass is over, and we do not checkpoint it there.
        """
        if not others_take_what_is_saved():
            return False
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "activation offload: %s is to be recomputed, and the model calls it within hooks "
                "for saved tensors that are not ours (a torch.utils.checkpoint of its own, or "
                "others); it is left to them",
                name,
            )
        return True

    def _has_script(self, layer: torch.nn.Module, name: str) -> bool:
        """Whether parts of a layer are TorchScript: their buffers cannot be as they were."""
        if not _is_scripted(layer):
            return False
        if layer not in self._has_warned_of:
            self._has_warned_of.add(layer)
            logger.warning(
                "activation offload: %s is to be recomputed, and a part of it is TorchScript, "
                "which torch's checkpoint cannot end half way; what it saves moves or stays "
                "instead; give it the module that the script was made of to have it recomputed",
                name,
            )
        return True

    def _enter(self, engine: OffloadEngine, name: str) -> Scope:
        """What is saved from now on has this name."""
        self._contexts.close()
        scope = engine.scope.of_layer(name)
        self._contexts.enter_context(engine.within(scope))
        return scope

    def run(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """In place of a layer's forward: saves its inputs only and runs again in backward."""
        if self._layer is None or not self._recomputes:
            return forward(*args, **kwargs)
        self._recomputes = False  # what it calls, itself even, runs again as a part of it
        assert self._engine is not None
        name = self._engine.scope.layer
        if self._is_within_hooks(name) or self._has_script(self._layer, name):
            return forward(*args, **kwargs)
        if not self._written[self._layer].is_known and _is_lazy(self._layer):
            return forward(*args, **kwargs)  # it makes its parameters in this call
        arguments = self._noted(self._layer, args, kwargs, copies=True)
        if not arguments.is_certain:
            return self._run_watched(forward, args, kwargs)
        self._engine.statistics.recomputed_layers += 1
        noted: Callable[[], _Context] = contextlib.nullcontext
        if self._timings is not None and self._profiler is not None:
            noted = functools.partial(self._profiler.recomputation, self._timings, WHOLE_LAYER)
        given = tree_leaves((args, kwargs))
        attributes = AttributeSnapshot(self._layer, self._changed[self._layer], given)
        buffers = BufferSnapshot(attributes.modules)
        parameters = ParameterSnapshot(attributes.parameters, self._written[self._layer])
        numbers = _NumberSnapshot([*attributes.modules, *given])
        weights = functools.partial(brought, self._layer)
        others = attention_kernels(), computed_weights(), modes()

        def contexts() -> tuple[_Context, _Context]:
            restored = buffers.restored, attributes.restored, parameters.restored
            again = noted, weights, *restored, numbers.restored, *others
            return contextlib.nullcontext(), _Recomputations(*again)

        run = _Again(functools.partial(arguments.run, forward), name)
        passed, in_names = arguments.passed()
        result = checkpoint(run, *passed, use_reentrant=False, context_fn=contexts, **in_names)
        computed = list(computed_in(result))
        if written := parameters.keep_written(attributes.counted()):
            raise ChangedInPlaceError(
                f"{name}, which is to be recomputed, writes to its parameter {written} while it "
                "runs, and needs it as it was; do not recompute the layer"
            )
        arguments.end(computed)
        buffers.keep_changed()
        attributes.keep_changed(computed, parameters.copied)
        numbers.keep_changed()
        return result

    def _run_watched(self, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs a layer that is to be recomputed from its next call on."""
        assert self._layer is not None
        arguments = self._noted(self._layer, args, kwargs, copies=False)
        result = forward(*args, **kwargs)
        arguments.end(())
        return result


def _is_scripted(layer: torch.nn.Module) -> bool:
    return any(isinstance(one, torch.jit.ScriptModule) for one in layer.modules())


class _Again:
    """A layer's forward, which torch's checkpoint ends where all that it wants is computed again.

    It raises an error to that end. Within a function that was scripted the interpreter makes
    another one of it, without a text, as the checkpoint's own has none. To go on would be wrong: in
    its second call the interpreter may run another graph of the function, which saves other things.
    """

    def __init__(self, forward: Callable[..., Any], name: str) -> None:
        self._forward, self._name = forward, name
        self._has_run = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._forward(*args, **kwargs)
        except RuntimeError as error:
            text = str(error)
            is_script = "failed in the TorchScript interpreter" in text
            if not (self._has_run and is_script and text.rstrip().endswith("RuntimeError:")):
                raise
            raise ConfigurationError(
                f"activation offload: {self._name} is recomputed, and what its forward saves last "
                "it saves in a function of torch.jit.script, which torch's checkpoint cannot end "
                "half way; leave the layer out of recompute_layers, or call the function that the "
                "script was made of"
            ) from error
        finally:
            self._has_run = True


def _is_lazy(layer: torch.nn.Module) -> bool:
    return any(map(is_lazy, (*layer.parameters(), *layer.buffers())))


class _NumberSnapshot:
    """Random numbers that are not torch's, where they were before a layer has run."""

    def __init__(self, owners: Iterable[Any]) -> None:
        self._numbers = OtherNumbers(owners)
        self._before: list[bytes] | None = self._numbers.states()

    def keep_changed(self) -> None:
        """The layer has run: lets go of what it has not drawn from."""
        if self._numbers.states() == self._before:
            self._before = None

    def restored(self) -> _Context:
        """A context in which the layer draws what it has drawn."""
        return contextlib.nullcontext() if self._before is None else self._numbers.at(self._before)


class _Recomputations(contextlib.AbstractContextManager[None]):
    """Contexts around each recomputation of a layer, of which a retained graph has several."""

    def __init__(self, *contexts: Callable[[], _Context]) -> None:
        self._contexts = contexts
        self._entered = contextlib.ExitStack()

    def __enter__(self) -> None:
        with contextlib.ExitStack() as entered:  # leaves them again if one raises
            for context in self._contexts:
                entered.enter_context(context())
            self._entered = entered.pop_all()

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.__exit__(*error)
