# SPDX-License-Identifier: Apache-2.0
"""A patched megatron-core trains as one that is decorated at run time: the same bits, by the same
calls in the same order. Without megatron-offload it is the megatron-core that it was.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import megatron.offload
from tests.support import launch
from tests.support.fork_server import ForkServer
from tests.support.launch import SCRIPTS, TINY, Outcome, rank_environment, run_trainer

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = SCRIPTS["gpt"]
FILES = ("transformer/transformer_layer.py", "pipeline_parallel/schedules.py")
# Two chunks on each of two stages: every kind of call, and prefetches out of the simple order.
LAYOUT = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"

# A script that is the trainer's, and writes beside itself the engine's calls of each rank, which
# megatron-core it ran and how many functions were decorated.
RECORDER = """
import contextlib, importlib, os, pathlib, runpy, sys

from megatron.offload.activations.engine import OffloadEngine

connect = importlib.import_module("megatron.offload.integration.megatron.connect")

HERE = pathlib.Path(__file__).parent
passes = []  # save orders, kept so that no two have the same id


def note(name, *values):
    with open(HERE / f"{name}.{os.environ['RANK']}", "a") as file:
        print(*values, file=file)


def of(save_order):  # which pass filled it
    return next((scope for known, scope in passes if known is save_order), "no forward pass")


forward, capture = OffloadEngine.forward, OffloadEngine.capture
prefetch, backward = OffloadEngine.prefetch, OffloadEngine.backward
place_layer, decorate = OffloadEngine.place_layer, connect.decorate


@contextlib.contextmanager
def noted_forward(self, scope):
    note("calls", "forward begins", scope)
    with forward(self, scope) as save_order:
        passes.append((save_order, scope))
        yield save_order
    note("calls", "forward ends", scope)


def noted_capture(self, scope, outputs, inputs, **more):
    outputs, inputs = list(outputs), list(inputs)
    note("calls", "capture", scope, [tuple(tensor.shape) for tensor in outputs], len(inputs))
    capture(self, scope, outputs=outputs, inputs=inputs, **more)


def noted_prefetch(self, save_order, *, opens_at_once=False):
    note("calls", "prefetch", of(save_order), opens_at_once)
    prefetch(self, save_order, opens_at_once=opens_at_once)


@contextlib.contextmanager
def noted_backward(self, save_order):
    note("calls", "backward begins", of(save_order))
    with backward(self, save_order):
        yield
    note("calls", "backward ends", of(save_order))


def noted_place_layer(self, scope):
    placement = place_layer(self, scope)
    note("calls", "place", scope, placement)
    return placement


def noted_decorate():
    found = decorate()
    note("core", len(found), sys.modules["megatron.core"].__file__)
    return found


OffloadEngine.forward, OffloadEngine.capture = noted_forward, noted_capture
OffloadEngine.prefetch, OffloadEngine.backward = noted_prefetch, noted_backward
OffloadEngine.place_layer, connect.decorate = noted_place_layer, noted_decorate
sys.argv[0] = SCRIPT
sys.path[0] = str(pathlib.Path(SCRIPT).parent)
runpy.run_path(SCRIPT, run_name="__main__")
"""


@pytest.fixture(scope="module")
def installed() -> Path:
    """The directory of the installed megatron-core."""
    specification = importlib.util.find_spec("megatron.core")
    assert specification is not None and specification.origin is not None
    return Path(specification.origin).parent


@pytest.fixture(scope="module")
def patched(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a patched megatron-core; links to the installed one but for two files."""
    directory = tmp_path_factory.mktemp("patched")
    core = directory / "megatron" / "core"
    core.mkdir(parents=True)
    changed = {core / Path(file).parent for file in FILES}
    for folder in (core, *changed):
        folder.mkdir(exist_ok=True)
        for entry in (installed / folder.relative_to(core)).iterdir():
            path = folder / entry.name
            # A cache of our own: two sources must not take turns in one.
            if path not in changed and entry.name != "__pycache__":
                path.symlink_to(entry)
    for file in FILES:
        (core / file).unlink()
        shutil.copy(installed / file, core / file)
    tool = [sys.executable, str(ROOT / "tools" / "apply_patches.py")]
    subprocess.run([*tool, "--apply", str(directory)], check=True, timeout=120)
    return directory


