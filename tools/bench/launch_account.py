# SPDX-License-Identifier: Apache-2.0
"""What our code takes of threads, by layer and part: `Account`, and what has it timed.

`launch.py`, beside this, reads it. Nothing here trains.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

from megatron.offload.activations.capture.context import SavingContext
from megatron.offload.activations.capture.hooks import SavedTensorHooks
from megatron.offload.activations.capture.layer import LayerCapture
from megatron.offload.activations.engine import OffloadEngine
from megatron.offload.activations.saved.view import SavedView
from megatron.offload.activations.transfer.reader import Reader
from megatron.offload.activations.transfer.writer import Outgoing, Writer
from megatron.offload.device.cpu import CpuDevice
from megatron.offload.integration.torch.layer_calls import LayerCalls
from megatron.offload.tiers.budget import ByteBudget
from megatron.offload.tiers.file import UnlinkedFile

_LEFT_OUT = ""  # a part that does not count
_OURS = "activation-offload"  # our threads' names begin so
MOVING = "moving bytes"
_moving_s: collections.Counter[str] = collections.Counter()  # processor seconds, of I/O threads

Function = Callable[..., Any]


class Layer:
    """What one layer took in one step.

    Attributes:
        spent_ns: by part.
        num_storages: that it saved and that were handed over to be written.
        num_tensors: that hooks handed back.
    """

    def __init__(self) -> None:
        self.spent_ns: collections.defaultdict[str, float] = collections.defaultdict(float)
        self.num_storages = self.num_tensors = 0


class Clock(NamedTuple):
    """A clock, and what it costs to use it.

    Attributes:
        now_ns: nanoseconds.
        inside_ns: of a timed function's time, what the instrument adds.
        outside_ns: of the time of a timed function that calls another one, what that call adds.
    """

    now_ns: Callable[[], int]
    inside_ns: float = 0.0
    outside_ns: float = 0.0


class Account:
    """Nanoseconds by layer and part; time within a nested part is that one's alone.

    One thread at a time is in parts: the one that launches, in backward autograd's.

    Args:
        clocks: that take turns.
    """

    def __init__(self, *clocks: Clock) -> None:
        self.layers: dict[str, Layer] = collections.defaultdict(Layer)
        self._clocks = collections.deque(clocks)
        self._parts: list[tuple[Layer, str]] = []  # that it is in
        self._since_ns = 0

    @property
    def is_wall(self) -> bool:
        """Whether time goes by the clock on the wall, or is what the processor spends."""
        return self._clocks[0].now_ns is time.perf_counter_ns

    def take(self) -> dict[str, Layer]:
        """The layers since the last call. From now on it is the other clock's turn."""
        taken, self.layers = self.layers, collections.defaultdict(Layer)
        self._clocks.rotate()
        return taken

    def timed(self, part: str, function: Function, layer_of: Callable[..., str]) -> Function:
        """A function that does the same and is timed.

        Args:
            part: that it belongs to.
            function: of our code.
            layer_of: which layer its time is of, from its arguments. What this does is not timed.
        """
        parts = self._parts

        def timed(*args: Any, **kwargs: Any) -> Any:
            clock, inside_ns, outside_ns = self._clocks[0]
            now = clock()
            if parts:
                outer, outer_part = parts[-1]
                outer.spent_ns[outer_part] += now - self._since_ns - outside_ns
            layer = self.layers[layer_of(*args)]
            parts.append((layer, part))
            self._since_ns = clock()
            try:
                return function(*args, **kwargs)
            finally:
                layer.spent_ns[part] += clock() - self._since_ns - inside_ns
                parts.pop()
                self._since_ns = clock()

        return timed

    def of_outgoing(self, _: Writer, outgoing: list[Outgoing]) -> str:
        """The layer of storages that are handed over; each counts for the one that saved it."""
        name = ""
        for one in outgoing:
            record = one.record()
            if record is not None:
                name = record.scope.layer
                self.layers[name].num_storages += 1
        return name

    def of_packed(self, _: SavedTensorHooks, packed: Any) -> str:
        """The layer that a tensor was saved in, which counts."""
        scope = packed.saved.scope if isinstance(packed, SavedView) else packed._scope
        self.layers[scope.layer].num_tensors += 1
        return str(scope.layer)


