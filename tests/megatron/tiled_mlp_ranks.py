# SPDX-License-Identifier: Apache-2.0
"""MLPs of Megatron as they are, over tiles, and in fp64; test_tiled_mlp.py starts it on two ranks,
which first have the whole MLP each, then share it.

Prints for each case how far result and gradients are from fp64, both ways, and how often each
parameter has heard of its gradient; and what is refused, or left alone.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.offload import ConfigurationError
from megatron.offload.integration.hook import Hook
from megatron.offload.integration.megatron import cpu_runtime
from megatron.offload.integration.megatron.tiled_mlps import TiledMlps
from tests.support.ranks import init_process_group

HIDDEN, WIDE, LENGTH, BATCH = 64, 192, 48, 3
TILE = 20  # divides neither the tokens of all ranks nor those of one
KINDS: dict[str, dict[str, Any]] = {
    "gelu": {},
    "gelu, fused with its bias": {"bias_activation_fusion": True},
    "swiglu": {
        "activation_func": torch.nn.functional.silu,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "bias_activation_fusion": True,
    },
}
Found = dict[str, torch.Tensor]


class Case:
    """One MLP, and what goes in."""

    def __init__(self, dtype: torch.dtype, settings: dict[str, Any], *, divided: bool) -> None:
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        config = TransformerConfig(
            num_layers=1,
            hidden_size=HIDDEN,
            ffn_hidden_size=WIDE,
            num_attention_heads=2,
            use_cpu_initialization=True,
            params_dtype=dtype,
            tensor_model_parallel_size=ranks,
            sequence_parallel=divided,
            gradient_accumulation_fusion=False,
            **settings,
        )
        parts = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        mlp = MLP(config, parts, ffn_hidden_size=WIDE).to(dtype)
        draw = torch.Generator().manual_seed(3)
        for one in mlp.parameters():
            one.data.copy_(torch.randn(one.shape, generator=draw) / HIDDEN**0.5)
        self.model = torch.nn.ModuleDict({"mlp": mlp})
        shape = LENGTH // (ranks if divided else 1), BATCH, HIDDEN
        self.x = torch.randn(shape, generator=draw).to(dtype)
        self.given = torch.randn(shape, generator=draw).to(dtype)
        self.heard: Counter[str] = Counter()

    def exact(self) -> Found:
        """As `run`, in fp64."""
        own = [one.data for one in self.model.parameters()]
        for one in self.model.parameters():
            one.data = one.data.double()
        given, self.x, self.given = (self.x, self.given), self.x.double(), self.given.double()
        found = self.run()
        self.x, self.given = given
        for one, data in zip(self.model.parameters(), own, strict=True):
            one.grad, one.data = None, data
        return found

    def run(self) -> Found:
        """What comes out, and all gradients."""
        mlp: Any = self.model["mlp"]
        mlp.zero_grad()
        x = self.x.clone().requires_grad_()
        nodes, hooks = [], []  # of gradients that are added up: Megatron listens there
        for name, one in mlp.named_parameters():
            node = one.expand_as(one).grad_fn.next_functions[0][0]
            hooks.append(node.register_hook(lambda *_, name=name: self.heard.update([name])))
            nodes.append(node)
        result = added(*mlp(x))
        result.backward(self.given)
        for hook in hooks:  # a graph that lives on keeps its nodes, and the next run finds them
            hook.remove()
        assert x.grad is not None
        found = {name: one.grad for name, one in mlp.named_parameters()}
        return {"y": result.detach(), "x": x.grad, **found}

    def checkpointed(self) -> Found:
        """As Megatron's own checkpoint has it: without gradients first, and once more."""
        from megatron.core.tensor_parallel.random import checkpoint

        mlp: Any = self.model["mlp"]
        mlp.zero_grad()
        x = self.x.clone().requires_grad_()
        result = checkpoint(lambda x: added(*mlp(x)), False, x)
        result.backward(self.given)
        assert x.grad is not None
        found = {name: one.grad for name, one in mlp.named_parameters()}
        return {"y": result.detach(), "x": x.grad, **found}

    def errors(self) -> dict[str, Any]:
        """Relative distances to fp64: as it is, and over tiles."""
        exact, usual = self.exact(), self.run()
        tiles = TiledMlps([self.model], TILE)
        tiles.connect()
        self.heard.clear()
        tiled = self.run()
        heard = dict(self.heard)
        again = self.checkpointed()
        tiles.close()
        restored = self.run()
        return {
            "usual": {name: distance(usual[name], exact[name]) for name in exact},
            "tiled": {name: distance(tiled[name], exact[name]) for name in exact},
            "heard": heard,
            "differs": any(not torch.equal(usual[name], tiled[name]) for name in exact),
            "checkpointed": all(torch.equal(again[name], tiled[name]) for name in exact),
            "restored": all(torch.equal(usual[name], restored[name]) for name in exact),
        }