def train(
    directory: Path, server: ForkServer, environment: dict[str, str], patch: pytest.MonkeyPatch
) -> Outcome:
    """Three recorded steps on two ranks of a server; the records are in the directory."""
    directory.mkdir()
    script = directory / "recorded_trainer.py"
    script.write_text(f"SCRIPT = {str(SCRIPT)!r}\n{RECORDER}")
    flags = (
        f"--train-iters 3 --activation-offload ssd --activation-offload-dir {directory}"
        " --activation-offload-min-bytes 1KiB --activation-recompute-layers 2"
    )
    with patch.context() as patched:
        patched.setitem(launch.SCRIPTS, "gpt", script)
        patched.setattr(launch, "server", lambda: server)
        outcome = run_trainer(TINY, LAYOUT, flags, world_size=2, environment=environment)
    assert outcome.exit_codes == [0, 0], outcome.output
    return outcome


def recorded(directory: Path, name: str) -> list[str]:
    """What each rank wrote."""
    return [(directory / f"{name}.{rank}").read_text() for rank in range(2)]


@pytest.fixture(scope="module")
def patched_server(patched: Path) -> Iterator[ForkServer]:
    """Ranks with the patched megatron-core."""
    modules = ("trainer.gpt", "trainer.training")
    started = ForkServer(SCRIPT, modules, rank_environment({"PYTHONPATH": str(patched)}))
    yield started
    started.close()


@pytest.mark.slow
def test_patched_source_and_install_at_run_time_do_the_same(
    patched_server: ForkServer,
    patched: Path,
    installed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, run_time = tmp_path / "source", tmp_path / "run-time"
    theirs = train(run_time, launch.server(), {}, monkeypatch)
    ours = train(source, patched_server, {"PYTHONPATH": str(patched)}, monkeypatch)

    # It is the patched source that ran, and nothing was decorated a second time.
    core = patched / "megatron" / "core" / "__init__.py"
    assert recorded(source, "core") == [f"0 {core}\n"] * 2
    assert recorded(run_time, "core") == [f"4 {installed / '__init__.py'}\n"] * 2

    assert len(ours.metrics) == 3
    for name in ("loss", "grad_norm", "model"):
        assert [m.get(name) for m in ours.metrics] == [m.get(name) for m in theirs.metrics], name
    assert ours.metrics[-1]["loss"] != ours.metrics[0]["loss"]

    calls = recorded(source, "calls")
    assert calls == recorded(run_time, "calls")
    for log in calls:
        for call in ("forward begins", "capture", "prefetch", "backward ends"):
            assert f"\n{call} chunk 1 micro-batch 3" in log, call
        assert "no forward pass" not in log
    assert "RECOMPUTE" in "".join(calls)


def python(code: str, directory: Path) -> str:
    """Runs code in a new interpreter, with a directory first on its path."""
    environment = {**os.environ, "PYTHONPATH": str(directory), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_without_our_package_a_patched_core_is_the_one_it_was(patched: Path) -> None:
    code = """
import sys
sys.modules["megatron.offload"] = None  # to Python: there is no such module
try:
    import megatron.offload
except ImportError:
    print("not there")
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.transformer_layer import TransformerLayer
print(schedules.__file__)
functions = (
    TransformerLayer.forward,
    schedules.forward_step,
    schedules.backward_step,
    schedules.check_first_val_step,
)
print([hasattr(f, "__wrapped__") for f in functions])
print([f.__code__.co_filename.rpartition("/")[2] for f in functions])
print([name for name in sys.modules if name.startswith("megatron.offload.")])
"""
    assert python(code, patched).splitlines() == [
        "not there",
        str(patched / "megatron" / "core" / FILES[1]),
        "[False, False, False, False]",
        "['transformer_layer.py', 'schedules.py', 'schedules.py', 'schedules.py']",
        "[]",
    ]


def test_what_a_patched_core_imports_is_small_and_never_leads_back_to_it() -> None:
    code = """
import sys
before = set(sys.modules)
import megatron.offload.integration.megatron.decorators
added = set(sys.modules) - before
print(sorted(name for name in added if name.partition(".")[0] == "megatron"))
print([name for name in added if name.partition(".")[0] in ("torch", "numpy", "ctypes")])
"""
    ours = "megatron.offload"
    packages = ["megatron", ours, f"{ours}.integration", f"{ours}.integration.megatron"]
    names = [*packages, f"{ours}.integration.megatron.decorators"]
    assert python(code, ROOT).splitlines() == [str(names), "[]"]


def test_the_package_has_its_names_whoever_imports_what_first() -> None:
    package = importlib.import_module("megatron.offload.integration.megatron")
    file = importlib.import_module(f"{package.__name__}.connect")
    assert package.install is file.install
    for module in (package, megatron.offload):
        assert set(module.__all__) <= set(dir(module))
        for name in module.__all__:
            assert getattr(module, name) is not None
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            module.nothing  # noqa: B018
