# SPDX-License-Identifier: Apache-2.0
"""Forward hooks that stay with their model and not with its copies: `ModuleHooks`.

They are how a PyTorch model calls us: none of its code is replaced.

Note [What ends a call]
torch runs the hooks of a call that raised, but not if what it raised is no Exception: a Ctrl-C, or
the SystemExit of a thread. What a pass has put onto its thread, autograd's hooks first of all,
would then stay there. So modules that are hooked outside of graphs are called through
`_Call`, in the attribute that `Module.compile` uses; what is there already stays in place within
it.

Note [Layers that are graphs]
A graph leaves the hooks of a layer out, also where the graph is that layer (`Module.compile`). Such
a layer is called through `_CallOfGraph`, in the same attribute.

Note [Parts within a graph]
A model and parts of it are hooked, for some training loops call the parts by themselves. A graph
of the model that ended at each part would be several, of other kernels and other last bits. So it
leaves the parts' functions out: they are told of calls within a call for nothing. What runs when
the graph is made shows it: the model's call is on the stack then.

Note [Copied attributes]
Libraries for meta-learning (learn2learn) copy a module by giving a new one a copy of its `__dict__`
and parameters of its own. That one shares our hooks and our call, and has to compute with what it
has itself. What it saves moves; it is none of the layers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Set
from types import FrameType
from typing import Any

import torch

from megatron.offload.activations.capture.not_traced import not_traced
from megatron.offload.errors import PREFIX, OffloadError
from megatron.offload.integration.hook import (
    Hook,
    LeftOutOfGraphs,
    OutsideOfGraphs,
    do_nothing,
    outside_of_graphs,
)
from megatron.offload.integration.own_attributes import put

_TAKES_NO_HOOKS = "don't yet support saved tensor hooks"  # says torch
_CALL = "_compiled_call_impl"  # an attribute of each module
_CALL_OF_TORCH = torch.nn.Module._wrapped_call_impl.__code__  # looks it up


class ModuleHooks:
    """The hooks on the modules of a model, to be taken off together."""

    def __init__(self) -> None:
        self._handles: list[torch.utils.hooks.RemovableHandle | _Call] = []
        self._of_graphs: list[_CallOfGraph] = []
        self._outside: set[torch.nn.Module] = set()

    def add(
        self,
        module: torch.nn.Module,
        begin: Callable[[torch.nn.Module, tuple[Any, ...], dict[str, Any]], None],
        end: Callable[[torch.nn.Module, Any], None],
        *,
        outside_of_graphs: bool,
    ) -> None:
        """Calls functions around a module's forward, however it ends.

        Args:
            module: whose forward.
            begin: gets the module and the arguments; runs before hooks that are there already.
            end: gets the module and the result; None if it raised.
            outside_of_graphs: `torch.compile` ends its graph before them, but see
                Note [Parts within a graph]; else it leaves them out, and `end` is not called for
                what Note [What ends a call] is about.
        """
        call = _Call(module, end, self._outside) if outside_of_graphs else None
        if outside_of_graphs:
            self._outside.add(module)

        def hook(function: Callable[..., Any]) -> Hook:
            return LeftOutOfGraphs(function) if call is None else _OutsideOfOwn(function, call)

        def begin_call(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
            if call is not None:
                call.connect()  # in case the module was compiled since
            begin(module, args, kwargs)

        def end_call(module: torch.nn.Module, args: tuple[Any, ...], result: Any) -> None:
            end(module, result)

        self._handles += [
            module.register_forward_pre_hook(hook(begin_call), prepend=True, with_kwargs=True),
            module.register_forward_hook(hook(end_call), always_call=True),
        ]
        if call is not None:
            call.connect()
            self._handles.append(call)

    def add_before(self, module: torch.nn.Module, call: Callable[[torch.nn.Module], None]) -> None:
        """Calls a function just before a module's forward, after hooks that are there."""

        def before(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
            call(module)

        self._handles.append(module.register_forward_pre_hook(OutsideOfGraphs(before)))

    def add_of_graph(
        self,
        module: torch.nn.Module,
        begin: Callable[[torch.nn.Module, tuple[Any, ...], dict[str, Any]], None],
        run: Callable[..., Any],
        end: Callable[[torch.nn.Module, Any], None],
    ) -> None:
        """Calls functions around a module where it is a graph of its own; see `connect`.

        Args:
            run: gets what calls the graph, and its arguments.
            module, begin, end: see `add`.
        """
        call = _CallOfGraph(module, begin, run, end)
        self._of_graphs.append(call)
        self._handles.append(call)

    def connect(self) -> None:
        """Before a pass, outside of graphs: modules may have been compiled since the last one."""
        for call in self._of_graphs:
            if is_compiled(call.module):
                call.connect()

    def remove(self) -> None:
        """Takes all of them off, the last one first."""
        self._of_graphs.clear()
        self._outside.clear()
        while self._handles:
            self._handles.pop().remove()


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether `torch.compile` or `Module.compile` has compiled a module as a whole."""
    call = vars(module).get(_CALL)
    while isinstance(call, _Call):
        call = call._inner
    return hasattr(module, "_orig_mod") or call is not None


class _Call:
    """The call of a module; calls `end` where torch runs no hook: Note [What ends a call].

    torch leaves this attribute out of copies and pickles of a module, but not modules that choose
    themselves what is copied (LSTM, GRU, DistributedDataParallel): there it becomes None.
    """

    def __init__(
        self,
        module: Any,
        end: Callable[[torch.nn.Module, Any], None],
        outside: Set[torch.nn.Module] = frozenset(),
    ) -> None:
        self.module = module
        self.outside = outside  # all modules that are hooked with it
        self._end = end
        self._inner: Any = None  # what the module was called through before

    def connect(self) -> None:
        """Makes torch call the module through this, if it does not already."""
        outer: Any = vars(self.module).get(_CALL)
        call = outer
        while isinstance(call, _Call):
            if call is self:
                return
            call = call._inner
        self._inner = outer
        put(self.module, _CALL, self)

    def remove(self) -> None:
        """Calls nothing more."""
        self._end = do_nothing
        outer: Any = vars(self.module).get(_CALL)
        if outer is self:
            put(self.module, _CALL, self._inner)
        while isinstance(outer, _Call):
            if outer._inner is self:
                outer._inner = self._inner
            outer = outer._inner

    def __reduce__(self) -> Any:  # of pickle and of deepcopy
        return type(None), ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_exporting():  # which refuses functions that it is to leave out
            return (self._inner or self._called()._call_impl)(*args, **kwargs)
        if torch.compiler.is_compiling() and _is_part(self):
            return (self._inner or self.module._call_impl)(*args, **kwargs)
        return self._call(*args, **kwargs)

    @outside_of_graphs(
        "a pass of this model begins and ends in its hooks",
        "give offload_activations what torch.compile returns, or call model.compile()",
        recursive=False,
    )
    def _call(self, *args: Any, **kwargs: Any) -> Any:
        module = self._called()
        try:
            return (self._inner or module._call_impl)(*args, **kwargs)
        except Exception as error:
            if _TAKES_NO_HOOKS in str(error) and not isinstance(error, OffloadError):
                raise OffloadError(
                    f"{PREFIX}{type(module).__name__} runs a transform of torch.func (grad, vjp, "
                    "jacrev, hessian) in its forward pass, and torch runs none where saved tensors "
                    "have hooks, as they have where activations are offloaded; have it use "
                    "torch.autograd.grad, or leave activations in memory"
                ) from error
            raise
        except BaseException:
            self._end(module, None)
            raise

    def _called(self) -> Any:
        """The module that torch calls: it, or a copy of its attributes (Note [Copied attributes]).

        torch does not hand it over, so its frame has to show it.
        """
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code is not _CALL_OF_TORCH:
            frame = frame.f_back
        called = self.module if frame is None else frame.f_locals["self"]
        call = vars(called).get(_CALL)
        while isinstance(call, _Call):
            if call is self:
                return called
            call = call._inner
        return self.module


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _is_part(call: _Call) -> bool:
    """Whether a graph is made within the call of a hooked module: Note [Parts within a graph]."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL_OF_TORCH and frame.f_locals["self"] in call.outside:
            return True
        frame = frame.f_back
    return False


class _OutsideOfOwn(Hook):
    """Calls a function outside of graphs, but for a part's within a graph: it is left out."""

    def __init__(self, function: Callable[..., Any], call: _Call) -> None:
        super().__init__(function)
        self._call = call
        self._outside = OutsideOfGraphs(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and _is_part(self._call):
            return None
        return self._outside(*args, **kwargs)


# As `disable(recursive=False)` does, but for its error in exports: no graph begins here.
for _one in (_Call, _OutsideOfOwn):
    not_traced(_one.__call__, with_calls=False)


class _CallOfGraph(_Call):
    """The call of a module that is a graph of its own: Note [Layers that are graphs]."""

    def __init__(
        self,
        module: Any,
        begin: Callable[[torch.nn.Module, tuple[Any, ...], dict[str, Any]], None],
        run: Callable[..., Any],
        end: Callable[[torch.nn.Module, Any], None],
    ) -> None:
        super().__init__(module, end)
        self._begin = begin
        self._run = run

    def remove(self) -> None:
        """Calls nothing more."""
        self._begin, self._run = do_nothing, _run
        super().remove()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # within a larger graph
            return self._inner(*args, **kwargs)
        result = None
        self._begin(self.module, args, kwargs)
        try:
            result = self._run(self._inner, *args, **kwargs)
        finally:
            self._end(self.module, result)
        return result


def _run(call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return call(*args, **kwargs)