def added(result: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return result if bias is None else result + bias


class Other(ColumnParallelLinear):
    """Another layer than Megatron's, as an adapter's."""


def refused(case: Case) -> dict[str, str]:
    """What is said where tiles would be wrong."""

    def said() -> str:
        tiles = None
        try:
            tiles = TiledMlps([case.model], TILE)
            tiles.connect()
            case.run()
        except ConfigurationError as error:
            return str(error)
        finally:
            if tiles is not None:
                tiles.close()
        return ""

    mlp: Any = case.model["mlp"]
    found = {}
    makers = {
        "pre-hook": lambda: mlp.linear_fc1.register_forward_pre_hook(lambda *_: None),
        "hook": lambda: mlp.linear_fc2.register_forward_hook(lambda *_: None),
        "backward hook": lambda: mlp.linear_fc1.register_full_backward_hook(lambda *_: None),
        "gradient": lambda: mlp.linear_fc2.weight.register_hook(lambda grad: grad * 2),
    }
    for name, make in makers.items():
        handle = make()
        found[name] = said()
        handle.remove()
    mlp.linear_fc1.__class__ = Other
    found["layer"] = said()
    mlp.linear_fc1.__class__ = ColumnParallelLinear
    found["own hook"] = said_with_own_hook(mlp, said)
    return found


def said_with_own_hook(mlp: Any, said: Callable[[], str]) -> str:
    """Megatron's DDP and our division of layers have such hooks: they may be called again."""
    handle = mlp.linear_fc1.register_forward_pre_hook(Hook(lambda *_: None))
    try:
        return said()
    finally:
        handle.remove()


def left_alone(case: Case) -> dict[str, bool]:
    """Passes that are not of training, calls with scales."""
    mlp: Any = case.model["mlp"]
    rows: list[int] = []
    own = mlp.linear_fc1.forward
    mlp.linear_fc1.forward = lambda x, *more: (rows.append(x.shape[0]), own(x, *more))[1]
    tiles = TiledMlps([case.model], TILE)
    tiles.connect()

    def is_whole(run: Callable[[], object]) -> bool:
        rows.clear()
        run()
        return rows == [LENGTH]

    scale = torch.ones(LENGTH, BATCH)
    found = {
        "training": is_whole(lambda: mlp(case.x)),
        "scaled": is_whole(lambda: mlp(case.x, scale)),
    }
    with torch.no_grad():
        found["checkpointed"] = is_whole(lambda: mlp(case.x))
    mlp.eval()
    with torch.no_grad():
        found["evaluated"] = is_whole(lambda: mlp(case.x))
    mlp.train()
    tiles.close()
    del mlp.linear_fc1.forward
    return found


def distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def cases(size: int) -> Iterator[tuple[str, Case]]:
    """All of them for so many ranks that share an MLP."""
    for dtype in (torch.float32, torch.bfloat16):
        for kind, settings in KINDS.items():
            for divided in (False, True) if size > 1 else (False,):
                yield (
                    f"TP{size} {dtype} {kind} SP={divided}",
                    Case(dtype, settings, divided=divided),
                )


def main() -> None:
    torch._dynamo.config.disable = True  # as the trainer has it on a CPU: fused functions compile
    init_process_group()
    cpu_runtime.activate()
    results: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for size in (1, 2):
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
        model_parallel_cuda_manual_seed(5)
        for name, case in cases(size):
            results[name] = case.errors()
        if size == 1:
            case = Case(torch.float32, {"add_bias_linear": False}, divided=False)
            others = {"refused": refused(case), "whole": left_alone(case)}
        parallel_state.destroy_model_parallel()
    if int(os.environ["RANK"]) == 0:
        print(json.dumps({"cases": results, **others}))


if __name__ == "__main__":
    main()
