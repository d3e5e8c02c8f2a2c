# SPDX-License-Identifier: Apache-2.0
"""The CPU's vector math library, called once before two threads can be first: `first_call`.

The door for torch models and Megatron's CPU runtime call it before a training on a CPU begins.

Note [The first call]
torch's `log`, `tanh`, `exp`, `erf`, `sqrt`, `sin` and `cos` of float32 and float64 on a CPU are
functions of MKL, which look up the kind of CPU at the first call of any of them. MKL 2024.2 stores
it twice: first by one numbering, then by the one that kernels are found with, and on newer Intel
CPUs the two differ. A thread whose call begins in between gets a kernel of another accuracy for all
of its share of the values, with errors of up to 2e-4 of them. In a quarter of all processes half of
Megatron's first `log` was computed so. GPT-2 calls `tanh` first: where half of that was, the loss
had the same bits and all gradients had others. Offload has no part in it, and one earlier call, in
one thread, prevents it for all of these functions.
"""

from __future__ import annotations

import torch


def first_call() -> None:
    """Calls a function of the vector math library in this thread alone; see the Note above."""
    torch.log(torch.ones(1, dtype=torch.float32, device="cpu"))
