# SPDX-License-Identifier: Apache-2.0
"""Numbers in few bits: how far off they are, what stays what it is, both ways to compute it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.offload.activations.saved import quantization
from megatron.offload.activations.saved.quantization import INT4, INT8, Quantization
from megatron.offload.activations.saved.rounding_noise import GROUP

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [0, 1, 2, 127, 128, 129, 255, 256, 5 * GROUP + 3, (1 << 17) + 7]


@pytest.fixture(params=["machine code", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(quantization.KERNELS, "on_host", lambda: None)
    else:
        pytest.importorskip("numba")


def values_of(size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Groups of very different magnitudes, some of them all zeros."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(size, generator=generator)
    powers = torch.randint(-8, 8, (size // GROUP + 1,), generator=generator)
    magnitudes = torch.exp2(powers.float()) * (powers != 3)
    return (values * magnitudes.repeat_interleave(GROUP)[:size]).to(dtype)


@pytest.fixture(params=[INT8, INT4], ids=["int8", "int4"])
def codec(request: pytest.FixtureRequest) -> Quantization:
    found: Quantization = request.param
    return found


def there_and_back(codec: Quantization, values: torch.Tensor) -> torch.Tensor:
    encoded = codec.encode(values)
    assert encoded.shape == (codec.encoded_bytes(values.numel()),)
    assert encoded.dtype is torch.uint8
    return codec.decode(encoded, values.numel(), values.dtype)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_a_value_is_off_by_so_much_at_most_and_zero_stays_zero(
    size: int, dtype: torch.dtype, codec: Quantization
) -> None:
    values = values_of(size, dtype)
    found = there_and_back(codec, values)
    assert found.dtype is dtype and found.shape == values.shape
    for group, own in zip(values.split(GROUP), found.split(GROUP), strict=True):
        if group.numel() == 0:
            continue
        largest = group.double().abs().max()
        off = (group.double() - own.double()).abs().max()
        rounding = largest * torch.finfo(dtype).eps / 2  # of the result to its type
        assert off <= largest / (250 if codec is INT8 else 6.9) + rounding
        assert bool((own[group == 0] == 0).all())


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_group_with_what_is_no_number_has_none(
    value: float, dtype: torch.dtype, codec: Quantization
) -> None:
    values = values_of(4 * GROUP, dtype)
    values[GROUP + 5] = value
    found = there_and_back(codec, values)
    assert bool(found[GROUP : 2 * GROUP].isnan().all())
    assert bool(found[:GROUP].isfinite().all()) and bool(found[2 * GROUP :].isfinite().all())


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_numbers_stay_numbers_and_the_smallest_are_near_zero(
    dtype: torch.dtype, codec: Quantization
) -> None:
    info = torch.finfo(dtype)
    largest = torch.full((GROUP,), info.max / 2, dtype=dtype)
    assert bool(there_and_back(codec, largest).isfinite().all())
    smallest = torch.full((GROUP,), info.smallest_normal, dtype=dtype)
    assert bool((there_and_back(codec, smallest) <= 2 * smallest).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_machine_code_gives_the_bits_of_torch(
    size: int, dtype: torch.dtype, codec: Quantization, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numba")
    values = values_of(size, dtype, seed=1)
    if size > GROUP:
        values[3], values[-1] = float("inf"), float("nan")
    encoded = codec.encode(values)
    decoded = codec.decode(encoded, size, dtype)
    monkeypatch.setattr(quantization.KERNELS, "on_host", lambda: None)
    expected = codec.encode(values)
    split = 2 * -(-size // GROUP)
    assert torch.equal(encoded[split:], expected[split:])
    scales = [one[:split].view(torch.bfloat16) for one in (encoded, expected)]
    assert torch.allclose(*scales, 0, 0, equal_nan=True)
    assert torch.allclose(decoded, codec.decode(encoded, size, dtype), 0, 0, equal_nan=True)


def test_it_takes_so_many_bits_a_value() -> None:
    assert INT8.encoded_bytes(1 << 20) * 8 == 8.125 * (1 << 20)
    assert INT4.encoded_bytes(1 << 20) * 8 == 4.125 * (1 << 20)
    assert [INT4.encoded_bytes(number) for number in (0, 1, 2, 3, 129)] == [0, 3, 3, 4, 69]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_mean_of_many_draws_is_the_value(dtype: torch.dtype) -> None:
    """Of the same group at 4096 places: each draws noise of its own."""
    group = values_of(GROUP, dtype, seed=3)
    many = there_and_back(INT4, group.repeat(4096)).double().view(4096, GROUP)
    error = many.mean(0) - group.double()
    scale = group.double().abs().max() / 7
    deviation = (many.std(0) + scale / 64) / 64  # few draws say little of what is rarely drawn
    rounding = scale * torch.finfo(dtype).eps * 8  # of what is decoded, to its type
    assert bool((error.abs() <= 4.5 * deviation + rounding).all())
    # As much noise as rounding to two neighbours has: p (1 - p) of the scale's square.
    parts = group.double() / scale
    expected = scale * (parts - parts.floor()).mul_(parts.ceil() - parts).sum().sqrt()
    assert float(many.std(0).square().sum().sqrt() / expected) == pytest.approx(1, abs=0.05)


@pytest.mark.usefixtures("kernels")
def test_noise_of_neighbours_and_of_groups_is_independent() -> None:
    values = torch.full((512, GROUP), 0.5)
    values[:, 0] = 7  # the scale is 1, and half of all are rounded up
    up = there_and_back(INT4, values.view(-1)).view(512, GROUP)[:, 1:].double() - 0.5
    assert bool((up.abs() == 0.5).all())
    num = up.numel()
    assert abs(float(up.sum())) < 4 * 0.5 * num**0.5
    for other in (up.roll(1, 1), up.roll(1, 0), up.roll(7, 1), up.roll((1, 1), (0, 1))):
        assert abs(float((up * other).sum())) < 4 * 0.25 * num**0.5


@pytest.mark.usefixtures("kernels")
def test_noise_depends_on_the_values() -> None:
    """Else each step would round alike."""
    values = torch.full((GROUP,), 0.5)
    values[0] = 7
    found = []
    for nudge in range(8):
        values[1] = 0.25 + nudge / 256
        found.append(there_and_back(INT4, values)[2:])
    assert not any(torch.equal(one, found[0]) for one in found[1:])


@pytest.mark.usefixtures("kernels")
def test_the_same_values_give_the_same_bytes(codec: Quantization) -> None:
    values = values_of(3000, torch.float32, seed=5)
    state = torch.get_rng_state()
    assert torch.equal(codec.encode(values), codec.encode(values.clone()))
    assert torch.equal(torch.get_rng_state(), state)


class Divisors(TorchDispatchMode):
    """Notes what is divided by."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.div, torch.ops.aten.div_):
            self.seen.append(args[1])
        return func(*args, **(kwargs or {}))


def test_nothing_is_divided_by_a_number(codec: Quantization) -> None:
    """CUDA multiplies by the reciprocal of a number, which has other bits than a division."""
    values = values_of(5 * GROUP, torch.float32)
    with Divisors() as divisors:
        codec.encode_by_torch(
            values, torch.empty(codec.encoded_bytes(5 * GROUP), dtype=torch.uint8)
        )
    assert divisors.seen
    assert all(isinstance(one, torch.Tensor) for one in divisors.seen), divisors.seen
