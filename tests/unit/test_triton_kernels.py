# SPDX-License-Identifier: Apache-2.0
"""Triton kernels without a GPU: interpreted they give the bits of torch, and they compile for GPUs.

What a GPU makes of them is compared there before they are used (`machine/device_kernels.py`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload.activations.saved import quantization
from megatron.offload.machine import device_kernels
from megatron.offload.parameters import weight_codec
from tests.support.processes import ROOT

# Not in the environment itself, where other packages would find it and act otherwise.
SITE = Path(sys.prefix) / "triton"

INTERPRETED = """
    import json, torch
    from megatron.offload.activations.saved import quantization, quantization_on_gpu
    from megatron.offload.parameters import weight_codec, weight_codec_on_gpu
    cpu, same = torch.device("cpu"), {}
    same["quantization"] = quantization.kernels_agree(quantization_on_gpu, cpu)
    same["weights"] = weight_codec.kernels_agree(weight_codec_on_gpu, cpu)
    for codec in (quantization.INT8, quantization.INT4):
        for dtype in quantization.TYPES:
            for number in (1, 2, 127, 128, 129, 255, 256, 2053):
                draw = torch.Generator().manual_seed(number)
                values = torch.randn(number, generator=draw).to(dtype)
                expected = torch.empty(codec.encoded_bytes(number), dtype=torch.uint8)
                codec.encode_by_torch(values, expected)
                found = torch.full_like(expected, 77)
                scales, multiples = quantization._parts(found, number)
                quantization_on_gpu.encode(values, multiples, scales, codec.bits)
                decoded, again = torch.empty_like(values), torch.empty_like(values)
                codec.decode_by_torch(expected, decoded)
                quantization_on_gpu.decode(multiples, scales, again, codec.bits)
                is_same = torch.equal(found, expected) and torch.equal(decoded, again)
                same[f"{codec.bits} {dtype} {number}"] = is_same
    print(json.dumps(same))
