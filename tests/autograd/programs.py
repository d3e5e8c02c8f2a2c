# SPDX-License-Identifier: Apache-2.0
"""Small random programs over tensors, as data: `Program`, and `run`, which carries one out.

`test_random_graphs.py` draws them. A program is a list of instructions with small numbers as
operands, each taken modulo what there is, so that every list is a program and hypothesis can
shorten a failing one. Results depend on nothing but the program. The instructions come in the
groups `VIEWS`, `OPERATIONS`, `IN_PLACE`, `FUNCTIONS`, `REGIONS`.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from megatron.offload import Scope
from tests.autograd.roundtrip import Failure, Watch, on_own_thread

Tensor = torch.Tensor
Instruction = tuple[str, int, int, int]


@dataclass(frozen=True)
class Graph:
    """One forward pass and what is asked of it afterwards.

    Attributes:
        instructions: what it computes.
        layers: after every so many instructions a layer ends and is captured; 0: only one layer.
        keeps: the pass ends with all its tensors dropped but every so-many-th; 0: all dropped.
        backward: a member of `BACKWARDS`.
        times: backward runs so often, the graph retained in between.
        on_thread: backward runs on a thread of its own.
        watched: backward too runs under the hooks.
    """

    instructions: tuple[Instruction, ...]
    layers: int = 0
    keeps: int = 0
    backward: str = "all"
    times: int = 1
    on_thread: bool = False
    watched: bool = False


@dataclass(frozen=True)
class Program:
    """Several graphs on the same leaves.

    Attributes:
        shape: of the leaves.
        graphs: their forward passes run in order.
        order: in which their backward passes run, as sort keys.
        settles: waits for writes before the backward passes.
        is_prompt: waits for each write when it starts.
    """

    shape: tuple[int, ...]
    graphs: tuple[Graph, ...]
    order: tuple[int, ...]
    settles: bool = True
    is_prompt: bool = False


# -- Instructions: from the state and three numbers to a new tensor, or None --------------------


def _some(n: int, size: int) -> int:
    """1 .. size."""
    return n % size + 1


def _matrix(x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], -1) if x.dim() > 1 else x.reshape(1, -1)


def _dim(x: Tensor, n: int) -> int:
    return n % x.dim() if x.dim() else 0


def _slice(x: Tensor, a: int, b: int) -> Tensor:
    if not x.dim():
        return x.view(1)
    dim = _dim(x, a)
    step = b % 2 + 1
    index = [slice(None)] * x.dim()
    index[dim] = slice(a % x.shape[dim] if x.shape[dim] > 1 else 0, None, step)
    return x[tuple(index)]


def _expand(x: Tensor, a: int, b: int) -> Tensor:
    return x.unsqueeze(_dim(x, a)).expand(
        *x.shape[: _dim(x, a)], _some(b, 3), *x.shape[_dim(x, a) :]
    )


def _overlapping(x: Tensor, a: int, b: int) -> Tensor:
    flat = x.reshape(-1)
    rows, columns = _some(a, 3), max(flat.numel() // 4, 1)
    step = 1 if rows - 1 + columns <= flat.numel() else 0
    return flat.as_strided((rows, columns), (step, 1), flat.storage_offset())


def _unfold(x: Tensor, a: int, b: int) -> Tensor:
    flat = x.reshape(-1)
    return flat.unfold(0, min(_some(a, 4), flat.numel()), _some(b, 3))


def _complex(x: Tensor, a: int, b: int) -> Tensor:
    flat = x.reshape(-1)
    pairs = flat[: flat.numel() // 2 * 2].view(-1, 2)
    return torch.view_as_real(torch.view_as_complex(pairs.contiguous()).conj() * (1 + a * 1j))


def _complex_view(x: Tensor, a: int, b: int) -> Tensor:
    """A complex result, a real view of which stays."""
    z = torch.complex(x, x.cos())
    return (z.imag, z.real, torch.view_as_real(z.conj().resolve_conj()), z.abs())[a % 4]


VIEWS: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    "slice": _slice,
    "transpose": lambda x, a, b: x.transpose(_dim(x, a), _dim(x, b)),
    "flip_dims": lambda x, a, b: x.permute(tuple(reversed(range(x.dim())))),
    "flatten": lambda x, a, b: x.reshape(-1),
    "matrix": lambda x, a, b: _matrix(x),
    "expand": _expand,
    "overlapping": _overlapping,
    "chunk": lambda x, a, b: x.reshape(-1).chunk(_some(a, 3))[0],
    "split": lambda x, a, b: x.reshape(-1).tensor_split(_some(a, 3))[-1],
    "select": lambda x, a, b: x.select(0, a % x.shape[0]) if x.dim() else x,
    "unfold": _unfold,
    "diagonal": lambda x, a, b: _matrix(x).diagonal(),
    "complex": _complex,
    "complex_view": _complex_view,
    "bits": lambda x, a, b: x.detach().contiguous().view(torch.int32).bitwise_and(1).to(x.dtype),
    "detach": lambda x, a, b: x.detach(),
    "alias": lambda x, a, b: x.view_as(x),
}

OPERATIONS: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    "scale": lambda x, a, b: x * (a + 0.5),
    "exp": lambda x, a, b: x.tanh().exp(),
    "sigmoid": lambda x, a, b: x.sigmoid(),
    "sin": lambda x, a, b: x.sin(),
    "square": lambda x, a, b: x * x,
    "relu": lambda x, a, b: x.relu(),
    "sqrt": lambda x, a, b: (x.square() + 1).sqrt(),
    "softmax": lambda x, a, b: x.softmax(_dim(x, a)),
    "cumsum": lambda x, a, b: x.cumsum(_dim(x, a)),
    "prod": lambda x, a, b: (x.tanh() + 1).prod(_dim(x, a)),
    "sort": lambda x, a, b: x.sort(_dim(x, a)).values,
    "max": lambda x, a, b: x.amax(_dim(x, a)),
    "norm": lambda x, a, b: F.layer_norm(x, x.shape[-1:]) if x.dim() else x.sin(),
    "batch_norm": lambda x, a, b: F.batch_norm(
        torch.cat([_matrix(x)] * 2), None, None, training=True
    ),
    "gelu": lambda x, a, b: F.gelu(x),
    "dropout": lambda x, a, b: F.dropout(x, 0.3),
    "gather": lambda x, a, b: x.reshape(-1)[torch.arange(0, x.numel(), _some(a, 3)).flip(0)],
    "matmul_self": lambda x, a, b: _matrix(x) @ _matrix(x).t(),
    "where": lambda x, a, b: torch.where(x > 0, x.sin(), x * x),
    "half": lambda x, a, b: (x.bfloat16() * 2).sigmoid().float(),
    "double": lambda x, a, b: x.double().cos().float(),
    "attention": lambda x, a, b: F.scaled_dot_product_attention(*[_matrix(x)[None]] * 3)[0],
}


def _join(x: Tensor, y: Tensor, a: int) -> Tensor:
    x, y = x.reshape(-1), y.reshape(-1)
    n = min(x.numel(), y.numel())
    x, y = x[:n], y[:n]
    return (
        lambda: x * y,
        lambda: x + y,
        lambda: x / (y.abs() + 1),
        lambda: torch.cat([x, y]),
        lambda: torch.stack([x, y, x]),
        lambda: torch.outer(x[:8], y[:8]),
        lambda: torch.atan2(x, y.abs() + 1),
        lambda: torch.lerp(x, y, x),
    )[a % 8]()


def _write_part(x: Tensor, y: Tensor) -> None:
    if x.dim():
        x[0] = y.reshape(-1)[:1].sum()


def _write_flat(x: Tensor, y: Tensor) -> None:
    n = min(x.numel(), y.numel())
    x.view(-1)[:n].copy_(y.reshape(-1)[:n])


def _without_grad(x: Tensor, y: Tensor) -> None:
    with torch.no_grad():
        x.mul_(0.5)


IN_PLACE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "mul_": lambda x, y: x.mul_(1.5),
    "add_": lambda x, y: x.add_(y.mean()),
    "sigmoid_": lambda x, y: x.sigmoid_(),
    "relu_": lambda x, y: x.relu_(),
    "tanh_": lambda x, y: x.tanh_(),
    "silu_": lambda x, y: F.silu(x, inplace=True),
    "leaky_relu_": lambda x, y: F.leaky_relu(x, 0.1, inplace=True),
    "clamp_": lambda x, y: x.clamp_(-0.5, 0.5),
    "masked_fill_": lambda x, y: x.masked_fill_(x > 0.3, 0.3),
    "zero_": lambda x, y: x.zero_(),
    "write_part": _write_part,
    "write_flat": _write_flat,
    "write_view": lambda x, y: x.reshape(-1)[::2].mul_(2),
    "write_transposed": lambda x, y: x.transpose(0, -1)[:1].exp_() if x.dim() else x.exp_(),
    "write_through_detach": lambda x, y: x.detach().add_(1),
    "without_grad": _without_grad,
}


class SavesInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, power: int) -> Tensor:
        ctx.power = power
        ctx.save_for_backward(x)
        return x**power

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradient * ctx.power * x ** (ctx.power - 1), None


class SavesOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = x.tanh()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (result,) = ctx.saved_tensors
        return gradient * (1 - result * result)


class SavesIntermediates(torch.autograd.Function):
    """Saves views of one intermediate storage, an unused output's indices and a None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        inner = torch.stack([x.cos(), x.sin(), x])
        order = x.argsort(-1)
        ctx.save_for_backward(inner[0], None, inner[1], inner.flatten()[::3], order)
        ctx.mark_non_differentiable(order)
        ctx.set_materialize_grads(False)
        return inner[0] * inner[1], order

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor | None, of_order: Tensor | None) -> Tensor | None:
        cosine, nothing, sine, mixed, order = ctx.saved_tensors
        assert nothing is None and of_order is None
        if gradient is None:
            return None
        # Uses all that was saved.
        return gradient * (cosine**2 - sine**2) + 0 * mixed.sum() + 0 * order.sum()


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.sigmoid_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (result,) = ctx.saved_tensors
        return gradient * result * (1 - result)


