# SPDX-License-Identifier: Apache-2.0
"""When a step, a forward pass and a backward pass begin and end: `Passes`.

The training loop does not tell us; hooks of the model and of autograd show it. `Passes` tells the
engine, as the hooks of Megatron's schedules do.

Note [A step without a loop]
- A forward pass is the outermost call of a hooked module that wants gradients, outside of any
  backward pass: what a checkpoint runs again in backward is part of none.
- Its backward pass begins when a gradient reaches one of its outputs and ends at autograd's final
  callback.
- A step begins with the first forward pass and ends when each of its forward passes has had its
  backward pass, or has lost its graph. So each micro-batch of a gradient accumulation is a step;
  the micro-batches of a pipeline, which runs several forward passes ahead of the first backward,
  are one step together.
- The planner decides when the next step begins: autograd's callback is no place for it.
- A step whose passes were all cut short by an error shows nothing of the training.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from megatron.offload.activations.capture.context import SavingContext, others_take_what_is_saved
from megatron.offload.activations.engine import OffloadEngine
from megatron.offload.activations.saved.save_order import SaveOrder
from megatron.offload.activations.saved.scope import Scope
from megatron.offload.device.cuda import is_captured
from megatron.offload.errors import ConfigurationError
from megatron.offload.integration.torch.compute_device import FirstSaved
from megatron.offload.integration.torch.surroundings import (
    can_hook,
    compiles_backward,
    frame_of_module_call,
    in_backward,
    is_recorded,
    is_running,
)
from megatron.offload.integration.training_steps import TrainingSteps
from megatron.offload.layer_major.pausable_call import running_call
from megatron.offload.machine.transform import in_transform

logger = logging.getLogger(__name__)

# A graph that the training script never drops does not keep its step from ending: after so many
# later forward passes it no longer counts.
_MOST_OVERTAKEN = 64

_IN_BACKWARD = (
    "%s is called with gradients within a backward pass (by a loss that computes its gradients in "
    "pieces, such as the Cached... losses of sentence-transformers, or by a checkpoint with "
    "use_reentrant=True around the model); what it saves there stays in memory"
)

_of_thread = threading.local()  # `.forward`: refers weakly to its last pass, of any `Passes`


class _ForwardPass:
    """A forward pass of the step under way, until its backward has ended."""

    def __init__(self, module: torch.nn.Module, number: int) -> None:
        self.module = module
        self.number = number
        self.thread = threading.get_ident()
        self.depth = 0  # of calls of the same module within it
        self.frame: FrameType | None = frame_of_module_call()
        self.is_open = True
        self.contexts = contextlib.ExitStack()  # around the forward pass
        self.save_order = SaveOrder()
        self.has_had_backward = False
        self.was_cut_short = False  # it raised, or its backward did
        self.listener: weakref.ref[_OutputHook] | None = None  # lives as long as the graph
        self.first_saved: FirstSaved | None = None  # its hooks, if its device was not known

    @property
    def is_over(self) -> bool:
        """Whether no backward pass is to be expected any more."""
        if self.has_had_backward:
            return True
        if self.listener is not None:
            return self.listener() is None
        return self.save_order.last() is None

    def enter_hooks(self, hooks: SavingContext) -> None:
        """Enters the hooks for saved tensors, whose end comes off with the other contexts.

        Their end is noted first: else an interrupt between the two would leave them on the thread.
        And it is noted twice: one that an interrupt ends half way is repeated.
        """
        self.contexts.push(hooks)
        self.contexts.push(hooks)
        hooks.__enter__()


class _OutputHook:
    """A tensor hook on a pass's outputs: its backward begins. It leaves the gradient as it is."""

    __torch_unserializable__ = True  # else torch warns where a script saves an output

    def __init__(self, passes: Passes, forward: _ForwardPass) -> None:
        self._passes = passes
        self._forward = forward

    def __call__(self, _: torch.Tensor) -> None:
        self._passes.begin_backward(self._forward)


