# SPDX-License-Identifier: Apache-2.0
"""Parameters of a model that was made without memory, from the files of a saved one.

`SavedWeights` reads them.

A model whose parameters are on PyTorch's meta device takes no memory. `parameter_offload.py` fills
the parameters of one unit, which then leaves for its tier, and goes on with the next unit: so a
model comes to a tier that is larger than memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from megatron.offload.errors import PARAMETERS_PREFIX, ConfigurationError
from megatron.offload.parameters.weight_files import SavedTensor, WeightFiles


class SavedWeights:
    """The saved values of a model's parameters that are on the meta device.

    Args:
        model: with such parameters.
        path: a folder with safetensors files, or one of these.

    Raises:
        ConfigurationError: the model or the files cannot work; says why.
        OSError: a file cannot be read.
    """

    def __init__(self, model: torch.nn.Module, path: Path) -> None:
        files = WeightFiles(path)
        self._saved: dict[torch.nn.Parameter, SavedTensor] = {}
        for name, param in model.named_parameters():
            if param.is_meta:
                self._saved[param] = _saved(files, name, param)
        if not self._saved:
            raise _refusal(
                "weights= fills parameters without memory, and this model has none; make it under "
                "accelerate.init_empty_weights(), or leave weights= out"
            )
        for name, buffer in model.named_buffers():
            if buffer.is_meta:
                raise _refusal(
                    f"the buffer {name} is on the meta device, and no file has it; make the model "
                    "under accelerate.init_empty_weights(), which leaves buffers in memory"
                )

    def fill(self, params: Iterable[torch.nn.Parameter]) -> None:
        """Gives those of some parameters that have no memory theirs, on the CPU, and their values.

        Raises:
            OSError: a file cannot be read.
        """
        for param in params:
            saved = self._saved.pop(param, None)
            if saved is not None:
                value = saved.read().to(param.dtype)
                # It stays the object that modules, ties and optimizers refer to.
                filled = torch.nn.Parameter(value, requires_grad=param.requires_grad)
                torch.utils.swap_tensors(param, filled)


def _saved(files: WeightFiles, name: str, param: torch.nn.Parameter) -> SavedTensor:
    try:
        saved = files[name]
    except KeyError:
        raise _refusal(
            f"{name} is on the meta device, and {files.path} has no tensor of this name; give the "
            "folder of this model, add adapters after offload_parameters, and call "
            "model.tie_weights() before it if the model has ties"
        ) from None
    if saved.shape != tuple(param.shape):
        raise _refusal(
            f"{name} has shape {list(param.shape)}, and in {saved.path} {list(saved.shape)}; give "
            "the folder of this model"
        )
    return saved


def _refusal(sentence: str) -> ConfigurationError:
    return ConfigurationError(PARAMETERS_PREFIX + sentence)
