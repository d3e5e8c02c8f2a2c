# SPDX-License-Identifier: Apache-2.0
"""One computation, plain and with what autograd saved taken to the tier and back.

`Watch` is what a test computes under: plain autograd, or one of the two ways of capture. Engines
here write at once, the hardest order for the bytes on the tier, and nobody but autograd holds what
was saved, so that backward has to read it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from megatron.offload import ChangedInPlaceError, OffloadConfig, OffloadEngine, Scope
from megatron.offload.activations.saved.record import State
from megatron.offload.activations.transfer.writer import Outgoing
from megatron.offload.stats.statistics import StepStatistics
from tests.support.models import settle
from tests.support.waiting import SOON_S

CONTEXT, CAPTURE = "context", "capture"
WAYS = (CONTEXT, CAPTURE)
"""`engine.saved_tensors_hooks()` around the operations, `engine.capture(...)` after them."""


def ways() -> pytest.MarkDecorator:
    """Both ways as parameter `way` of a test."""
    return pytest.mark.parametrize("way", WAYS)


class PromptEngine(OffloadEngine):
    """An engine whose writes end before the operation that saved goes on.

    Whatever is changed later is not in the bytes on the tier.
    """

    is_prompt = True

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        submit = self.writer.submit

        def submit_and_wait(outgoing: list[Outgoing]) -> None:
            submit(outgoing)
            records = [one.record() for one in outgoing]
            self.dispatcher.drain()
            while self.is_prompt and any(r and r.state is State.WRITING for r in records):
                time.sleep(0)

        self.writer.submit = submit_and_wait  # type: ignore[method-assign]

    @property
    def used_bytes(self) -> int:
        """On all tiers together."""
        return sum(tier.used_bytes for tier in self.tiers.values())

    def used_bytes_in_the_end(self, expected_bytes: int = 0, timeout_s: float = SOON_S) -> int:
        """After transfers, a garbage collection if need be, and the I/O threads' last steps."""
        settle(self)
        if self.used_bytes > expected_bytes:
            gc.collect()
        deadline = time.monotonic() + timeout_s
        while self.used_bytes > expected_bytes and time.monotonic() < deadline:
            time.sleep(0.001)  # a thread lets go of a cancelled write after it has said so
        return self.used_bytes


@contextlib.contextmanager
def open_engine(**changes: object) -> Iterator[PromptEngine]:
    """An engine that offloads every storage to a file, in buffered mode so that every byte moves.

    The file is in memory where that is possible: there are thousands of small writes, each of
    which buffered I/O on a disk would wait for.
    """
    in_memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=in_memory if os.access(in_memory, os.W_OK) else None) as d:
        settings = {"mode": "ssd", "directories": (Path(d),), "min_bytes": 1, "io": "buffered"}
        engine = PromptEngine(OffloadConfig(**{**settings, **changes}))  # type: ignore[arg-type]
        try:
            yield engine
        finally:
            engine.close()


class Watch:
    """Plain autograd, or autograd whose saved tensors an engine takes over.

    Args:
        engine: None: plain autograd.
        way: of capture, one of `WAYS`.
    """

    def __init__(self, engine: OffloadEngine | None = None, way: str = CONTEXT) -> None:
        self.engine = engine
        self.way = way

    @contextlib.contextmanager
    def region(self) -> Iterator[None]:
        """Around operations."""
        if self.engine is not None and self.way == CONTEXT:
            with self.engine.saved_tensors_hooks():
                yield
        else:
            yield

    def capture(self, outputs: Any, inputs: Any, scope: Scope | None = None) -> None:
        """After operations, with what they gave and what they were given."""
        if self.engine is not None and self.way == CAPTURE:
            self.engine.capture(scope or Scope(), differentiable(outputs), differentiable(inputs))

    def call(self, function: Callable[..., Any], *arguments: Any, inputs: Any = None) -> Any:
        """The function's result, as clones: nobody holds what its operations saved.

        Args:
            function: computes under watch.
            arguments: what it is called with.
            inputs: where its part of the graph begins, if not at the arguments.
        """
        with self.region():
            outputs = function(*arguments)
        self.capture(outputs, arguments if inputs is None else inputs)
        self.settle()
        return clones_of(outputs)

    def settle(self) -> None:
        """Waits for writes."""
        if self.engine is not None:
            settle(self.engine)


