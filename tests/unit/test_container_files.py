# SPDX-License-Identifier: Apache-2.0
"""The compose file and the Dockerfile belong together: arguments, volumes, commands."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "examples" / "cluster" / "compose.yaml"
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def test_compose_file_builds_this_dockerfile_with_its_arguments() -> None:
    build = yaml.safe_load(COMPOSE.read_text())["services"]["train"]["build"]
    assert (COMPOSE.parent / build["context"]).resolve() == ROOT
    assert set(build["args"]) == set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE))


def test_compose_file_mounts_the_volumes_of_the_image() -> None:
    service = yaml.safe_load(COMPOSE.read_text())["services"]["train"]
    mounted = [volume.rsplit(":", 1)[1] for volume in service["volumes"]]
    (volumes,) = re.findall(r"^VOLUME \[(.*)\]", DOCKERFILE, re.MULTILINE)
    assert mounted == re.findall(r'"(.*?)"', volumes)
    assert service["environment"]["OFFLOAD_DIR"] in mounted


def test_commands_are_files_of_this_repository() -> None:
    service = yaml.safe_load(COMPOSE.read_text())["services"]["train"]
    (command,) = re.findall(r'^CMD \["(.*?)"', DOCKERFILE, re.MULTILINE)
    for path in (command, service["command"][0]):
        assert (ROOT / path).is_file(), path
    (workdir,) = re.findall(r"^WORKDIR (.*)$", DOCKERFILE, re.MULTILINE)
    # Where a Slurm job in a container looks for the scripts.
    assert f"--container-workdir {workdir})" in (COMPOSE.parent / "train.sbatch").read_text()


def test_nothing_names_a_registry() -> None:
    """The base image is given by whoever builds."""
    assert re.findall(r"^FROM (.*)$", DOCKERFILE, re.MULTILINE) == ["${BASE}"]
    for text in (DOCKERFILE, COMPOSE.read_text()):
        assert not re.search(r"\b[\w-]+\.(io|com|org)/", text)
