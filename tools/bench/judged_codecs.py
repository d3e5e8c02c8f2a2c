#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What ways to save activations in fewer bytes do to gradients: those offered, and those judged.

    tools/bench/judged_codecs.py --json judged.json     # a minute or two on 2 cores
    tools/bench/judged_codecs.py --layers 2 --hidden 128 --warm 2 --batches 2

A Llama of transformers trains exactly for some steps. Then, from the same weights and for several
batches, the gradient of each way is compared with the exact one. Forward passes are exact.

`linear`: a way stands for what weight gradients of linear layers read, and for nothing else;
`SiLU`: for what the derivative of SiLU reads; `all`: for every tensor of tokens that autograd saves
in floating point. They are norms of the difference
over that of the exact gradient of all parameters, the mean over batches. `bits` are of a value.

int8, int4   this package's, see docs/codecs.md
int2         rounded up or down at random, 32 values have a scale
DIVISION     the mean of 8 tokens in bfloat16, what is left of each as int2 with 128 to a scale
CRS          so many tokens, those with the largest norms and some of the others, weighted so that
             sums over tokens are right in the mean; WTA-CRS takes norms of gradients as well
ReSiLU2      the derivative of SiLU has four values, with the constants of Approx-BP's authors
             (arXiv 2406.16282)
frozen       bytes that autograd saves for a linear layer with a frozen weight, over its input's:
             what MobileTL spares

Exit code: 0 each way that is not offered has a larger error than int4, and a frozen layer saves
nothing; 1 not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tabulate import tabulate
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
sys.path[1:1] = [str(ROOT), str(ROOT / "tools")]

from bench.codecs import Gradients, error  # noqa: E402
from bench.train_model import make_model  # noqa: E402
from megatron.offload.activations.saved.quantization import (  # noqa: E402
    INT4,
    INT8,
    Quantization,
)
from megatron.offload.commands.training_runs.machine import in_a_line, machine_facts  # noqa: E402

Way = Callable[[torch.Tensor], torch.Tensor]  # what comes back of a tensor of tokens
_TOKENS = 8  # that DIVISION takes the mean of
_RESILU2 = ((-6.3050461, -0.0406036), (-0.0008685, 1.0809254), (6.3258152, -0.0403219))


def quantized(codec: Quantization) -> Way:
    """A codec of this package, there and back."""

    def back(values: torch.Tensor) -> torch.Tensor:
        flat = values.contiguous().view(-1)
        return codec.decode(codec.encode(flat), flat.numel(), flat.dtype).view_as(values)

    return back


def two_bits(values: torch.Tensor, group: int = 32) -> torch.Tensor:
    """Four levels between the least and the most of a group, each value up or down at random."""
    flat = torch.nn.functional.pad(values.flatten(), (0, -values.numel() % group)).view(-1, group)
    least, most = flat.amin(1, keepdim=True), flat.amax(1, keepdim=True)
    step = ((most - least) / 3).clamp(min=1e-30)
    levels = ((flat - least) / step + torch.rand_like(flat)).floor_().clamp_(0, 3)
    return (levels * step + least).view(-1)[: values.numel()].view_as(values)


def division(values: torch.Tensor) -> torch.Tensor:
    """Neighbouring tokens by their mean, and what is left of each in two bits."""
    tokens = values.reshape(-1, values.shape[-1])
    missing = -len(tokens) % _TOKENS
    padded = torch.nn.functional.pad(tokens, (0, 0, 0, missing)).view(-1, _TOKENS, tokens.shape[1])
    mean = padded.mean(1, keepdim=True).bfloat16().float()
    found = mean + two_bits(padded - mean, 128)
    return found.view(-1, tokens.shape[1])[: len(tokens)].view_as(values)


