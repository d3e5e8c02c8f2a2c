# SPDX-License-Identifier: Apache-2.0
"""Functions that `torch.compile` runs as they are: `not_traced`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., object])


def not_traced(function: _Function, *, with_calls: bool = True) -> _Function:
    """Marks a function that autograd calls, for `torch.compile` to leave it and all it calls alone.

    Where a compiled model breaks its graph, each Python function that is called next would be
    compiled, and so would a hook for saved tensors: in vain, for seconds, with warnings. Unlike
    `torch.compiler.disable` this costs a call nothing. A PyTorch without the means traces on.

    Args:
        function: it.
        with_calls: else what it calls is compiled as elsewhere.
    """
    try:
        frames = torch._C._dynamo.eval_frame
        skip = frames._FrameAction.SKIP
        of_calls = skip if with_calls else frames._FrameAction.DEFAULT
        strategy = frames._FrameExecStrategy(skip, of_calls)
        frames.set_code_exec_strategy(function.__code__, strategy)
    except AttributeError:
        pass
    return function
