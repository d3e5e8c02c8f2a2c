# SPDX-License-Identifier: Apache-2.0
"""Section `states`: optimizer states on tiers end with the same bits as in memory, in less memory.

AdamW, fused, in fp32 and bf16, of a stack of transformer layers. With the step on the device the
bits are those of the same training with states in memory. With the step on the host another kernel
computes, so there the bits are those of the same training whose optimizer runs on the CPU, of the
gradients that the device made. Two runs with states in memory are compared first: only if they
agree is a difference the offload's.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from check.gpu.parity import deterministic, same_bits
from check.gpu.result import Section
from check.gpu.settings import Settings, Size
from check.gpu.stack import Stack
from megatron.offload import offload_optimizer
from megatron.offload.device.open import open_device
from megatron.offload.sizes import MIB, format_size

MODES = ("ssd", "host")
STEPS_ON = ("device", "cpu")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_NUM_STEPS = 3  # states are made, go out and come back; then all of that once more
_SLACK_BYTES = 16 * MIB  # counts of steps, and whatever torch's allocator rounds


@dataclass
class Outcome:
    """What a run computed.

    Attributes:
        tensors: by name: gradients of each step, weights and states at the end, in host memory.
        left_bytes: what device memory holds more after the first step; None: not counted.
        moved_bytes: read from a tier and written to it.
    """

    tensors: dict[str, torch.Tensor]
    left_bytes: int | None = None
    moved_bytes: int = 0

    def first_difference(self, other: Outcome) -> str | None:
        """Where two runs differ in any bit; None: nowhere."""
        for name, tensor in self.tensors.items():
            if name not in other.tensors or not same_bits(tensor, other.tensors[name]):
                return name
        return None if self.tensors.keys() == other.tensors.keys() else "what there is"


def _adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, fused=True)


def train(
    stack: Stack, make: Callable[[Stack], tuple[torch.optim.Optimizer, Callable[[], None]]]
) -> tuple[torch.optim.Optimizer, dict[str, torch.Tensor]]:
    """A few steps of a stack; its optimizer, and gradients and weights by name.

    Args:
        make: gives the optimizer, and what takes a step with the gradients that the stack has.
    """
    optimizer, step = make(stack)
    found: dict[str, torch.Tensor] = {}
    for number in range(_NUM_STEPS):
        for param in stack.parameters():
            assert param.grad is not None
            param.grad.zero_()
        stack.step()
        for name, param in stack.named_parameters():
            assert param.grad is not None
            found[f"the gradient of {name} in step {number + 1}"] = param.grad.cpu()
        step()
    for name, param in stack.named_parameters():
        found[name] = param.detach().cpu()
    return optimizer, found


def in_memory(stack: Stack, step_on: str) -> Outcome:
    """States in memory; `cpu`: of copies of the parameters on the CPU, which are updated there."""

    def make(stack: Stack) -> tuple[torch.optim.Optimizer, Callable[[], None]]:
        params = list(stack.parameters())
        if step_on == "device":
            optimizer = _adamw(params)
            return optimizer, optimizer.step
        twins = [torch.nn.Parameter(param.detach().cpu().clone()) for param in params]
        optimizer = _adamw(twins)

        @torch.no_grad()
        def step() -> None:
            for param, twin in zip(params, twins, strict=True):
                assert param.grad is not None
                twin.grad = param.grad.cpu()
            optimizer.step()
            for param, twin in zip(params, twins, strict=True):
                param.copy_(twin)

        return optimizer, step

    optimizer, found = train(stack, make)
    return Outcome(found | _states_of(optimizer))


def on_tier(stack: Stack, mode: str, step_on: str, settings: Settings) -> Outcome:
    """States on a tier, and how much of the device's memory they have between steps."""
    device = open_device(settings.device)
    bucket_bytes = _bucket_bytes(stack)
    left: list[int] = []
    handle: Any = None

    def make(stack: Stack) -> tuple[torch.optim.Optimizer, Callable[[], None]]:
        nonlocal handle
        optimizer = _adamw(stack.parameters())
        directory = settings.directory if mode == "ssd" else None
        handle = offload_optimizer(
            optimizer,
            directory,
            mode=mode,
            step_on=step_on,
            bucket_bytes=bucket_bytes,
            window_bytes=0,
            **({"host_budget": 4 * _states_bytes(stack)} if mode == "host" else {}),
        )

        def step() -> None:
            before_bytes = device.allocated_bytes()
            optimizer.step()
            if not left:  # later steps go on while writes do
                handle.states.wait_for_writes()
                left.append(device.allocated_bytes() - before_bytes)

        return optimizer, step

    try:
        optimizer, found = train(stack, make)
        tiers = [tier.statistics for tier in handle.states.tiers]
        moved = sum(one.reads.total_bytes + one.writes.total_bytes for one in tiers)
        return Outcome(found | _states_of(optimizer), left[0], moved)
    finally:
        if handle is not None:
            handle.close(restore=False)


