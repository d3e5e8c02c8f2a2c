# SPDX-License-Identifier: Apache-2.0
"""One file of settings for Python and for flags: the same configs, and sentences on mistakes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import ConfigurationError, offload, read_settings
from megatron.offload.commands.launch_command import LaunchCommand
from megatron.offload.integration.megatron.arguments import (
    add_offload_arguments,
    config_from_args,
    layer_major_config_from_args,
    parameters_config_from_args,
    states_config_from_args,
)
from megatron.offload.integration.torch.trainer_callback import TrainerOffload
from tests.support.models import Model

_TEXT = """
directory = "DIRECTORY"

[activations]
mode = "tiered"
host_budget = "2GiB"
min_bytes = 4096

[optimizer_states]
step_on = "cpu"

[parameters]
mode = "host"

[layer_major]
units = 2
order = "alternating"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file that names everything once."""
    path = tmp_path / "offload.toml"
    path.write_text(_TEXT.replace("DIRECTORY", str(tmp_path)))
    return path


def _parsed(*flags: str) -> argparse.Namespace:
    parser = add_offload_arguments(argparse.ArgumentParser(exit_on_error=False))
    return parser.parse_args(flags)


def test_the_flags_get_what_the_file_says(file: Path, tmp_path: Path) -> None:
    args = _parsed("--offload-settings", str(file))
    activations = config_from_args(args)
    assert activations.mode == "tiered" and activations.directories == (tmp_path,)
    assert activations.host_budget == 2 * 2**30 and activations.min_bytes == 4096
    states = states_config_from_args(args)
    assert states.mode == "ssd" and states.step_on == "cpu" and states.directories == (tmp_path,)
    assert parameters_config_from_args(args).mode == "host"
    steps = layer_major_config_from_args(args)
    assert steps.units == 2 and steps.alternates
    # What it does not name is as without it.
    assert activations.threads == config_from_args(_parsed()).threads


def test_flags_after_it_come_first(file: Path) -> None:
    later = _parsed("--offload-settings", str(file), "--activation-offload", "keep")
    assert config_from_args(later).mode == "keep"
    earlier = _parsed("--activation-offload", "keep", "--offload-settings", str(file))
    assert config_from_args(earlier).mode == "tiered"


def test_what_is_off_in_it_is_off_and_directories_may_be_flags(tmp_path: Path) -> None:
    path = tmp_path / "offload.toml"
    path.write_text('activations = "off"\nparameters = false\n[optimizer_states]\nmode = "ssd"\n')
    earlier = ("--activation-offload", "host", "--parameter-offload", "host")
    args = _parsed(
        *earlier, "--offload-settings", str(path), "--optimizer-state-dir", str(tmp_path)
    )
    assert config_from_args(args).mode == "off" and parameters_config_from_args(args).mode == "off"
    states = states_config_from_args(args)
    assert states.mode == "ssd" and states.directories == (tmp_path,)
    without = _parsed("--offload-settings", str(path))
    with pytest.raises(ConfigurationError, match="needs a place on an SSD"):
        states_config_from_args(without)


def test_relative_directories_are_those_of_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = read_settings({"directory": "here", "activations": {"directory": "there,too"}})
    assert given["activations"]["directories"] == (tmp_path / "there", tmp_path / "too")


def test_steps_that_are_off_are_usual_ones() -> None:
    model = Model(num_layers=4)
    with offload(model, activations="host", layer_major={"units": "off"}) as handle:
        assert handle.layer_major is None


def test_a_launch_command_has_it(file: Path) -> None:
    args, parser = argparse.Namespace(), argparse.ArgumentParser(add_help=False)
    add_offload_arguments(parser)
    command = LaunchCommand.of(
        ["torchrun", "train.py", "--lr", "1", "--offload-settings", str(file)]
    )
    assert command.read(parser, args) == ["--lr"]
    assert config_from_args(args).mode == "tiered"
    misspelt = LaunchCommand.of(["train.py", "--offload-setings", str(file)])
    with pytest.raises(ConfigurationError, match="did you mean --offload-settings"):
        misspelt.read(parser, args)


def test_one_call_opens_all_of_it(file: Path) -> None:
    model = Model(num_layers=4)
    optimizer = torch.optim.AdamW(model.parameters())
    with offload(model, optimizer, **read_settings(file)) as handle:
        handle.step([torch.ones(2, 4, 32)] * 2, lambda batch: model(batch).sum())
        optimizer.step()
        assert handle.statistics.keys() == {"activations", "optimizer_states", "parameters"}
        assert handle.layer_major is not None and len(set(handle.layer_major.units.values())) == 2
    with offload(model, optimizer, **read_settings({"activations": "host"})) as handle:
        assert handle.statistics.keys() == {"activations"}


def test_activations_that_stay_may_have_their_loss_in_chunks() -> None:
    """And MLPs over tiles: as `offload_activations` has them with mode `off`."""
    own = {"mode": "off", "tiled_mlp": 2}
    assert read_settings({"activations": own})["activations"] == own
    callback = TrainerOffload.from_settings({"activations": own})
    assert callback._settings == own
    chunked = read_settings({"activations": {"mode": "off", "chunked_loss": "auto"}})
    with pytest.raises(ConfigurationError, match="for causal language models"):
        offload(Model(num_layers=2), **chunked)


def test_a_callback_takes_it(file: Path, tmp_path: Path) -> None:
    without_steps = file.read_text().partition("[layer_major]")[0]
    file.write_text(without_steps)
    callback = TrainerOffload.from_settings(file, layers=["layers.*"])
    assert callback._settings["mode"] == "tiered" and callback._settings["layers"] == ["layers.*"]
    assert callback._of_states is not None and callback._of_states["step_on"] == "cpu"
    with pytest.raises(ConfigurationError, match="leave layer_major out"):
        TrainerOffload.from_settings({"layer_major": 2})
    TrainerOffload.from_settings({"layer_major": {"units": False}})  # usual steps


def test_what_is_not_named_stays() -> None:
    stays = {"activations": False, "optimizer_states": False, "parameters": False}
    assert read_settings({}) == stays | {"layer_major": False}
    assert read_settings({"activations": "off", "parameters": {"mode": "off"}}) == read_settings({})
    assert read_settings({"activations": True})["activations"] == {"mode": "host"}
    own = read_settings({"directory": "/a", "parameters": {"directory": "/b"}, "activations": True})
    assert own["parameters"] == {"directories": (Path("/b"),), "mode": "ssd"}
    assert own["activations"] == {"directories": (Path("/a"),), "mode": "ssd"}
    assert read_settings({"layer_major": True})["layer_major"] == {"units": "auto"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"activation": True}, "there is no 'activation'; did you mean activations?"),
        ({"activations": {"mod": "ssd"}}, r"\[activations\]: there is no setting 'mod'; did you"),
        ({"activations": {"mode": "sdd"}}, r"\[activations\]: mode: 'sdd' is none of its values"),
        ({"activations": 3}, r"activations = 3 is no table of settings; write \[activations\]"),
        ({"parameters": {"gradients": "on", "mode": "off"}}, r"\[parameters\]: gradients on needs"),
        ({"layer_major": {"order": "down"}}, r"\[layer_major\]: order: 'down' is none of its"),
        ({"activations": {"mode": "ssd"}}, r"\[activations\]: mode ssd needs a place"),
    ],
)
def test_mistakes_are_sentences(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        read_settings(given)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"none\.toml: .* cannot be read: No such file"):
        read_settings(tmp_path / "none.toml")
    (tmp_path / "no.toml").write_text("activations = \n")
    with pytest.raises(ConfigurationError, match="is not TOML: Invalid value"):
        read_settings(tmp_path / "no.toml")
    (tmp_path / "no.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match="it is not text"):
        read_settings(tmp_path / "no.toml")
    with pytest.raises(argparse.ArgumentError, match=r"--offload-settings.*No such file"):
        _parsed("--offload-settings", str(tmp_path / "none.toml"))
