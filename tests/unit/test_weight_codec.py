# SPDX-License-Identifier: Apache-2.0
"""Weights in few bits: rounded once, by a bound, and the same bits both ways to compute it."""

from __future__ import annotations

import pytest
import torch

from megatron.offload.parameters import weight_codec
from megatron.offload.parameters.weight_codec import CODECS, TYPES, WeightCodec, normal_levels

SIZES = [0, 1, 2, 63, 64, 65, 127, 128, 129, 1000, (1 << 17) + 77]
# QLoRA, arXiv 2305.14314, appendix E.
PUBLISHED = [
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
]
each_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=list(CODECS))
each_type = pytest.mark.parametrize("dtype", TYPES, ids=str)


@pytest.fixture(params=["machine code", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(weight_codec.KERNELS, "on_host", lambda: None)
    else:
        pytest.importorskip("numba")


def values_of(size: int, dtype: torch.dtype, smallest: int = -8) -> torch.Tensor:
    """Groups of very different magnitudes, some of them all zeros."""
    generator = torch.Generator().manual_seed(size)
    values = torch.randn(size, generator=generator)
    powers = torch.randint(smallest, 8, (size // 64 + 1,), generator=generator).float()
    return (values * (torch.exp2(powers) * (powers != 3)).repeat_interleave(64)[:size]).to(dtype)


def encoded(codec: WeightCodec, values: torch.Tensor) -> torch.Tensor:
    made = torch.full((codec.encoded_bytes(len(values), values.dtype),), 77, dtype=torch.uint8)
    codec.encode(values, made)
    return made


def rounded(codec: WeightCodec, values: torch.Tensor) -> torch.Tensor:
    found = torch.full_like(values, 77)
    codec.decode(encoded(codec, values), found)
    return found


@each_codec
@each_type
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.usefixtures("kernels")
def test_values_are_rounded_once(codec: WeightCodec, dtype: torch.dtype, size: int) -> None:
    # Of fp16 also values so small that they have a few bits left.
    once = rounded(codec, values_of(size, dtype, -24 if dtype is torch.float16 else -8))
    assert torch.equal(rounded(codec, once), once)


@each_codec
@each_type
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.usefixtures("kernels")
def test_values_are_off_by_a_part_of_the_largest(
    codec: WeightCodec, dtype: torch.dtype, size: int
) -> None:
    levels = (
        torch.arange(-127, 128) / 127 if codec.bits == 8 else torch.tensor(normal_levels())
    ).double()
    values = values_of(size, dtype)
    missing = -size % codec.group
    groups = torch.nn.functional.pad(values.double(), (0, missing)).view(-1, codec.group)
    ours = torch.nn.functional.pad(rounded(codec, values).double(), (0, missing)).view_as(groups)
    largest = groups.abs().amax(1, keepdim=True)
    nearest = (groups.unsqueeze(-1) - levels * largest.unsqueeze(-1)).abs().amin(-1)
    # The type rounds a level to its own precision, at most by half of the last place.
    slack = largest * 2.0 ** {torch.float32: -22, torch.float16: -10, torch.bfloat16: -7}[dtype]
    assert ((groups - ours).abs() <= nearest + slack + 2.0**-24).all()
    is_largest = groups.abs() == largest
    assert torch.equal(ours[is_largest], groups[is_largest])


@each_codec
@each_type
@pytest.mark.parametrize("size", SIZES)
def test_machine_code_gives_the_same_bits(
    codec: WeightCodec, dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numba")
    values = values_of(size, dtype)
    ours = encoded(codec, values), rounded(codec, values)
    monkeypatch.setattr(weight_codec.KERNELS, "on_host", lambda: None)
    assert torch.equal(ours[0], encoded(codec, values))
    assert torch.equal(ours[1], rounded(codec, values))


@each_codec
@each_type
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")], ids=str)
@pytest.mark.usefixtures("kernels")
def test_a_group_without_a_number_is_nan_and_no_other_is(
    codec: WeightCodec, dtype: torch.dtype, bad: float
) -> None:
    values = values_of(1000, dtype)
    values[codec.group + 3] = bad
    found = rounded(codec, values)
    assert found[codec.group : 2 * codec.group].isnan().all()
    assert found.isnan().sum() == codec.group


@each_codec
def test_how_far_normal_weights_are_off(codec: WeightCodec) -> None:
    """The figures of docs/codecs.md."""
    values = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
    error = (values - rounded(codec, values)).norm() / values.norm()
    assert round(float(error), 4) == {"int8": 0.0065, "nf4": 0.092}[codec.name]


def test_the_levels_of_nf4_are_those_that_were_published() -> None:
    assert list(normal_levels()) == pytest.approx(PUBLISHED, abs=1e-6)


@each_codec
def test_bytes_of_16_bit_weights(codec: WeightCodec) -> None:
    part = codec.encoded_bytes(1 << 20, torch.bfloat16) / (2 << 20)
    assert part == {"int8": 8.125 / 16, "nf4": 4.25 / 16}[codec.name]


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
@each_codec
@pytest.mark.usefixtures("kernels")
def test_what_is_the_default_changes_nothing(codec: WeightCodec, default: torch.dtype) -> None:
    values = values_of(1000, torch.float16)
    expected = rounded(codec, values)
    for cached in (weight_codec._between, weight_codec._table):
        cached.cache_clear()
    torch.set_default_dtype(default)
    try:
        with torch.device("meta"):
            found = torch.full_like(values, 77)
            made = torch.zeros(
                codec.encoded_bytes(len(values), values.dtype), dtype=torch.uint8, device="cpu"
            )
            codec.encode(values, made)
            codec.decode(made, found)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)
