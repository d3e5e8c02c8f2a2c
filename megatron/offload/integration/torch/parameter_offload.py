# SPDX-License-Identifier: Apache-2.0
"""Parameters of a model's layers on SSDs or in host memory: `offload_parameters`.

Hooks of layers say which unit computes, in forward and in backward; `parameters/window.py` brings
it into memory. An optimizer whose states are offloaded as well (`offload_optimizer`) updates
parameters unit by unit; any other has all of them in memory during its step (`optimizer_steps.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, Unpack

import torch
from torch.nn.parameter import is_lazy

from megatron.offload.device.open import open_device
from megatron.offload.errors import PARAMETERS_PREFIX, ConfigurationError
from megatron.offload.integration.hook import OutsideOfGraphs
from megatron.offload.integration.open_parameters import unit_of
from megatron.offload.integration.open_streams import OPEN, Handle
from megatron.offload.integration.torch.backward_passes import BackwardPasses, hook_first
from megatron.offload.integration.torch.layer_parameters import LayerParameters, adapters_of
from megatron.offload.integration.torch.layers import find_layers, params_outside
from megatron.offload.integration.torch.optimizer_steps import OptimizerSteps
from megatron.offload.integration.torch.passes import computed_in, tensors_in
from megatron.offload.integration.torch.ranks import local_world_size
from megatron.offload.integration.torch.refusals import check_models, check_parts
from megatron.offload.integration.torch.saved_weights import SavedWeights
from megatron.offload.integration.torch.untold_backward import check_gradients
from megatron.offload.keywords import ParameterMode, ParameterSettings
from megatron.offload.layer_major.config import LayerMajorConfig
from megatron.offload.layer_major.units import units_of
from megatron.offload.parameters.config import ParametersConfig
from megatron.offload.parameters.file_tier import FileTier
from megatron.offload.parameters.gradients import Gradients
from megatron.offload.parameters.open import open_parameter_tiers
from megatron.offload.parameters.parameter_places import Part
from megatron.offload.parameters.unit import can_take_place
from megatron.offload.parameters.unit_encoding import encoded_bytes, moves_encoded
from megatron.offload.parameters.weight_codec import CODECS
from megatron.offload.parameters.window import ParameterWindow
from megatron.offload.sizes import format_size
from megatron.offload.values import parse_path


class ParameterOffload(Handle):
    """The parameters of a model's layers, which wait on a tier. Made by `offload_parameters`.

    Args:
        layers: of the model, with their units, counted from 0 in the order in which they run.
        config: with mode `off` nothing is touched.
        device: where layers compute. None: where their parameters are.
        parts: of parameters, which come and go with them.
        gradients: opens the offload of gradients, once the window has all units; None: those of
            these parameters.
        gradient_bytes: of all of them.
        staying: parameters that are in no unit, though a layer has them.
        saved: the values of parameters that have no memory yet, or where to read them; None: all
            have memory, and are written.

    Raises:
        ConfigurationError: a parameter cannot move, or the tiers cannot be opened.
    """

    def __init__(
        self,
        layers: Mapping[torch.nn.Module, int],
        config: ParametersConfig,
        device: torch.device | str | None = None,
        parts: Mapping[torch.Tensor, Part] | None = None,
        gradients: Callable[[ParameterWindow], Gradients] | None = None,
        gradient_bytes: int | None = None,
        staying: Set[torch.nn.Parameter] = frozenset(),
        saved: SavedWeights | None = None,
    ) -> None:
        self.window: ParameterWindow | None = None
        self._undo: list[Callable[[], None]] = []
        if not config.enabled:
            return
        check_parts(layers)
        units = _params_of(layers, staying, is_filled=saved is not None)
        computes_on = open_device(_device_of(units, device), PARAMETERS_PREFIX)
        codec = CODECS.get(config.codec)
        sizes = [sum(param.nbytes for param in params) for params in units]
        moved = sizes if codec is None else [encoded_bytes(params, codec) for params in units]
        if codec is not None and not any(map(moves_encoded, units)):
            raise _refusal(
                f"--parameter-codec {codec.name} is for layers whose matrices are frozen, but for "
                "adapters of at most a sixteenth of their bytes, and there is none; freeze the "
                "base model (requires_grad_(False)) and add adapters after offload_parameters, or "
                "leave it off"
            )
        if saved is not None:
            saved.check_in_place(units, codec)
        places = [None if saved is None else saved.places(params) for params in units]
        moved = [0 if place else size for place, size in zip(places, moved, strict=True)]
        gradient_sizes: list[int] = []
        if config.offloads_gradients:
            gradient_sizes = sizes if gradient_bytes is None else [gradient_bytes]
        tiers = open_parameter_tiers(
            config,
            computes_on,
            num_bytes=_with_pages(moved) + _with_pages(gradient_sizes),
            largest_bytes=max(moved) + _SLACK,
            num_local_ranks=local_world_size(),
        )
        files = None if saved is None or not saved.in_place else FileTier(saved.path, computes_on)
        live = config.live_units
        self.window = window = ParameterWindow(tiers, computes_on, live, codec, files)
        OPEN.parameters.add(window)
        try:
            for number, params in enumerate(units):
                if saved is not None:
                    saved.fill(params)
                window.add(f"unit {number + 1} of {len(units)}", params, parts, places[number])
            if saved is not None:
                saved.warn_of_written(window.units, files)
            if config.offloads_gradients:
                window.gradients = (gradients or _of_parameters)(window)
        except BaseException:
            window.close(restore=saved is None or not saved.has_empty)  # it may not fit into memory
            raise
        passes = BackwardPasses(window)
        steps = OptimizerSteps(window)
        self._undo += [steps.close, *check_gradients(window.units)]
        for layer, number in layers.items():
            self._hook(layer, number, steps, passes)

    @property
    def statistics(self) -> dict[str, int | float]:
        """What moved since the beginning, in bytes, and what compute has waited for, in seconds."""
        if self.window is None:
            return {}
        every = [tier.statistics for tier in self.window.tiers]
        return {
            "parameter_bytes": self.window.num_bytes,
            "moved_bytes": self.window.moved_bytes,
            "memory_bytes": self.window.memory_bytes,
            "peak_bytes": self.window.copies.peak_bytes,
            "read_bytes": sum(one.reads.total_bytes for one in every),
            "written_bytes": sum(one.writes.total_bytes for one in every),
            "stall_s": self.window.copies.stall_s,
        } | self._gradient_statistics

    @property
    def _gradient_statistics(self) -> dict[str, int | float]:
        gradients = self.window.gradients if self.window is not None else None
        if gradients is None:
            return {}
        return {
            "gradient_memory_bytes": gradients.memory_bytes,
            "gradient_peak_bytes": gradients.peak_bytes,
            "gradient_stall_s": gradients.copies.stall_s,
        }

    def report(self) -> str:
        """A line for people."""
        if self.window is None:
            return "parameters are in memory"
        found = self.statistics
        gradients, waited = "", f"waited {self.window.copies.stall_s:.3f} s"
        if self.window.gradients is not None:
            peak_bytes = int(found["gradient_peak_bytes"])
            gradients = f", and {format_size(peak_bytes)} of their gradients"
            waited += f", for gradients {found['gradient_stall_s']:.3f} s"
        encoded = ""
        if self.window.moved_bytes < self.window.num_bytes:
            encoded = f", encoded to {format_size(self.window.moved_bytes)},"
        return (
            f"parameters: {format_size(int(found['parameter_bytes']))} of layers{encoded} on "
            f"{', '.join(map(str, self.window.tiers))}, at most "
            f"{format_size(int(found['peak_bytes']))} of them in memory{gradients}; read "
            f"{format_size(int(found['read_bytes']))}, written "
            f"{format_size(int(found['written_bytes']))}, {waited}"
        )

    def expose(self) -> None:
        """Shows all parameters in their places until the next forward pass or step.

        A parameter that is touched while it is away shows its unit by itself; this shows all units
        at once, as `state_dict()` and `load_state_dict()` of the model and of its parts do.
        """
        if self.window is not None:
            self.window.expose()

    def bring_gradients(self) -> None:
        """Reads all gradients back into memory, where they stay until the optimizer's step.

        Call it before code that looks at gradients; `clip_grad_norm_` does not need it.

        Raises:
            LostStateError: some could not be read back.
        """
        if self.window is not None and self.window.gradients is not None:
            self.window.gradients.bring()

    def close(self, *, restore: bool = True) -> None:
        """Leaves the model as it was.

        Args:
            restore: brings all back to memory before; without, those that are away stay NaN.

        Raises:
            LostStateError: some could not be read back. They are NaN: do not save the model.
        """
        while self._undo:
            self._undo.pop()()
        window, self.window = self.window, None
        if window is not None:
            OPEN.parameters.discard(window)
            window.close(restore=restore)

    # -- Hooks ----------------------------------------------------------------------------------

    def bring_before(self, module: torch.nn.Module, number: int) -> None:
        """Brings a unit before a module around it is called.

        `torch.nn.TransformerEncoder` looks at the parameters of its first layer, and takes another
        path in evaluation, with other bits, where one is no plain tensor.
        """
        window = self.window
        if window is not None:

            def before(*_: Any) -> None:
                window.use(number, 1)

            hook = module.register_forward_pre_hook(OutsideOfGraphs(before))
            self._undo.append(hook.remove)

    def _hook(
        self,
        layer: torch.nn.Module,
        number: int,
        steps: OptimizerSteps,
        passes: BackwardPasses,
    ) -> None:
        window = self.window
        assert window is not None
        params = LayerParameters(layer, window.has)
        # Of the calls under way; a layer may put its results into what it was called with.
        given: list[list[torch.Tensor]] = []

        def before_forward(_: torch.nn.Module, args: Any, kwargs: Any) -> None:
            given.append(list(tensors_in((args, kwargs))) if torch.is_grad_enabled() else [])
            window.check_whole()
            params.check()
            steps.forget()
            passes.enter_forward(number)

        def before_backward(_: torch.Tensor) -> None:
            window.check_backward()
            if not window.units:  # closed since, and all are in memory
                return
            if window.gradients is not None:
                window.gradients.check_is_told()
            passes.enter_backward(number)
            window.units[number].note_backward()

        def after_forward(_: torch.nn.Module, __: Any, result: Any) -> None:
            if not torch.is_grad_enabled():
                return
            # What a layer hands on (T5's position bias) gets its gradient in an earlier layer.
            known = set(map(id, given[-1]))
            for one in computed_in(result):
                if id(one) not in known:
                    hook_first(one, before_backward)

        def end_forward(*_: Any) -> None:
            if given:
                given.pop()
            passes.leave_forward(number)

        def before_state_dict(*_: Any) -> None:
            params.check()
            window.expose()

        def before_load_state_dict(
            module: torch.nn.Module, state: Any, prefix: str, *_: Any
        ) -> None:
            params.check()
            if any(prefix + name in state for name, _ in module.named_parameters(recurse=False)):
                window.show_to_load(number)

        hooks = [
            layer.register_forward_pre_hook(OutsideOfGraphs(before_forward), with_kwargs=True),
            layer.register_forward_hook(OutsideOfGraphs(after_forward)),
            layer.register_forward_hook(OutsideOfGraphs(end_forward), always_call=True),
            layer.register_load_state_dict_post_hook(OutsideOfGraphs(window.end_load)),
        ]
        for module in layer.modules():
            saving, loading = map(OutsideOfGraphs, (before_state_dict, before_load_state_dict))
            hooks.append(module.register_state_dict_pre_hook(saving))
            hooks.append(module.register_load_state_dict_pre_hook(loading))
        self._undo += [hook.remove for hook in hooks]


def offload_parameters(
    model: torch.nn.Module,
    directory: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | None = None,
    *,
    units: int | None = None,
    layers: Iterable[str | type[torch.nn.Module]] | None = None,
    mode: ParameterMode | None = None,
    device: torch.device | str | None = None,
    weights: str | os.PathLike[str] | None = None,
    in_place: bool = False,
    **settings: Unpack[ParameterSettings],
) -> ParameterOffload:
    """Keeps the parameters of a model's layers on SSDs or in host memory while others compute.

        offload_parameters(model, "/mnt/nvme0")

    Those of a unit of layers come in before it computes, in forward and in backward, and leave
    after it. With `LayerMajor` that is once a step in each direction and not once a micro-batch.
    Losses, gradients and weights stay the same, bit for bit.

    Args:
        model: not sharded. A weight that it has outside of layers too stays in memory.
        directory: an existing directory on an SSD, or several on different SSDs.
        units: of consecutive layers; None: each layer is one.
        layers: see `offload_activations`.
        mode: `ssd`, `host` or `tiered`. Default: `ssd` with a directory, `host` without one. `off`
            does nothing.
        device: where layers compute. Default: where they are. A model that does not fit on an
            accelerator is made on the CPU: `offload_parameters(model, ..., device="cuda")`, then
            `model.to("cuda")`, which moves what is outside of layers.
        weights: a folder with the safetensors files of a saved model, for a model that was made
            without memory (`accelerate.init_empty_weights()`): it is filled unit by unit.
        in_place: frozen layers are read where they are in `weights` and are not written; the files
            must stay as they are until `close()`.
        settings: any other field of `ParametersConfig` by its name: `live_units=3`;
            `gradients="on"`: with `LayerMajor`, those of these layers wait there too.

    Returns:
        A handle with `statistics`, `report()`, `expose()`, `bring_gradients()` and `close()`, also
        a context manager.

    Raises:
        ConfigurationError: the directory, a setting, the model or its files cannot work; says why.
        OSError: a file of `weights` cannot be read.
    """
    check_models((model,), PARAMETERS_PREFIX)
    with ParametersConfig.speaking_of_settings():
        config = ParametersConfig.of_door(directory, mode, settings).resolved()
        found = list(find_layers((model,), layers))
        if not found:
            raise _refusal("the model has no layers that repeat; name them with layers=")
        with LayerMajorConfig.speaking_of_settings():
            unit_of_layer = units_of(found, units)
        staying = set(params_outside(model, found)) | adapters_of(unit_of_layer)
        saved = None
        if weights is not None:
            saved = SavedWeights(model, parse_path(weights), in_place=in_place)
        elif in_place:
            raise _refusal("in_place=True reads layers where they are; say where with weights=")
        try:
            if saved is not None:
                saved.fill(list(model.parameters()) if not config.enabled else list(staying))
            handle = ParameterOffload(unit_of_layer, config, device, staying=staying, saved=saved)
        except BaseException:
            if saved is not None:
                saved.take_back()
            raise
    for module in model.modules():
        if isinstance(module, torch.nn.TransformerEncoder) and module.layers[0] in unit_of_layer:
            handle.bring_before(module, unit_of_layer[module.layers[0]])
    return handle


def _of_parameters(window: ParameterWindow) -> Gradients:
    units = [unit.params for unit in window.units]
    return Gradients(units, window.tiers, window.device, window.live_units)


_SLACK = 1 << 20  # bytes of a unit beyond its parameters: they are aligned, in whole pages


def _with_pages(sizes: Sequence[int]) -> int:
    return sum(sizes) + _SLACK * len(sizes)


def _params_of(
    layers: Mapping[torch.nn.Module, int], staying: Set[torch.nn.Parameter], *, is_filled: bool
) -> list[list[torch.nn.Parameter]]:
    """The parameters of each unit, but for those that stay.

    Args:
        layers: with their units.
        staying: in no unit.
        is_filled: parameters without memory get theirs before they leave.

    Raises:
        ConfigurationError: one of them cannot move.
    """
    units: list[dict[int, torch.nn.Parameter]] = [{} for _ in range(max(layers.values()) + 1)]
    owner: dict[int, int] = {}
    for layer, number in layers.items():
        for name, param in layer.named_parameters():
            if param in staying:
                continue
            if unit_of(param) >= 0:
                raise _refusal(f"{name} is offloaded already; close() the handle that has it")
            if owner.setdefault(id(param), number) != number:
                raise _refusal(f"{name} belongs to layers of two units; give fewer units")
            if is_lazy(param):
                raise _refusal(f"{name} of a lazy module has no shape; call the model once before")
            if type(param) is not torch.nn.Parameter or param.layout is not torch.strided:
                raise _refusal(
                    f"{name} is a {type(param).__name__}, and only plain parameters move: sharded "
                    "and quantized models keep their own; give a model in its own type"
                )
            if param.is_meta and not is_filled:
                raise _refusal(
                    f"{name} is on the meta device and has no values; give weights=, the folder of "
                    "the saved model"
                )
            if not (param.is_floating_point() or param.is_complex()):
                raise _refusal(f"{name} has type {param.dtype}, which has no NaN")
            units[number][id(param)] = param
    found = [list(params.values()) for params in units]
    if not all(found):
        raise _refusal("a unit has no parameters; give fewer units")
    return found


def _device_of(
    units: Iterable[Iterable[torch.nn.Parameter]], wanted: torch.device | str | None
) -> torch.device:
    """Where layers compute: the device that is wanted, or where all parameters are.

    Raises:
        ConfigurationError: parameters are on several devices, or cannot come to the one wanted.
    """
    found = {param.device for params in units for param in params if not param.is_meta}
    found = found or {torch.device("cpu")}  # all are filled there
    if wanted is None:
        if len(found) > 1:
            places = " and ".join(sorted(map(str, found)))
            raise _refusal(f"layers are on {places}; give device, where they compute")
        return found.pop()
    for one in sorted(found, key=str):
        if not can_take_place(one, wanted):
            raise _refusal(f"layers are on {one} and cannot be moved to {wanted} one by one; do it")
    return torch.device(wanted)


def _refusal(sentence: str) -> ConfigurationError:
    return ConfigurationError(PARAMETERS_PREFIX + sentence)
