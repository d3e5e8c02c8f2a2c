# SPDX-License-Identifier: Apache-2.0
"""tools/gpu_day.py: a dry run on the CPU, what it makes of jobs that go wrong, its figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

import gpu_day
from check.gpu_day import bits, pictures, tables
from check.gpu_day.job import FAILED, NOT_BEGUN, OK, SKIPPED, TIMED_OUT, Job, Result
from check.gpu_day.parts import PARTS, jobs
from check.gpu_day.results import Day
from check.gpu_day.settings import Settings
from check.gpu_day.spans import by_lane, merged

ROOT = Path(__file__).resolve().parents[2]
# Jobs that run other tools, each of which has a dry run of its own in the suite, the compiler, and
# those that run no line that others do not.
LEFT_OUT = (
    "Python a storage,gpu_check,tests of,auto/compile,torch.compile,loss/,on both,states on ssd,"
    "recomputed,bits/checkpointing,everything on host,rok/batch 1 h,rok/batch 1 r,"
    "timeline/recompute,full8b/fsdp2,full8b/recompute,long/32768 n,long/32768 c"
)
TIMEOUT_S = 1500.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1600)]  # dozens of processes


def dry_run(out: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """The command as a person starts it, without a GPU."""
    command = [sys.executable, str(ROOT / "tools/gpu_day.py"), "--dry-run-cpu", "--out", str(out)]
    return subprocess.run(
        [*command, "--directory", str(out / "drive"), *flags],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def settings(tmp_path: Path, *, is_tiny: bool = True) -> Settings:
    return Settings(torch.device("cpu"), tmp_path, is_tiny)


# -- A dry run ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def day_out(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a run of all parts, but for what is left out above."""
    out = tmp_path_factory.mktemp("day")
    done = dry_run(out, "--skip", LEFT_OUT, "--limit", str(TIMEOUT_S))
    assert done.returncode == 0, done.stdout + done.stderr
    (out / "drive" / "printed").write_text(done.stdout)
    yield out


def test_every_part_runs_on_the_cpu(day_out: Path) -> None:
    day = Day.load(day_out / "results.json")
    assert day.is_good and day.is_dry
    assert {name.partition("/")[0] for name in day.results} == set(PARTS) - {"loss"}
    ended = {result.status for result in day.results.values()}
    assert ended == {OK, SKIPPED}
    reasons = {name: r.reason for name, r in day.results.items() if r.status == SKIPPED}
    assert reasons == {
        "bits/activations on ssd by kvikio": "GPUDirect Storage needs a CUDA device, and there is "
        "none; use --activation-offload-io auto",
        "stack/4096 trl": "OffloadActivations needs an accelerator",
        "stack/4096 save_on_cpu_pinned": "page-locked memory needs a GPU",
    }
    skipped = LEFT_OUT.split(",")
    wanted = [j.name for j in jobs(list(PARTS), settings(day_out)) if "loss/" not in j.name]
    assert list(day.results) == [n for n in wanted if not any(text in n for text in skipped)]


def test_what_comes_back_is_a_few_small_files(day_out: Path) -> None:
    files = [path for path in day_out.iterdir() if path.is_file()]
    names = {"results.json", "results.md", "log.txt", "rok.png", "timeline.png"}
    assert {path.name for path in files} == names
    assert all(path.stat().st_size < 4 << 20 for path in files)
    assert [path.name for path in (day_out / "drive").iterdir()] == ["printed"]
    texts = [path.read_text() for path in files if path.suffix != ".png"]
    assert not any(f"{ROOT}/" in text for text in texts)


def test_every_training_is_in_the_tables(day_out: Path) -> None:
    day = Day.load(day_out / "results.json")
    page = (day_out / "results.md").read_text()
    for name, result in day.results.items():
        assert f"| {name} " in page
        if "steps_s" in result.found:
            found = result.found
            assert len(found["steps_s"]) == len(found["losses"]) - found["first_steps"] >= 1
            parts = found["forward_s"] + found["backward_s"] + found["optimizer_s"]
            assert 0 < parts <= sum(found["steps_s"])
    assert "prove nothing about a GPU" in page
    assert "activations on host" in page and "identical" in page
    assert "compute busy" in page and "predicted peak" in page
    printed = (day_out / "drive" / "printed").read_text()
    assert all(f"] {name} " in printed for name in day.results)


