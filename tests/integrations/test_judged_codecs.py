# SPDX-License-Identifier: Apache-2.0
"""The measurement of ways that are not offered: each is what it is called, and it judges right."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from bench import judged_codecs as judged

from megatron.offload.activations.saved.quantization import INT4

_DRAWS = 400


def test_two_bits_have_four_levels_of_a_group() -> None:
    values = torch.randn(5, 64)
    groups = judged.two_bits(values).view(-1, 32)
    assert all(len(group.unique()) <= 4 for group in groups)
    spread = values.view(-1, 32).amax(1) - values.view(-1, 32).amin(1)
    off = (groups - values.view(-1, 32)).abs().amax(1)
    assert (off <= spread / 3 * 1.001).all()


@pytest.mark.parametrize("way", [judged.two_bits, judged.division], ids=["int2", "DIVISION"])
def test_roundings_at_random_are_right_in_the_mean(
    way: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    torch.manual_seed(1)
    values = torch.randn(16, 32)
    draws = torch.stack([way(values) for _ in range(_DRAWS)])
    error = draws.std(0) / _DRAWS**0.5
    mean = (draws.mean(0) - values).abs()
    assert (mean < 5 * error + 1e-5).float().mean() > 0.99
    assert draws.std(0).mean() > 0.1


def test_sums_over_sampled_tokens_are_right_in_the_mean() -> None:
    torch.manual_seed(1)
    values, other = torch.randn(2, 20, 8), torch.randn(40, 3)
    way = judged.sampled(0.5)
    draws = torch.stack([way(values) for _ in range(_DRAWS)])
    assert ((draws != 0).any(-1).flatten(1).sum(1) <= 20).all()
    sums = draws.view(_DRAWS, 40, 8).transpose(1, 2) @ other
    off = (sums.mean(0) - values.view(40, 8).t() @ other).abs()
    assert (off < 5 * sums.std(0) / _DRAWS**0.5).all()


def test_linear_layers_compute_what_they_did() -> None:
    layer = torch.nn.Linear(8, 4, bias=False)
    x, way = torch.randn(2, 3, 8, requires_grad=True), lambda one: one.clone()

    def gradients() -> list[torch.Tensor]:
        y = layer(x)
        return [y, *torch.autograd.grad(y.square().sum(), (x, layer.weight))]

    expected = gradients()
    with judged.in_linear_layers(way):
        found = gradients()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_the_step_function_is_near_the_derivative_of_silu_far_from_zero() -> None:
    x = torch.tensor([-9.0, -1.0, 1.0, 9.0], requires_grad=True)
    y = judged._ReSiLU2.apply(x)
    assert torch.equal(y, torch.nn.functional.silu(x))
    (found,) = torch.autograd.grad(y.sum(), x)
    expected = torch.tensor([0.0, -0.0406036, 1.0403218, 0.9999999])
    torch.testing.assert_close(found, expected)


def test_a_frozen_layer_saves_nothing() -> None:
    assert judged.saved_of_a_frozen_layer() == 0.0


@pytest.mark.slow
def test_a_small_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "judged.json"
    argv = "--layers 2 --hidden 128 --sequence 64 --batch 2 --warm 2 --batches 2"
    monkeypatch.setattr(sys, "argv", ["judged_codecs.py", *argv.split(), "--json", str(file)])
    assert judged.main() == 0
    found = json.loads(file.read_text())
    ways = found["ways"]
    assert ways["int4"]["bits"] == INT4.encoded_bytes(1 << 20) * 8 / (1 << 20)
    assert ways["int8"]["linear"] < ways["int4"]["linear"] < found["batch_noise"]
    better = {**ways, "int2": {**ways["int2"], "SiLU": 0.0}}
    assert not judged.is_as_judged({**found, "ways": better})
    assert not judged.is_as_judged({**found, "frozen": 1.0})