class Passes:
    """Tells an engine where in a training it is.

    Args:
        open_steps: gives the steps, opened at the first pass: only then is it certain among how
            many ranks the model trains. Gets the device.
        find_device: of a pass with these inputs; None: what it saves first shows it.
        min_bytes: of what can show it on a CPU.
        around_step: gives a context around each step, within which its passes are.
        around_forward: and one around each forward pass. Gets the tensors that go into it.
    """

    def __init__(
        self,
        open_steps: Callable[[torch.device], TrainingSteps],
        find_device: Callable[[Iterable[torch.Tensor]], torch.device | None],
        min_bytes: int,
        around_step: Callable[[TrainingSteps], contextlib.AbstractContextManager[None]],
        around_forward: Callable[[Sequence[torch.Tensor]], contextlib.AbstractContextManager[None]],
    ) -> None:
        self._open_steps = open_steps
        self._find_device = find_device
        self._min_bytes = min_bytes
        self._around_step = around_step
        self._around_forward = around_forward
        self._steps: TrainingSteps | None = None
        self._step: contextlib.ExitStack | None = None  # the step under way
        self._is_undecided = False  # a step has ended, and the planner has not decided since
        self._forward: _ForwardPass | None = None  # under way
        self._passes: list[_ForwardPass] = []  # of the step
        self._backward: list[tuple[_ForwardPass, contextlib.ExitStack]] = []  # under way
        self._graph_task = -1  # autograd's number of that backward
        self._warned: set[str] = set()  # sentences
        self._stands_aside = False  # the caller of `whole_step` runs the passes of the step
        self._has_looked = False  # for the device of a pass: there was one
        self.is_whole = False  # the step that has just ended: not all its passes were cut short

    # -- Forward --------------------------------------------------------------------------------

    def begin_forward(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """A hooked module is called."""
        if self._stands_aside or self._is_within(module) or is_recorded():
            return
        if not torch.is_grad_enabled():
            self._pause()
            return
        if compiles_backward():
            raise ConfigurationError(
                "compiled autograd cannot trace what tells when backward begins and ends; turn it "
                "off (torch._dynamo.config.compiled_autograd), and give inside_graphs=True for a "
                "compiled model"
            )
        if in_transform():
            self._warn_once(
                "a transform of torch.func takes no hooks; what %s saves inside of one stays in "
                "memory",
                module,
            )
        if not can_hook() or _is_in_another():
            if in_backward() and self._steps is None:  # else it is what a checkpoint runs again
                self._warn_once(_IN_BACKWARD, module)
            return
        # A graph would take our events along, and none of our copies.
        if is_captured():
            self._warn_once(
                "%s is called while a CUDA graph is captured, which can hold no transfers; what it "
                "saves there stays in memory; capture what is around the model's layers, or train "
                "without graphs, to have it offloaded",
                module,
            )
            return
        inputs = list(tensors_in((args, kwargs)))
        if self._steps is None and (device := self._find_device(inputs)) is not None:
            self._steps = self._open_steps(device)
        if others_take_what_is_saved():  # Note [Hooks of others]
            self._warn_once(
                "%s is called within hooks for saved tensors that are not ours (a "
                "torch.utils.checkpoint around the call, save_on_cpu, or others); what it saves "
                "there is left to them; call it outside of them to have it offloaded",
                module,
            )
            return
        if self._steps is None:
            self._look(_ForwardPass(module, 0), inputs)
            return
        self._go_on(self._steps)
        forward = _ForwardPass(module, len(self._passes))
        self._begin(forward, self._steps, inputs)
        try:
            forward.enter_hooks(self._steps.engine.saved_tensors_hooks())
        except BaseException:
            forward.has_had_backward = forward.was_cut_short = True
            self._close(forward)
            raise

    def _look(self, forward: _ForwardPass, inputs: Sequence[torch.Tensor]) -> None:
        """Opens the steps, and begins the first one, when the pass saves something."""

        def open_on(device: torch.device) -> OffloadEngine:
            hooks = forward.contexts.pop_all()
            try:
                steps = self._steps = self._open_steps(device)
                self._go_on(steps)
                self._begin(forward, steps, inputs)
            except BaseException:
                hooks.close()
                raise
            forward.contexts.push(hooks)  # they come off first
            return steps.engine

        self._has_looked = True
        self._forward = forward
        _of_thread.forward = weakref.ref(forward)
        forward.first_saved = FirstSaved(open_on, self._min_bytes)
        forward.enter_hooks(forward.first_saved)

    def _begin(
        self, forward: _ForwardPass, steps: TrainingSteps, inputs: Sequence[torch.Tensor]
    ) -> None:
        """Enters what is around a forward pass, but for its hooks."""
        # The caller holds them, in most cases until the next step.
        steps.engine.exclude(inputs, are_inputs=True)
        enter = forward.contexts.enter_context
        try:
            if steps.profiler is not None:
                enter(steps.profiler.forward(0, forward.number))
            scope = Scope(micro_batch=forward.number, is_scheduled=False)
            forward.save_order = enter(steps.engine.forward(scope))
            enter(self._around_forward(inputs))
            self._passes.append(forward)
            self._forward = forward
            _of_thread.forward = weakref.ref(forward)
        except BaseException:
            forward.has_had_backward = forward.was_cut_short = True
            self._close(forward)
            raise

    def _warn_once(self, sentence: str, module: torch.nn.Module) -> None:
        if sentence not in self._warned:
            self._warned.add(sentence)
            logger.warning(f"activation offload: {sentence}", type(module).__name__)

    @property
    def saw_forward(self) -> bool:
        """Whether there was a forward pass with gradients, also if it opened no steps."""
        return self._has_looked or bool(self._warned)

    def end_forward(self, module: torch.nn.Module, result: Any) -> None:
        """The call of a hooked module has ended, with its result or None."""
        forward = self._forward
        if forward is None or forward.thread != threading.get_ident():
            return
        if forward.module is not module:
            if self._steps is not None:
                self._steps.engine.note_returned(tensors_in(result))
            return
        if forward.depth:
            forward.depth -= 1
            return
        if forward.first_saved is not None and result is not None:
            forward.first_saved.end()
        self._close(forward)
        # It raised: a handler may hold its graph.
        forward.has_had_backward = forward.was_cut_short = result is None
        hook = _OutputHook(self, forward)
        for one in computed_in(result):
            one.register_hook(hook)
            forward.listener = weakref.ref(hook)

    @property
    def is_in_forward(self) -> bool:
        """Whether this thread is in a forward pass, and not in what a backward pass runs again."""
        if self._stands_aside:
            is_inside = running_call() is not None
        else:
            is_inside = self._forward is not None and (
                self._forward.thread == threading.get_ident()
            )
        return is_inside and torch.is_grad_enabled() and not in_backward()

    def _is_within(self, module: torch.nn.Module) -> bool:
        """Whether this is a call within the forward pass under way, or beside it."""
        forward = self._forward
        if forward is None:
            return False
        is_beside = forward.thread != threading.get_ident()
        if is_beside and forward.thread in sys._current_frames():
            return True  # left alone: what it saves stays in memory
        # Cut short where `_Call` in `module_hooks.py` was not around it and could not tell us.
        if is_beside or not is_running(forward.frame):
            forward.has_had_backward = forward.was_cut_short = True
            self._close(forward)
            return False
        forward.depth += forward.module is module
        return True

    def _close(self, forward: _ForwardPass) -> None:
        forward.contexts.close()  # first: what an interrupt leaves of it, `_is_within` closes
        self._forward = None
        forward.is_open = False
        forward.frame = None

    # -- Backward -------------------------------------------------------------------------------

    def begin_backward(self, forward: _ForwardPass) -> None:
        """A gradient has reached an output of a forward pass."""
        if self._steps is None:  # closed meanwhile
            return
        task = torch._C._current_graph_task_id()
        if task != self._graph_task:
            self._close_backward()  # of a backward pass that raised: autograd has not called back
        if any(one is forward for one, _ in self._backward):
            return
        if not self._backward:
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._end_backward)
        self._graph_task = task
        contexts = contextlib.ExitStack()
        self._backward.append((forward, contexts))
        if self._steps.profiler is not None:
            contexts.enter_context(self._steps.profiler.backward(0, forward.number))
        contexts.enter_context(self._steps.engine.backward(forward.save_order))

    def _end_backward(self) -> None:
        """Autograd has finished: the gradients are there."""
        for forward, _ in self._backward:
            forward.has_had_backward = True
        self._close_backward()
        if self._is_over:
            self._end_step()

    def _close_backward(self) -> None:
        self._graph_task = -1
        while self._backward:
            forward, contexts = self._backward.pop()
            forward.was_cut_short |= not forward.has_had_backward
            contexts.close()

    # -- Steps ----------------------------------------------------------------------------------

    def idle_engine(self, device: torch.device) -> OffloadEngine | None:
        """The engine, for what is no step; None: a step is under way."""
        steps = self._steps = self._steps or self._open_steps(device)
        return steps.engine if self._step is None and not self._stands_aside else None

    @contextlib.contextmanager
    def whole_step(self, device: torch.device) -> Iterator[TrainingSteps]:
        """A step whose passes the caller tells the engine of, in threads of their own."""
        steps = self._steps = self._steps or self._open_steps(device)
        self._close_backward()
        self._end_step()
        self._decide(steps)
        self._stands_aside = True
        try:
            with self._around_step(steps):
                yield steps
                self.is_whole = True
        finally:
            self._stands_aside = False
            self._is_undecided = True

    def _go_on(self, steps: TrainingSteps) -> None:
        """Before a forward pass: within the step under way, or a new one."""
        if self._is_over:
            self._close_backward()
            self._end_step()
        if self._step is not None:
            return
        self._decide(steps)
        step = contextlib.ExitStack()
        step.enter_context(self._around_step(steps))
        self._step = step

    def _decide(self, steps: TrainingSteps) -> None:
        if self._is_undecided:
            self._is_undecided = False
            steps.decide()

    @property
    def _is_over(self) -> bool:
        """Whether no pass of the step under way still waits for its backward."""
        return all(one.is_over for one in self._passes[-_MOST_OVERTAKEN:])

    def _end_step(self, *, has_failed: bool = False) -> None:
        step, self._step = self._step, None
        self.is_whole = not (has_failed or all(one.was_cut_short for one in self._passes))
        self._passes.clear()
        if step is not None:
            self._is_undecided = True
            step.close()

    def _pause(self) -> None:
        """A forward pass without gradients: evaluation, or the generation of samples."""
        if self._steps is not None and self._step is None:
            self._steps.pause()

    def close(self, *, has_failed: bool) -> None:
        """Ends what is under way, which an error cuts short or not."""
        if self._forward is not None:
            self._close(self._forward)
        self._close_backward()
        self._end_step(has_failed=has_failed)
        self._steps = None


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """The tensors of what a module gets or gives: containers, and attributes of other objects."""
    for one in tree_leaves(values):
        if isinstance(one, torch.Tensor):
            yield one
        elif hasattr(one, "__dict__"):
            yield from (own for own in vars(one).values() if isinstance(own, torch.Tensor))


def computed_in(values: Any) -> Iterator[torch.Tensor]:
    """Those of `tensors_in` that gradients come through on their way to a module.

    No leaves: a parameter among them would keep its hook for all backward passes to come.
    """
    return (one for one in tensors_in(values) if one.requires_grad and not one.is_leaf)


def _is_in_another() -> bool:
    """Whether a forward pass is under way in this thread."""
    last: weakref.ref[_ForwardPass] | None = getattr(_of_thread, "forward", None)
    forward = None if last is None else last()
    return forward is not None and forward.is_open