def sampled(share: float) -> Way:
    """Half of so many tokens by their norms, half of them at random from the rest."""

    def back(values: torch.Tensor) -> torch.Tensor:
        tokens = values.reshape(-1, values.shape[-1])
        winners = drawn = max(int(share * len(tokens) / 2), 1)
        norms, order = tokens.norm(dim=1).sort(descending=True)
        chances = norms[winners:] / norms[winners:].sum()
        picked = torch.multinomial(chances, drawn, replacement=True)
        found = torch.zeros_like(tokens)
        found[order[:winners]] = tokens[order[:winners]]
        places = order[winners:][picked]
        found.index_add_(0, places, tokens[places] / (drawn * chances[picked]).unsqueeze(1))
        return found.view_as(values)

    return back


WAYS: dict[str, tuple[float, Way]] = {  # bits of a value that had 16, and the way
    "int8": (INT8.encoded_bytes(1 << 20) * 8 / (1 << 20), quantized(INT8)),
    "int4": (INT4.encoded_bytes(1 << 20) * 8 / (1 << 20), quantized(INT4)),
    "int2": (2 + 32 / 32, two_bits),
    "DIVISION": (16 / _TOKENS + 2 + 32 / 128, division),
    "CRS 0.5": (16 * 0.5, sampled(0.5)),
    "CRS 0.25": (16 * 0.25, sampled(0.25)),
}
KINDS = ("linear", "SiLU", "all")
OFFERED = ("int8", "int4")
ONLY_LINEAR = ("CRS 0.5", "CRS 0.25")  # elsewhere nothing is summed over tokens


class _Linear(torch.autograd.Function):
    """A linear layer whose weight gradient reads its input as a way hands it back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, way: Way) -> torch.Tensor:
        ctx.save_for_backward(way(x), weight)
        return torch.matmul(x, weight.t())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        (grad,) = grads
        of_weight = grad.reshape(-1, grad.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
        return grad @ weight, of_weight, None


class _SiLU(torch.autograd.Function):
    """SiLU whose derivative reads its input as a way hands it back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, way: Way) -> torch.Tensor:
        ctx.save_for_backward(way(x))
        return torch.ops.aten.silu(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grads[0], x), None


