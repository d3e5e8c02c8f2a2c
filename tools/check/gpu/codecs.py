# SPDX-License-Identifier: Apache-2.0
"""Section `codecs`: numbers in few bits have the same bits on the GPU as on the host, and how fast.

Values are encoded and decoded on both, where a GPU has Triton kernels by these and by operations of
torch. The table has gigabytes of values a second, in and out.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable

import torch

from check.gpu.result import Section
from check.gpu.settings import Settings
from megatron.offload.activations.saved import quantization
from megatron.offload.activations.saved.quantization import INT4, INT8, Quantization
from megatron.offload.device.open import open_device
from megatron.offload.parameters import weight_codec
from megatron.offload.parameters.weight_codec import CODECS, WeightCodec

_CODECS: dict[str, Quantization | WeightCodec] = {
    "activations int8": INT8,
    "activations int4": INT4,
    **{f"weights {name}": one for name, one in CODECS.items()},
}
_NUM_VALUES, _NUM_VALUES_ON_GPU = 1 << 18, 1 << 28
_TURNS = 5


def run(settings: Settings, section: Section) -> None:
    """Runs the section."""
    device = settings.device
    _compare_kernels(section, device)
    for name, codec in _CODECS.items():
        for dtype in quantization.TYPES:
            draw = torch.Generator().manual_seed(settings.seed)
            values = torch.randn(_NUM_VALUES + 61, generator=draw).to(dtype)
            expected, found = (
                [one.cpu() for one in _both_ways(codec, values.to(place))]
                for place in (torch.device("cpu"), device)
            )
            section.check(
                f"{name} {dtype}",
                all(map(torch.equal, found, expected)),
                "what is encoded and decoded has the bits of the host",
            )
    number = _NUM_VALUES_ON_GPU if settings.on_gpu and not settings.quick else _NUM_VALUES
    values = torch.randn(number, device=device).to(torch.bfloat16)
    rows = [
        [name, *(f"{rate / 1e9:.1f}" for rate in _rates(codec, values))]
        for name, codec in _CODECS.items()
    ]
    section.table("bfloat16, GB/s of values", ["codec", "in", "out", "out by torch"], rows)


def _compare_kernels(section: Section, device: torch.device) -> None:
    """Whether Triton kernels are used where there may be some."""
    if device.type != "cuda":
        section.skip("Triton kernels", "need a GPU")
        return
    if importlib.util.find_spec("triton") is None:
        section.skip("Triton kernels", "Triton is not installed")
        return
    for name, module in (("activations", quantization), ("weights", weight_codec)):
        section.check(
            f"Triton kernels of {name}",
            module.KERNELS.on_gpu(device) is not None,
            "they compile and give the bits of operations of torch",
        )


def _both_ways(
    codec: Quantization | WeightCodec, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Encoded, and decoded again."""
    if isinstance(codec, Quantization):
        encoded = codec.encode(values)
        return encoded, codec.decode(encoded, len(values), values.dtype)
    encoded = _room(codec, values)
    codec.encode(values, encoded)
    decoded = torch.empty_like(values)
    codec.decode(encoded, decoded)
    return encoded, decoded


def _room(codec: WeightCodec, values: torch.Tensor) -> torch.Tensor:
    size = codec.encoded_bytes(len(values), values.dtype)
    return torch.empty(size, dtype=torch.uint8, device=values.device)


def _rates(codec: Quantization | WeightCodec, values: torch.Tensor) -> tuple[float, float, float]:
    """Bytes of values a second: encoded, decoded, and decoded by operations of torch."""
    encoded, decoded = _both_ways(codec, values)
    if isinstance(codec, Quantization):
        ways = (
            lambda: codec.encode(values),
            lambda: codec.decode(encoded, len(values), values.dtype),
        )
    else:
        ways = (lambda: codec.encode(values, encoded), lambda: codec.decode(encoded, decoded))
    by_torch = lambda: codec.decode_by_torch(encoded, decoded)  # noqa: E731
    return tuple(values.nbytes / _seconds(one, values.device) for one in (*ways, by_torch))  # type: ignore[return-value]


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """The median of a few turns, as the device saw it."""
    clock = open_device(device)
    found = []
    for _ in range(_TURNS):
        began = clock.timestamp()
        work()
        found.append(clock.seconds_between(began, clock.timestamp()))
    return statistics.median(found)
