# SPDX-License-Identifier: Apache-2.0
"""Every kind of tensor that autograd may save comes back as it was, or is left alone.

A function written in Python saves the tensor and hands it out in backward; what it sees has to be
what plain autograd gives it: type, dtype, shape, strides and every bit. `MOVED` go to a file and
back; `LEFT_ALONE` stay in memory, because their bytes alone do not make them.
"""

from __future__ import annotations

import gc
import tempfile
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import DTensor, init_device_mesh
from torch.utils import _pytree as pytree

from megatron.offload.activations.saved.bits import bits_bytes
from megatron.offload.stats.statistics import StepStatistics
from tests.autograd.roundtrip import (
    CAPTURE,
    CONTEXT,
    PromptEngine,
    Watch,
    difference,
    on_own_thread,
    run_both,
    ways,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # many kinds are prototypes, torch says


class Shows(torch.autograd.Function):
    """Saves a tensor, and shows it in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tensor: torch.Tensor, show: Callable) -> torch.Tensor:
        ctx.show = show
        ctx.save_for_backward(tensor)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (tensor,) = ctx.saved_tensors
        ctx.show(tensor)
        return gradient, None, None


Looks = Callable[[torch.Tensor], Any]


def bits(tensor: torch.Tensor) -> Any:
    """All that a strided tensor is."""
    dense = tensor.detach()
    if not dense.is_contiguous():
        dense = dense.clone(memory_format=torch.contiguous_format)
    as_bytes = dense.reshape(-1).view(torch.uint8).clone()
    return [type(tensor), tensor.dtype, tensor.shape, tensor.stride(), as_bytes]


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random bits, the same every time."""
    generator = torch.Generator().manual_seed(3)
    if dtype is torch.bool:
        return torch.randint(2, shape, generator=generator).bool()
    size = torch.empty(0, dtype=dtype).element_size()
    if not shape:
        return numbers(1, dtype=dtype)[0]
    raw = (*shape[:-1], shape[-1] * size)
    return torch.randint(256, raw, generator=generator, dtype=torch.uint8).view(dtype)


DTYPES = [
    value
    for name in sorted(vars(torch))
    if isinstance(value := getattr(torch, name), torch.dtype)
    and name == str(value).removeprefix("torch.")
    and not name.startswith(("q", "bits"))
    and value.itemsize > 0
]


def _shared() -> torch.Tensor:
    return numbers(100).share_memory_()


def _mapped() -> torch.Tensor:
    with tempfile.NamedTemporaryFile() as file:
        numbers(100).numpy().tofile(file.name)
        return torch.from_file(file.name, size=100)


MOVED: dict[str, Callable[[], torch.Tensor]] = {
    "0-dim of many": lambda: numbers(100)[7],
    "channels last": lambda: numbers(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "channels last 3d": lambda: numbers(2, 3, 4, 5, 2).to(memory_format=torch.channels_last_3d),
    "transposed": lambda: numbers(6, 8).t(),
    "every other": lambda: numbers(6, 8)[::2, 1::3],
    "expanded": lambda: numbers(6, 1).expand(6, 50),
    "expanded number": lambda: numbers().expand(5, 5),
    "overlapping": lambda: numbers(100).as_strided((10, 20), (3, 1), 5),
    "window": lambda: numbers(100).unfold(0, 8, 2),
    "small part": lambda: numbers(1000)[500:510],
    "small part, odd offset": lambda: numbers(1000, dtype=torch.uint8)[501:513],
    "bits as another type": lambda: numbers(100).view(torch.int16)[3:],
    "real part": lambda: numbers(100, dtype=torch.complex64).real,
    "imaginary part": lambda: numbers(100, dtype=torch.complex64).imag,
    "diagonal": lambda: numbers(20, 20).diagonal(1),
    "bytes that are no whole number of elements": lambda: numbers(101, dtype=torch.uint8)[
        :100
    ].view(torch.float32),
    "of NumPy": lambda: torch.from_numpy(numpy.arange(100.0)[::3]),
    "in shared memory": _shared,
    "in a mapped file": _mapped,
}


class Marked(torch.Tensor):
    """A subclass that takes part in functions."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Wrapped(torch.Tensor):
    """A subclass that has no bytes of its own."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = pytree.tree_map_only(cls, lambda t: t.inner, (args, kwargs or {}))
        return pytree.tree_map_only(torch.Tensor, cls, func(*plain[0], **plain[1]))


def _fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(3, 4)


def _distributed() -> torch.Tensor:
    return DTensor.from_local(numbers(6, 4), init_device_mesh("cpu", (1,)))


def _parts(tensor: torch.Tensor) -> Any:
    return [type(tensor), [bits(part) for part in tensor.unbind()]]


def _sparse(tensor: torch.Tensor) -> Any:
    return [type(tensor), tensor.layout, tensor.shape, bits(tensor.to_dense())]


def _outside(tensor: torch.Tensor) -> Any:
    return [type(tensor), tensor.dtype, tensor.shape, tensor.device.type]


LEFT_ALONE: dict[str, tuple[Callable[[], torch.Tensor], Looks]] = {
    "empty": (lambda: torch.empty(0, 5), bits),
    "sparse": (lambda: numbers(6, 8, dtype=torch.int32).to_sparse(), _sparse),
    "sparse rows": (lambda: numbers(6, 8, dtype=torch.int32).to_sparse_csr(), _sparse),
    "sparse columns": (lambda: numbers(6, 8, dtype=torch.int32).to_sparse_csc(), _sparse),
    "sparse blocks": (lambda: numbers(6, 8, dtype=torch.int32).to_sparse_bsr((2, 2)), _sparse),
    "oneDNN": (lambda: torch.ones(6, 8).to_mkldnn(), lambda t: [t.layout, bits(t.to_dense())]),
    "quantised": (
        lambda: torch.quantize_per_tensor(torch.linspace(0, 1, 20), 0.1, 3, torch.qint8),
        lambda t: [t.dtype, t.q_scale(), t.q_zero_point(), t.int_repr()],
    ),
    "meta": (lambda: torch.empty(3, 4, device="meta"), _outside),
    "fake": (_fake, _outside),
    "lazily conjugated": (
        lambda: numbers(50, dtype=torch.complex64).conj(),
        lambda t: [t.is_conj(), bits(t.resolve_conj())],
    ),
    "lazily negated": (
        lambda: numbers(50, dtype=torch.complex64).conj().imag,
        lambda t: [t.is_neg(), bits(t.resolve_neg())],
    ),
    "parameter": (lambda: torch.nn.Parameter(numbers(50).nan_to_num()), lambda t: bits(t)[1:]),
    "subclass": (lambda: numbers(50).as_subclass(Marked), bits),
    "wrapper": (lambda: Wrapped(numbers(50)), lambda t: [type(t), bits(t.inner)]),
    "DTensor": (_distributed, lambda t: [type(t), t.placements, bits(t.to_local())]),
    "nested, jagged": (
        lambda: torch.nested.nested_tensor([numbers(2, 3), numbers(4, 3)], layout=torch.jagged),
        _parts,
    ),
    "zero without bytes": (
        lambda: torch._efficientzerotensor(5),
        lambda t: [t._is_zerotensor(), (t + 0).tolist()],
    ),
}


@pytest.fixture(scope="module")
def one_process() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def shown(watch: Watch, make: Callable[[], torch.Tensor], look: Looks) -> list[Any]:
    """What backward sees of the tensor that was saved in forward."""
    seen: list[Any] = []
    x = torch.linspace(0, 1, 5, requires_grad=True)
    y = watch.call(
        lambda: Shows.apply(x.clone(), make(), lambda t: seen.append(look(t))), inputs=[x]
    )
    y.sum().backward()
    assert len(seen) == 1
    return seen


def compare(
    engine: PromptEngine, way: str, make: Callable[[], torch.Tensor], look: Looks = bits
) -> StepStatistics:
    """Fails if backward sees anything else than without hooks."""
    plain = on_own_thread(lambda: shown(Watch(), make, look))
    with engine.step():
        ours = on_own_thread(lambda: shown(Watch(engine, way), make, look))
    found = difference(ours, plain)
    assert found is None, found
    assert engine.used_bytes_in_the_end() == 0
    return engine.statistics


@ways()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back(prompt_engine, way, dtype):
    step = compare(prompt_engine, way, lambda: numbers(50, dtype=dtype))
    moved = bits_bytes(50) if dtype is torch.bool else 50 * dtype.itemsize
    assert step.read_bytes == step.written_bytes == moved


@ways()
@pytest.mark.parametrize("kind", MOVED)
def test_every_view_comes_back(prompt_engine, way, kind):
    step = compare(prompt_engine, way, MOVED[kind])
    assert step.read_bytes == step.written_bytes > 0


@ways()
@pytest.mark.parametrize("kind", LEFT_ALONE)
def test_what_is_more_than_its_bytes_is_unsupported(prompt_engine, one_process, way, kind):
    step = compare(prompt_engine, way, *LEFT_ALONE[kind])
    assert step.offloaded_storages == 0
    assert step.unsupported == (kind not in ("empty", "parameter", "meta"))


@ways()
def test_nested_strided_tensors_are_unsupported(prompt_engine, way):
    def scenario(watch: Watch) -> Any:
        parts = [numbers(2, 3).nan_to_num(), numbers(4, 3).nan_to_num()]
        x = torch.nested.nested_tensor(parts, requires_grad=True)
        y = watch.call(lambda: torch.nested.to_padded_tensor((x * x).relu(), 0.0), inputs=[x])
        y.sum().backward()
        return list(x.grad.unbind())

    step = run_both(scenario, prompt_engine, way, moves=False)
    assert step.offloaded_storages == 0 and step.unsupported >= 2


def _jagged() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)


RESULTS: dict[str, Callable[[], torch.Tensor]] = {
    "wrapper": lambda: (Wrapped(numbers(50)).requires_grad_() * 1).exp(),
    "nested, jagged": lambda: (_jagged().requires_grad_() * 1).exp(),
    "subclass, changed in place": lambda: (
        numbers(50).as_subclass(Marked).requires_grad_() * 1
    ).exp_(),
}


@pytest.mark.parametrize("kind", RESULTS)
def test_a_saved_result_of_a_subclass_dies_without_a_backward_pass(prompt_engine, kind):
    """Its node holds what stands for it, which must not lead to the node."""
    with prompt_engine.step(), prompt_engine.saved_tensors_hooks():
        result = RESULTS[kind]()
    alive = weakref.ref(result)
    del result
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("kind", RESULTS)
def test_a_change_in_place_of_a_result_of_a_subclass_is_seen(prompt_engine, kind):
    result = RESULTS[kind]()
    held = prompt_engine.hooks.keep(result)
    assert type(result) is not torch.Tensor and not held.is_changed
    with torch.no_grad():
        result.add_(1)
    assert held.is_changed


def test_capture_hands_back_the_very_parameter(prompt_engine):
    weight = torch.nn.Parameter(numbers(50).nan_to_num())
    weight.main_grad = "of the optimizer"
    seen = seen_by_capture(prompt_engine, lambda: weight)
    assert seen is weight and seen.main_grad == "of the optimizer"


def test_attributes_of_a_captured_tensor_come_back(prompt_engine):
    def make() -> torch.Tensor:
        tensor = numbers(50)
        tensor.note = "of the model"
        return tensor

    assert seen_by_capture(prompt_engine, make).note == "of the model"
    assert prompt_engine.statistics.unsupported == 1


def seen_by_capture(engine: PromptEngine, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What backward sees, under `capture`: hooks around the operations make new tensors always."""
    seen: list[torch.Tensor] = []
    with engine.step():
        shown(Watch(engine, CAPTURE), make, seen.append)
    return seen[0]


@ways()
def test_a_single_number_comes_back(prompt_engine, way):
    step = compare(prompt_engine, way, numbers)
    assert step.offloaded_storages == (way == CONTEXT), "captured, it might be one of Python's"


@ways()
def test_a_python_number_stays_one_for_type_promotion(prompt_engine, way):
    def scenario(watch: Watch) -> torch.Tensor:
        x = torch.tensor(0.3, requires_grad=True)
        watch.call(lambda: (x.clone() * 0.1) * 0.7, inputs=[x]).backward(torch.tensor(1.1))
        return x.grad

    run_both(scenario, prompt_engine, way, moves=False)
