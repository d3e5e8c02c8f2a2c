# SPDX-License-Identifier: Apache-2.0
"""`report`, `doctor` and `rok` with `--script`: a training script that calls the door."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from megatron.offload import cli
from megatron.offload.commands.training_runs.trainer import read_metrics

SCRIPT = """
    import sys, torch
    from megatron.offload import offload_activations

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Linear(64, 64)
            self.layers = torch.nn.Sequential(*(
                torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.GELU())
                for _ in range(4)
            ))

        def forward(self, x):
            return self.layers(self.first(x)).square().mean()

    torch.manual_seed(0)
    model = Model()
    settings = {"min_bytes": "16KiB", "write_bytes_per_s": "4GB/s"}
    settings["inflight_bytes"] = "128KiB"  # so forward waits for writes, however busy the disk is
    offload_activations(model, sys.argv[1], **settings)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for step in range(int(sys.argv[2])):
        model(torch.randn(256, 64)).backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


def arguments(tmp_path: Path, num_steps: int = 60) -> list[str]:
    return ["--script-args", f"{tmp_path} {num_steps}"]


@pytest.mark.slow
def test_report_runs_it_without_offload_and_as_it_is(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["report", "--script", str(script), "--steps", "4", *arguments(tmp_path, 4)]
    assert cli.main(command) == 0
    _, off, offload = capsys.readouterr().out.splitlines()
    assert off.split()[:2] == ["off", "4"] and "identical" in off and " 0 B " in off
    assert offload.split()[:2] == ["offload", "4"] and "identical" in offload
    assert " 0 B " not in offload


@pytest.mark.slow
def test_doctor_looks_at_the_settings_in_it(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        cli.main(["doctor", "--no-bandwidth", "--script", str(script), *arguments(tmp_path)]) == 0
    )
    found = capsys.readouterr().out
    assert f"Directory {tmp_path}" in found and "--activation-offload ssd" in found
    missing = ["--script-args", f"{tmp_path / 'missing'} 4"]
    assert cli.main(["doctor", "--no-bandwidth", "--script", str(script), *missing]) == 1


@pytest.mark.slow
def test_rok_measures_it(script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "rok"
    command = ["rok", "--script", str(script), *arguments(tmp_path, 300)]
    command += [
        "--strategies",
        "off,recompute,recompute-ssd,ssd",
        "--steps",
        "2",
        "--no-turns",
        "--rounds",
        "1",
    ]
    command += ["--output", str(output), "--activation-offload-dir", str(tmp_path / "offload")]
    assert cli.main(command) == 0
    result = json.loads((output / "rok.json").read_text())
    assert result["title"] == "train.py" and not result["differences"]
    written = {one["placement"]: one["written_bytes"] for one in result["figures"]}
    assert written["off"] == written["recompute"] == 0
    # What moves may be needed before it is written, on a machine whose disk is busy.
    for placement, num_again, moves in (
        ("recompute", 4, False),
        ("recompute-ssd", 4, True),
        ("ssd", 0, True),
    ):
        # A training that has shown enough is killed: it may be in the middle of a line.
        log = next((output / "trainings").glob(f"*-{placement}@*/metrics.jsonl"))
        steps = [step["offload"] for step in read_metrics(log)]
        assert {step["recomputed_layers"] for step in steps} == {num_again}
        assert {step["offloaded_bytes"] > 0 for step in steps} == {moves}


def test_a_script_without_the_door_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "other.py"
    script.write_text("print('hello')\n")
    assert cli.main(["doctor", "--script", str(script)]) == 2
    error = capsys.readouterr().err
    assert "exit code 0 and did not call offload_activations" in error and "hello" in error
    assert cli.main(["report", "--script", str(script)]) == 2
    assert "other.py ended and did not call offload_activations" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["doctor", "report", "rok"])
def test_a_script_that_is_not_there_is_named(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([command, "--script", "nope.py"]) == 2
    assert capsys.readouterr().err == "megatron-offload: error: there is no script nope.py\n"


@pytest.mark.parametrize("command", [["report"], ["report", "a.jsonl", "--script", "b.py"]])
def test_report_takes_files_or_a_script(command: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(command)


def test_selective_recomputation_is_megatrons(script: Path, tmp_path: Path) -> None:
    command = ["rok", "--script", str(script), "--strategies", "off,selective"]
    assert cli.main(command) == 2


LENGTHS = """
    import sys, torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from megatron.offload import offload_activations

    torch.manual_seed(0)
    tokens = int(sys.argv[2])
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=16000, hidden_size=64, intermediate_size=2048, num_hidden_layers=6,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=1 << 20,
    ))
    offload_activations(model, sys.argv[1], min_bytes="64KiB")
    ids = torch.randint(0, 16000, (1, tokens))
    for step in range(20):
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()
"""


@pytest.mark.slow
def test_longest_finds_what_fits_with_each_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(LENGTHS))
    command = ["longest", "--script", str(script), "--script-args", f"{tmp_path} {{N}}"]
    command += ["--device-memory-budget", "672MiB", "--ways", "none,checkpointing,chunked"]
    command += ["--first", "192", "--most", "2048", "--json", str(tmp_path / "found.json")]
    assert cli.main(command) == 0, capsys.readouterr().err
    found = json.loads((tmp_path / "found.json").read_text())["ways"]
    none, checkpointing, chunked = (found[name]["longest"] for name in found)
    assert 192 < none < checkpointing < chunked and 2 * none < chunked
    for one in found.values():
        peaks = [run["peak_bytes"] for run in one["runs"]]
        assert peaks == sorted(peaks) and peaks[-1] <= 1.02 * (672 << 20)  # as predicted
