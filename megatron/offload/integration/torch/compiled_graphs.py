# SPDX-License-Identifier: Apache-2.0
"""Activations of a compiled graph move inside of it: `moving_in_graphs`.

`torch.compile` makes one autograd node of a graph. With hooks all that it saves would be in memory
until its forward ends, and come back when its backward begins. So the two graphs are rewritten
after the backend has divided them: `begin_write` where a saved tensor is complete, `wait_for_read`
before its first use. What the operators do is what `SavedTensorHooks` does in eager.

Note [Shells]
In place of a tensor autograd saves a shell: a tensor of the same sizes, strides and type, whose
storage has no bytes. So strides and symbolic sizes come to the backward graph the usual way. A
shell is found again by the address of its storage: where it is looked up it is alive.

Note [What inductor must not do]
- Reuse the memory of a buffer behind its last use in the graph, or have an operation write its
  result there: its bytes may be on their way. Some operations do that by themselves, once nothing
  else uses what they change: what goes into one of these stays. Nor may backward, where several
  views may share the memory that was read, and shells have none. So the backward graph is compiled
  with the forward graph, with the same settings, not when backward first runs.
- Lay several tensors into one buffer (for a `cat`), of which one is complete before another: what
  does not fill its storage is copied first.
- Choose another layout for what is written than for what a graph gives out; it would copy shells.
- Learn only from the first write in a process that writes want a buffer, as what a graph gives out
  is one: it would compute what it came to before that again in other kernels, and round bf16
  elsewhere.
- Make a tensor only because an operator of ours names it, for the order: other operations would be
  fused then, with other bits. So `after` is always the result of a matrix product, and of one that
  no elementwise operation takes: a product and a sum become one operation if nothing else takes the
  product (the gradient of a tied embedding).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import threading
import weakref
import zlib
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._functorch import aot_autograd
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from megatron.offload.activations.capture.context import others_take_what_is_saved
from megatron.offload.activations.capture.hooks import Packed
from megatron.offload.activations.engine import OffloadEngine
from megatron.offload.activations.saved.scope import Scope
from megatron.offload.integration.own_attributes import replaced
from megatron.offload.integration.torch.graph_codec import roundable
from megatron.offload.integration.torch.graph_nodes import (
    PRODUCTS,
    base_of,
    bytes_of,
    layer_of,
    made_of,
    may_be_fused,
    may_change,
    storage_of,
)
from megatron.offload.integration.torch.layer_calls import LayerCalls

logger = logging.getLogger(__name__)

_LIBRARY = torch.library.Library("megatron_offload", "DEF")
_LIBRARY.define(
    "begin_write(Tensor saved, str layer, int graph, int use, bool rounds) -> Tensor",
    tags=(torch.Tag.needs_exact_strides,),
)
_LIBRARY.define("wait_for_read(Tensor shell, Tensor? after) -> Tensor")

_COMPILE = "aot_stage2_compile"  # gets a joint graph, and what divides it, of any backend
_BOTH_AT_ONCE = "force_non_lazy_backward_lowering"
_REWRITTEN = "megatron_offload"  # in what is noted of a graph
_FORMAT = 8  # of graphs in inductor's caches

_of_thread = threading.local()  # `.calls`: of the forward pass that this thread is in


class _Saved(NamedTuple):
    """What a shell stands for."""

    alive: weakref.ref[torch.UntypedStorage]  # of the shell; its end is the end of this
    calls: LayerCalls
    engine: OffloadEngine
    scope: Scope
    packed: Packed


_saved: dict[int, _Saved] = {}  # by the address of the shell's storage


def _begin_write(
    saved: torch.Tensor, layer: str, graph: int, use: int, rounds: bool
) -> torch.Tensor:
    plain = saved.data  # inductor's aliases have versions of their own, which say nothing
    calls: LayerCalls | None = getattr(_of_thread, "calls", None)
    # A hook of others may copy what it gets, and a checkpoint drops it.
    if calls is None or others_take_what_is_saved():
        return _copied(plain, saved)
    shell = _like(saved)
    storage = shell.untyped_storage()
    storage.resize_(0)
    address = storage._cdata
    if plain.nbytes < plain.untyped_storage().nbytes():
        plain = plain.clone()
    engine = calls.save_in_graph(layer)
    order = engine.save_order
    num_before = 0 if order is None else len(order)
    packed = engine.hooks.pack(plain, rounds=rounds)
    if order is not None and len(order) > num_before:
        order.arrange(len(order) - num_before, graph, use)
    alive = weakref.ref(storage, functools.partial(_forget, address))
    _saved[address] = _Saved(alive, calls, engine, engine.scope, packed)
    return shell


def _forget(address: int, alive: weakref.ref[torch.UntypedStorage]) -> None:
    """The graph has been dropped. Another shell may have its address by now."""
    found = _saved.get(address)
    if found is not None and found.alive is alive:
        del _saved[address]


def _wait_for_read(shell: torch.Tensor, after: torch.Tensor | None) -> torch.Tensor:
    storage = shell.untyped_storage()
    if storage.nbytes():  # it is the tensor itself
        return _copied(shell, shell)  # an operator may not hand out what it gets
    address = storage._cdata
    keeps_graph = _keeps_graph()
    # Else it would be in memory until the whole graph's backward has ended.
    take = _saved.get if keeps_graph else _saved.pop
    found = take(address, None)
    if found is None:
        raise RuntimeError(
            "activation offload: backward asks a second time for what a compiled graph has saved; "
            "give retain_graph=True to the first of two backward passes"
        )
    found.calls.use_in_graph(found.scope)
    tensor = found.engine.hooks.unpack(found.packed)
    # It is a copy of a part; or backward may hand it out as a gradient, and asks for it again.
    if tensor.stride() != shell.stride() or keeps_graph:
        tensor = _copied(tensor, shell)
    return tensor


def _copied(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A copy with the strides of another tensor, which may be expanded."""
    made = _like(like)
    to = made
    for dim, stride in enumerate(like.stride()):
        if stride == 0:
            to, tensor = to.narrow(dim, 0, 1), tensor.narrow(dim, 0, 1)
    to.copy_(tensor)
    return made


_keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph


_LIBRARY.impl("begin_write", _begin_write, "CompositeExplicitAutograd")
_LIBRARY.impl("wait_for_read", _wait_for_read, "CompositeExplicitAutograd")


@torch.library.register_fake("megatron_offload::begin_write", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _fake_shell(
    saved: torch.Tensor, layer: str, graph: int, use: int, rounds: bool
) -> torch.Tensor:
    return _like(saved)


@torch.library.register_fake("megatron_offload::wait_for_read", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _fake_read(shell: torch.Tensor, after: torch.Tensor | None) -> torch.Tensor:
    return _like(shell)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(
        tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )


# -- The two graphs ------------------------------------------------------------------------------


def rewrite(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    num_outputs: int,
    layers: Collection[str],
    min_bytes: int,
) -> None:
    """Has what a graph saves move from where it is complete to where backward needs it.

    Args:
        forward: gives its own outputs and then what it saves.
        backward: gets what was saved by the same names.
        num_outputs: of forward's own.
        layers: names of layers, for what they save.
        min_bytes: smaller storages are left alone.
    """
    forward.meta[_REWRITTEN] = True
    if config.triton.cudagraphs:
        logger.warning(
            "activation offload: a graph is compiled for CUDA graphs, which can hold no transfers; "
            "what it saves stays in memory; compile without mode='reduce-overhead' to have it moved"
        )
        return
    end = forward.graph.output_node()
    outputs: list[Any] = list(end.args[0])  # type: ignore[arg-type]
    given = {one.name: one for one in backward.graph.find_nodes(op="placeholder")}
    number = zlib.crc32(str(backward.graph).encode())  # the same when it comes from a cache
    uses = _uses_in(backward.graph)
    own = [one for one in outputs[:num_outputs] if isinstance(one, fx.Node)]
    stay = [*forward.graph.find_nodes(op="placeholder"), *own]
    held = {storage_of(one) for one in stay}
    bases = {base_of(one) for one in stay}
    rounded = roundable(forward.graph, backward.graph)
    moved: dict[fx.Node, fx.Node] = {}
    for place in range(num_outputs, len(outputs)):
        saved = outputs[place]
        storage = storage_of(saved)
        if storage is None or bytes_of(saved) < min_bytes:
            continue
        if storage in held or base_of(saved) in bases:
            continue
        placeholder = given.get(saved.name)
        if placeholder is None or not placeholder.users:
            continue
        if may_change(saved) or may_change(placeholder):
            continue
        layer, use = layer_of(saved, layers), uses[placeholder].number
        is_behind = bool(layers) and not layer  # losses divide by what is small: `encoded.py`
        arguments = saved, layer, number, use, saved in rounded and not is_behind
        _take_forward(saved)
        with forward.graph.inserting_after(saved):
            shell = forward.graph.call_function(_ops().begin_write.default, arguments)
        with saved.meta["val"].fake_mode:
            shell.meta["val"] = _like(saved.meta["val"])
        shell.meta["eager_input_vals"] = ((saved.meta["val"], *arguments[1:]), {})
        outputs[place] = shell
        moved[placeholder] = shell
    for placeholder in sorted(moved, key=lambda one: uses[one].number):
        _read_late(placeholder, uses[placeholder], moved[placeholder])
    end.args = (tuple(outputs),)
    for module in (forward, backward):
        module.graph.lint()
        module.recompile()


def _take_forward(view: fx.Node) -> None:
    """Has a view be made as soon as its bytes are there; partitioners may make it at the end."""
    origin = made_of(view)
    if origin is not None and view.all_input_nodes == [origin]:
        _take_forward(origin)
        origin.append(view)


class _FirstUse(NamedTuple):
    """Where a graph first uses one of its inputs."""

    number: int  # among the first uses of all
    node: fx.Node
    after: fx.Node | None  # the last matrix product before it, of those that stay by themselves


def _uses_in(graph: fx.Graph) -> dict[fx.Node, _FirstUse]:
    """The first use of each input of a graph."""
    found: dict[fx.Node, _FirstUse] = {}
    product = None
    for node in graph.nodes:
        for one in node.all_input_nodes:
            if one.op == "placeholder" and one not in found:
                found[one] = _FirstUse(len(found), node, product)
        if node.target in PRODUCTS and not may_be_fused(node):
            product = node
    return found


def _read_late(placeholder: fx.Node, use: _FirstUse, shell: fx.Node) -> None:
    """Has backward wait for a tensor just before its first use."""
    graph = placeholder.graph
    with graph.inserting_before(placeholder):
        new = graph.placeholder(f"{placeholder.name}_shell")
    new.meta.update(shell.meta)
    with graph.inserting_before(use.node):
        tensor = graph.call_function(_ops().wait_for_read.default, (new, use.after))
    tensor.meta.update(placeholder.meta)
    tensor.meta.pop("eager_input_vals", None)  # of the operator that made it, as a custom one has
    placeholder.replace_all_uses_with(tensor)
    graph.erase_node(placeholder)


def _ops() -> Any:
    return torch.ops.megatron_offload


# -- Where graphs are made -----------------------------------------------------------------------


class _Partitioner(CustomPartitionerFn):
    """Inductor's own, and what it gives rewritten. Its caches on disk tell graphs apart by it.

    Args:
        own: the user's; None: inductor's.
        layers, min_bytes: see `rewrite`.
    """

    def __init__(
        self, own: CustomPartitionerFn | None, layers: Collection[str], min_bytes: int
    ) -> None:
        self._own = own
        self._layers = sorted(layers)
        self._min_bytes = min_bytes

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Any, **settings: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        divide: Any = self._own or min_cut_rematerialization_partition
        forward, backward = divide(gm, joint_inputs, **settings)
        rewrite(forward, backward, settings["num_fwd_outputs"], self._layers, self._min_bytes)
        return forward, backward

    def uuid(self) -> Any:
        own = None if self._own is None else self._own.uuid()
        return f"megatron_offload {_FORMAT} {self._min_bytes} {self._layers} {own}"


@contextlib.contextmanager
def moving_in_graphs(calls: LayerCalls, layers: Collection[str], min_bytes: int) -> Iterator[None]:
    """A context around a forward pass: what its graphs save goes to the engine of these calls.

    Graphs that `torch.compile` makes within it have operators for that. Elsewhere, in evaluation or
    after offload has ended, these hand out what they get.
    """
    before = getattr(_of_thread, "calls", None)
    _of_thread.calls = calls
    try:
        with _rewriting(layers, min_bytes):
            yield
    finally:
        _of_thread.calls = before


def has_seam() -> bool:
    """Whether this PyTorch divides a graph where we can rewrite it."""
    own = getattr(aot_autograd, _COMPILE, None)
    if not hasattr(functorch_config, _BOTH_AT_ONCE):
        return False
    return own is not None and list(inspect.signature(own).parameters)[2:3] == ["partition_fn"]


@functools.cache
def _want_buffers() -> None:
    """Tells inductor what it would find out when it first comes to one of our operators."""
    from torch._inductor import lowering  # takes long to import

    lowering.add_needs_realized_inputs(_ops().begin_write.default)
    lowering.add_needs_realized_inputs(_ops().wait_for_read.default)


@contextlib.contextmanager
def _rewriting(layers: Collection[str], min_bytes: int) -> Iterator[None]:
    """A context in which graphs that are made are rewritten, whatever the backend."""
    own = getattr(aot_autograd, _COMPILE)
    _want_buffers()

    @functools.wraps(own)
    def compile_graph(state: Any, captured: Any, divide: Any, *compilers: Any, **more: Any) -> Any:
        def divided(
            gm: Any, joint_inputs: Any, *, num_fwd_outputs: int, **settings: Any
        ) -> tuple[fx.GraphModule, fx.GraphModule]:
            found = divide(gm, joint_inputs, num_fwd_outputs=num_fwd_outputs, **settings)
            forward, backward = found
            if _REWRITTEN not in forward.meta:  # by `_Partitioner`
                rewrite(forward, backward, num_fwd_outputs, layers, min_bytes)
            return forward, backward

        state.fw_metadata.bw_donated_idxs = []  # of what backward may overwrite
        return own(state, captured, divided, *compilers, **more)

    settings = {  # Note [What inductor must not do]
        "allow_buffer_reuse": False,
        "inplace_buffers": False,
        "custom_partitioner_fn": _Partitioner(config.custom_partitioner_fn, layers, min_bytes),
    }
    of_both = functorch_config.patch({_BOTH_AT_ONCE: True, "donated_buffer": False})
    with replaced(aot_autograd, **{_COMPILE: compile_graph}), config.patch(settings), of_both:
        yield