def test_ours_and_none_have_the_same_losses(day_out: Path) -> None:
    found = {n: r.found for n, r in Day.load(day_out / "results.json").of("stack").items()}
    reference = found["4096 none"]["losses"]
    assert len(set(reference)) == len(reference) >= 2
    for way in ("host", "ssd", "tiered", "half", "keep", "recompute_host", "checkpointing"):
        losses = found[f"4096 {way}"]["losses"]
        shared = min(len(losses), len(reference))
        assert losses[:shared] == reference[:shared], way


def test_what_went_well_before_is_not_run_again(day_out: Path, tmp_path: Path) -> None:
    again = ["--earlier", str(day_out / "results.json"), "--skip", LEFT_OUT]
    done = dry_run(tmp_path, *again, "--parts", "facts,rok")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 to run" in done.stdout
    assert Day.load(tmp_path / "results.json").results.keys() >= {"stack/4096 host", "bits/Trainer"}


# -- What goes wrong ------------------------------------------------------------------------------

FAULTS = """
import os, sys, time
from check.gpu_day.job import Skip

def good(settings, note):
    return {"is": "good"}

def wrong(settings, note):
    note({"until": "then"})
    raise ValueError("a sentence\\nand more")

def missing(settings, note):
    raise Skip("no such library")

def hanging(settings, note):
    note({"until": "then"})
    child = os.fork()
    if child:
        note({"until": "then", "child": child})
    while True:
        time.sleep(1)

def dying(settings, note):
    print("last words", flush=True)
    os.kill(os.getpid(), 11)

def alone(settings, note):
    if "preloaded" in sys.modules:
        raise RuntimeError("CUDA has begun here")
    return {"line": "alone"}
"""
SCRIPT = """
import json, sys
from pathlib import Path
import torch
from check.gpu_day import job
from check.gpu_day.settings import Settings

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    job._PRELOAD = "preloaded"
    job._START = job.Job("start", sys.argv[2], 240.0)
    runner = job.Runner(Settings(torch.device("cpu"), folder, True), folder)
    found = {"machine": runner.prepare(), "jobs": {}}
    found["note"] = runner.note
    for name in sys.argv[3:]:
        limit_s = 5.0 if name == "hanging" else 240.0
        found["jobs"][name] = vars(runner.run(job.Job(f"faults/{name}", f"faults:{name}", limit_s)))
    print(json.dumps(found))
"""


def run_faults(tmp_path: Path, start: str, *names: str) -> dict[str, Any]:
    """What a process found that ran these functions of `FAULTS` as jobs."""
    (tmp_path / "faults.py").write_text(FAULTS)
    (tmp_path / "preloaded.py").write_text("import check.gpu_day.machine\n")  # all that these need
    script = tmp_path / "run.py"
    script.write_text(SCRIPT)
    folders = [str(tmp_path), str(ROOT / "tools"), str(ROOT)]
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), start, *names],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_job_that_goes_wrong_ends_no_other(tmp_path: Path) -> None:
    names = ("wrong", "missing", "hanging", "dying", "good")
    found = run_faults(tmp_path, "check.gpu_day.machine:touch_device", *names)
    assert found["note"] == "" and found["machine"]["line"]
    jobs_found = found["jobs"]
    assert {name: (job["status"], job["reason"]) for name, job in jobs_found.items()} == {
        "wrong": (FAILED, "ValueError: a sentence"),
        "missing": (SKIPPED, "no such library"),
        "hanging": (TIMED_OUT, "it did not end within 5 s"),
        "dying": (FAILED, "its process ended with -11"),
        "good": (OK, ""),
    }
    assert jobs_found["wrong"]["found"] == {"until": "then"}
    assert "ValueError: a sentence" in jobs_found["wrong"]["log"]
    assert "last words" in jobs_found["dying"]["log"]
    left = jobs_found["hanging"]["found"]  # of a job that was ended, what it had found until then
    assert left["until"] == "then"
    state = Path(f"/proc/{left['child']}/stat")  # its children ended with it; perhaps not buried
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def test_where_forked_processes_cannot_use_the_device_each_job_starts_anew(tmp_path: Path) -> None:
    found = run_faults(tmp_path, "faults:alone", "good")
    assert found["machine"] == {"line": "alone"}
    assert "imports everything anew" in found["note"] and "CUDA has begun here" in found["note"]
    assert found["jobs"]["good"]["status"] == OK


def test_a_machine_that_cannot_use_its_device_is_said_in_a_sentence(tmp_path: Path) -> None:
    folders = [str(ROOT / "tools"), str(ROOT)]
    script = (
        "import sys, torch; from pathlib import Path; from check.gpu_day.job import Runner;"
        "from check.gpu_day.settings import Settings;"
        f"folder = Path({str(tmp_path)!r});"
        "Runner(Settings(torch.device('cuda'), folder, True), folder).prepare()"
    )
    if torch.cuda.is_available():
        pytest.skip("here it can")
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 1
    assert "RuntimeError: " in done.stderr.splitlines()[-1]