FUNCTIONS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "saves_input": lambda x, a: SavesInput.apply(x, a % 3 + 1),
    "saves_output": lambda x, a: SavesOutput.apply(x),
    "saves_intermediates": lambda x, a: SavesIntermediates.apply(x)[0],
    "in_place_function": lambda x, a: InPlace.apply(x),
}

PURE = (*OPERATIONS, "saves_input", "saves_output", "saves_intermediates")


def _pure(name: str, x: Tensor, a: int) -> Tensor:
    return FUNCTIONS[name](x, a) if name in FUNCTIONS else OPERATIONS[name](x, a, a)


def _checkpointed(x: Tensor, a: int, b: int, reentrant: bool, depth: int = 0) -> Tensor:
    """A few pure operations, the middle ones in a checkpoint of the other kind."""
    names = [PURE[(a + i * (b + 1)) % len(PURE)] for i in range(3)]

    def inner(x: Tensor) -> Tensor:
        x = _pure(names[0], x, a)
        if depth < b % 3:
            x = _checkpointed(x, b, a, not reentrant if a % 2 else reentrant, depth + 1)
        return _pure(names[1], _pure(names[2], x, b), a)

    return checkpoint(inner, x, use_reentrant=reentrant)


REGIONS = (
    "checkpoint",
    "reentrant",
    "no_grad",
    "join",
    "parts",
    "drop",
    "many_uses",
    "leaf",
    "constant",
)

