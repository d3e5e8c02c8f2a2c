# SPDX-License-Identifier: Apache-2.0
"""Parameters of a model that was made without memory, from the files of a saved one.

`SavedWeights` reads them.

A model whose parameters are on PyTorch's meta device takes no memory. `parameter_offload.py` fills
the parameters of one unit, which then leaves for its tier, and goes on with the next unit: so a
model comes to a tier that is larger than memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from megatron.offload.device.device import Device
from megatron.offload.errors import PARAMETERS_PREFIX, ConfigurationError
from megatron.offload.parameters.weight_codec import WeightCodec
from megatron.offload.parameters.weight_files import SavedTensor, WeightFiles


class SavedWeights:
    """The saved values of a model's parameters.

    Args:
        model: with parameters on the meta device, all of which the files must have.
        path: a folder with safetensors files, or one of these.
        in_place: layers are read there; then no parameter has to be on the meta device.

    Raises:
        ConfigurationError: the model or the files cannot work; says why.
        OSError: a file cannot be read.
    """

    def __init__(self, model: torch.nn.Module, path: Path, *, in_place: bool = False) -> None:
        files = WeightFiles(path, str(getattr(model, "base_model_prefix", "")))
        self.path, self.in_place = path, in_place
        self._filled: list[torch.nn.Parameter] = []
        self._saved: dict[torch.nn.Parameter, SavedTensor] = {}
        names: dict[torch.nn.Parameter, list[str]] = {}  # a tied one has several
        for name, param in model.named_parameters(remove_duplicate=False):
            names.setdefault(param, []).append(name)
        for param, of_param in names.items():
            if param.is_meta or (in_place and any(map(files.has, of_param))):
                self._saved[param] = _saved(files, of_param, param)
        if not in_place and not self._saved:
            raise _refusal(
                "weights= fills parameters without memory, and this model has none; make it under "
                "accelerate.init_empty_weights(), give in_place=True to read frozen layers where "
                "they are, or leave weights= out"
            )
        self.has_empty = any(param.is_meta for param in self._saved)
        if self.has_empty:
            _fill_buffers(model, files)

    def fill(self, params: Iterable[torch.nn.Parameter]) -> None:
        """Gives those of some parameters that have no memory theirs, on the CPU, and their values.

        Raises:
            ConfigurationError: other code keeps a parameter from being filled.
            OSError: a file cannot be read.
        """
        for param in params:
            if param.is_meta:
                value = self._saved[param].read().to(param.dtype)
                self._filled.append(param)
                _become(param, value)

    def take_back(self) -> None:
        """What was filled has no memory and no values any more, as before."""
        while self._filled:
            param = self._filled.pop()
            _become(param, torch.empty(param.shape, dtype=param.dtype, device="meta"))

    def places(self, params: Sequence[torch.nn.Parameter]) -> list[SavedTensor] | None:
        """Where frozen parameters can be read as they are; None: they cannot."""
        if not self.in_place:
            return None
        found = [self._saved.get(param) for param in params]
        known = [
            one
            for one, param in zip(found, params, strict=True)
            if one is not None and one.dtype == param.dtype and not param.requires_grad
        ]
        return known if len(known) == len(params) else None

    def check_in_place(
        self,
        places: Sequence[Sequence[SavedTensor] | None],
        codec: WeightCodec | None,
        device: Device,
    ) -> None:
        """Raises ConfigurationError if no unit can be read where it is, by its `places`."""
        if not self.in_place:
            return
        if not device.is_host:
            raise _refusal(
                "in_place=True is for layers that compute on the CPU; leave it out, and they are "
                "written to the directory once"
            )
        if codec is not None:
            raise _refusal(
                f"in_place=True reads whole values, and --parameter-codec {codec.name} is for "
                "fewer bits; give one of the two"
            )
        if not any(places):
            raise _refusal(
                "in_place=True is for layers that are frozen as a whole and saved in their own "
                "type, and none is; freeze the model before (requires_grad_(False)), or leave it "
                "out"
            )


def _become(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Gives a parameter other memory; it stays the object that modules and ties refer to."""
    filled = torch.nn.Parameter(value, requires_grad=param.requires_grad)
    vars(filled).update(vars(param))  # marks that others have put on it
    try:
        torch.utils.swap_tensors(param, filled)
    except RuntimeError as error:  # a weak reference, a graph
        raise _refusal(
            f"a parameter of shape {list(param.shape)} cannot be filled ({error}); call "
            "offload_parameters before other code uses the model"
        ) from None


def _fill_buffers(model: torch.nn.Module, files: WeightFiles) -> None:
    """Takes persistent buffers from the files, as `load_state_dict` does.

    Raises:
        ConfigurationError: one is on the meta device, or of another shape.
        OSError: a file cannot be read.
    """
    for prefix, module in model.named_modules():
        for own, buffer in module._buffers.items():
            name = f"{prefix}.{own}".lstrip(".")
            if buffer is None:
                continue
            if own not in module._non_persistent_buffers_set and files.has(name):
                value = _saved(files, [name], buffer).read()
                if not buffer.is_meta:
                    buffer.data.copy_(value)
                    continue
                module._buffers[own] = value.to(buffer.dtype)
            elif buffer.is_meta:
                raise _refusal(
                    f"the buffer {name} is on the meta device, and no file has it; make the model "
                    "under accelerate.init_empty_weights(), which leaves buffers in memory"
                )


def _saved(files: WeightFiles, names: Sequence[str], like: torch.Tensor) -> SavedTensor:
    name = next(filter(files.has, names), None)
    if name is None:
        raise _refusal(
            f"{names[0]} is on the meta device, and {files.path} has no tensor of this name; give "
            "the folder of this model, add adapters after offload_parameters, and call "
            "model.tie_weights() before it if the model has ties; a model whose weights "
            "transformers renames or joins when it loads them needs from_pretrained"
        )
    saved = files[name]
    if saved.shape != tuple(like.shape):
        raise _refusal(
            f"{name} has shape {list(like.shape)}, and in {saved.path} {list(saved.shape)}; give "
            "the folder of this model"
        )
    if saved.dtype is None or saved.dtype.is_floating_point != like.is_floating_point():
        raise _refusal(
            f"{name} is saved in {saved.path} in a type that its layer does not compute in; a "
            "quantized model needs from_pretrained"
        )
    return saved


def _refusal(sentence: str) -> ConfigurationError:
    return ConfigurationError(PARAMETERS_PREFIX + sentence)
