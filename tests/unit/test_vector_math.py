# SPDX-License-Identifier: Apache-2.0
"""Whoever starts a training has the vector math library called first in one thread.

Two threads that are first would get other bits only on some CPUs, and only now and then: here is
tested that there is a call, not what it prevents.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.offload import offload_activations
from megatron.offload.machine import vector_math
from tests.support.loops import net
from tests.support.vector_calls import ONE_VALUE, VectorCalls


def test_the_first_call_is_of_one_value() -> None:
    with VectorCalls() as calls:
        vector_math.first_call()
    assert calls.found == [ONE_VALUE]


def test_the_first_call_is_on_the_cpu_whatever_torch_is_told() -> None:
    torch.set_default_dtype(torch.bfloat16)  # of which the library has no functions
    try:
        with torch.device("meta"), VectorCalls() as calls:
            vector_math.first_call()
    finally:
        torch.set_default_dtype(torch.float32)
    assert calls.found == [ONE_VALUE]


@pytest.mark.parametrize("mode", ["off", "host", "ssd"])
def test_the_door_makes_the_first_call_before_the_model_runs(mode: str, tmp_path: Path) -> None:
    model = net()
    with VectorCalls() as calls, offload_activations(model, tmp_path, mode=mode):
        assert calls.found == [ONE_VALUE]