# In-place changes seldom, for most of them make backward raise.
NAMES = (*VIEWS, *OPERATIONS, *IN_PLACE, *FUNCTIONS, *REGIONS, *OPERATIONS, *FUNCTIONS, *REGIONS)


def _failure_of_use(x: Tensor) -> Failure | None:
    try:
        _ = x.grad_fn
    except RuntimeError as error:
        return Failure.of(error)
    return None


class Mark:
    """Lives as long as the node of the graph that it is put on."""


class _Pass:
    """The registers of one forward pass, and its instructions' effect on them."""

    def __init__(self, leaves: list[Tensor], watch: Watch, graph: Graph, scope: Scope) -> None:
        self._leaves = leaves
        self._watch = watch
        self._graph = graph
        self._scope = scope
        self.tensors = [leaf.clone() for leaf in leaves]
        self.failures: list[Failure] = []
        self.marks: list[weakref.ref[Mark]] = []
        self._no_grad_left = 0
        self._layer_inputs: list[Tensor] = leaves

    def run(self) -> Tensor | None:
        """Carries the instructions out; the loss, None if nothing has a gradient."""
        with self._watch.region():
            for index, instruction in enumerate(self._graph.instructions):
                try:
                    with torch.set_grad_enabled(self._no_grad_left == 0):
                        self._carry_out(*instruction)
                except RuntimeError as error:  # autograd allows some in-place changes, not others
                    self.failures.append(Failure.of(error))
                self._drop_useless()
                self._put_marks()
                self._no_grad_left = max(self._no_grad_left - 1, 0)
                if self._graph.layers and index % self._graph.layers == 0:
                    self._end_layer()
            loss = self._loss()
        if loss is not None:
            self._capture([loss])
        return loss

    def _capture(self, outputs: list[Tensor]) -> None:
        inputs = [tensor for tensor in self._layer_inputs if _failure_of_use(tensor) is None]
        self._watch.capture(outputs, inputs, self._scope)

    def _end_layer(self) -> None:
        self._capture(self.tensors)
        self._layer_inputs = [t for t in self.tensors if t.requires_grad] or self._leaves

    def _loss(self) -> Tensor | None:
        parts = [t for t in self.tensors if t.requires_grad]
        return sum((t * (i + 0.5)).mean() for i, t in enumerate(parts)) if parts else None

    def _carry_out(self, name: str, i: int, a: int, b: int) -> None:
        tensors = self.tensors
        x = tensors[i % len(tensors)]
        y = tensors[a % len(tensors)]
        if name in VIEWS:
            self._add(VIEWS[name](x, a, b))
        elif name in OPERATIONS:
            self._add(OPERATIONS[name](x, a, b))
        elif name in IN_PLACE:
            IN_PLACE[name](x, y)
        elif name in FUNCTIONS:
            self._add(FUNCTIONS[name](x, a))
        elif name == "join":
            self._add(_join(x, y, b))
        elif name == "parts":  # of one storage, which autograd does not relate
            for part in (x * 1).reshape(-1).unsafe_chunk(_some(a, 3)):
                self._add(part)
        elif name in ("checkpoint", "reentrant"):
            self._add(_checkpointed(x, a, b, reentrant=name == "reentrant"))
        elif name == "no_grad":
            self._no_grad_left = _some(a, 3) + 1
        elif name == "drop" and len(tensors) > 1:
            del tensors[i % len(tensors)]
        elif name == "many_uses":
            self._add(x.sin() * x + x * x.exp().tanh() + x.sigmoid() * x)
        elif name == "leaf":
            self._add(self._leaves[a % len(self._leaves)].view(-1))
        elif name == "constant":
            self._add(torch.linspace(-1, 1, _some(a, 7)))

    def _drop_useless(self) -> None:
        """Autograd may refuse any further use of a view whose base was changed."""
        for index in reversed(range(len(self.tensors))):
            failure = _failure_of_use(self.tensors[index])
            if failure is not None:
                self.failures.append(failure)
                del self.tensors[index]

    def _put_marks(self) -> None:
        for node in filter(None, (tensor.grad_fn for tensor in self.tensors)):
            if "mark" not in node.metadata:
                node.metadata["mark"] = mark = Mark()
                self.marks.append(weakref.ref(mark))

    def _add(self, x: Tensor) -> None:
        if x.numel() and x.dtype is torch.float32:
            self.tensors.append(x[:2] if x.numel() > 20_000 else x)


