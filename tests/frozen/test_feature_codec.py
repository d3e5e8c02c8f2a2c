# SPDX-License-Identifier: Apache-2.0
"""`cache_frozen` with a codec: the training of a model that rounds what its frozen part returns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import ConfigurationError, cache_frozen
from megatron.offload.activations.saved.quantization import INT8
from megatron.offload.frozen.digests import layout_of
from megatron.offload.frozen.rows import Rows
from tests.support.frozen_training import BATCH, TOKENS, llama, rows_of_text, train

pytest.importorskip("transformers", reason="transformers is not installed")

HIDDEN = 32


def rounded(values: torch.Tensor) -> torch.Tensor:
    """Each row by itself, in memory."""
    rows = [INT8.decode(INT8.encode(one.reshape(-1)), one.numel(), one.dtype) for one in values]
    return torch.stack(rows).view_as(values)


def rounding_llama(dtype: torch.dtype) -> Any:
    model = llama().to(dtype)
    model.model.layers[2].register_forward_hook(lambda layer, args, result: rounded(result))
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_trains_as_a_model_that_rounds_whether_rows_are_there_or_not(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    rows = rows_of_text()
    expected = train(rounding_llama(dtype), rows, None, epochs=3)
    first = train(llama().to(dtype), rows, tmp_path, epochs=3, codec="int8")
    again = train(llama().to(dtype), rows, tmp_path, epochs=3, codec="int8")
    assert first.same_as(expected) and again.same_as(expected)
    assert first.hits == [0, 2 * BATCH, 2 * BATCH]
    assert again.hits == [2 * BATCH] * 3
    exact = train(llama().to(dtype), rows, None, epochs=3)
    assert exact.losses != expected.losses
    assert exact.losses == pytest.approx(expected.losses, rel=0.02)


def test_exact_rows_and_rounded_ones_have_files_of_their_own(tmp_path: Path) -> None:
    rows = rows_of_text()
    kept = train(llama(), rows, None)
    train(llama(), rows, tmp_path, codec="int8")
    exact = train(llama(), rows, tmp_path)
    assert exact.same_as(kept) and exact.hits == [0, 2 * BATCH]


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float32, 32), (torch.bfloat16, 16)], ids=str)
def test_rows_take_eight_bits_a_value(tmp_path: Path, dtype: torch.dtype, bits: int) -> None:
    found = {}
    for codec in ("off", "int8"):
        directory = tmp_path / codec
        directory.mkdir()
        model = llama().to(dtype)
        with cache_frozen(model, directory, codec=codec) as features:  # type: ignore[arg-type]
            for _ in range(2):
                model(**rows_of_text())
                features.store.wait_for_writes()
            found[codec] = features.statistics
        assert found[codec]["hit_rows"] == found[codec]["computed_rows"] == 2 * BATCH
    values = 2 * BATCH * TOKENS * HIDDEN
    assert found["off"]["stored_bytes"] == values * bits // 8
    assert found["int8"]["stored_bytes"] == values + 2 * values // 128
    assert found["int8"]["read_bytes"] == found["int8"]["stored_bytes"]


class Meets(torch.nn.Module):
    """Its rows depend on each other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = torch.nn.Sequential(torch.nn.Linear(64, 64), Mixed()).requires_grad_(False)
        self.head = torch.nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.frozen(x)).square().mean()


class Mixed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x - x.mean(0))


def test_what_is_stored_as_a_whole_is_rounded_from_its_first_pass_on(tmp_path: Path) -> None:
    model = Meets()
    x = torch.randn(4, 64)
    expected = model.frozen(x)
    expected = INT8.decode(INT8.encode(expected.reshape(-1)), expected.numel(), expected.dtype)
    with cache_frozen(model, tmp_path, codec="int8") as features:
        for _ in range(3):
            assert torch.equal(model.frozen(x).reshape(-1), expected)
            features.store.wait_for_writes()
        assert features.statistics["hit_rows"] == 4


def test_what_is_no_floating_point_or_not_smaller_keeps_its_bits() -> None:
    leaves = [
        torch.arange(12).view(3, 4),
        torch.rand(3, 1),  # one value and its scale would take more than the value in bf16
        torch.tensor([[True], [False], [True]]),
        torch.rand(3, 7, dtype=torch.float64),
        torch.empty(3, 0),
        torch.randn(3, 5, 60).transpose(1, 2),
    ]
    leaves[1] = leaves[1].to(torch.bfloat16)
    rows = Rows([layout_of(one) for one in leaves], 3, INT8)
    encoded = rows.encode(leaves)
    assert [sum(map(len, row)) for row in encoded] == [rows.num_bytes] * 3
    found = rows.decode([bytearray().join(row) for row in encoded], torch.device("cpu"))
    for one, other in zip(found[:-1], leaves[:-1], strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
    assert found[-1].stride() == leaves[-1].stride()
    assert torch.equal(found[-1], rounded(leaves[-1]))


def test_an_unknown_codec_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"there is no codec .int4..*; give codec=.int8."):
        cache_frozen(llama(), tmp_path, codec="int4")  # type: ignore[arg-type]
