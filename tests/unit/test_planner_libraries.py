# SPDX-License-Identifier: Apache-2.0
"""Invariant 13: what trains without `auto` needs neither scipy nor numba, and `auto` says so."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.offload import ConfigurationError, OffloadConfig, cli
from megatron.offload.commands.doctor.examine import Flags, _flags_check
from megatron.offload.integration.megatron import connect
from tests.support.models import Model
from tests.support.processes import finish, start_python

SENTENCE = r"needs scipy and numba, which are not installed; pip install scipy numba"


@pytest.mark.slow
def test_the_engine_and_the_integration_import_no_solver() -> None:
    script = """
        import sys
        import megatron.offload.activations.engine, megatron.offload.integration.megatron.connect
        print({"scipy", "numba"} & set(sys.modules))
    """
    code, output, errors = finish(start_python(script))
    assert (code, output) == (0, "set()\n"), errors


@pytest.mark.slow
def test_training_with_an_ssd_works_where_neither_is_installed(tmp_path: Path) -> None:
    script = """
        import sys
        from pathlib import Path
        sys.modules.update(scipy=None, numba=None)  # an import of them fails
        import torch
        from megatron.offload import OffloadConfig, OffloadEngine
        from megatron.offload.device.open import open_device
        from tests.support.models import Model
        import megatron.offload.integration.megatron.connect

        model, x = Model(), torch.randn(3, 17, 32)
        config = OffloadConfig(mode="ssd", directories=(Path(sys.argv[1]),), min_bytes=1024)
        engine = OffloadEngine(config, open_device(torch.device("cpu")), rank=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            engine.exclude(model.parameters())
            with engine.step():
                with engine.forward(engine.scope), engine.saved_tensors_hooks():
                    loss = model(x).square().mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(engine.statistics.offloaded_bytes > 0, loss.isfinite().item())
        engine.close()
    """
    code, output, errors = finish(start_python(script, tmp_path))
    assert (code, output) == (0, "True True\n"), errors


@pytest.fixture
def neither_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `importlib.util.find_spec` sees it."""
    for name in ("scipy", "numba"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.usefixtures("neither_is_installed")
@pytest.mark.parametrize("command", ["plan --hardware h100 --num-layers 2", "rok"])
def test_commands_that_plan_say_what_is_missing(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(command.split()) == 2
    output, errors = capsys.readouterr()
    assert output == "" and errors.count("\n") == 1
    assert re.search(SENTENCE, errors)


@pytest.mark.parametrize(
    ("command", "missing", "words"),
    [
        ("tune -- x.py", ["tqdm"], "tune needs tqdm, which is not installed; pip install tqdm"),
        (
            "rok --redraw x.json",
            ["tqdm", "matplotlib"],
            "rok needs matplotlib and tqdm, which are not installed; pip install matplotlib tqdm",
        ),
        (
            "rok",
            ["scipy", "numba", "matplotlib", "tqdm", "megatron.core"],
            "rok needs scipy, numba, matplotlib, tqdm and megatron-core, which are not installed; "
            "pip install scipy numba matplotlib tqdm megatron-core==0.16.1",
        ),
    ],
)
def test_a_command_names_all_that_is_missing_at_once(
    command: str,
    missing: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)
    assert cli.main(command.split()) == 2
    assert words in capsys.readouterr().err


@pytest.mark.usefixtures("neither_is_installed")
def test_auto_is_refused_before_anything_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "check_version", lambda: None)
    auto = OffloadConfig(mode="auto")
    with pytest.raises(ConfigurationError, match=f"--activation-offload auto {SENTENCE}"):
        connect.check(auto, SimpleNamespace())
    model = Model()
    model.config = SimpleNamespace()
    with pytest.raises(ConfigurationError, match=f"--activation-offload auto {SENTENCE}"):
        connect.install(auto, [model])


@pytest.mark.usefixtures("neither_is_installed")
def test_the_doctor_finds_it_too() -> None:
    parser = argparse.ArgumentParser()
    OffloadConfig.add_arguments(parser)
    args = parser.parse_args(["--activation-offload", "auto"])
    found = _flags_check(args, Flags.from_args(args))
    assert "needs scipy and numba" in found.value


def test_only_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(ConfigurationError, match=r"auto needs numba, which is not installed; pip"):
        connect.check_libraries("--activation-offload auto")