# -- Backward -----------------------------------------------------------------------------------

BACKWARDS = ("all", "accumulate", "part", "twice_differentiated", "never", "freed")


def _backward(loss: Tensor, leaves: list[Tensor], kind: str, retain: bool) -> list[Any]:
    if kind == "never":
        return []
    if kind == "part":
        return list(torch.autograd.grad(loss, leaves[:1], retain_graph=retain, allow_unused=True))
    if kind == "twice_differentiated":
        first = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
        total = sum(g.square().sum() for g in first if g is not None)
        second: Any = []
        if isinstance(total, Tensor) and total.requires_grad:
            second = torch.autograd.grad(total, leaves, retain_graph=retain, allow_unused=True)
        return [g if g is None else g.detach() for g in (*first, *second)]
    if kind == "all":
        return list(torch.autograd.grad(loss, leaves, retain_graph=retain, allow_unused=True))
    # "accumulate", and "freed", which retains nothing and asks again
    loss.backward(retain_graph=retain and kind != "freed")
    return [None if leaf.grad is None else leaf.grad.clone() for leaf in leaves]


@dataclass
class Outcome:
    """What a program computed: values, gradients and failures, in order.

    Attributes:
        marks: on all nodes of its graphs.
    """

    values: list[Any] = field(default_factory=list)
    failures: list[Any] = field(default_factory=list)
    gradients: list[Any] = field(default_factory=list)
    marks: list[weakref.ref[Mark]] = field(default_factory=list)

    def tree(self) -> list[Any]:
        """All of it, to be compared."""
        return [self.values, self.failures, self.gradients]