def run_both(
    scenario: Callable[[Watch], Any], engine: PromptEngine, way: str, *, moves: bool = True
) -> StepStatistics:
    """Runs the scenario plain and on the engine; what it returns has to be equal, to the bit.

    Args:
        scenario: computes under the watch that it gets, with the same random numbers every time.
        engine: runs a step.
        way: of capture.
        moves: whether something has to be read back.

    Returns:
        What the engine's step moved.
    """

    def compute(watch: Watch) -> Any:
        seed(11)
        return on_own_thread(lambda: attempt(lambda: scenario(watch)))

    plain = compute(Watch())
    with engine.step():
        ours = compute(Watch(engine, way))
    found = difference(ours, plain)
    assert found is None, f"{way}: {found}"
    assert engine.used_bytes_in_the_end() == 0
    step = engine.statistics
    assert (step.read_bytes + step.host_read_bytes > 0) or not moves
    _check_that_it_works(engine)
    return step


def _check_that_it_works(engine: PromptEngine) -> None:
    """A step like any other, whatever the one before did."""
    engine.is_prompt = True
    x = torch.linspace(-1, 1, 100, requires_grad=True)
    with engine.step():
        with engine.saved_tensors_hooks():
            y = (x * 1).exp().clone()
        y.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, x.detach().exp())
    assert engine.statistics.read_bytes == x.nbytes


def leaf(*shape: int, number: int = 3) -> torch.Tensor:
    """A leaf with the same values every time."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(*shape, generator=generator, requires_grad=True)


def layer(x: torch.Tensor) -> torch.Tensor:
    """Saves inputs, outputs and views of both; as wide as its input and half as long."""
    a, b = (x * 1).sin().chunk(2)
    return (a.exp() * b).softmax(-1)


def gradients(
    watch: Watch, function: Callable[..., Any], leaves: Sequence[Any], *, order: int = 1
) -> list[torch.Tensor | None]:
    """Gradients of all differentiable leaves, of first or second order.

    Args:
        watch: how to compute.
        function: called with clones of the leaves, which are as good as any earlier result.
        leaves: its arguments; containers and other values are handed on.
        order: 2: gradients of the first gradients, each weighted, also for the first weights.
    """
    wrt = differentiable(leaves)
    outputs = differentiable(watch.call(lambda: function(*clones_of(leaves)), inputs=wrt))
    if not outputs:
        return []
    weights = [_weights_of(output, requires_grad=order == 2) for output in outputs]
    if order == 2:

        def first() -> list[torch.Tensor]:
            found = torch.autograd.grad(outputs, wrt, weights, create_graph=True, allow_unused=True)
            return differentiable(found)

        outputs = watch.call(first, inputs=[*wrt, *weights])
        wrt = [*wrt, *differentiable(weights)]
        weights = [_weights_of(output, requires_grad=False) for output in outputs]
    return list(torch.autograd.grad(outputs, wrt, weights, allow_unused=True))


def _weights_of(output: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    if output.layout is not torch.strided:
        return output.detach().clone()
    return torch.randn_like(output, requires_grad=requires_grad)


def seed(number: int) -> None:
    """Of the random numbers on the CPU; `torch.manual_seed` would also format a stack trace."""
    torch.default_generator.manual_seed(number)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """All tensors of nested containers, in order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def differentiable(tree: Any) -> list[torch.Tensor]:
    """The tensors that have a gradient."""
    return [tensor for tensor in tensors_in(tree) if tensor.requires_grad]


