# SPDX-License-Identifier: Apache-2.0
"""Digests of what goes into a frozen part: rows of tensors, weights, what else changes bits.

The bytes of tensors by XXH3 of 128 bits; a key, which is made of several of these, by BLAKE2b:
two inputs do not meet by accident. XXH3 reads about thirty times as many bytes a second, and a pass
waits for it. Tensors on an accelerator are copied to the host first, which waits for the device.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from megatron.offload.frozen.structure import UnknownValueError

DIGEST_BYTES = 20
_THREADS = 4  # for the weights, once a run
_CONSTANTS = (bool, int, float, str)
# What fp32 is computed in: torch's public names for it raise where a script has used both kinds.
_FP32 = [
    ("generic", "all"),
    *((backend, op) for backend in ("cuda", "mkldnn") for op in ("all", "matmul", "conv", "rnn")),
]


def digest_of(*parts: bytes) -> bytes:
    """Of several byte strings, which cannot be taken for others of the same bytes."""
    return digest_of_framed(framed(*parts))


def framed(*parts: bytes) -> bytes:
    """Several byte strings as one, which tells where each begins."""
    return b"".join([one for part in parts for one in (len(part).to_bytes(8, "little"), part)])


def digest_of_framed(parts: bytes) -> bytes:
    """The `digest_of` of what was framed, perhaps in several calls."""
    return hashlib.blake2b(parts, digest_size=DIGEST_BYTES).digest()


def json_bytes(value: Any) -> bytes:
    """The one JSON text of a value, for a digest."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The values of a tensor in their logical order, in host memory. It waits for a device."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    values: Any = flat.view(torch.uint8).numpy()
    return memoryview(values)


def row_digests(tensor: torch.Tensor, num_rows: int, *, by_rows: bool) -> list[bytes]:
    """One digest for each row of a call.

    Args:
        tensor: an argument.
        num_rows: of the call.
        by_rows: its first dimension is that of the rows; else all of it goes into each digest.
    """
    values = bytes_of(tensor)
    if not by_rows:
        return [_digest(values)] * num_rows
    size = len(values) // num_rows
    return [_digest(values[row * size : (row + 1) * size]) for row in range(num_rows)]


def _digest(values: memoryview) -> bytes:
    return xxhash.xxh3_128_digest(values)


def has_bytes(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one range of memory: not sparse, quantized, nor made of others."""
    is_strided = tensor.layout is torch.strided and not tensor.is_quantized
    return is_strided and not is_traceable_wrapper_subclass(tensor)


def layout_of(tensor: torch.Tensor) -> list[Any]:
    """What of a tensor, beside its values, may choose a kernel.

    Raises:
        UnknownValueError: it has no bytes that could be told.
    """
    if not has_bytes(tensor):
        raise UnknownValueError(f"tensor of the kind {type(tensor).__name__}, {tensor.layout}")
    dtype, device = str(tensor.dtype), tensor.device.type
    return [dtype, device, list(tensor.shape), list(tensor.stride())]


def masks_nothing(tensor: torch.Tensor) -> bool:
    """Whether it may be a mask in which no row is padded. It waits for a device.

    Models that find one take another kernel for all rows, and look for that inside of a part.
    """
    is_mask = tensor.dim() == 2 and not (tensor.is_floating_point() or tensor.is_complex())
    return is_mask and bool((tensor == 1).all())


def tensors_digest(tensors: Sequence[torch.Tensor]) -> bytes:
    """Of the values and layouts of weights and buffers."""

    def one(tensor: torch.Tensor) -> bytes:
        return digest_of(json_bytes(layout_of(tensor)), _digest(bytes_of(tensor)))

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="frozen-weights") as threads:
        return digest_of(*threads.map(one, tensors))


def environment(device: torch.device, classes: Iterable[type]) -> list[Any]:
    """What changes bits and is no argument: versions, code, the machine.

    Args:
        device: that computes.
        classes: of the modules, and what they derive from.
    """
    names = {one.__module__ for one in classes}
    versions = {
        name: str(getattr(sys.modules.get(name), "__version__", ""))
        for name in sorted({"torch", *(one.partition(".")[0] for one in names)})
    }
    code = sorted({_code_of(one) for one in classes})
    if device.type == "cpu":
        machine = [torch.backends.cpu.get_cpu_capability(), os.environ.get("MKL_CBWR", "")]
    else:
        module: Any = torch.get_device_module(device)
        machine = [str(module.get_device_name(device))]
    return [versions, code, device.type, machine]


def _code_of(kind: type) -> str:
    """A digest of the file that a class is written in, or of its functions where there is none."""
    path = getattr(sys.modules.get(kind.__module__), "__file__", None)
    try:
        if path is not None:
            return digest_of(Path(path).read_bytes()).hex()
    except OSError:
        pass
    functions = (getattr(one, "__code__", None) for one in vars(kind).values())
    told = [
        [one.co_code.hex(), one.co_names, [str(x) for x in one.co_consts if type(x) in _CONSTANTS]]
        for one in functions
        if one is not None
    ]
    return digest_of(json_bytes(told)).hex()


def switches(device: torch.device) -> list[Any]:
    """What of the environment may be another one in each pass."""
    kind = device.type
    autocast = torch.is_autocast_enabled(kind) and str(torch.get_autocast_dtype(kind))
    matmul: Any = torch.backends.cuda.matmul
    return [
        autocast,
        torch.is_grad_enabled(),
        str(torch.get_default_dtype()),
        torch.get_num_threads(),
        *(torch._C._get_fp32_precision_getter(*one) for one in _FP32),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.mkldnn.enabled,
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
    ]