def calibrated(now_ns: Callable[[], int]) -> Clock:
    """A clock with what it costs, from the fastest of some batches: in a training it costs more."""

    def nothing(*_: object) -> None:
        pass

    def once(_: object, times: int = 500) -> tuple[float, float, float]:
        account = Account(Clock(now_ns))
        inner = account.timed("inner", nothing, lambda *_: "")

        def calls(function: Function) -> None:
            for _ in range(times):
                function(None)

        account.timed("plain", lambda: calls(nothing), lambda *_: "")()
        account.timed("outer", lambda: calls(inner), lambda *_: "")()
        spent_ns = account.layers[""].spent_ns
        return tuple(spent_ns[name] / times for name in ("plain", "inner", "outer"))

    # A plain call's time is that of the call, which is no cost of the clock, and of the loop.
    batches = [once(number) for number in range(40)]
    plain_ns, inner_ns, outer_ns = (min(of_all) for of_all in zip(*batches, strict=True))
    return Clock(now_ns, max(inner_ns - plain_ns, 0.0), max(outer_ns - plain_ns, 0.0))


def watch(account: Account, stack: contextlib.ExitStack) -> None:
    """Has our code's entry points timed until the stack is closed."""

    def replace(owner: Any, name: str, part: str, layer_of: Callable[..., str]) -> None:
        timed = account.timed(part, getattr(owner, name), layer_of)
        stack.enter_context(mock.patch.object(owner, name, timed))

    replace(OffloadEngine, "capture", "pack", lambda _, scope, *__: scope.layer)
    replace(LayerCapture, "_find", "walk", lambda _, scope, *__: scope.layer)
    for name in ("_pack", "__exit__"):
        replace(SavingContext, name, "pack", lambda one, *_: one._hooks._step.scope.layer)
    replace(Writer, "submit", "submit", account.of_outgoing)
    replace(SavedTensorHooks, "unpack", "unpack", account.of_packed)
    replace(Reader, "end_use", "read_ahead", lambda _, view: view.saved.scope.layer)
    replace(Reader, "_stall", _LEFT_OUT, lambda _, record: record.scope.layer)
    replace(ByteBudget, "acquire", _LEFT_OUT, lambda *_: "")
    for name in ("begin", "end"):
        replace(LayerCalls, name, "layers", lambda one, layer, *_: one._names[layer])


def watch_megatron(account: Account, stack: contextlib.ExitStack) -> None:
    """The same for what the integration with Megatron does around layers."""
    from megatron.offload.integration.megatron import layer_hooks, layer_split

    running = [""]  # the layer

    def name_of_running(*_: Any) -> str:
        return running[0]

    own_layer = account.timed("layers", layer_hooks.LayerHooks.layer, name_of_running)

    def layer(hooks: Any, forward: Function, module: Any, args: Any, kwargs: Any) -> Any:
        outer, running[0] = running[0], hooks._names.get(module, "")
        try:
            not_ours = account.timed(_LEFT_OUT, forward, name_of_running)
            return own_layer(hooks, not_ours, module, args, kwargs)
        finally:
            running[0] = outer

    hook = account.timed("layers", layer_split.LayerDivision._hook, name_of_running)
    stack.enter_context(mock.patch.object(layer_hooks.LayerHooks, "layer", layer))
    stack.enter_context(mock.patch.object(layer_split.LayerDivision, "_hook", hook))


def others_seconds() -> collections.Counter[str]:
    """Processor seconds of our threads so far: of that which starts transfers, and of I/O."""
    spent: collections.Counter[str] = collections.Counter()
    for thread in threading.enumerate():
        if thread.name.startswith(_OURS) and thread.ident is not None:
            name = "starts transfers" if thread.name == f"{_OURS} transfers" else "I/O"
            spent[name] += time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    spent["I/O"] -= _moving_s[MOVING]
    return spent + _moving_s


def watch_moving(stack: contextlib.ExitStack) -> None:
    """Has the calls timed in which I/O threads move bytes, without the interpreter."""
    _moving_s.clear()  # of threads that are there no more

    def replace(owner: Any, name: str) -> None:
        move = getattr(owner, name)

        def moving(*args: Any) -> Any:
            began_s = time.thread_time()
            try:
                return move(*args)
            finally:
                _moving_s[MOVING] += time.thread_time() - began_s

        stack.enter_context(mock.patch.object(owner, name, moving))

    for name in ("write", "read"):
        replace(UnlinkedFile, name)
    for name in ("copy_to_host", "copy_from_host"):
        replace(CpuDevice, name)
