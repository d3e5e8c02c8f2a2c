# SPDX-License-Identifier: Apache-2.0
"""Parameters of a model that was made without memory, from the files of a saved one.

`SavedWeights` reads them.

A model whose parameters are on PyTorch's meta device takes no memory. `parameter_offload.py` fills
the parameters of one unit, which then leaves for its tier, and goes on with the next unit: so a
model comes to a tier that is larger than memory.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from megatron.offload.errors import PARAMETERS_PREFIX, ConfigurationError
from megatron.offload.integration.torch.saved_values import SavedValue, SavedValues
from megatron.offload.parameters.unit import ParameterUnit
from megatron.offload.parameters.weight_codec import WeightCodec
from megatron.offload.parameters.weight_files import SavedPiece
from megatron.offload.tiers.tier import Tier

logger = logging.getLogger(__name__)


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
        files = SavedValues(model, path)
        self.path, self.in_place = path, in_place
        self._filled: list[torch.nn.Parameter] = []
        self._saved: dict[torch.nn.Parameter, SavedValue] = {}
        names: dict[torch.nn.Parameter, list[str]] = {}  # a tied one has several
        for name, param in model.named_parameters(remove_duplicate=False):
            names.setdefault(param, []).append(name)
        for param, of_param in names.items():
            if param.is_meta or (in_place and any(map(files.get, of_param))):
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
                value = _read(self._saved[param], param)
                self._filled.append(param)
                _become(param, value)

    def take_back(self) -> None:
        """What was filled has no memory and no values any more, as before."""
        while self._filled:
            param = self._filled.pop()
            _become(param, torch.empty(param.shape, dtype=param.dtype, device="meta"))

    def places(self, params: Sequence[torch.nn.Parameter]) -> list[Sequence[SavedPiece]] | None:
        """Of what in the files frozen parameters are made, as they are; None: they are not."""
        if not self.in_place or not _is_frozen(params):
            return None
        found = []
        for param in params:
            value = self._saved.get(param)
            pieces = () if value is None else value.pieces or ()
            is_as_saved = all(one.tensor.dtype == param.dtype for one in pieces)
            if not is_as_saved or sum(one.tensor.num_bytes for one in pieces) != param.nbytes:
                return None
            found.append(pieces)
        return found

    def check_in_place(
        self, units: Iterable[Iterable[torch.nn.Parameter]], codec: WeightCodec | None
    ) -> None:
        """Raises ConfigurationError if layers are to be read in place and none can be."""
        if not self.in_place:
            return
        if codec is not None:
            raise _refusal(
                f"in_place=True reads whole values, and --parameter-codec {codec.name} is for "
                "fewer bits; give one of the two"
            )
        if not any(map(_is_frozen, units)):
            raise _refusal(
                "in_place=True is for layers that are frozen as a whole, and none is; freeze the "
                "model before (requires_grad_(False)), or leave it out"
            )

    def warn_of_written(self, units: Sequence[ParameterUnit], files: Tier | None) -> None:
        """Says how many frozen units left for a tier because the files do not have their bytes."""
        frozen = [unit for unit in units if _is_frozen(unit.params)]
        written = [unit for unit in frozen if unit.tier is not files]
        if files is not None and written:
            logger.warning(
                "%s%d of %d frozen units are not read where they are: %s has other values, or has "
                "them in another type or order; they are written to a tier once",
                PARAMETERS_PREFIX,
                len(written),
                len(frozen),
                self.path,
            )


def _is_frozen(params: Iterable[torch.nn.Parameter]) -> bool:
    return not any(param.requires_grad for param in params)


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
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if hooks := getattr(param, name):  # autograd knows them of the memory that is gone
            setattr(param, name, hooks)


def _fill_buffers(model: torch.nn.Module, files: SavedValues) -> None:
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
            if own not in module._non_persistent_buffers_set and files.get(name) is not None:
                value = _read(_saved(files, [name], buffer), buffer)
                if not buffer.is_meta:
                    buffer.data.copy_(value)
                    continue
                module._buffers[own] = value
            elif buffer.is_meta:
                raise _refusal(
                    f"the buffer {name} is on the meta device, and no file has it; make the model "
                    "under accelerate.init_empty_weights(), which leaves buffers in memory"
                )


def _saved(files: SavedValues, names: Sequence[str], like: torch.Tensor) -> SavedValue:
    saved = next(filter(None, map(files.get, names)), None)
    if saved is None:
        raise _refusal(
            f"{names[0]} is on the meta device, and {files.path} has no tensor of this name; give "
            "the folder of this model, add adapters after offload_parameters, and call "
            "model.tie_weights() before it if the model has ties"
        )
    for tensor in saved.tensors:
        if tensor.dtype is None or tensor.dtype.is_floating_point != like.is_floating_point():
            raise _refusal(
                f"{names[0]} is saved in {tensor.path} in a type that its layer does not compute "
                "in; a quantized model needs from_pretrained"
            )
    if len(saved.tensors) == 1 and saved.pieces:
        _check_shape(saved, saved.tensors[0].shape, like, names[0])
    return saved


def _read(saved: SavedValue, like: torch.Tensor) -> torch.Tensor:
    """Raises ConfigurationError: the value has another shape; OSError: a file cannot be read."""
    value = saved.read(like.dtype)
    _check_shape(saved, value.shape, like, "a parameter")
    return value


def _check_shape(saved: SavedValue, shape: Sequence[int], like: torch.Tensor, name: str) -> None:
    if tuple(shape) != tuple(like.shape):
        raise _refusal(
            f"{name} has shape {list(like.shape)}, and in {saved.tensors[0].path} {list(shape)}; "
            "give the folder of this model"
        )


def _refusal(sentence: str) -> ConfigurationError:
    return ConfigurationError(PARAMETERS_PREFIX + sentence)
