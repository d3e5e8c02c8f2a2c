# SPDX-License-Identifier: Apache-2.0
"""A model of transformers from its configuration, without weights: `Architecture`.

Models are made on the meta device, so that one of 70 billion parameters takes no memory.
transformers and peft are imported here alone, when a model is made.

Note [Fewer layers]
The bytes of a model whose layers are alike grow by the same with each layer, in every phase of a
step. So two models with few layers say all of one with many: see `step.py`. Layers are alike if
they are of one class, have parameters of the same shapes and are of one type in the configuration
(`layer_types`); other models are made as they are.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.offload.documents import FAULTS, reading
from megatron.offload.errors import ConfigurationError
from megatron.offload.integration.torch.layers import find_layers
from megatron.offload.packages import check_packages

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_FILE = "config.json"
_ADVICE = "give the config.json of a model of transformers, or its folder"


@dataclass(frozen=True)
class Adapters:
    """LoRA adapters, of which alone the parameters are trained.

    Attributes:
        rank: of each.
        targets: names of the modules that get one, or `all-linear`; None: those that peft knows for
            the model.
    """

    rank: int
    targets: tuple[str, ...] | str | None = None


class Architecture:
    """What a configuration describes.

    Attributes:
        name: of the model, for people.
        num_layers: of the whole model.
        layers_are_alike: fewer of them can stand for all.
        trained_sizes: bytes of each parameter that gets a gradient, in the order of the model.

    Args:
        source: a configuration of transformers, a file or folder that has one, or a hub's name.
        dtype: of the weights: `bf16` or `fp32`.
        adapters: None: all parameters are trained.

    Raises:
        ConfigurationError: there is no such configuration, or no language model that it describes.
    """

    def __init__(self, source: Any, dtype: str = "bf16", adapters: Adapters | None = None) -> None:
        check_packages("megatron-offload estimate", "transformers", *(["peft"] * bool(adapters)))
        self._config = source if hasattr(source, "to_dict") else _read(str(source))
        self._dtype = DTYPES[dtype]
        self._adapters = adapters
        self.name = _name(self._config, source)
        whole = self.make()
        layers = list(find_layers([whole]))
        self.num_layers = len(layers)
        self.layers_are_alike = self._are_alike(layers)
        self.trained_sizes = tuple(one.nbytes for one in whole.parameters() if one.requires_grad)

    def make(self, num_layers: int | None = None) -> Any:
        """The model on the meta device, in training mode; of so many layers, or of all."""
        config = copy.deepcopy(self._config)
        if num_layers is not None:
            _shorten(config, num_layers)
        kind = _class_of(config)
        with torch.device("meta"):
            model = kind(config)
        model.to(self._dtype)
        if self._adapters is not None:
            model = _adapted(model, self._adapters)
        return model.train()

    def inputs(self, batch: int, sequence: int) -> dict[str, torch.Tensor]:
        """What a step is called with: `input_ids` and `labels`, [batch, sequence]."""
        longest = getattr(self._config, "max_position_embeddings", None)
        learned = getattr(self._config, "position_embedding_type", "") == "absolute"
        if longest and sequence > longest and (learned or "gpt2" in self._config.model_type):
            raise ConfigurationError(
                f"--sequence {sequence} is more than the {longest} positions that {self.name} has; "
                "give a shorter one"
            )
        tokens = torch.zeros((batch, sequence), dtype=torch.int64, device="meta")
        return {"input_ids": tokens, "labels": tokens}

    def _are_alike(self, layers: Sequence[torch.nn.Module]) -> bool:
        text = _text_part(self._config)
        kinds = getattr(text, "layer_types", None)
        if kinds and len(set(kinds)) > 1:
            return False
        if getattr(text, "num_hidden_layers", None) != len(layers):
            return False
        looks = {
            (type(layer), tuple((tuple(one.shape), one.dtype) for one in layer.parameters()))
            for layer in layers
        }
        return len(looks) == 1


def _read(source: str) -> Any:
    """A configuration from a file, a folder or a hub."""
    import transformers

    path = Path(source)
    if path.is_dir():
        path = path / _FILE
        if not path.is_file():
            raise ConfigurationError(f"{source} has no {_FILE}; {_ADVICE}")
    if path.is_file():
        with reading(f"{path} is no configuration of a model", _ADVICE):
            try:
                return transformers.AutoConfig.from_pretrained(str(path))
            except FAULTS:
                raise
            except Exception as error:  # of checks that a configuration makes of its own fields
                raise ValueError(str(error).strip().replace("\n", " ")[:160]) from None
    if path.suffix == ".json" or source.startswith((".", "/", "~")):
        raise ConfigurationError(f"there is no {source}; {_ADVICE}")
    try:
        return transformers.AutoConfig.from_pretrained(source)
    except Exception as error:  # of the hub's client, and of what it calls, any kind
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigurationError(
            f"{source} is neither a folder nor a file here, and its configuration could not be "
            f"fetched from the hub ({reason[:120]}); download the model's config.json and give its "
            "path"
        ) from None


def _name(config: Any, source: Any) -> str:
    architectures = getattr(config, "architectures", None) or []
    of_file = Path(str(source)).name if isinstance(source, str | Path) else ""
    if of_file == _FILE:
        of_file = Path(str(source)).resolve().parent.name
    return of_file or (architectures[0] if architectures else str(config.model_type))


def _class_of(config: Any) -> Any:
    """The class of a language model: the one that the configuration names, if it has a loss."""
    import transformers

    if getattr(config, "is_encoder_decoder", False):
        raise ConfigurationError(
            f"a {config.model_type} has an encoder and a decoder, and estimate knows causal and "
            "masked language models; measure it with your script: megatron-offload longest --script"
        )
    for name in getattr(config, "architectures", None) or []:
        kind = getattr(transformers, name, None)
        if kind is not None and name.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM")):
            return kind
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForMaskedLM):
        kind = auto._model_mapping.get(type(config), None)
        if kind is not None:
            return kind[0] if isinstance(kind, tuple | list) else kind
    raise ConfigurationError(
        f"a {config.model_type} is no causal or masked language model of transformers, of which "
        "estimate knows how a step is called; give the configuration of one"
    )


def _text_part(config: Any) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _shorten(config: Any, num_layers: int) -> None:
    """Gives a configuration fewer layers, and what it says of each of them."""
    text = _text_part(config)
    before = text.num_hidden_layers
    text.num_hidden_layers = num_layers
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == before:
            setattr(text, name, value[:num_layers])


def _adapted(model: Any, adapters: Adapters) -> Any:
    import peft

    settings: dict[str, Any] = {"r": adapters.rank}
    if adapters.targets is not None:
        names = adapters.targets
        settings["target_modules"] = names if isinstance(names, str) else list(names)
    try:
        return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    except ValueError as error:
        raise ConfigurationError(
            f"peft cannot put adapters on this model ({str(error).splitlines()[0][:160]}); name "
            "its modules with --lora-targets"
        ) from None