def check_case(
    dtype: str, step_on: str, size: Size, settings: Settings, section: Section
) -> list[list[str]]:
    """Both tiers with the step on one side; their rows of the table."""

    def stack() -> Stack:
        return Stack(size, _DTYPES[dtype], settings.device)

    name = f"{dtype}, step on {step_on}"
    reference = in_memory(stack(), step_on)
    difference = reference.first_difference(in_memory(stack(), step_on))
    if not section.check(
        f"{name}: memory equals memory",
        difference is None,
        "two runs with states in memory are the same bits"
        if difference is None
        else f"two runs with states in memory differ in {difference}: nothing can be judged",
    ):
        return []
    rows = []
    for mode in MODES:
        one = stack()
        outcome = on_tier(one, mode, step_on, settings)
        difference = reference.first_difference(outcome)
        where = "weights, gradients and states are the same bits"
        section.check(
            f"{name}: {mode}",
            difference is None and outcome.moved_bytes > 0,
            f"{difference or where}{' differs' if difference else ''}; "
            f"{format_size(outcome.moved_bytes)} moved",
        )
        all_bytes, left_bytes = _states_bytes(one), outcome.left_bytes or 0
        if settings.on_gpu:
            section.check(
                f"{name}: {mode}: no states stay on the device",
                left_bytes <= _SLACK_BYTES < all_bytes,
                f"{format_size(max(left_bytes, 0))} more after the first step than before it, "
                f"bound {format_size(_SLACK_BYTES)}, all states {format_size(all_bytes)}",
            )
        section.data[f"{name}, {mode}"] = {
            "size": str(size),
            "states_bytes": all_bytes,
            "left_bytes": left_bytes,
            "moved_bytes": outcome.moved_bytes,
            "difference": difference,
        }
        words = "identical" if difference is None else "DIFFERENT"
        cells = (all_bytes, outcome.moved_bytes, max(left_bytes, 0))
        rows.append([f"{name}, {mode}", words, *map(format_size, cells)])
    return rows


def run(settings: Settings, section: Section) -> None:
    """Runs the section: both types, both tiers, the step on the device and on the host."""
    if settings.on_gpu:
        size = Size(2048, 2 if settings.quick else 4, 256, 2)
    else:
        size = Size(64, 2, 32, 2)
    headers = ["states of AdamW, fused", "against memory", "states", "moved", "left on the device"]
    rows: list[list[str]] = []
    # The only attention whose backward pass repeats itself in every type.
    with deterministic(), sdpa_kernel(SDPBackend.MATH):
        for dtype in ["bf16"] if settings.quick else list(_DTYPES):
            for step_on in STEPS_ON:
                try:
                    rows += check_case(dtype, step_on, size, settings, section)
                except Exception as error:  # the next case may work
                    name = f"{dtype}, step on {step_on}"
                    section.check(name, False, f"{type(error).__name__}: {error}")
                gc.collect()
                if settings.on_gpu:
                    torch.cuda.empty_cache()
                section.table(f"Weights and states after {_NUM_STEPS} steps, {size}", headers, rows)


def _states_of(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """All states by name, copied to host memory."""
    return {
        f"{key} of parameter {number}": value.cpu().reshape(-1).clone()
        for number, state in optimizer.state_dict()["state"].items()
        for key, value in state.items()
    }


def _states_bytes(stack: Stack) -> int:
    """Of Adam's two, in the type of the parameters."""
    return sum(2 * param.nbytes for param in stack.parameters())


def _bucket_bytes(stack: Stack) -> int:
    """So many that a step has several of them, each of one matrix or more."""
    return max(2 * param.nbytes for param in stack.parameters())
