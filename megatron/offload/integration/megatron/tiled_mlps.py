# SPDX-License-Identifier: Apache-2.0
"""The MLPs of Megatron's layers, over tiles of tokens: `TiledMlps`.

`install` makes one if --activation-tiled-mlp asks for it. It takes the place of each MLP's
`forward` in training; `ops/tiled_mlp.py` computes. Linear layers stay Megatron's own: each tile is
gathered and reduced over tensor-parallel ranks as all tokens are.

Experts are left alone: a router has given them their tokens, as many as there are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from megatron.offload.errors import ConfigurationError
from megatron.offload.integration.replaced_forwards import ReplacedForwards
from megatron.offload.ops.tiled_mlp import Tiles, tile_tokens_of, tiled

_FLAG = "--activation-tiled-mlp"
_OURS = "megatron."  # modules of hooks that may be called for each tile: Megatron's and these
_PRE_HOOKS = "_forward_pre_hooks"
_HOOKS = (_PRE_HOOKS, "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def check_mlps(settings: Any) -> None:
    """Makes sure that a model has MLPs without experts.

    Args:
        settings: its `TransformerConfig`.

    Raises:
        ConfigurationError: each layer has experts.
    """
    every = getattr(settings, "moe_layer_freq", 1)  # which layers have: each so manieth, or a list
    has_mlps = every > 1 if isinstance(every, int) else 0 in every
    if getattr(settings, "num_moe_experts", None) and not has_mlps:
        raise ConfigurationError(
            f"num_moe_experts cannot be combined with {_FLAG} at moe_layer_freq {every}: it leaves "
            f"experts alone, and each layer of this model has experts; drop {_FLAG}"
        )


class TiledMlps(ReplacedForwards):
    """Runs the MLPs of a rank's model chunks over tiles.

    Args:
        model_chunks: wrapped for data parallelism or not. Those without an MLP are left alone.
        tokens: most of a tile; None: as many as suit the model.

    Raises:
        ConfigurationError: an MLP computes something else; nothing was touched then.
    """

    def __init__(self, model_chunks: Sequence[torch.nn.Module], tokens: int | None) -> None:
        super().__init__([_Mlp(*found, tokens) for chunk in model_chunks for found in _mlps(chunk)])


class _Mlp:
    """One module, and its own `forward`."""

    def __init__(self, name: str, module: Any, tokens: int | None) -> None:
        self.module = module
        self._name = name
        self._own: Callable[..., Any] = module.forward
        self._tokens = tokens
        self._is_checked = False
        self._check_layers()

    def forward(
        self, hidden: torch.Tensor, per_token_scale: torch.Tensor | None = None, **others: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As the module's own, over tiles where there is more than one.

        Args:
            hidden: [tokens, batch, hidden], of this rank.
            per_token_scale: of experts; then there are no tiles.
            others: what the layer gives every MLP, and this one does not look at.

        Returns:
            The result of its shape, and the bias that is to be added to it.
        """
        module = self.module
        # A checkpoint runs the first pass without gradients, and has to get the same of both.
        trains = module.training or torch.is_grad_enabled()
        if not trains or per_token_scale is not None:
            return self._own(hidden, per_token_scale, **others)
        if not self._is_checked:
            self._check_hooks()
            self._is_checked = True
        fused = [one.weight for one in self._linear() if one.gradient_accumulation_fusion]
        tiles = Tiles(self._rows(hidden.shape[-1]), tokens_first=True, added_by_it=fused)
        run = functools.partial(self._result, others)
        second = module.linear_fc2
        bias = second.bias if second.skip_bias_add else None  # it is added, and learns, outside
        inner = [one for one in module.parameters() if one is not bias]
        return tiled(run, hidden, inner, tiles), bias

    def _result(self, others: dict[str, Any], hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self._own(hidden, **others)[0]
        return result

    def _rows(self, hidden_size: int) -> int:
        """Tokens of a tile on this rank; with sequence parallelism others have as many."""
        first = self.module.linear_fc1
        tokens = self._tokens or tile_tokens_of(hidden_size)
        return max(1, tokens // (first.tp_group.size() if first.sequence_parallel else 1))

    def _linear(self) -> tuple[Any, Any]:
        return self.module.linear_fc1, self.module.linear_fc2

    def _check_layers(self) -> None:
        """Refuses what has not been tried in tiles."""
        from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

        expected = ColumnParallelLinear, RowParallelLinear
        names = "linear_fc1", "linear_fc2"
        for name, layer, kind in zip(names, self._linear(), expected, strict=True):
            if type(layer) is not kind:
                self._refuse(f"computes {name} with {_kind(layer)}, not with {_kind(kind)}")

    def _check_hooks(self) -> None:
        """Refuses where something would hear of each tile."""
        for name, module in self.module.named_modules():
            hooks = [
                hook
                for kind in _HOOKS
                for hook in getattr(module, kind).values()
                if kind != _PRE_HOOKS or not _module_of(hook).startswith(_OURS)
            ]
            if name and hooks:
                self._refuse(f"has hooks on {name}, which would be called for each tile")
        for name, parameter in self.module.named_parameters():
            if parameter._backward_hooks:
                self._refuse(f"has a hook on the gradient of {name}, which would see each tile's")

    def _refuse(self, why: str) -> None:
        raise ConfigurationError(
            f"{_FLAG} runs an MLP over tiles of tokens, and {self._name} {why}; drop {_FLAG}"
        )


def _mlps(chunk: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Those of a chunk's layers that no router gives tokens to."""
    from megatron.core.transformer.mlp import MLP

    for name, module in chunk.named_modules():
        if type(module) is MLP and name.rpartition(".")[2] == "mlp":
            yield name, module


def _kind(layer: Any) -> str:
    kind = layer if isinstance(layer, type) else type(layer)
    return f"{kind.__module__.partition('.')[0]}'s {kind.__name__}"


def _module_of(hook: Any) -> str:
    return str(getattr(hook, "__module__", None) or "")