def exit_code(*flags: str) -> int:
    try:
        return gpu_day.main(list(flags))
    except SystemExit as stop:
        assert isinstance(stop.code, int)
        return stop.code


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ([], "needs a CUDA GPU; --dry-run-cpu tries the script on the CPU"),
        (["--parts", "facts,speed"], "unknown part 'speed'; choose from facts, bits"),
        (["--limit", "long"], "'long' is not a number of seconds"),
        (["--host-budget", "much"], "'much' is not a size"),
        (["--dry-run-cpu", "--earlier", "nowhere.json"], "--earlier nowhere.json: "),
        (["--report-only"], "--report-only needs --earlier: there is nothing else to report"),
    ],
)
def test_bad_flags_are_one_sentence(
    flags: list[str],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert exit_code("--out", str(tmp_path / "out"), *flags) == 2
    error = capsys.readouterr().err
    assert complaint in error and len(error.splitlines()) == 1


def made_up(device: str = "a GPU", **results: Result) -> Day:
    return Day("tools/gpu_day.py", False, device, f"{device}, 16 cores", "", results)


def test_results_of_another_gpu_stand_in_no_table_with_these(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / "one.json", tmp_path / "other.json"]
    for path, device in zip(paths, ("a GPU", "another"), strict=True):
        made_up(device).save(path, ROOT)
    flags = ["--out", str(tmp_path), "--report-only", "--earlier"]
    assert exit_code(*flags, *map(str, paths)) == 2
    assert "its results are of another and these of a GPU; leave it out" in capsys.readouterr().err


def test_a_report_says_what_failed_and_what_has_not_begun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    late = Result(NOT_BEGUN, "the time was up")
    made_up(**{"stack/4096 none": late, "rok/batch 1 none": late}).save(first, ROOT)
    failed = Result(FAILED, "OutOfMemoryError: no room", log="the last words")
    made_up(**{"stack/4096 none": failed}).save(second, ROOT)
    out = tmp_path / "out"
    flags = ["--out", str(out), "--report-only", "--earlier", str(first), str(second)]
    assert exit_code(*flags) == 1
    printed = capsys.readouterr().out
    assert "FAILED: stack/4096 none: OutOfMemoryError: no room" in printed
    assert "not begun: rok/batch 1 none: the time was up" in printed
    assert "OutOfMemoryError: no room" in (out / "results.md").read_text()
    assert "the last words" in (out / "log.txt").read_text()
    assert made_up(**{"rok/batch 1 none": late}).is_good  # it has not run


def test_a_table_that_cannot_be_made_loses_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> str:
        raise KeyError("step_s")

    for name, module in {"page": tables, "draw": pictures}.items():
        monkeypatch.setattr(module, name, broken)
    made_up(**{"facts/machine": Result(OK)}).save(tmp_path / "first.json", ROOT)
    out = tmp_path / "out"
    flags = ["--out", str(out), "--report-only", "--earlier", str(tmp_path / "first.json")]
    assert exit_code(*flags) == 1
    assert "no results.md: KeyError: 'step_s'; see --report-only" in capsys.readouterr().out
    assert Day.load(out / "results.json").results["facts/machine"].status == OK


# -- Figures --------------------------------------------------------------------------------------


def test_operations_and_bytes_of_a_layer_of_llama_3_8b(tmp_path: Path) -> None:
    shape = replace(settings(tmp_path, is_tiny=False).shape("stack"), batch=1)
    more = replace(shape, layers=shape.layers + 1)
    forward = (more.step_flops - shape.step_flops) / 3
    weights = 4096 * (4096 + 2 * 1024 + 4096) + 3 * 4096 * 14336
    causal = 4 * 4096 * 4096 / 2  # two products of a token with half of all tokens, in all heads
    assert forward == 4096 * (2 * weights + causal)
    assert shape.layer_bytes == int(24.5 * 4096 * 4096 * 2)
    assert shape.budget(0.5) - shape.head_bytes == shape.layers // 2 * shape.layer_bytes
    assert shape.budget(0.0) - shape.head_bytes == 3 * shape.layer_bytes


def test_lanes_are_busy_once_where_spans_overlap() -> None:
    assert merged([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (3.5, 4.0)], 0.5) == [(0.0, 4.0), (5.0, 6.0)]
    found = by_lane(
        [
            ("gemm", 0.0, 400.0),
            ("softmax", 200.0, 500.0),
            ("Memcpy DtoH (Device -> Pinned)", 100.0, 350.0),
            ("Memcpy HtoD (Pinned -> Device)", 900.0, 1000.0),
        ]
    )
    assert found["step_ms"] == 1.0
    assert found["busy"] == {"compute": 0.5, "to host": 0.25, "from host": 0.1}
    assert found["lanes"]["from host"] == [[0.9, 0.1]]
    assert by_lane([])["busy"]["compute"] == 0.0


def test_other_bits_are_named() -> None:
    one = {"loss": torch.ones(1), "weight": torch.ones(3)}
    assert bits.first_difference(one, {k: v.clone() for k, v in one.items()}) is None
    last_bit = {**one, "weight": torch.tensor([1.0, 1.0, 1.0000001])}
    assert bits.first_difference(one, last_bit) == "weight"
    assert bits.first_difference(one, {**one, "bias": torch.ones(1)}) == "what there is"


def test_a_door_that_changes_a_bit_or_moves_nothing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = bits.offload_optimizer

    def other_rate(optimizer: torch.optim.Optimizer, *args: Any, **more: Any) -> Any:
        optimizer.param_groups[0]["betas"] = (0.9, 0.9989)
        return real(optimizer, *args, **more)

    def check(door: str) -> None:
        bits.compare(settings(tmp_path), lambda found: None, door=door)

    monkeypatch.setattr(bits, "offload_optimizer", other_rate)
    with pytest.raises(AssertionError, match="other bits with the door: "):
        check("states on host")
    monkeypatch.setattr(bits, "_where", lambda *_: {"mode": "off"})
    with pytest.raises(AssertionError, match="no activation moved"):
        check("activations on host")


# -- Wheels ---------------------------------------------------------------------------------------


@pytest.fixture
def download(tmp_path: Path) -> Callable[[str], subprocess.CompletedProcess[str]]:
    """Runs tools/gpu_wheels.sh with a pip that makes wheels of a size and notes its flags."""

    def run(size: str) -> subprocess.CompletedProcess[str]:
        python = tmp_path / "python"
        python.write_text(
            f'#!/bin/bash\necho "$@" >>{tmp_path}/asked\n'
            "while [[ $1 != --dest ]]; do shift; done\n"
            f'for name in "${{@:3}}"; do truncate -s {size} "$2/${{name%%==*}}.whl"; done\n'
        )
        python.chmod(0o755)
        return subprocess.run(
            [str(ROOT / "tools/gpu_wheels.sh"), str(tmp_path / "wheels")],
            env={**os.environ, "PYTHON": str(python)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


def test_wheels_are_those_of_the_pinned_versions_and_their_size_is_said(
    download: Callable[[str], subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "trl-0.1.whl").write_text("an older one")
    done = download("512K")
    assert done.returncode == 0, done.stderr
    assert "gpu_wheels: 3.5 MiB in 7 wheels" in done.stdout
    asked = (tmp_path / "asked").read_text()
    assert "--no-deps" in asked and "--python-version 3.12" in asked
    pins = (ROOT / "tools/constraints.txt").read_text().split()
    assert sum(pin in asked.split() for pin in pins) == 3
    assert not (tmp_path / "wheels" / "trl-0.1.whl").exists()


def test_more_than_can_be_carried_along_is_an_error(
    download: Callable[[str], subprocess.CompletedProcess[str]],
) -> None:
    done = download("17M")
    assert done.returncode == 1
    assert "has more than 64 MiB, the most that can be carried along" in done.stderr


def test_a_dry_run_has_all_jobs_of_a_real_one_but_lengths_and_batches(tmp_path: Path) -> None:
    tiny, real = (
        {job.name: job for job in jobs(list(PARTS), settings(tmp_path, is_tiny=is_tiny))}
        for is_tiny in (True, False)
    )
    left_out = {name for name in real if name not in tiny}
    parts = ("stack/8192 ", "auto/", "rok/batch 4 ", "long/65536 ", "bits/gpu_check ")
    assert all(name.startswith(parts) for name in left_out)
    assert tiny.keys() <= real.keys()
    assert all(isinstance(job, Job) and job.part in PARTS for job in real.values())


def test_a_command_names_no_folder_of_the_machine() -> None:
    argv = ["--out", "/a/b/first", "--skip", "4096 ssd", "--earlier", f"{gpu_day.ROOT}/docs/x.json"]
    expected = "tools/gpu_day.py --out first --skip '4096 ssd' --earlier docs/x.json"
    assert gpu_day._command(argv) == expected
