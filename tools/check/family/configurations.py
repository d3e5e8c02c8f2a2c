# SPDX-License-Identifier: Apache-2.0
"""Small configurations of transformers' families: `small_configurations`.

A configuration is that of its own class with every default untouched but for sizes, which are known
by the names of its fields. No two classes agree on how sizes depend on each other, so there are
several ways to make one smaller; `sample.py` takes the first one that gives a model that runs.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from transformers import PretrainedConfig

WORDS = 128  # of every vocabulary
POSITIONS = 128  # of every table of positions
LAYERS = 3  # one more than are in memory at a time where parameters move
_MOST_LAYERS = 8
_SIDE = 64  # of pictures, in points
_WINDOW = 16  # of attention: less than the tokens of a text
_STAGE_LAYERS = 2

_LAYERS = re.compile(
    r"^(num_|n_)?(\w*_)?(layers?|depth)$|^(num|n)_(\w*_)?(blocks|stacks)$|^num_hidden_layers$"
)
_NOT_LAYERS = re.compile(
    r"pattern|interval|freq|moe_layer_|deepstack|feature_layer|_step|shared_layers|"
    r"adapter_layers|kv_shared|mtp|nextn|skip|layer_norm|dense_layers|first_k"
)
_DENSE_LAYERS = re.compile(r"first_k_dense_replace|num_dense_layers|mlp_only_layers")
_NO_MORE_LAYERS = re.compile(r"nextn_predict|num_mtp|kv_shared_layers")
_STAGES = re.compile(r"^(depths?|layers|num_blocks|stage_num_blocks|\w*_depths?|num_layers)$")
_HEADS = re.compile(r"heads?(_kv)?$|^num_key_value_heads$|_heads_|_groups?_heads$")
_KEY_VALUE_HEADS = re.compile(r"(kv|key_value)_heads?|heads_kv$")
_HEAD_SIZE = re.compile(r"(^|_)(head_dim|head_size|d_kv|d_head|head_width|kv_channels)$|_head_dim$")
_INNER = re.compile(r"intermediate|ffn|ff_dim|inner_dim|mlp_dim|d_ff|n_inner|feed_forward|mlp_size")
_WIDTH = re.compile(
    r"hidden_size|d_model|n_embd|embed_dim|^dim$|_dim$|_dims?$|hidden_dim|_size$|width|channels|"
    r"_rank$|^d_|lru|expand|hidden_sizes|embed|projection"
)
_NOT_WIDTH = re.compile(
    r"image_size|patch_size|kernel|window|vocab|stride|pool|num_channels|in_channels|chunk|block|"
    r"out_features|spatial|tile|crop|input_channels|queue|grid|batch|codebook_size|downsample|"
    r"temporal|conv_dim|bucket|mel|group_size|input_dim|tokenizer|step|feature_size|expand"
)
_KINDS_OF_LAYERS = ("layer_types", "layers_block_type", "attention_layers")
_EXPERTS = re.compile(r"^(num|n|moe_num)_(\w*_)?experts$|^n_routed_experts$|^num_local_experts$")
_CHOSEN = re.compile(r"experts_per_tok|moe_topk|top_?k(_experts)?$|moe_k$|experts_top|num_selected")
_POSITIONS = re.compile(
    r"max_(\w*_)?position(_embedding)?s?|^n_positions$|^n_ctx$|max_seq_len|max_(source|target)_"
    r"positions|max_sequence_length|max_seq_length"
)
_WINDOWS = re.compile(r"^(sliding_window\w*|attention_chunk_size|local_attention|window_size)$")
_PICTURES = re.compile(r"^(image_size|img_size|input_size|crop_size)$")
_IMAGE_TOKENS = re.compile(r"tokens_per_image|image_seq_len|num_image_tokens|image_tokens_per")
_TOKEN = re.compile(r"(_token_id|_token_index|_token_ids|_id|_token)$")


@dataclass
class Way:
    """One way of making a configuration smaller.

    Attributes:
        name: of it.
        width: the new size of one that has a given size.
        heads: likewise of numbers of heads.
        tokens: by what they were, the small numbers of special tokens: those of a configuration
            and of the ones in it are the same.
    """

    name: str
    width: Callable[[str, int], int]
    heads: Callable[[str, int], int]
    tokens: dict[int, int] = field(default_factory=dict)

    def token(self, number: int) -> int:
        """A special token's number in the small vocabulary."""
        if number < WORDS // 2:
            return number
        return self.tokens.setdefault(number, WORDS - 1 - len(self.tokens))


def _fixed_width(name: str, value: int) -> int:
    if _HEAD_SIZE.search(name):
        return min(value, 16)
    return min(value, 96 if _INNER.search(name) else 64)


def _fixed_heads(name: str, value: int) -> int:
    return min(value, 2 if _KEY_VALUE_HEADS.search(name) else 4)


