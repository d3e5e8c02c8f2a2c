# SPDX-License-Identifier: Apache-2.0
"""Gradients are clipped without copies of them, and with the bits of Megatron's own scaling."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.optimizer import clip_grads
from megatron.core.utils import local_multi_tensor_applier, local_multi_tensor_scale

from megatron.offload.device.cpu import CpuDevice
from megatron.offload.integration.megatron.scaling import scale_in_place
from megatron.offload.sizes import MIB


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron has neither Transformer Engine nor Apex."""
    monkeypatch.setattr(clip_grads, "multi_tensor_scale_impl", local_multi_tensor_scale)


def scaled(gradients: list[torch.Tensor], scale: float) -> list[torch.Tensor]:
    local_multi_tensor_applier(
        clip_grads.multi_tensor_scale_impl,
        torch.zeros(1, dtype=torch.int),
        [gradients, gradients],
        scale,
    )
    return gradients


def test_the_bits_are_megatrons_own() -> None:
    gradients = [torch.randn(1000), torch.randn(30, 20).bfloat16(), torch.tensor([torch.inf])]
    expected = scaled([one.clone() for one in gradients], 0.3137)
    undo = scale_in_place()
    assert clip_grads.multi_tensor_scale_impl is not local_multi_tensor_scale
    for mine, theirs in zip(scaled(gradients, 0.3137), expected, strict=True):
        assert torch.equal(mine, theirs)
    undo()
    assert clip_grads.multi_tensor_scale_impl is local_multi_tensor_scale


def test_no_copy_of_a_gradient_is_made() -> None:
    gradients = [torch.ones(64 * MIB // 4)]
    device = CpuDevice()
    peak = device.peak_reader()

    def peak_bytes() -> int:
        device.return_freed_memory()
        before = device.allocated_bytes()
        peak.reset()
        scaled(gradients, 0.5)
        return peak.peak_bytes() - before

    assert peak_bytes() > 60 * MIB
    scale_in_place()
    assert peak_bytes() < 8 * MIB


def test_a_kernel_that_does_it_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = lambda *arguments: None  # noqa: E731
    monkeypatch.setattr(clip_grads, "multi_tensor_scale_impl", kernel)
    scale_in_place()
    assert clip_grads.multi_tensor_scale_impl is kernel