@contextlib.contextmanager
def _backward_pass(watch: Watch, save_order: Any) -> Iterator[None]:
    if watch.engine is None:
        yield
    else:
        with watch.engine.backward(save_order):
            yield


@contextlib.contextmanager
def _forward_pass(watch: Watch, scope: Scope) -> Iterator[Any]:
    if watch.engine is None:
        yield None
    else:
        with watch.engine.forward(scope) as save_order:
            yield save_order


def run(program: Program, watch: Watch) -> Outcome:
    """Carries the program out under the watch."""
    outcome = Outcome()
    count = torch.Size(program.shape).numel()
    leaves = [
        (torch.linspace(-1 - i, 1, count) * (i + 1)).sin().view(program.shape).requires_grad_(i < 3)
        for i in range(4)
    ]
    passes: list[tuple[Graph, Tensor | None, Any]] = []
    kept: list[Tensor] = []
    for number, graph in enumerate(program.graphs):
        scope = Scope(micro_batch=number)
        with _forward_pass(watch, scope) as save_order:
            forward = _Pass(leaves, watch, graph, scope)
            loss = forward.run()
        outcome.values += [t.detach().clone() for t in forward.tensors]
        outcome.failures += forward.failures
        outcome.marks += forward.marks
        if graph.keeps:
            kept += forward.tensors[:: graph.keeps]
        passes.append((graph, loss, save_order))
        del forward, loss
    if program.settles:
        watch.settle()
    order = sorted(range(len(passes)), key=lambda i: (program.order[i % len(program.order)], i))
    for index in order:
        graph, loss, save_order = passes[index]
        # Each thread numbers the nodes that it makes; the numbers order the sums of gradients. In
        # a graph made by two threads that order would depend on what else they made before.
        on_thread = graph.on_thread and graph.backward != "twice_differentiated"
        passes[index] = (graph, None, None)
        for time in range(graph.times if loss is not None else 0):

            def backward(graph: Graph = graph, loss: Any = loss, last: bool = False) -> list[Any]:
                with watch.region() if graph.watched else contextlib.nullcontext():
                    return _backward(loss, leaves[:3], graph.backward, retain=not last)

            def backward_now(last: bool = time == graph.times - 1) -> list[Any]:
                return backward(last=last)

            with _backward_pass(watch, save_order):
                try:
                    found = on_own_thread(backward_now) if on_thread else backward_now()
                except RuntimeError as error:
                    found = Failure.of(error)
            outcome.gradients.append(found)
            if program.settles:
                watch.settle()
        del loss, save_order
    return outcome
