# SPDX-License-Identifier: Apache-2.0
"""Every place that names a version promises the same, and pins fit each promised Python."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from megatron.offload.commands.doctor import machine
from megatron.offload.integration.megatron.versions import SUPPORTED_VERSIONS

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT: dict[str, Any] = PYPROJECT["project"]
PAGES = ("README.md", "docs/install.md", "docs/training.md", "docs/troubleshooting.md")


def text(path: str) -> str:
    return (ROOT / path).read_text()


def pins(path: str) -> dict[str, str]:
    """Name and version of each line of a file of constraints."""
    lines = [line for line in text(path).splitlines() if line and not line.startswith("#")]
    found = dict(line.split("==") for line in lines)  # no markers: one version for all Pythons
    assert len(found) == len(lines)
    return found


def floor_of(name: str, requirements: list[str]) -> str:
    (requirement,) = (one for one in map(Requirement, requirements) if one.name == name)
    (specifier,) = requirement.specifier
    assert specifier.operator == ">="
    return specifier.version


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def oldest_and_newest() -> tuple[str, str]:
    """The Pythons that README.md promises."""
    found = re.search(r"Python (3\.\d+) to (3\.\d+), PyTorch", text("README.md"))
    assert found
    return found[1], found[2]


def pythons() -> list[str]:
    first, last = (int(one.partition(".")[2]) for one in oldest_and_newest())
    return [f"3.{minor}" for minor in range(first, last + 1)]


# -- One promise ----------------------------------------------------------------------------------


def test_every_place_promises_the_same_pythons() -> None:
    oldest, newest = oldest_and_newest()
    promise = f"Python {oldest} to {newest}"
    assert PROJECT["requires-python"] == f">={oldest}"
    assert dotted(machine._MIN_PYTHON) == oldest
    assert PYPROJECT["tool"]["ruff"]["target-version"] == "py" + oldest.replace(".", "")
    assert f"for {promise}." in text("tools/constraints.txt")
    for page in PAGES:
        assert set(re.findall(r"Python 3\.\d+ to 3\.\d+", text(page))) == {promise}, page
    bootstrap = text("tools/bootstrap.sh")
    bounds = [one.replace(".", ", ") for one in (oldest, newest)]
    assert f"({bounds[0]}) <= sys.version_info[:2] <= ({bounds[1]})" in bootstrap
    assert set(re.findall(r"3\.\d+ to 3\.\d+", bootstrap)) == {f"{oldest} to {newest}"}
    assert set(re.findall(r"python(3\.\d+)", bootstrap)) == set(pythons())


def test_every_place_promises_the_same_pytorch() -> None:
    floor = floor_of("torch", PROJECT["dependencies"])
    assert dotted(machine._MIN_TORCH) == floor
    assert f"PyTorch {floor} or newer" in text("README.md")
    assert f"`torch>={floor}`" in text("docs/install.md")
    assert f"PyTorch is {floor} or newer" in text("Dockerfile")
    tried = f"PyTorch {pins('tools/constraints.txt')['torch']}"
    assert tried in text("docs/install.md")
    assert f"{pins('tools/constraints-next.txt')['torch']}" in text("docs/install.md")


def test_every_place_promises_the_same_transformers() -> None:
    floor = floor_of("transformers", PROJECT["optional-dependencies"]["huggingface"])
    assert f"transformers from {floor} on" in text("docs/install.md")


def test_the_extra_brings_a_megatron_core_that_is_supported() -> None:
    version = pins("tools/constraints.txt")["megatron-core"]
    assert f"megatron-core=={version}" in PROJECT["optional-dependencies"]["megatron"]
    assert version == SUPPORTED_VERSIONS[-1]
    for page in ("README.md", "docs/install.md"):
        assert f"# with megatron-core {version} from PyPI" in text(page), page
    for supported in SUPPORTED_VERSIONS:
        for page in ("docs/megatron-lm.md", "docs/troubleshooting.md"):
            assert supported in text(page), (supported, page)


# -- Pins that can be installed -------------------------------------------------------------------


def installed_pins() -> dict[str, importlib.metadata.Distribution]:
    """What is installed here at its pinned version, by name."""
    pinned = pins("tools/constraints.txt")
    found = {}
    for one in importlib.metadata.distributions():
        name = canonicalize_name(one.metadata["Name"])
        if pinned.get(name) == one.version.partition("+")[0]:
            found[str(name)] = one
    return found


def requirements(of: importlib.metadata.Distribution, python: str) -> Iterator[Requirement]:
    """What a distribution needs under a Python, on Linux and without extras."""
    here = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    for requirement in map(Requirement, of.requires or ()):
        if requirement.marker is None or requirement.marker.evaluate(here):
            yield requirement


def problems_under(python: str) -> list[str]:
    """What keeps the pins from being installed with a Python, by the metadata of what is here."""
    pinned, installed = pins("tools/constraints.txt"), installed_pins()
    if len(installed) < len(pinned) / 2:
        pytest.skip(f"{len(installed)} of {len(pinned)} pins are installed here as they are pinned")
    problems = []
    for name, one in installed.items():
        needed = one.metadata.get("Requires-Python") or ""
        if f"{python}.0" not in SpecifierSet(needed):
            problems.append(f"{name} {one.version} needs Python {needed}")
        for requirement in requirements(one, python):
            version = pinned.get(canonicalize_name(requirement.name))
            if version is not None and version not in requirement.specifier:
                problems.append(f"{name} needs {requirement}, pinned is {version}")
            elif version is None and not of_cuda(requirement):
                problems.append(f"{name} needs {requirement}, which has no pin")
    return problems


@pytest.mark.parametrize("python", pythons())
def test_every_pin_can_be_installed_with_each_promised_python(python: str) -> None:
    assert problems_under(python) == []


def test_a_python_that_pins_do_not_support_is_noticed() -> None:
    problems = problems_under("3.10")
    assert any(re.match(r"numpy \S+ needs Python >=3", problem) for problem in problems)
    assert any(problem.endswith("which has no pin") for problem in problems)  # tomli


def of_cuda(requirement: Requirement) -> bool:
    """Whether a CUDA build of torch alone needs it, and names its version."""
    return re.match(r"nvidia-|cuda-|triton$", requirement.name) is not None


def test_the_other_pytorch_is_newer_and_takes_the_place_of_a_pin() -> None:
    usual, other = pins("tools/constraints.txt"), pins("tools/constraints-next.txt")
    assert set(other) <= set(usual)
    newer = SpecifierSet(f">{usual['torch']}")
    assert other["torch"] in newer