def leaves_of(tree: Any) -> Any:
    """The same tree with its tensors as leaves of a graph to come."""
    return pytree.tree_map_only(
        torch.Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), tree
    )


def clones_of(tree: Any) -> Any:
    """The same tree with clones of its tensors."""
    return pytree.tree_map_only(torch.Tensor, lambda t: t.clone(), tree)


def difference(ours: Any, plain: Any, where: str = "result") -> str | None:
    """Where two results differ in structure, dtype, shape, layout or any value; None: nowhere.

    NaN equals NaN. Layouts that cannot be compared are compared as dense tensors.
    """
    if isinstance(plain, tuple | list) and isinstance(ours, tuple | list):
        if len(ours) != len(plain):
            return f"{where}: {len(ours)} results instead of {len(plain)}"
        pairs = enumerate(zip(ours, plain, strict=True))
        found = (difference(*pair, where=f"{where}[{index}]") for index, pair in pairs)
        return next(filter(None, found), None)
    if not (isinstance(plain, torch.Tensor) and isinstance(ours, torch.Tensor)):
        is_same = type(ours) is type(plain) and ours == plain
        return None if is_same else f"{where}: {_short(ours)} instead of {_short(plain)}"
    facts = [(type(t), t.dtype, t.shape, t.layout, t.device) for t in (ours, plain)]
    if facts[0] != facts[1]:
        return f"{where}: {facts[0]} instead of {facts[1]}"
    if plain.layout is not torch.strided:
        ours, plain = ours.to_dense(), plain.to_dense()
    if plain.is_complex():
        ours, plain = (torch.view_as_real(t.resolve_conj().resolve_neg()) for t in (ours, plain))
    if torch.equal(ours, plain):
        return None
    differs = (ours != plain) & ~(ours.isnan() & plain.isnan())
    if not differs.any():
        return None
    first = tuple(differs.nonzero()[0].tolist())
    return (
        f"{where}: {int(differs.sum())} of {differs.numel()} values differ, the first at {first}: "
        f"{ours[first].item()} instead of {plain[first].item()}"
    )


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return str(value)[:300]


@dataclass(frozen=True)
class Failure:
    """An exception, as far as both have to agree on it."""

    kind: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """An in-place change is the same failure whether autograd or the engine finds it."""
        message = str(error)
        if isinstance(error, ChangedInPlaceError) or "modified inplace" in message:
            return CHANGED
        if "modified by an inplace operation" in message:
            return CHANGED
        return cls(type(error).__name__, str(error).split("\n")[0][:300])


CHANGED = Failure("RuntimeError", "changed in place")


def attempt(function: Callable[[], Any]) -> Any:
    """What the function returns, or how it failed.

    On an accelerator kernels fail late: all have run when this returns, so a failure is its own.
    """
    try:
        result = function()
        _wait_for_kernels()
        return result
    except Exception as error:
        with contextlib.suppress(Exception):  # of kernels that came after the first that failed
            _wait_for_kernels()
        return Failure.of(error)


def _wait_for_kernels() -> None:
    if torch.get_default_device().type != "cpu":
        torch.get_device_module().synchronize()


def on_own_thread(function: Callable[[], Any]) -> Any:
    """What the function returns, computed on a thread of its own.

    A backward pass that fails leaves the nodes that were ready to run in its thread's queue, with
    all that they saved. With the thread they go.

    Raises:
        Exception: what the function raises.
    """
    results: list[Any] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    try:
        if errors:
            raise errors[0]
        return results[0]
    finally:
        errors.clear()  # the error refers to this frame


@dataclass
class Coverage:
    """What ran, for the summary at the end of the test run."""

    lines: dict[str, Callable[[], Iterable[str]]] = field(default_factory=dict)
    written_bytes: int = 0
    read_bytes: int = 0

    def count(self, step: StepStatistics) -> None:
        """Adds what a step moved."""
        self.written_bytes += step.written_bytes + step.host_written_bytes
        self.read_bytes += step.read_bytes + step.host_read_bytes
