# SPDX-License-Identifier: Apache-2.0
"""Parameters of Megatron's layers that wait on a tier change no bit, in checkpoints neither."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.offload.errors import ConfigurationError
from megatron.offload.integration.megatron import check_model_parameters, offload_model_parameters
from megatron.offload.parameters.config import ParametersConfig
from tests.support.launch import assert_same_bits, train
from tests.support.offload_flags import ssd

STEPS = 4
UNTIED = "--untie-embeddings-and-output-weights"
STATES = "--optimizer-state-offload ssd --optimizer-state-bucket 32KiB --optimizer-state-window 0B"
UNITS = f"{UNTIED} --layer-major-units auto"
LAYOUTS = {
    "fp32": (1, ""),
    "fp32, states": (1, STATES),
    "bf16, states, layer-major": (1, f"--bf16 {STATES} {UNITS}"),
    "bf16": (1, "--bf16"),
    "TP2, layer-major": (2, f"--tensor-model-parallel-size 2 --sequence-parallel {UNITS}"),
    "PP2xVPP2": (2, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
    "DP2, states": (2, STATES),
}
# The rest is left out unless --rare is given.
FAST = {"bf16, states, layer-major", "TP2, layer-major"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [pytest.param(one, marks=() if one in FAST else pytest.mark.rare) for one in LAYOUTS],
)
def test_parameters_that_move_change_no_bit(layout: str, tmp_path: Path) -> None:
    world_size, flags = LAYOUTS[layout]
    flags += f" --train-iters {STEPS} {ssd(tmp_path)}"
    expected = train(flags, world_size=world_size)
    found = train(flags, "--parameter-offload ssd", world_size=world_size)
    assert_same_bits(found, expected, STEPS)
    counted = found.metrics[-1]["parameters"]
    # A rank with two layers keeps both of them, but for the time of the optimizer's step.
    assert counted["read_bytes"] >= counted["parameter_bytes"] > 0
    table = re.search(r"memory of this rank .*\nweights .*", found.output)
    assert table is not None and not table[0].endswith("-")  # the column of SSDs


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ssd", pytest.param("host", marks=pytest.mark.rare)])
def test_checkpoints_have_them(mode: str, tmp_path: Path) -> None:
    """Evaluated and saved with parameters away, gone on from without, and the other way round."""
    flags = f"{ssd(tmp_path)} --eval-interval 2 --eval-iters 1 --train-iters 4"
    moved = f"--parameter-offload {mode}"
    whole = train(flags)
    for first, then in ((moved, ""), ("", moved)):
        folder = tmp_path / (first and "moved")
        train(flags, first, f"--save {folder} --exit-interval 2")
        rest = train(flags, then, f"--load {folder}")
        assert rest.model == whole.model
        assert rest.values("loss") == whole.values("loss")[2:]


def test_a_pipeline_stage_without_layers_keeps_its_parameters(tmp_path: Path) -> None:
    """As `pipeline_model_parallel_layout` makes them; a whole model without layers is refused."""
    chunk: Any = torch.nn.Linear(2, 2)
    chunk.config = SimpleNamespace(pipeline_model_parallel_size=2)
    config = ParametersConfig(mode="ssd", directories=(tmp_path,))
    offload = offload_model_parameters(config, [chunk], optimizer=None)
    assert offload.statistics == {} and offload.summary() == ""
    offload.close()
    chunk.config.pipeline_model_parallel_size = 1
    with pytest.raises(ConfigurationError, match=r"^parameters: .* use --parameter-offload off"):
        offload_model_parameters(config, [chunk], optimizer=None)


@pytest.mark.parametrize(
    "settings", [{"cuda_graph_impl": "local"}, {"enable_cuda_graph": True}], ids=str
)
def test_captured_graphs_are_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    config = ParametersConfig(mode="ssd", directories=(tmp_path,))
    with pytest.raises(ConfigurationError, match=r"^parameters: .*cuda_graph.* cannot be"):
        check_model_parameters(config, SimpleNamespace(**settings))
    check_model_parameters(ParametersConfig(), SimpleNamespace(**settings))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("log_params_norm", True),
        ("check_weight_hash_across_dp_replicas_interval", 10),
        ("save_params_interval", 10),
        ("qk_clip", True),
        ("async_save", True),
    ],
)
def test_what_looks_at_parameters_between_steps_is_refused(
    name: str, value: Any, tmp_path: Path
) -> None:
    config = ParametersConfig(mode="ssd", directories=(tmp_path,))
    advice = f"^parameters: {name} cannot be combined .*; drop --{name.replace('_', '-')}"
    settings = SimpleNamespace(**{name: value})
    with pytest.raises(ConfigurationError, match=advice):
        check_model_parameters(config, settings)
    check_model_parameters(ParametersConfig(), settings)
    check_model_parameters(config, SimpleNamespace(**{name: None}))
