# SPDX-License-Identifier: Apache-2.0
"""The front door for any PyTorch model: `offload_activations`, one line in a training script.

It checks the model and the settings, finds the layers and gives the handle. From then on the
model's forward hooks do the rest (`passes.py`).
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn, Unpack

import torch

from megatron.offload.activations.open import check_tiers
from megatron.offload.config import OffloadConfig
from megatron.offload.errors import ConfigurationError
from megatron.offload.integration.own_attributes import Replaced
from megatron.offload.integration.tiled_mlps import TiledMlps
from megatron.offload.integration.torch.causal_lm_loss import chunked_losses
from megatron.offload.integration.torch.layers import find_layers
from megatron.offload.integration.torch.measured_run import MeasuredRun
from megatron.offload.integration.torch.offload import ActivationOffload
from megatron.offload.integration.torch.ranks import local_world_size, rank
from megatron.offload.integration.torch.refusals import check_models, check_named
from megatron.offload.keywords import ActivationMode, ActivationSettings
from megatron.offload.machine import vector_math
from megatron.offload.planner.libraries import check_libraries
from megatron.offload.values import parse_path


def offload_activations(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    directory: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | None = None,
    *,
    mode: ActivationMode | None = None,
    layers: Iterable[str | type[torch.nn.Module]] | None = None,
    inside_graphs: bool = False,
    run_directory: str | os.PathLike[str] | None = None,
    metrics_file: str | os.PathLike[str] | None = None,
    **settings: Unpack[ActivationSettings],
) -> ActivationOffload:
    """Moves what a model saves for backward to SSDs or host memory while it trains.

        offload_activations(model, "/mnt/nvme0")

    is all that a training loop needs, before or after the model is wrapped or compiled. A step
    begins with the first forward pass that wants gradients and ends with its backward pass; passes
    without gradients are left alone. Losses, gradients and weights stay the same, bit for bit. It
    goes on until `close()` or the end of a `with` block.

    Args:
        model: any module, or several that train together: plain, or inside of
            DistributedDataParallel, FSDP, DeepSpeed's engine, `torch.compile`.
        directory: an existing directory on an SSD, or several on different SSDs.
        mode: `ssd`, `host`, `tiered` or `auto`, see docs/flags.md. Default: `ssd` with a directory,
            `host` without one. `off` does nothing, so that a script needs no second way.
        layers: what counts as a layer, for `auto`, statistics and error messages: classes, names of
            classes or patterns of module names such as `model.layers.*`. Default: modules of one
            class that stand in a ModuleList or Sequential.
        inside_graphs: what `torch.compile` makes of a forward pass moves its activations inside of
            its graphs; see docs/integrations.md. Of the codecs `int8` is for it.
        run_directory: with `auto`, where what was measured is written.
        metrics_file: gets a JSON line for each step of the first rank: its time, its peak memory,
            its loss and what moved; `megatron-offload report` makes a table of several.
        settings: any other field of `OffloadConfig` by its name; sizes as numbers or as text:
            `memory_budget_bytes="12GiB"`, `min_bytes="256KiB"`. `chunked_loss="auto"` is for causal
            language models of transformers: their loss over chunks of tokens, `tiled_mlp="auto"`
            runs MLPs over tiles of tokens (docs/long-sequences.md): neither is bit-identical.

    Returns:
        A handle with `statistics`, `summary()`, `report()` and `close()`, also a context manager.

    Raises:
        ConfigurationError: the directory, a setting or the model cannot work; says why.
        OSError: the metrics file cannot be made.
    """
    if isinstance(model, torch.nn.Module) or not isinstance(model, Iterable):
        models: tuple[torch.nn.Module, ...] = (model,)  # or something else: `check_models` names it
    else:
        models = tuple(model)
    check_models(models)
    vector_math.first_call()  # with mode `off` too, which others are compared with
    with OffloadConfig.speaking_of_settings():
        config = OffloadConfig.of_door(directory, mode, settings)
        measured = MeasuredRun.of_environment()
        if measured is not None:
            if measured.flags_file is not None:
                _tell(config, Path(measured.flags_file))
            config = measured.config(config)
            run_directory = measured.run_directory or run_directory
            metrics_file = measured.metrics_file or metrics_file
        config = config.resolved()
        found = find_layers(models, layers)
        if inside_graphs:
            _check_graphs(config)
        replaced: list[Replaced] = []
        if config.chunks_loss:
            replaced += chunked_losses(models, config.chunk_tokens)
        if config.tiles_mlps:
            replaced.append(TiledMlps(models, config.tile_tokens))
        if config.enabled:
            config.check_recompute_input(
                "give both or neither (what a checkpoint of the model's own keeps goes where "
                "everything goes)"
            )
            check_named(
                found.values(),
                offload_layers=config.offload_layers,
                recompute_layers=config.recompute_layers,
            )
            check_tiers(config, reserve_bytes=0, num_local_ranks=local_world_size())
            if config.plans:
                check_libraries("mode='auto'")
                if not found:
                    raise ConfigurationError(
                        "auto decides layer by layer, and this model has no modules that repeat; "
                        "name its layers with layers=, or use mode='ssd' or 'host'"
                    )
    offload = ActivationOffload(
        config,
        models,
        found,
        replaced=replaced,
        run_directory=None if run_directory is None else parse_path(run_directory),
        inside_graphs=inside_graphs,
    )
    if metrics_file is not None and rank() == 0:
        in_turns = measured is not None and measured.in_turns
        try:
            offload.log_steps(parse_path(metrics_file), in_turns=in_turns)
        except BaseException:  # the caller gets no handle to close
            offload.close()
            raise
    return offload


def _check_graphs(config: OffloadConfig) -> None:
    if config.codec not in ("off", "int8"):
        raise ConfigurationError(
            f"--activation-codec {config.codec} keeps sums in more bits than the rest, and within "
            "a compiled graph the two are not told apart; use int8 with inside_graphs"
        )
    try:
        from megatron.offload.integration.torch.compiled_graphs import has_seam

        is_known = has_seam()
    except ImportError:  # of a part that an older PyTorch lacks
        is_known = False
    if not is_known:
        raise ConfigurationError(
            f"inside_graphs is for PyTorch 2.11 and newer, and this is {torch.__version__}, which "
            "divides a graph elsewhere; drop it"
        )


def _tell(config: OffloadConfig, path: Path) -> NoReturn:
    """Writes the script's settings to the file and ends the script: the command wants no more of
    it."""
    settings = {spec.name: getattr(config, spec.name) for spec in dataclasses.fields(config)}
    lines = "\n".join(OffloadConfig.flags_of(settings)) + "\n"
    path.write_text(lines, errors="surrogateescape")  # names of directories are bytes
    sys.exit(0)
