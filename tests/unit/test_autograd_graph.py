# SPDX-License-Identifier: Apache-2.0
"""What a part of the autograd graph saved: where the walk ends, and in which order it tells."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.offload.activations.saved.autograd_graph import saved_tensors_between


def found_between(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> list[int]:
    """Where the saved tensors lie in memory, as they are told."""
    told = [tensor for _, _, tensor in saved_tensors_between(outputs, inputs)]
    return [tensor.data_ptr() for tensor in told if tensor is not None]


def test_saved_tensors_come_in_forward_order() -> None:
    x = torch.randn(4, requires_grad=True)
    a = x.exp()  # saves its result
    b = a.tanh()  # likewise
    c = x.sigmoid()  # likewise, on a branch of its own
    d = b.exp()
    assert found_between([d, c], [x]) == [t.data_ptr() for t in (a, b, c, d)]
    assert found_between([c, d], [x]) == [t.data_ptr() for t in (a, b, c, d)]


def test_the_walk_does_not_go_behind_the_inputs() -> None:
    x = torch.randn(4, requires_grad=True)
    before = x.exp()
    inside = before.tanh()
    assert found_between([inside.exp()], [before])[0] == inside.data_ptr()
    assert found_between([before], [before]) == []


def test_a_node_that_is_reached_in_two_ways_is_told_once() -> None:
    x = torch.randn(4, requires_grad=True)
    y = x.exp()
    z = y.tanh()
    assert found_between([z + y, y], [x]) == [y.data_ptr(), z.data_ptr()]


def test_nothing_of_a_tensor_changed_in_place_is_told() -> None:
    x = torch.randn(4, requires_grad=True)
    y = x.exp()
    z = y.tanh()
    y.detach().add_(1)
    assert found_between([z], [x]) == [z.data_ptr()]


class SavesTwo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, x * 2)
        return x.clone()


def test_what_has_hooks_is_told_and_not_looked_at() -> None:
    def forbidden(packed: torch.Tensor) -> torch.Tensor:
        raise AssertionError("somebody else's hook was called")

    x = torch.randn(4, requires_grad=True)
    y = (x * 1).exp()
    z = SavesTwo.apply(y)
    saved = [y.grad_fn._raw_saved_result, z.grad_fn._raw_saved_tensors[1]]
    for one in saved:
        one.register_hooks(lambda tensor: tensor, forbidden)
    told = list(saved_tensors_between([z], [x]))
    assert [one.unpack_hook for _, one, tensor in told if tensor is None] == [forbidden] * 2
    assert [tensor.shape for _, _, tensor in told if tensor is not None] == [torch.Size([])]


def test_a_view_that_autograd_refuses_to_use_again_is_no_error() -> None:
    x = torch.randn(4, requires_grad=True)
    whole = x * 1
    part = whole.chunk(2)[0]
    y = part.exp()
    whole.mul_(2)
    with pytest.raises(RuntimeError, match="modified inplace"):
        part.grad_fn  # noqa: B018
    assert y.data_ptr() in found_between([y, part], [part])
