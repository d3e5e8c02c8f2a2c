# SPDX-License-Identifier: Apache-2.0
"""Section `parameters`: parameters that wait on tiers end with the same bits, in less memory.

Fused AdamW trains a stack of transformer layers, in bf16: one micro-batch after the other and
layer-major, made on the GPU and made on the CPU. Losses are left out, they are in the gradients.
Two runs with parameters in memory are compared first: only if they agree is a difference ours.
"""

from __future__ import annotations

import gc
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from check.gpu.parity import deterministic, same_bits
from check.gpu.result import Section
from check.gpu.settings import Settings, Size
from check.gpu.stack import Layer, Stack
from megatron.offload import LayerMajor, offload_parameters
from megatron.offload.device.open import open_device
from megatron.offload.sizes import MIB, format_size

MODES = ("ssd", "host")
_NUM_STEPS, _MICRO_BATCHES = 3, 2
_SLACK_BYTES = 8 * MIB  # parameters that stand for those that are away, and what torch rounds


@dataclass
class Outcome:
    """What a run computed.

    Attributes:
        tensors: gradients of each step, weights at the end, in host memory.
        taken_bytes: of device memory, by layers that wait; None: not counted.
        read_bytes: from a tier.
    """

    tensors: list[torch.Tensor]
    taken_bytes: int | None = None
    read_bytes: int = 0

    def is_same(self, other: Outcome) -> bool:
        """Whether all bits are."""
        pairs = zip(self.tensors, other.tensors, strict=True)
        return all(same_bits(one, another) for one, another in pairs)


class _Loss(torch.nn.Module):
    """A stack, whose loss of a micro-batch is its result."""

    def __init__(self, stack: Stack) -> None:
        super().__init__()
        self.stack = stack

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        x = self.stack.input * scale
        for layer in self.stack.layers:
            x = layer(x)
        return (x * self.stack.probe).sum(dtype=torch.float32)


def train(
    weights: dict[str, torch.Tensor],
    size: Size,
    settings: Settings,
    *,
    mode: str = "off",
    layer_major: bool = False,
    made_on: torch.device | None = None,
) -> Outcome:
    """A few steps from given weights.

    Args:
        mode: where the parameters wait.
        layer_major: each unit runs all micro-batches; else one runs after the other.
        made_on: where the model is made; None: where it computes.
    """
    device = open_device(settings.device)
    stack = Stack(size, torch.bfloat16, made_on or settings.device)
    stack.load_state_dict(weights)
    stack.zero_grad()
    stack.input, stack.probe = _inputs(size, settings)
    gc.collect()
    model, before_bytes = _Loss(stack), device.allocated_bytes()
    on_device = stack.layers[0].qkv.weight.device == settings.device
    all_bytes = sum(param.nbytes for param in stack.parameters())
    scales = torch.tensor([1.0, 0.5], dtype=torch.bfloat16, device=settings.device)
    batches, outcome = list(scales), Outcome([])
    with ExitStack() as handles:
        handle = offload_parameters(
            model,
            settings.directory if mode == "ssd" else None,
            mode=mode,
            layers=[Layer],
            device=settings.device,
            **({"host_budget": 2 * all_bytes} if mode == "host" else {}),
        )
        handles.enter_context(handle)
        if handle.window is not None:
            for unit in handle.window.units:
                unit.wait_for_write()
            left = device.allocated_bytes() - before_bytes
            outcome.taken_bytes = left + (all_bytes if on_device else 0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        steps = LayerMajor(model, layers=[Layer]) if layer_major else None
        for _ in range(_NUM_STEPS):
            if steps is not None:
                steps.step(batches, model)
            else:
                for batch in batches:
                    model(batch).backward()
            outcome.tensors += [p.grad.cpu() for p in model.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
        outcome.read_bytes = int(handle.statistics.get("read_bytes", 0))
        outcome.tensors += [value.cpu() for value in model.state_dict().values()]
        if steps is not None:
            steps.close()
    return outcome


def check_cases(size: Size, settings: Settings, section: Section) -> list[list[str]]:
    """All cases; their rows of the table."""
    weights = {
        k: v.cpu() for k, v in Stack(size, torch.bfloat16, settings.device).state_dict().items()
    }
    reference = train(weights, size, settings)
    same = reference.is_same(train(weights, size, settings))
    if not section.check(
        "memory equals memory",
        same,
        f"two runs with parameters in memory {'are the same bits' if same else 'differ'}",
    ):
        return []
    rows = []
    unit_bytes = sum(one.nbytes for name, one in weights.items() if name.startswith("layers.0."))
    cases: list[tuple[str, dict[str, Any]]] = [
        (f"{mode}, {order}", {"mode": mode, "layer_major": order == "layer-major"})
        for mode in MODES
        for order in ("one after the other", "layer-major")
    ]
    cases.append(("ssd, made on the CPU", {"mode": "ssd", "made_on": torch.device("cpu")}))
    for name, case in cases:
        found = train(weights, size, settings, **case)
        same = found.is_same(reference) and found.read_bytes > 0
        section.check(
            name,
            same,
            f"gradients and weights {'are the same bits' if same else 'differ'}; "
            f"{format_size(found.read_bytes)} read",
        )
        taken_bytes = found.taken_bytes or 0
        if settings.on_gpu:
            bound_bytes = unit_bytes + _SLACK_BYTES
            section.check(
                f"{name}: no parameters stay on the device",
                taken_bytes <= bound_bytes,
                f"{format_size(max(taken_bytes, 0))} while layers wait, bound "
                f"{format_size(bound_bytes)}",
            )
        section.data[name] = {
            "size": str(size),
            "read_bytes": found.read_bytes,
            "taken_bytes": taken_bytes,
            "same": same,
        }
        words = "identical" if same else "DIFFERENT"
        cells = (found.read_bytes, max(taken_bytes, 0))
        rows.append([name, words, *map(format_size, cells)])
    return rows


def run(settings: Settings, section: Section) -> None:
    """Runs the section: both tiers, both orders, made on the device and on the CPU."""
    size = Size(64, 4, 32, 2)
    if settings.on_gpu:
        size = Size(2048, 4 if settings.quick else 8, 256, 2)
    # The only attention whose backward pass repeats itself in every type.
    with deterministic(), sdpa_kernel(SDPBackend.MATH):
        rows = check_cases(size, settings, section)
    headers = ["parameters", "against memory", "read", "on the device while all wait"]
    section.table(f"Gradients and weights of {_NUM_STEPS} steps, {size}", headers, rows)


def _inputs(size: Size, settings: Settings) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(settings.seed)
    shape = (size.micro_batch, size.seq_length, size.hidden)
    one, other = (torch.randn(shape, generator=draw).bfloat16() for _ in range(2))
    return one.to(settings.device), other.to(settings.device)
