# SPDX-License-Identifier: Apache-2.0
"""Profiles survive a file, and what is no profile is refused with a reason."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.offload.errors import ConfigurationError
from megatron.offload.planner.profile.pipeline_schedule import PipelinePosition
from megatron.offload.planner.profile.stage_profile import StageProfile
from tests.support.stages import layer, part, stage, tier


def test_a_profile_survives_a_file(tmp_path: Path) -> None:
    parts = (part("attention", recompute_s=0.5, input_bytes=3), part("mlp", 0, selective_s=0.25))
    profile = stage(
        position=PipelinePosition(4, 3, 2, 4),
        layers=(layer(parts=parts, recompute_s=None), layer("decoder.1", 1)),
        tiers=(tier("host", capacity_bytes=5), tier(shared_bytes_per_s=9.0, latency_s=0.1)),
        sizes={"micro_batch_size": 4},
        source="a test",
    )
    path = tmp_path / "profile.json"
    path.write_text(profile.to_json())
    assert StageProfile.load(path) == profile


@pytest.mark.parametrize("text", ["", "[]", "1", "{}", '{"version": 2}', "nonsense"])
def test_what_is_no_profile_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="this is no profile of a stage"):
        StageProfile.from_json(text)


@pytest.mark.parametrize("version", [1, 7])
def test_another_format_is_named(version: int) -> None:
    values = json.loads(stage().to_json()) | {"version": version}
    sentence = f"has format {version}, this release reads 2; measure it again"
    with pytest.raises(ConfigurationError, match=sentence):
        StageProfile.from_json(json.dumps(values))


def test_a_wrong_value_in_a_file_is_said_with_its_place() -> None:
    values = json.loads(stage(2).to_json())
    values["layers"][1]["parts"][0]["movable_bytes"] = "8MiB"
    with pytest.raises(ConfigurationError, match=r"got `str` - at `\$.layers\[1\].parts\[0\].mova"):
        StageProfile.from_json(json.dumps(values))


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('"num_micro_batches": 1', '"num_micro_batches": 1000000000000000000', "micro-batches; at"),
        ('"position": [\n  1,', '"position": [\n  1000000000,', "pipeline stage 0 of 1000000000"),
        ('"position": [\n  1,\n  0,', '"position": [\n  1,\n  1,', "pipeline stage 1 of 1;"),
        ('"transient_bytes": 0', '"transient_bytes": 1e18', "got `float`"),
        ('"transient_bytes": 0', '"transient_bytes": 1000000000000000000', "transient_bytes = 1e"),
        ('"step_fixed_s": 0.0', '"step_fixed_s": 1e300', "step_fixed_s = 1e+300"),
    ],
)
def test_a_profile_that_no_simulation_ends_with_is_refused(
    old: str, new: str, sentence: str
) -> None:
    text = stage().to_json()
    assert old in text
    with pytest.raises(ConfigurationError) as refused:
        StageProfile.from_json(text.replace(old, new))
    assert sentence in str(refused.value)


def test_figures_that_cannot_be_are_refused_in_a_file_too() -> None:
    text = stage().to_json().replace('"num_micro_batches": 1', '"num_micro_batches": 0')
    with pytest.raises(ConfigurationError, match=r"^activation offload: the profile has num_micro"):
        StageProfile.from_json(text)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"before_s": (0.0, 0.0)},
            "before_s has 2 entries; expected one for each of 1 model chunks",
        ),
        ({"layers": (layer(chunk=1),)}, "not in the order of its 1 model chunks"),
        ({"tiers": (tier(write=0.0),)}, "write_bytes_per_s = 0.0"),
        ({"tiers": (tier("tape"),)}, r"tiers \['tape'\]; expected host and ssd"),
        ({"tiers": (tier(), tier())}, "each once at most"),
        ({"step_fixed_s": float("nan")}, "step_fixed_s = nan"),
        ({"layers": (layer(parts=(part(size=-1),)),)}, "movable_bytes = -1"),
        ({"num_micro_batches": 0}, "num_micro_batches = 0"),
    ],
)
def test_figures_that_cannot_be_are_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        replace(stage(), **change)