class _ReSiLU2(torch.autograd.Function):
    """SiLU whose derivative has four values."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(sum((x > at).to(torch.uint8) for at, _ in _RESILU2))
        return torch.ops.aten.silu(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (number,) = ctx.saved_tensors
        levels = torch.tensor([0.0, *(add for _, add in _RESILU2)]).cumsum(0)
        return grads[0] * levels[number.long()]


@contextlib.contextmanager
def in_linear_layers(way: Way) -> Any:
    """A context in which linear layers without a bias save what a way hands back."""

    def forward(self: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
        assert self.bias is None
        found: torch.Tensor = _Linear.apply(x, self.weight, way)
        return found

    with mock.patch.object(torch.nn.Linear, "forward", forward):
        yield


def in_silu(way: Way) -> Any:
    """A context in which SiLU saves what a way hands back."""
    return mock.patch.object(torch.nn.functional, "silu", lambda x: _SiLU.apply(x, way))


@contextlib.contextmanager
def in_all_that_is_saved(way: Way, model: torch.nn.Module, vocabulary: int) -> Any:
    """A context in which a way hands back every tensor of tokens that autograd saves.

    But for log-probabilities, which this package's codecs leave exact too, and tables.
    """
    own = {param.untyped_storage().data_ptr() for param in model.parameters()}

    def pack(saved: torch.Tensor) -> torch.Tensor:
        is_own = saved.untyped_storage().data_ptr() in own
        if is_own or saved.dim() < 2 or not saved.is_floating_point():
            return saved
        if saved.shape[0] == 1 or saved.shape[-1] in (1, vocabulary):
            return saved
        return way(saved.detach())

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        yield


def saved_of_a_frozen_layer() -> float:
    """Bytes that autograd saves for a linear layer whose weight is frozen, over its input's."""
    layer = torch.nn.Linear(64, 64, bias=False).requires_grad_(False)
    x, saved = torch.randn(16, 64, requires_grad=True), []

    def pack(one: torch.Tensor) -> torch.Tensor:
        if one.untyped_storage().data_ptr() != layer.weight.untyped_storage().data_ptr():
            saved.append(one.nbytes)
        return one

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        layer(x)
    return sum(saved) / x.nbytes


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The figures."""
    own = argparse.Namespace(**vars(args), model="llama", dtype="float32")
    model = make_model(own)
    gradients = Gradients(model, args)
    gradients.train(args.warm)
    batches = range(args.batches)
    exact = [gradients.of(number)[1] for number in batches]

    def mean_error(context: Callable[[], Any], **more: Any) -> float:
        errors = []
        for number in batches:
            with context():
                errors.append(error(gradients.of(number, **more)[1], exact[number]))
        return statistics.mean(errors)

    yardsticks = {
        "bf16_error": mean_error(contextlib.nullcontext, autocast=True),
        "batch_noise": statistics.mean(
            error(one, other) for one, other in zip(exact, exact[1:] + exact[:1], strict=True)
        ),
    }
    ways: dict[str, dict[str, float | None]] = {}
    for name, (bits, way) in tqdm(WAYS.items(), unit="way", disable=None, leave=False):
        ways[name] = {
            "bits": bits,
            "linear": mean_error(lambda way=way: in_linear_layers(way)),
            "SiLU": None if name in ONLY_LINEAR else mean_error(lambda way=way: in_silu(way)),
            "all": None
            if name in ONLY_LINEAR
            else mean_error(lambda way=way: in_all_that_is_saved(way, model, args.vocabulary)),
        }
    silu = mock.patch.object(torch.nn.functional, "silu", _ReSiLU2.apply)
    resilu2 = mean_error(lambda: silu)
    ways["ReSiLU2"] = {"bits": 2.0, "linear": None, "SiLU": resilu2, "all": None}
    return {**yardsticks, "ways": ways, "frozen": saved_of_a_frozen_layer()}


def main() -> int:
    """Measures; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "default: %(default)s"
    parser.add_argument("--batches", type=int, default=4, help=default)
    parser.add_argument("--warm", type=int, default=30, help=f"exact steps before; {default}")
    parser.add_argument("--layers", type=int, default=4, help=default)
    parser.add_argument("--hidden", type=int, default=256, help=default)
    parser.add_argument("--sequence", type=int, default=256, help=default)
    parser.add_argument("--batch", type=int, default=4, help=default)
    parser.add_argument("--vocabulary", type=int, default=1024, help=default)
    parser.add_argument("--json", type=Path, help="also write the figures there")
    args = parser.parse_args()
    command = shlex.join(["tools/bench/judged_codecs.py", *sys.argv[1:]]).replace(f"{ROOT}/", "")
    result = {"machine": machine_facts(Path.cwd()), "command": command, **measure(args)}
    print(in_a_line(result["machine"]))
    rows = [
        [name, f"{one['bits']:.2f}", *(_cell(one[kind]) for kind in KINDS)]
        for name, one in result["ways"].items()
    ]
    print(tabulate(rows, headers=("way", "bits", *KINDS), disable_numparse=True))
    print(f"bf16 autocast {result['bf16_error']:.4f}, between batches {result['batch_noise']:.4f}")
    print(f"a frozen linear layer saves {result['frozen']:.2f} of its input")
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if is_as_judged(result) else 1


def is_as_judged(result: dict[str, Any]) -> bool:
    """Whether the ways that are not offered have a larger error than int4."""
    int4 = result["ways"]["int4"]
    is_worse = all(
        one[kind] is None or one[kind] > int4[kind]
        for name, one in result["ways"].items()
        if name not in OFFERED
        for kind in KINDS
    )
    return is_worse and result["frozen"] == 0.0


def _cell(found: float | None) -> str:
    return "-" if found is None else f"{found:.4f}"


if __name__ == "__main__":
    sys.exit(main())
