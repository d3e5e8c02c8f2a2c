# SPDX-License-Identifier: Apache-2.0
"""What happens around the forward of a layer: `LayerCalls`.

What it saves gets its name, a profiler hears of it, and where the policy says so it is recomputed
in backward, by torch's own checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from megatron.offload.engine import OffloadEngine
from megatron.offload.integration.torch.passes import Passes
from megatron.offload.placement.policy import WHOLE_LAYER, Placement
from megatron.offload.planner.profile.profiler import Profiler
from megatron.offload.planner.profile.timings import LayerTimings

_FORWARD = "forward"


class LayerCalls:
    """Hears of each call of a layer.

    Args:
        names: of the layers.
        passes: knows which calls are part of a forward pass that backward will follow.
    """

    def __init__(self, names: Mapping[torch.nn.Module, str], passes: Passes) -> None:
        self._names = names
        self._passes = passes
        self._engine: OffloadEngine | None = None
        self._profiler: Profiler | None = None
        self._layer: torch.nn.Module | None = None  # whose forward is under way
        self._contexts = contextlib.ExitStack()  # around it

    def connect(self, engine: OffloadEngine, profiler: Profiler | None) -> None:
        """From now on these hear of layers."""
        self._engine, self._profiler = engine, profiler

    def begin(self, layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A layer is called."""
        engine = self._engine
        if engine is None or not self._passes.is_in_forward:
            return
        if self._layer is not None:  # within itself, or one that was interrupted
            if self._layer is not layer:
                self._end(None)
            return
        self._layer = layer
        scope = dataclasses.replace(engine.scope, layer=self._names[layer])
        inputs = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        # Without an input that wants a gradient, nothing would ask for the recomputation.
        recomputes = engine.place_layer(scope) is Placement.RECOMPUTE and any(
            one.requires_grad for one in inputs
        )
        timings = None
        if self._profiler is not None:
            timings = self._profiler.begin_layer(scope, inputs, recomputes=recomputes)
        self._contexts.enter_context(engine.within(scope))
        if recomputes:
            engine.statistics.recomputed_layers += 1
            self._contexts.enter_context(_recomputed(layer, self._noted(timings)))

    def end(self, layer: torch.nn.Module, result: Any) -> None:
        """The call of a layer has ended, with its result or None."""
        if self._layer is layer:
            self._end(result)

    def _end(self, result: Any) -> None:
        self._layer = None
        self._contexts.close()
        if self._profiler is not None:
            tensors = [one for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
            self._profiler.end_layer(tensors)

    def _noted(
        self, timings: LayerTimings | None
    ) -> Callable[[], contextlib.AbstractContextManager[None]]:
        """Gives a context around the second run of a layer, in which it is timed."""
        if timings is None or self._profiler is None:
            return contextlib.nullcontext
        return functools.partial(self._profiler.recomputation, timings, WHOLE_LAYER)


@contextlib.contextmanager
def _recomputed(
    layer: torch.nn.Module, around_second_run: Callable[[], contextlib.AbstractContextManager[None]]
) -> Any:
    """A context in which a layer saves its inputs only and runs again in backward."""
    own = vars(layer)
    before = {_FORWARD: own[_FORWARD]} if _FORWARD in own else {}
    forward = layer.forward

    def contexts() -> tuple[
        contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]
    ]:
        return contextlib.nullcontext(), around_second_run()

    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    own[_FORWARD] = run
    try:
        yield
    finally:
        del own[_FORWARD]
        own.update(before)
