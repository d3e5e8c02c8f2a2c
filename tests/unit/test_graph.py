# SPDX-License-Identifier: Apache-2.0
"""What a part of the autograd graph saved: where the walk ends, and in which order it tells."""

from __future__ import annotations

import torch

from megatron.offload.saved.graph import saved_tensors_between


def found_between(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> list[int]:
    """Where the saved tensors lie in memory, as they are told."""
    return [tensor.data_ptr() for _, tensor in saved_tensors_between(outputs, inputs)]


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
