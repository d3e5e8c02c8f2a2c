# SPDX-License-Identifier: Apache-2.0
"""Which modules of a model are frozen parts: `frozen_modules`.

The largest submodules without trainable weights: a vision tower, a text encoder, a reference model,
and of a list of layers those before the first trainable one. A decoder of transformers returns its
cache of keys and values too, which is not stored, so its layers are the part and not the decoder.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

from megatron.offload.errors import FEATURES_PREFIX, ConfigurationError
from megatron.offload.integration.open_parameters import unit_of

Part = list[tuple[str, torch.nn.Module]]

_LISTS = (torch.nn.ModuleList, torch.nn.Sequential)
_NOT_CALLED = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList)
# Classes of modules in which tokens of all rows share experts: what a row gets depends on others.
_ROUTES = re.compile(r"MoE|MoeBlock|SparseMoe|Experts$|Router$|SparseMLP$")


def frozen_modules(model: torch.nn.Module) -> list[Part]:
    """The parts of a model: one module each, or several that run one after another.

    Args:
        model: plain or wrapped.

    Raises:
        ConfigurationError: there is none, or the weights of one are not in one piece.
    """
    routing: list[str] = []
    parts = [part for part in _parts("", model, routing) if part]
    if not parts:
        if routing:
            raise ConfigurationError(
                f"{FEATURES_PREFIX}{routing[0]} routes tokens of all rows to experts, so what a "
                "row gets depends on the rows beside it; leave out the cache"
            )
        raise ConfigurationError(
            f"{FEATURES_PREFIX}{type(model).__name__} has no frozen part: no tower, encoder or "
            "first layers without a trainable weight (LoRA on all layers leaves none); freeze one "
            "with requires_grad_(False), or leave out the cache"
        )
    for name, module in (one for part in parts for one in part):
        _check_weights(name, module)
    return parts


def ask_for_gradients(model: torch.nn.Module) -> bool:
    """Whether a trainer has the embeddings' outputs ask for gradients.

    With gradient checkpointing transformers and PEFT hook the embeddings so, for checkpoints whose
    inputs have to want gradients. What they ask for goes nowhere.
    """
    return any(
        getattr(hook, "__name__", "").startswith("make_inputs_require_grad")
        for module in model.modules()
        for hook in module._forward_hooks.values()
    )


def _parts(name: str, module: torch.nn.Module, routing: list[str]) -> Iterator[Part]:
    own_config = getattr(module, "config", None)
    hands_cache_out = bool(getattr(own_config, "use_cache", False))
    is_callable = not isinstance(module, _NOT_CALLED)
    if is_callable and not hands_cache_out and _is_frozen(module):
        if not any(True for _ in module.children()):
            return  # one operation, which costs about as much as reading its result
        if not _routes(module):
            yield [(name, module)]
            return
        routing.append(name)
    if not isinstance(module, _LISTS):
        has_experts = _ROUTES.search(type(module).__name__) is not None
        for inner, child in module.named_children():
            if not (has_experts and isinstance(child, _LISTS)):
                yield from _parts(f"{name}.{inner}".lstrip("."), child, routing)
            elif any(map(_is_frozen, child.children())):  # each gets its tokens, of all rows
                routing.append(f"{name}.{inner}".lstrip("."))
        return
    first: Part = []
    for inner, child in module.named_children():
        if any(one.requires_grad for one in child.parameters()):
            break
        if _routes(child):
            routing.append(f"{name}.{inner}".lstrip("."))
            break
        first.append((f"{name}.{inner}".lstrip("."), child))
    if any(_is_frozen(child) for _, child in first):
        yield first
        return
    for inner, child in module.named_children():  # a list of towers, say
        yield from _parts(f"{name}.{inner}".lstrip("."), child, routing)


def _is_frozen(module: torch.nn.Module) -> bool:
    weights = list(module.parameters())
    return bool(weights) and not any(one.requires_grad for one in weights)


def _routes(module: torch.nn.Module) -> bool:
    return any(_ROUTES.search(type(one).__name__) for one in module.modules())


def _check_weights(name: str, module: torch.nn.Module) -> None:
    for inner, one in module.named_parameters():
        where = f"{name}.{inner}".lstrip(".")
        if type(one) is not torch.nn.Parameter or hasattr(one, "ds_id"):
            raise ConfigurationError(
                f"{FEATURES_PREFIX}{where} is a {type(one).__name__} that is sharded or quantized, "
                "so its values cannot be told; keep frozen parts whole, or leave out the cache"
            )
        if unit_of(one) >= 0 or one.is_meta:
            raise ConfigurationError(
                f"{FEATURES_PREFIX}{where} is offloaded or without values, and a key holds its "
                "values; keep frozen parts in memory, or leave out the cache"
            )
