# SPDX-License-Identifier: Apache-2.0
"""Which tensors the cache lets move: those whose bytes come back exactly, and no others."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from megatron.offload.activations.saved import tensor_kind
from megatron.offload.activations.saved.cache import TensorCache
from megatron.offload.activations.saved.scope import Scope
from megatron.offload.activations.saved.tensor_kind import TensorKind, kind_of


class Marked(torch.Tensor):
    """A subclass may mean anything by its bytes."""


def inference_tensor() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(10)


REFUSED = {
    "a subclass": lambda: torch.ones(10).as_subclass(Marked),
    "a parameter": lambda: torch.nn.Parameter(torch.ones(10)),
    "lazily conjugated": lambda: torch.ones(10, dtype=torch.complex64).conj(),
    "lazily negated": lambda: torch.ones(10, dtype=torch.complex64).conj().imag,
    "inference": inference_tensor,
    "sparse": lambda: torch.ones(10, 10).to_sparse(),
    "without memory": lambda: torch.empty(10, device="meta"),
    "empty": lambda: torch.empty(0),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "zero without bytes": lambda: torch._efficientzerotensor(10),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", REFUSED)
def test_tensors_that_cannot_move_exactly_are_refused(kind: str) -> None:
    cache = TensorCache(torch.device("cpu"))
    assert cache.movable(REFUSED[kind]()) is None
    is_counted = kind not in ("a parameter", "without memory", "empty")
    assert cache.take_left_alone().num_unsupported == is_counted


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_a_tensor_is_does_not_depend_on_those_before_it() -> None:
    def kinds_of(names: Iterable[str]) -> dict[str, TensorKind]:
        tensor_kind.kinds.clear()
        return {name: kind_of(all_kinds[name]()) for name in names}

    plain = {
        "plain": lambda: torch.ones(10),
        "complex": lambda: torch.ones(10, dtype=torch.complex64),
        "computed": lambda: torch.ones(10, requires_grad=True) * 2,
    }
    all_kinds = {**REFUSED, **plain}
    at_first = {name: kinds_of([name])[name] for name in all_kinds}
    assert kinds_of(all_kinds) == kinds_of(reversed(all_kinds)) == at_first
    assert at_first["plain"] == TensorKind(True, True, False) != at_first["nested"]


def test_what_a_subclass_says_of_itself_is_of_it_alone() -> None:
    class Unlike(torch.Tensor):
        is_meta = True

    tensor_kind.kinds.clear()
    assert not kind_of(torch.ones(10).as_subclass(Unlike)).has_plain_storage
    assert kind_of(torch.ones(10)).has_plain_storage
    assert not kind_of(torch.ones(10).as_subclass(Unlike)).has_plain_storage


def test_tensors_of_another_device_are_refused() -> None:
    cache = TensorCache(torch.device("cuda"))
    assert cache.movable(torch.ones(10)) is None and cache.take_left_alone().num_unsupported == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool])
def test_plain_tensors_and_views_of_them_may_move(dtype: torch.dtype) -> None:
    cache, tensor = TensorCache(torch.device("cpu")), torch.ones(8, 8, dtype=dtype)
    for view in (tensor, tensor.t(), tensor[3:, 2]):
        assert cache.movable(view) is not None


def test_what_shares_a_storage_with_an_excluded_tensor_stays() -> None:
    cache, tensor = TensorCache(torch.device("cpu")), torch.ones(8, 8)
    cache.exclude([tensor[2:4]])
    assert cache.movable(tensor) is None and cache.movable(tensor[6:]) is None


def test_a_tensor_that_was_saved_with_attributes_stays() -> None:
    cache, tensor = TensorCache(torch.device("cpu")), torch.ones(8)
    assert cache.movable_if_saved(tensor) is not None
    tensor._dynamo_dynamic_indices = {0}  # type: ignore[attr-defined]
    assert cache.movable_if_saved(tensor) is not None
    tensor.note = "of the model"  # type: ignore[attr-defined]
    assert cache.movable_if_saved(tensor) is None and cache.take_left_alone().num_unsupported == 1


def test_a_python_number_that_was_saved_stays() -> None:
    cache, x = TensorCache(torch.device("cpu")), torch.ones(8, requires_grad=True)
    number = (x * 0.7).grad_fn._saved_other  # type: ignore[union-attr]
    assert torch.result_type(torch.tensor(0.5), number) is torch.float32 is not number.dtype
    assert cache.movable_if_saved(number) is None
    for tensor in (torch.ones(8)[3], torch.ones(1)):
        assert cache.movable_if_saved(tensor) is not None


def test_what_a_write_may_still_hold_outlives_two_steps_before_it_stays() -> None:
    """A write that was given up keeps its source until it ends, which may be late."""
    cache = TensorCache(torch.device("cpu"))
    held, table = torch.ones(64), torch.ones(32)
    for one in (held, table):
        assert cache.add(one.untyped_storage(), None, one, Scope())  # its record dies at once
    written = {one.untyped_storage()._cdata for one in (held, table)}
    assert cache.end_step(written) == 0 == cache.num_excluded
    del held, one
    assert cache.add(table.untyped_storage(), None, table, Scope())
    assert cache.end_step(written) == table.nbytes
    assert [one.num_bytes for one in cache.long_lived] == [table.nbytes]
    assert cache.num_records == 0 and cache.num_excluded == 1
