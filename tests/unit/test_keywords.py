# SPDX-License-Identifier: Apache-2.0
"""Keywords of the doors have types: editors complete them, a type checker refuses wrong ones."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest
from write_flags import flags_page

from megatron.offload import offload_activations, offload_optimizer, offload_parameters
from megatron.offload.config import OffloadConfig
from megatron.offload.integration.torch.trainer_callback import ActivationArguments, TrainerOffload
from megatron.offload.keywords import ActivationSettings
from megatron.offload.parameters.config import ParametersConfig
from megatron.offload.states.config import StatesConfig

ROOT = Path(__file__).resolve().parents[2]
DOORS = [
    (offload_activations, OffloadConfig),
    (offload_optimizer, StatesConfig),
    (offload_parameters, ParametersConfig),
]


def keywords_of(function: Any) -> Any:
    """The `TypedDict` of its settings."""
    (keywords,) = typing.get_args(typing.get_type_hints(function)["settings"])
    return keywords


@pytest.mark.parametrize(("door", "config"), DOORS)
def test_every_setting_is_a_typed_keyword_of_its_door(door: Any, config: Any) -> None:
    fields = {spec.name: spec for spec in dataclasses.fields(config)}
    types = typing.get_type_hints(keywords_of(door))
    assert types.keys() == fields.keys() - {"mode"}
    for name, spec in fields.items():
        if not spec.metadata["choices"]:
            continue
        found = types[name] if name != "mode" else typing.get_type_hints(door)["mode"]
        literals = [one for one in (found, *typing.get_args(found)) if _is_literal(one)]
        assert typing.get_args(literals[0]) == spec.metadata["choices"], name


def _is_literal(kind: Any) -> bool:
    return typing.get_origin(kind) is typing.Literal


def test_a_callback_takes_the_keywords_of_the_door() -> None:
    assert keywords_of(TrainerOffload.__init__) is ActivationArguments
    more = ActivationArguments.__annotations__.keys() - ActivationSettings.__annotations__.keys()
    parameters = inspect.signature(offload_activations).parameters.values()
    assert more == {one.name for one in parameters if one.kind is one.KEYWORD_ONLY}


@pytest.mark.parametrize(("door", "config"), DOORS)
def test_the_page_of_flags_has_the_name_that_python_takes(door: Any, config: Any) -> None:
    names = {*inspect.signature(door).parameters, *keywords_of(door).__annotations__}
    page = flags_page()
    for spec in dataclasses.fields(config):
        (line,) = (row for row in page.splitlines() if row.startswith(f"| `{_shown(spec)}"))
        name = line.split(" | ")[1].strip("`")
        assert name in names and name == ("directory" if spec.name == "directories" else spec.name)


def _shown(spec: dataclasses.Field[Any]) -> str:
    return f"{spec.metadata['flag']} "


SCRIPT = """\
import torch
from megatron.offload import OffloadCallback, offload_activations, offload_optimizer

model = torch.nn.Linear(2, 2)
offload_activations(model, "/d", mode="auto", memory_budget_bytes="12GiB", replay=False)
offload_activations(model, mode="sdd")  # wrong
offload_activations(model, memory_budget="1GiB")  # wrong
offload_activations(model, codec="int2")  # wrong
offload_optimizer(torch.optim.SGD(model.parameters()), window_bytes="1GiB")
offload_optimizer(torch.optim.SGD(model.parameters()), window_bytes=[1])  # wrong
OffloadCallback("/d", mode="host", metrics_file="m.jsonl", optimizer_states=True)
OffloadCallback("/d", modes="host")  # wrong
"""


@pytest.mark.slow
def test_a_type_checker_refuses_what_is_wrong_and_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="mypy is not installed")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", str(script)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
    )
    refused = {line.split(":")[1] for line in done.stdout.splitlines() if ": error:" in line}
    wrong = {str(n) for n, line in enumerate(SCRIPT.splitlines(), 1) if "# wrong" in line}
    assert refused == wrong, done.stdout + done.stderr