def _divided(by: int, least: int = 4) -> Callable[[str, int], int]:
    def width(name: str, value: int) -> int:
        return value if value <= least else max(least, value // by)

    return width


def _ways() -> Iterator[Way]:
    yield Way("fixed", _fixed_width, _fixed_heads)
    for by in (32, 16, 8, 4):  # all heads, each of them narrower
        yield Way(f"widths / {by}", _divided(by), lambda name, value: value)
    for by in (4, 8):  # fewer heads of a quarter of the width
        yield Way(
            f"widths / {4 * by}, heads / {by}",
            lambda name, value, by=by: _divided(4 if _HEAD_SIZE.search(name) else 4 * by)(  # type: ignore[misc]
                name, value
            ),
            lambda name, value, by=by: max(1, value // by),  # type: ignore[misc]
        )
    for by in (8, 16, 32):  # fewer heads, each of them as wide as it is
        yield Way(
            f"widths and heads / {by}",
            lambda name, value, by=by: value if _HEAD_SIZE.search(name) else max(4, value // by),  # type: ignore[misc]
            lambda name, value, by=by: max(1, value // by),  # type: ignore[misc]
        )
    yield Way("widths as they are", lambda name, value: value, lambda name, value: value)


def small_configurations(kind: type[PretrainedConfig]) -> Iterator[tuple[str, PretrainedConfig]]:
    """Configurations of a class with small sizes, each with how it was made; the best way first.

    Raises:
        Exception: what the class raises where it cannot be made even with its defaults.
    """
    default = kind()
    first_error: Exception | None = None
    found = 0
    for way in _ways():
        try:
            config = _made(default, way)
        except Exception as error:  # the class's own checks: its sizes depend on each other
            first_error = first_error or error
            continue
        found += 1
        yield way.name, config
    if not found and first_error is not None:
        raise first_error


def _made(default: PretrainedConfig, way: Way) -> PretrainedConfig:
    return type(default)(**_arguments(default, way))


def _arguments(default: PretrainedConfig, way: Way) -> dict[str, Any]:
    """Of the constructor: only what is smaller than its default."""
    changed: dict[str, Any] = {}
    layers = _num_layers(default)
    for name, parameter in inspect.signature(type(default).__init__).parameters.items():
        try:
            value = getattr(default, name, None)
        except AttributeError:  # of those that differ from layer to layer
            continue
        if isinstance(value, PretrainedConfig):
            changed[name] = _made(value, way)
            continue
        if parameter.default is None or name in ("self", "kwargs"):
            continue  # the class finds it from other sizes
        small = _smaller(name, value, way, layers, default)
        if small != value:
            changed[name] = small
    return changed


def _num_layers(default: PretrainedConfig) -> int:
    """As many as have a layer of every kind in them, and at least `LAYERS`."""
    kinds = next(filter(None, (getattr(default, name, None) for name in _KINDS_OF_LAYERS)), None)
    if not isinstance(kinds, list | tuple):
        return LAYERS
    every = set(map(str, kinds))
    for number in range(LAYERS, min(_MOST_LAYERS, len(kinds)) + 1):
        if set(map(str, kinds[:number])) == every:
            return number
    return LAYERS


def _smaller(name: str, value: Any, way: Way, layers: int, config: PretrainedConfig) -> Any:
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return _smaller_number(name, value, way, layers, config)
    if isinstance(value, list | tuple) and value and all(type(one) is int for one in value):
        if _STAGES.search(name):
            return type(value)(min(one, _STAGE_LAYERS) for one in value)
        if _PICTURES.search(name):
            return type(value)(_side(config) for _ in value)
        if _WIDTH.search(name) and not _NOT_WIDTH.search(name):
            return type(value)(way.width(name, one) for one in value)
        if _TOKEN.search(name):
            return type(value)(way.token(one) for one in value)
    return value


def _smaller_number(name: str, value: int, way: Way, layers: int, config: PretrainedConfig) -> int:
    if "vocab" in name:
        return min(value, WORDS)
    if _TOKEN.search(name):
        return way.token(value)
    if _NO_MORE_LAYERS.search(name):
        return 0
    if _DENSE_LAYERS.search(name):
        return min(value, 1)
    if _LAYERS.search(name) and not _NOT_LAYERS.search(name):
        return min(value, layers)
    if _EXPERTS.search(name):
        return min(value, 8)
    if name in ("n_group", "topk_group"):
        return min(value, 2 if name == "n_group" else 1)
    if _CHOSEN.search(name):
        return min(value, 2)
    if _POSITIONS.search(name):
        return min(value, POSITIONS)
    if _WINDOWS.search(name):
        return min(value, _WINDOW)
    if _PICTURES.search(name):
        return _side(config)
    if _IMAGE_TOKENS.search(name):
        return min(value, 16)
    if _HEADS.search(name) and not _HEAD_SIZE.search(name):
        return way.heads(name, value)
    if _HEAD_SIZE.search(name) or _INNER.search(name):
        return way.width(name, value)
    if _WIDTH.search(name) and not _NOT_WIDTH.search(name):
        return way.width(name, value)
    return value


def _side(config: PretrainedConfig) -> int:
    """Of a picture: four patches, or as many as a few stages divide in halves."""
    patch = getattr(config, "patch_size", None)
    if isinstance(patch, list | tuple):
        patch = patch[0] if patch else None
    if isinstance(patch, int) and patch >= 8:
        return 4 * patch
    return _SIDE
