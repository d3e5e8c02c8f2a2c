# SPDX-License-Identifier: Apache-2.0
"""The environment's part of `doctor`: memory, limits, the allocator, installed versions.

Each function returns checks and judges what it is given or finds. Versions are read from metadata;
no package is imported for them.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
import resource
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron.offload.commands.doctor.check import Check, Status
from megatron.offload.device.cuda_allocator import EXPANDABLE_ENVIRONMENT, keeps_fragments
from megatron.offload.machine.allocator import (
    MIMALLOC,
    allocator_environment,
    allocator_name,
)
from megatron.offload.machine.memory_limit import PHYSICAL, MemoryLimit
from megatron.offload.sizes import GIB, format_size

_MIN_PYTHON = (3, 11)
_MIN_TORCH = (2, 10)  # SavedTensor.unpack_hook, GradientEdge.ownership_token
# Names start a distribution's name: the rest is the CUDA version that it is built for.
_OPTIONAL = (
    ("transformer-engine", "fused layers and FP8 on NVIDIA GPUs"),
    ("apex", "NVIDIA's fused optimizers and norms"),
    ("nvidia-dali", "reading training data on the GPU"),
    ("kvikio", "GPUDirect Storage"),
)


def memory_checks(limit: MemoryLimit, has_gpu: bool) -> list[Check]:
    """Checks how much memory this process may use and lock, and how large a file may be."""
    facts = {
        "total_bytes": limit.total_bytes,
        "available_bytes": limit.available_bytes,
        "physical_bytes": limit.physical_bytes,
        "source": limit.source,
    }
    amount = f"{format_size(limit.total_bytes)}, {format_size(limit.available_bytes)} available"
    if limit.source == PHYSICAL:
        memory = Check("memory", Status.OK, f"{amount}; no container limit", facts=facts)
    else:
        physical = format_size(limit.physical_bytes)
        value = f"{amount}; limited by {limit.source} (the machine has {physical})"
        memory = Check("memory", Status.OK, value, facts=facts)
    return [memory, _locked_memory_check(has_gpu), _file_size_check()]


def _locked_memory_check(has_gpu: bool) -> Check:
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    name = "locked memory"
    if limit_bytes == resource.RLIM_INFINITY:
        return Check(name, Status.OK, "unlimited (ulimit -l)", facts={"limit_bytes": None})
    value = f"at most {format_size(limit_bytes)} (ulimit -l)"
    facts = {"limit_bytes": limit_bytes}
    if not has_gpu:
        return Check(name, Status.INFO, f"{value}; matters for GPUs only", facts=facts)
    if limit_bytes >= GIB:
        return Check(name, Status.OK, value, facts=facts)
    return Check(
        name,
        Status.WARNING,
        f"{value}; pinned host memory may be refused, and unpinned copies are slower",
        "raise it: ulimit -l unlimited; in a container: docker run --ulimit memlock=-1",
        facts,
    )


def file_size_limit_bytes() -> int | None:
    """The largest file that this process may write (ulimit -f); None: any."""
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return None if limit_bytes == resource.RLIM_INFINITY else limit_bytes


def _file_size_check() -> Check:
    limit_bytes = file_size_limit_bytes()
    facts = {"limit_bytes": limit_bytes}
    if limit_bytes is None:
        return Check("file size", Status.OK, "unlimited (ulimit -f)", facts=facts)
    return Check(
        "file size",
        Status.WARNING,
        f"a file may have at most {format_size(limit_bytes)} (ulimit -f); each rank keeps its "
        "activations in one file on each disk",
        "raise it: ulimit -f unlimited",
        facts,
    )


def allocator_check(has_gpu: bool) -> Check:
    """Checks whether others can use what freed activations leave, in host or in GPU memory."""
    name, environment = "allocator", allocator_environment()
    if has_gpu:
        return _cuda_allocator_check(name)
    facts = {"in_use": allocator_name(), "environment": environment}
    if allocator_name() == MIMALLOC:
        return Check(name, Status.OK, "mimalloc is in use", facts=facts)
    variables = " ".join(f"{key}={value}" for key, value in environment.items())
    if "LD_PRELOAD" in environment:
        value = (
            "mimalloc is installed; examples/pretrain_gpt.sh starts training with it. "
            f"With your own script: {variables} python ..."
        )
        return Check(name, Status.OK, value, facts=facts)
    return Check(
        name,
        Status.WARNING,
        "mimalloc is not installed; the C library's malloc gives memory back more slowly",
        f"pip install cmeel-mimalloc (x86-64), then doctor again says how to start your own script "
        f"with it; without it: {variables} python ...",
        facts,
    )


def _cuda_allocator_check(name: str) -> Check:
    fragments = keeps_fragments(torch.device("cuda"))
    facts = {"expandable_segments": not fragments}
    if not fragments:
        return Check(name, Status.OK, "what is freed on a GPU can be used again", facts=facts)
    return Check(
        name,
        Status.WARNING,
        "without expandable segments what is freed on a GPU stays in pieces, some of which fit "
        "nothing; the scripts in examples/ turn them on",
        f"start your own script with: {EXPANDABLE_ENVIRONMENT}",
        facts,
    )


def installed_versions() -> dict[str, str]:
    """Version of every installed distribution, by its normalised name. Imports none."""
    versions: dict[str, str] = {}
    for found in importlib.metadata.distributions():
        name = found.metadata["Name"]
        if name:  # the first on the path is the one that is imported
            versions.setdefault(re.sub(r"[-_.]+", "-", name).lower(), found.version)
    return versions


def version_checks(
    installed: dict[str, str], supported_megatron: Sequence[str], *, needs_megatron: bool = True
) -> list[Check]:
    """Checks the versions of Python, torch, megatron-core, and of what is optional."""
    megatron = megatron_check(megatron_version(installed), supported_megatron)
    if not needs_megatron and megatron.status is not Status.OK:
        megatron = Check(megatron.name, Status.INFO, f"{megatron.value}; the script needs none")
    checks = [
        _at_least("python", platform.python_version(), _MIN_PYTHON, "use a newer Python"),
        _at_least("torch", str(torch.__version__), _MIN_TORCH, "pip install --upgrade torch"),
        megatron,
    ]
    for name, purpose in _OPTIONAL:
        version = version_of(name, installed)
        if version is None:
            checks.append(Check(name, Status.INFO, f"not installed; optional, for {purpose}"))
        elif name == "apex" and _is_other_apex():
            value = f"{version} is not NVIDIA's apex: PyPI has another project of that name"
            advice = "pip uninstall apex; pip install git+https://github.com/NVIDIA/apex.git"
            checks.append(Check(name, Status.WARNING, value, advice, {"version": version}))
        else:
            checks.append(Check(name, Status.OK, version, facts={"version": version}))
    return checks


def megatron_check(version: str | None, supported: Sequence[str]) -> Check:
    """Checks whether the hooks are known to fit this megatron-core."""
    name, install = "megatron-core", f"pip install megatron-core=={supported[-1]}"
    facts = {"version": version, "supported": list(supported)}
    if version is None:
        return Check(
            name, Status.WARNING, "not installed; needed to train Megatron models", install, facts
        )
    if version not in supported:
        value = f"{version} is not supported, only {', '.join(supported)}"
        return Check(name, Status.PROBLEM, value, install, facts)
    return Check(name, Status.OK, f"{version}, supported", facts=facts)


def megatron_version(installed: dict[str, str]) -> str | None:
    """The version of the megatron-core that an import would find: a checkout may come first."""
    try:
        spec = importlib.util.find_spec("megatron.core")
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None:
        return None
    # Read, not imported: importing megatron.core takes seconds.
    text = _text(Path(spec.origin).parent / "package_info.py")
    parts = dict(re.findall(r"^(MAJOR|MINOR|PATCH|PRE_RELEASE)\s*=\s*[\"']?([\w.]*)", text, re.M))
    if {"MAJOR", "MINOR", "PATCH"} <= parts.keys():
        core = f"{parts['MAJOR']}.{parts['MINOR']}.{parts['PATCH']}"
        return core + parts.get("PRE_RELEASE", "")
    return installed.get("megatron-core", "an unknown version")


def version_of(name: str, installed: dict[str, str]) -> str | None:
    """The version of an installed package, also of one built for a CUDA release (`name-cu13`)."""
    matches = [found for found in installed if found == name or found.startswith(f"{name}-cu")]
    return installed[min(matches, key=len)] if matches else None


def _is_other_apex() -> bool:
    spec = importlib.util.find_spec("apex")
    places = (spec.submodule_search_locations or []) if spec else []
    return not any((Path(place) / "optimizers").is_dir() for place in places)


def _at_least(name: str, version: str, least: tuple[int, int], advice: str) -> Check:
    match = re.match(r"(\d+)\.(\d+)", version)
    facts = {"version": version}
    if match and (int(match[1]), int(match[2])) < least:
        value = f"{version} is too old; needed {least[0]}.{least[1]} or newer"
        return Check(name, Status.PROBLEM, value, advice, facts)
    return Check(name, Status.OK, version, facts=facts)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
