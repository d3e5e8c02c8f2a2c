# SPDX-License-Identifier: Apache-2.0
"""Inputs of a model by the signature of its forward: `ways_to_call`.

Nobody says in one form what a model of transformers takes, so there are several sets of inputs for
each; `sample.py` takes the first one with which it runs. All are drawn from a generator.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig

Batch = dict[str, Any]
ROWS = 2  # of a batch
TOKENS = 24  # of a text
_PADDED = 6  # of them, at the end of the second row
_FIRST_WORD, _LAST_WORD = 4, 60
_IGNORED = -100
_FRAMES, _SAMPLES = 128, 6400  # of sound
_MASKS = ("input_features_mask", "feature_attention_mask", "pixel_attention_mask")


@dataclass(frozen=True)
class WayToCall:
    """One set of inputs.

    Attributes:
        name: what is in it, for people.
        draw: makes a batch.
        image_tokens: in each text.
    """

    name: str
    draw: Callable[[torch.Generator], Batch]


def ways_to_call(
    model: torch.nn.Module, kind: str, image_tokens: Iterable[int]
) -> Iterator[WayToCall]:
    """Sets of inputs that may suit a model, the richest first.

    Args:
        model: of transformers.
        kind: of its family.
        image_tokens: how many a picture, or a piece of sound, may be in a text.
    """
    inputs = _Inputs(model)
    for name, draw in inputs.contents(kind, list(image_tokens)):
        for labels_name, labels in inputs.labels():
            # A decoder makes its input of the labels; without labels it needs one.
            for decoder in (False, True) if inputs.has("decoder_input_ids") else (False,):

                def batch(
                    generator: torch.Generator,
                    draw: Any = draw,
                    labels: Any = labels,
                    decoder: bool = decoder,
                ) -> Batch:
                    made = draw(generator)
                    target = labels(generator, made)
                    if target is not None:
                        made["labels"] = target
                    if decoder:
                        length = target.shape[1] if _is_text(target) else TOKENS
                        made["decoder_input_ids"] = inputs.words(generator, length)
                    return made

                text = f"{name}, {labels_name}" if labels_name else name
                yield WayToCall(f"{text}, decoder_input_ids" if decoder else text, batch)


class _Inputs:
    def __init__(self, model: torch.nn.Module) -> None:
        self._names = inspect.signature(model.forward).parameters
        self._model: Any = model
        self._config: PretrainedConfig = self._model.config

    def has(self, name: str) -> bool:
        return name in self._names

    def words(self, generator: torch.Generator, length: int = TOKENS) -> torch.Tensor:
        most = min(_LAST_WORD, _size(self._config, "vocab_size", default=_LAST_WORD))
        return torch.randint(_FIRST_WORD, most, (ROWS, length), generator=generator)

    # -- Contents -------------------------------------------------------------------------------

    def contents(
        self, kind: str, image_tokens: list[int]
    ) -> Iterator[tuple[str, Callable[[torch.Generator], Batch]]]:
        """What is in a batch beside labels."""
        if kind == "multimodal" or (self.has("input_ids") and kind == "audio"):
            for name, draw in [*self._sounds(), *self._pictures()]:
                for number in image_tokens:
                    yield (
                        f"input_ids with {number} places, {name}" if number else f"text, {name}",
                        lambda g, draw=draw, number=number: self._text(g, number) | draw(g),
                    )
        if not self.has("input_ids") or kind in ("vision", "audio"):
            yield from self._pictures()
            yield from self._sounds()
        if self.has("input_ids"):
            yield "text", lambda generator: self._text(generator, 0)
            yield "text without a mask", lambda g: {"input_ids": self.words(g)}

    def _text(self, generator: torch.Generator, places: int) -> Batch:
        """A text, in the second row padded; in its middle places for a picture or a sound."""
        ids = self.words(generator, TOKENS + places)
        token = _token(self._config)
        if places and token is not None:
            ids[:, 4 : 4 + places] = token
        mask = torch.ones_like(ids)
        mask[1, -_PADDED:] = 0
        made = {"input_ids": ids}
        if self.has("attention_mask"):
            made["attention_mask"] = mask
        for name in ("token_type_ids", "mm_token_type_ids"):
            if places and self.has(name):
                made[name] = (ids == token).long()
        return made

    def _pictures(self) -> Iterator[tuple[str, Callable[[torch.Generator], Batch]]]:
        name = next((n for n in ("pixel_values", "pixel_values_videos") if self.has(n)), None)
        if name is None:
            return
        config = self._config
        side, channels = _side(config), _size(config, "num_channels", "in_channels", default=3)
        if self.has("image_grid_thw"):
            patch = _size(config, "patch_size", default=14)
            times = _size(config, "temporal_patch_size", default=1)
            size = channels * times * patch * patch
            yield (
                "patches of pictures",
                lambda g: {
                    "pixel_values": torch.randn(ROWS * 16, size, generator=g),
                    "image_grid_thw": torch.tensor([[1, 4, 4]] * ROWS),
                },
            )
            return
        frames = _size(config, "num_frames", default=2)
        for before in dict.fromkeys([(ROWS,), (ROWS, 1), (ROWS, frames), (ROWS, 3)]):
            shape = (*before, channels, side, side)
            for says_size in (False, True) if self.has("image_sizes") else (False,):

                def draw(
                    generator: torch.Generator, shape: Any = shape, says_size: bool = says_size
                ) -> Batch:
                    made: Batch = {name: torch.randn(shape, generator=generator)}
                    if says_size:
                        made["image_sizes"] = torch.tensor([[side, side]] * ROWS)
                    return made

                yield f"{name} {list(shape)}{', image_sizes' if says_size else ''}", draw

    def _sounds(self) -> Iterator[tuple[str, Callable[[torch.Generator], Batch]]]:
        config = self._config
        bands = _size(
            config, "num_mel_bins", "feature_size", "input_feat_per_channel", "n_mels", default=80
        )
        frames = 2 * _size(config, "max_source_positions", default=0) or _FRAMES
        frames = _size(config, "max_length", default=frames) if "ast" in _type(config) else frames
        shapes: list[tuple[str, tuple[int, ...]]] = []
        for name in ("input_features", "input_values", "audio_values"):
            if not self.has(name):
                continue
            samples = [(ROWS, _SAMPLES), (ROWS, 1, _SAMPLES)]
            spectra = [(ROWS, bands, frames), (ROWS, frames, bands)]
            both = [*spectra, *samples] if name == "input_features" else [*samples, *spectra]
            shapes += [(name, shape) for shape in both]
        for name, shape in shapes:

            def draw(generator: torch.Generator, name: str = name, shape: Any = shape) -> Batch:
                made: Batch = {name: torch.randn(shape, generator=generator)}
                length = max(shape[1:])
                for mask in _MASKS[:2]:
                    if self.has(mask):
                        made[mask] = torch.ones(ROWS, length, dtype=torch.long)
                return made

            yield f"{name} {list(shape)}", draw

    # -- Labels ---------------------------------------------------------------------------------

    def labels(self) -> Iterator[tuple[str, Callable[[torch.Generator, Batch], Any]]]:
        """Labels for a batch, then none: the loss is then a function of the outputs."""
        if self.has("labels"):
            yield from self._labels(type(self._model).__name__)
        yield "", lambda generator, made: None

    def _labels(self, model: str) -> Iterator[tuple[str, Callable[[torch.Generator, Batch], Any]]]:
        number, side = self._config.num_labels, _side(self._config)
        if "Classification" in model:
            yield "classes", lambda g, _: torch.randint(number, (ROWS,), generator=g)
        elif "Segmentation" in model:
            yield (
                "classes of points",
                lambda g, _: torch.randint(number, (ROWS, side, side), generator=g),
            )
        elif "Depth" in model:
            yield "depths", lambda g, _: torch.rand(ROWS, side, side, generator=g)
        elif "Detection" in model:
            yield "boxes", lambda g, _: [_boxes(g, number) for _ in range(ROWS)]
        elif "CTC" in model:
            yield "words", lambda g, _: self.words(g, 6)
        else:
            yield "labels", self._next_words

    def _next_words(self, generator: torch.Generator, made: Batch) -> torch.Tensor:
        ids = made.get("input_ids")
        if ids is None or self._config.is_encoder_decoder:
            target = self.words(generator, 12)
            target[1, -3:] = _IGNORED
            return target
        mask = made.get("attention_mask", torch.ones_like(ids)).bool()
        return ids.masked_fill(~mask | (ids >= _LAST_WORD), _IGNORED)


def _boxes(generator: torch.Generator, number: int) -> dict[str, torch.Tensor]:
    return {
        "class_labels": torch.randint(number, (2,), generator=generator),
        "boxes": 0.3 + 0.2 * torch.rand(2, 4, generator=generator),
    }


def _is_text(labels: Any) -> bool:
    return isinstance(labels, torch.Tensor) and labels.ndim == 2


def _every(config: Any) -> Iterator[Any]:
    """A configuration and those within it."""
    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PretrainedConfig):
            yield from _every(value)


def _size(config: PretrainedConfig, *names: str, default: int) -> int:
    """A size that a configuration, or one within it, has under one of these names."""
    for one in _every(config):
        for name in names:
            try:
                value = getattr(one, name, None)
            except Exception:  # of those that differ from layer to layer
                continue
            if isinstance(value, list | tuple) and value:
                value = value[-1]
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return default


def _side(config: PretrainedConfig) -> int:
    return _size(config, "image_size", "img_size", "input_size", default=64)


def _token(config: PretrainedConfig) -> int | None:
    """What stands for a picture, or a sound, in a text."""
    for name in ("image_token_id", "image_token_index", "audio_token_id", "audio_token_index"):
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    return None


def _type(config: Any) -> str:
    return str(getattr(config, "model_type", ""))