"""
COMPILED = """
    import json, triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from megatron.offload.activations.saved import quantization_on_gpu as saved
    from megatron.offload.parameters import weight_codec_on_gpu as weights
    found = {}
    for kind, bits in ((0, "*fp32"), (1, "*i16"), (2, "*fp16")):
        tables = {"factors": "*i32", "keys": "*i32"}
        for name, function, tensors, size in (
            ("encode 8", saved._encode_8, {"values": bits, "out": "*i8", "scales": "*i16"}, 128),
            ("decode 8", saved._decode_8, {"multiples": "*i8", "scales": "*i16", "out": bits}, 128),
            ("encode 4", saved._encode_4,
             {"values": bits, "out": "*u8", "scales": "*i16", **tables}, 128),
            ("decode 4", saved._decode_4, {"multiples": "*u8", "scales": "*i16", "out": bits}, 128),
            ("int8", weights._decode_8, {"levels": "*i8", "scales": bits, "out": bits}, 128),
            ("nf4", weights._decode_4,
             {"levels": "*u8", "scales": bits, "out": bits, "pairs": "*fp32"}, 64),
        ):
            constants = {"kind": kind, "size": size, "groups": 2048 // size}
            signature = {**tensors, "number": "i32"}
            signature = {one: signature.get(one, "constexpr") for one in function.arg_names}
            for capability in (80, 90):
                made = triton.compile(
                    ASTSource(function, signature, constants),
                    target=GPUTarget("cuda", capability, 32),
                    options={"num_warps": 4},
                )
                assert made.asm["cubin"]
                found[f"{name} {bits} {capability}"] = made.asm["ptx"]
    print(json.dumps(found))
"""


def run(script: str, cache: Path, **variables: str) -> dict[str, Any]:
    """What a script prints, in a process that finds Triton."""
    if not (SITE / "triton").is_dir():
        pytest.skip(
            f"there is no {SITE}, which `source tools/bootstrap.sh; bootstrap_frameworks` makes"
        )
    path = os.pathsep.join((str(ROOT), str(SITE)))
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, "PYTHONPATH": path, "TRITON_CACHE_DIR": str(cache), **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert not ended.returncode, ended.stderr[-3000:]
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_interpreted_kernels_give_the_bits_of_torch(tmp_path: Path) -> None:
    same = run(INTERPRETED, tmp_path, TRITON_INTERPRET="1")
    assert len(same) == 2 + 2 * 3 * 8
    assert all(same.values()), [name for name, is_same in same.items() if not is_same]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_kernels_compile_for_gpus_and_round_as_torch_does(tmp_path: Path) -> None:
    """No division that is approximate, no smallest number that is taken for zero."""
    found = run(COMPILED, tmp_path)
    assert len(found) == 3 * 6 * 2
    for name, code in found.items():
        assert ".ftz" not in code and "div.full" not in code and "div.approx" not in code, name
        assert ("div.rn" in code) == name.startswith(("encode", "int8")), name


# -- When they are used ---------------------------------------------------------------------------


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module of kernels, on a machine with Triton."""
    module = types.ModuleType("a.kernels")
    monkeypatch.setitem(sys.modules, "a", types.ModuleType("a"))
    monkeypatch.setitem(sys.modules, "a.kernels", module)
    monkeypatch.setattr(device_kernels.importlib.util, "find_spec", lambda name: name == "triton")
    return module


def test_kernels_that_agree_are_used(
    installed: types.ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    assert (
        device_kernels.load_kernels("a.kernels", "here: ", lambda one: one is installed)
        is installed
    )
    assert not caplog.text


def test_kernels_that_do_not_agree_are_not_used(
    installed: types.ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    assert device_kernels.load_kernels("a.kernels", "here: ", lambda _: False) is None
    assert "kernels of kernels are not used here (they do not give the bits" in caplog.text


def test_kernels_that_do_not_compile_are_not_used(
    installed: types.ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(_: Any) -> bool:
        raise RuntimeError("no C compiler")

    assert device_kernels.load_kernels("a.kernels", "here: ", fails) is None
    assert "RuntimeError: no C compiler" in caplog.text


def test_without_triton_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device_kernels.importlib.util, "find_spec", lambda _: None)
    assert device_kernels.load_kernels("a.kernels", "here: ", lambda _: True) is None
    assert not caplog.text


class Wrong:
    """Kernels that give the bits of torch, but for one of them.

    Args:
        which: `encode`, `decode`, or none of them.
    """

    def __init__(self, which: str) -> None:
        self._which = which

    def encode(
        self, values: torch.Tensor, out: torch.Tensor, scales: torch.Tensor, bits: int
    ) -> None:
        one = quantization.INT8 if bits == 8 else quantization.INT4
        encoded = torch.empty(one.encoded_bytes(len(values)), dtype=torch.uint8)
        one.encode_by_torch(values, encoded)
        of_scales, multiples = quantization._parts(encoded, len(values))
        scales.copy_(of_scales)
        out.copy_(multiples)
        if self._which == "encode":
            out[-1] ^= 1

    def decode(self, *given: Any) -> None:
        if len(given) == 4:
            multiples, scales, out, bits = given
            one = quantization.INT8 if bits == 8 else quantization.INT4
            one.decode_by_torch(torch.cat((scales.view(torch.uint8), multiples)), out)
        else:
            levels, scales, out, pairs, _ = given
            codec = weight_codec.CODECS["int8" if pairs is None else "nf4"]
            codec.decode_by_torch(torch.cat((scales.view(torch.uint8), levels)), out)
        if self._which == "decode":
            out[-1] *= 1.5


@pytest.mark.parametrize("which", ["none", "encode", "decode"])
def test_one_wrong_bit_is_noticed(which: str) -> None:
    cpu = torch.device("cpu")
    assert quantization.kernels_agree(Wrong(which), cpu) == (which == "none")
    assert weight_codec.kernels_agree(Wrong(which), cpu) == (which != "decode")
