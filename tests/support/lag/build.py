# SPDX-License-Identifier: Apache-2.0
"""Compiles the test accelerator once for each version of torch: `build`; `why_not` says if it can.

The result lies in `build/lag-VERSION-HASH` of the repository, where the hash covers the sources and
how they are compiled. Processes side by side build once: the others wait. `python -m
tests.support.lag` builds ahead of the tests.
"""

from __future__ import annotations

import concurrent.futures
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch

EXTENSION = "lag_extension"
_SOURCES = Path(__file__).parent / "csrc"
_BUILD = Path(__file__).parents[3] / "build"
_TORCH = Path(torch.__file__).parent
_TIMEOUT_S = 600  # for one file on a machine that is busy


def why_not() -> str:
    """Why the accelerator cannot be used here, as the end of a sentence; empty: it can."""
    if sys.platform != "linux":
        return "it needs Linux"
    if _minor_version() == 10:
        return "with torch 2.10 a thread of a stream aborts when it lets a tensor go"
    if torch.cuda.is_available():
        return "torch has one accelerator in a process, and here it is CUDA"
    if _compiler() is None:
        return "there is no C++ compiler"
    if not (_TORCH / "include/ATen/core/Tensor.h").exists():
        return "this torch comes without its headers"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "Python's headers are not installed"
    return ""


def build() -> Path:
    """The compiled extension; compiles it, for half a minute, if that has not been done.

    Raises:
        RuntimeError: with what the compiler said.
    """
    result = _folder() / f"{EXTENSION}.so"
    if result.exists():
        return result
    _BUILD.mkdir(exist_ok=True)
    with open(_BUILD / "lag.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.exists():
            with tempfile.TemporaryDirectory(dir=_BUILD, prefix="lag-unfinished-") as scratch:
                library = _compile(Path(scratch))
                for old in _BUILD.glob(f"lag-{torch.__version__}-*"):
                    shutil.rmtree(old)  # of other sources; who has loaded it keeps it
                result.parent.mkdir()
                library.rename(result)
    return result


def _folder() -> Path:
    content = hashlib.sha256(" ".join([*_flags(), sys.version, str(_TORCH)]).encode())
    for file in sorted(_SOURCES.iterdir()):
        content.update(file.name.encode() + file.read_bytes())
    return _BUILD / f"lag-{torch.__version__}-{content.hexdigest()[:12]}"


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")


def _flags() -> list[str]:
    include = _TORCH / "include"
    return [
        "-std=c++20" if _minor_version() >= 12 else "-std=c++17",
        "-O1",
        "-fPIC",
        "-fvisibility=hidden",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        f"-DTORCH_EXTENSION_NAME={EXTENSION}",
        *(f"-isystem{path}" for path in (include, include / "torch/csrc/api/include")),
        f"-isystem{sysconfig.get_path('include')}",
    ]


def _minor_version() -> int:
    return int(torch.__version__.split(".")[1])


def _compile(scratch: Path) -> Path:
    sources = sorted(_SOURCES.glob("*.cpp"))
    objects = [scratch / f"{source.stem}.o" for source in sources]
    commands = [
        [*_flags(), "-c", str(source), "-o", str(target)]
        for source, target in zip(sources, objects, strict=True)
    ]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(_run_compiler, commands))
    library = scratch / f"{EXTENSION}.so"
    libraries = [f"-l{name}" for name in ("c10", "torch_cpu", "torch_python")]
    _run_compiler(
        ["-shared", *map(str, objects), f"-L{_TORCH / 'lib'}", *libraries, "-o", str(library)]
    )
    return library


def _run_compiler(arguments: list[str]) -> None:
    compiler = _compiler()
    assert compiler is not None, why_not()
    done = subprocess.run(
        [compiler, *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the test accelerator does not compile:\n{done.stderr[-4000:]}")
