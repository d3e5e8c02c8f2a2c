# SPDX-License-Identifier: Apache-2.0
"""Numbers in 8 bits: how far off they are, what stays what it is, and both ways to compute it."""

from __future__ import annotations

import pytest
import torch

from megatron.offload.activations.saved import int8
from megatron.offload.activations.saved.int8 import (
    GROUP,
    decode_int8,
    encode_int8,
    encoded_bytes,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [0, 1, 2, 127, 128, 129, 255, 256, 5 * GROUP + 3, (1 << 17) + 7]


@pytest.fixture(params=["machine code", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(int8, "_kernels", lambda: None)
    else:
        pytest.importorskip("numba")


def values_of(size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Groups of very different magnitudes, some of them all zeros."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(size, generator=generator)
    powers = torch.randint(-8, 8, (size // GROUP + 1,), generator=generator)
    magnitudes = torch.exp2(powers.float()) * (powers != 3)
    return (values * magnitudes.repeat_interleave(GROUP)[:size]).to(dtype)


def there_and_back(values: torch.Tensor) -> torch.Tensor:
    encoded = encode_int8(values)
    assert encoded.shape == (encoded_bytes(values.numel()),) and encoded.dtype is torch.uint8
    return decode_int8(encoded, values.numel(), values.dtype)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_a_value_is_off_by_half_a_scale_at_most_and_zero_stays_zero(
    size: int, dtype: torch.dtype
) -> None:
    values = values_of(size, dtype)
    found = there_and_back(values)
    assert found.dtype is dtype and found.shape == values.shape
    for group, own in zip(values.split(GROUP), found.split(GROUP), strict=True):
        if group.numel() == 0:
            continue
        largest = group.double().abs().max()
        off = (group.double() - own.double()).abs().max()
        rounding = largest * torch.finfo(dtype).eps / 2  # of the result to its type
        assert off <= largest / 250 + rounding
        assert bool((own[group == 0] == 0).all())


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_group_with_what_is_no_number_has_none(value: float, dtype: torch.dtype) -> None:
    values = values_of(4 * GROUP, dtype)
    values[GROUP + 5] = value
    found = there_and_back(values)
    assert bool(found[GROUP : 2 * GROUP].isnan().all())
    assert bool(found[:GROUP].isfinite().all()) and bool(found[2 * GROUP :].isfinite().all())


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_numbers_stay_numbers_and_the_smallest_are_near_zero(
    dtype: torch.dtype,
) -> None:
    info = torch.finfo(dtype)
    largest = torch.full((GROUP,), info.max / 2, dtype=dtype)
    assert bool(there_and_back(largest).isfinite().all())
    smallest = torch.full((GROUP,), info.smallest_normal, dtype=dtype)
    assert bool((there_and_back(smallest) <= 2 * smallest).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_machine_code_gives_the_bits_of_torch(
    size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numba")
    values = values_of(size, dtype, seed=1)
    if size > GROUP:
        values[3], values[-1] = float("inf"), float("nan")
    encoded = encode_int8(values)
    decoded = decode_int8(encoded, size, dtype)
    monkeypatch.setattr(int8, "_kernels", lambda: None)
    expected = encode_int8(values)
    split = encoded_bytes(size) - size
    assert torch.equal(encoded[split:], expected[split:])
    scales = [one[:split].view(torch.bfloat16) for one in (encoded, expected)]
    assert torch.allclose(*scales, 0, 0, equal_nan=True)
    assert torch.allclose(decoded, decode_int8(encoded, size, dtype), 0, 0, equal_nan=True)


def test_it_takes_8_and_an_eighth_bits_a_value() -> None:
    assert encoded_bytes(1 << 20) * 8 == 8.125 * (1 << 20)
