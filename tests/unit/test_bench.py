# SPDX-License-Identifier: Apache-2.0
"""`megatron-offload bench`: its arithmetic on made-up samples, and tiny runs beside a fake fio."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import cli
from megatron.offload.commands.bench import command, fio
from megatron.offload.commands.bench.fio import Fio, FioError, fio_environment, parse_sample
from megatron.offload.commands.bench.point import (
    OPERATIONS,
    MeasuredPoint,
    Round,
    headline,
    shortfalls,
)
from megatron.offload.commands.bench.sample import Sample
from megatron.offload.commands.bench.text import format_table
from megatron.offload.machine.allocator import allocator_environment
from megatron.offload.sizes import MIB


def job(**changes: Any) -> str:
    """What fio prints for a job that wrote 3 GB in 2 s and read 1 GB in 1 s."""
    ways = {
        "read": {"io_bytes": 1_000_000_000, "runtime": 1000},
        "write": {"io_bytes": 3_000_000_000, "runtime": 2000},
    }
    load = {"error": 0, "job_runtime": 2000, "usr_cpu": 2.5, "sys_cpu": 7.5}
    return "a warning\n" + json.dumps({"jobs": [ways | load | changes]})


def figure(
    operation: str = "write",
    gbps: tuple[tuple[float, float | None], ...] = ((1.0, 1.0),),
    cpu: float = 1.0,
    **changes: Any,
) -> MeasuredPoint:
    """Rounds of 1 GB with these bandwidths; ours takes `cpu` times fio's processor time."""
    shape = {"tier": "ssd", "reference": "fio", "block_bytes": 4 * MIB, "depth": 4} | changes
    rounds = [
        Round(
            Sample(10**9, 1 / ours, 0.1 * cpu),
            None if theirs is None else Sample(10**9, 1 / theirs, 0.1),
        )
        for ours, theirs in gbps
    ]
    return MeasuredPoint(operation=operation, rounds=rounds, **shape)


def test_fio_output_is_read() -> None:
    sample = parse_sample(job())
    assert sample == Sample(num_bytes=4_000_000_000, wall_s=2.0, cpu_s=0.2)
    assert sample.gbps == pytest.approx(2.0)
    assert sample.cpu_s_per_gb == pytest.approx(0.05)


@pytest.mark.parametrize(
    "output, complaint",
    [
        (job(error=errno.ENOSPC), "No space left"),
        (job(write={"io_bytes": 0, "runtime": 0}, read={"io_bytes": 0, "runtime": 0}), "too few"),
        (job(read=None), "not understood"),
        ("fio: unknown option", "not understood"),
    ],
)
def test_fio_output_that_is_no_measurement(output: str, complaint: str) -> None:
    with pytest.raises(FioError, match=complaint):
        parse_sample(output)


def test_ratios_are_paired_by_round() -> None:
    # The machine is twice as slow in round 2: the ratio of the medians would be 4 / 4.
    found = figure(gbps=((4.0, 5.0), (2.0, 2.5), (4.4, 4.0))).compared("gbps")
    assert found["ours"] == pytest.approx(4.0)
    assert found["reference"] == pytest.approx(4.0)
    assert found["ratio"] == pytest.approx(0.8)


def test_no_reference_no_ratio() -> None:
    found = figure(gbps=((4.0, None), (2.0, None))).compared("cpu_s_per_gb")
    assert found == {"ours": pytest.approx(0.1), "reference": None, "ratio": None}


def test_headline_is_4_mib_at_one_depth() -> None:
    figures = [
        figure("write", ((3.0, 2.0),), cpu=0.5),
        figure("read", ((2.0, 2.0),), cpu=1.4),
        figure("mixed", ((1.0, 2.0),), cpu=0.9),
        figure("write", ((9.0, 1.0),), cpu=9.0, depth=8),
        figure("write", ((9.0, 1.0),), cpu=9.0, block_bytes=MIB),
        figure("write", ((9.0, 1.0),), cpu=9.0, tier="tiered"),
    ]
    assert headline(figures, "ssd", depth=4) == pytest.approx(
        {
            "write_ratio_to_fio": 1.5,
            "read_ratio_to_fio": 1.0,
            "mixed_ratio_to_fio": 0.5,
            "cpu_ratio_to_fio": 1.4,
            "write_cpu_ratio_to_fio": 0.5,
            "read_cpu_ratio_to_fio": 1.4,
            "mixed_cpu_ratio_to_fio": 0.9,
        }
    )
    # An operation that is missing may have been the most expensive one.
    assert headline(figures[:2], "ssd", depth=4)["cpu_ratio_to_fio"] is None
    assert set(headline(figures, "ssd", depth=1).values()) == {None}


def test_host_memory_is_compared_with_memcpy() -> None:
    figures = [figure(each, tier="host", reference="memcpy") for each in OPERATIONS]
    assert headline(figures, "host", 4)["write_ratio_to_memcpy"] == pytest.approx(1.0)


def test_what_is_required() -> None:
    good = {"write_ratio_to_fio": 0.95, "cpu_ratio_to_fio": 1.5, "read_cpu_ratio_to_fio": 0.1}
    assert shortfalls(good) == []
    bad = {"write_ratio_to_fio": 0.94, "cpu_ratio_to_fio": 1.6, "read_ratio_to_fio": None}
    assert [complaint.split()[0] for complaint in shortfalls(bad)] == list(bad)


def test_fio_starts_without_our_allocator_unless_asked() -> None:
    started_with = {"HOME": "/root", **allocator_environment()}
    assert fio_environment(started_with, huge_pages=False) == {"HOME": "/root"}
    assert fio_environment({"HOME": "/root"}, huge_pages=True) == started_with


@pytest.fixture
def fake_fio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that has no io_uring and prints the file `said.json`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    said = folder / "said.json"
    said.write_text(job())
    program = folder / "fio"
    program.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        '*--version*) echo "fio-9";;\n'
        '*io_uring*) echo "fio: engine not there" >&2; exit 1;;\n'
        f'*) cat "{said}";;\n'
        "esac\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return said


def test_fio_falls_back_to_libaio(tmp_path: Path, fake_fio: Path) -> None:
    yardstick = Fio(tmp_path, MIB)
    assert (yardstick.version, yardstick.engine) == ("fio-9", "libaio")
    assert yardstick.refused is not None and "engine not there" in yardstick.refused
    fake_fio.write_text(job(error=errno.EIO))
    with pytest.raises(FioError, match="job failed"):
        yardstick.run(MIB, 1, "read")
    yardstick.close()
    with pytest.raises(FioError, match=r"io_uring.*libaio"):
        Fio(tmp_path, MIB)


def bench(tmp_path: Path, *more: str) -> int:
    """The command's exit code after a tiny run."""
    flags = ["--directory", str(tmp_path / "drive"), "--size", "48MiB", "--pairs", "1"]
    flags += ["--blocks", "4MiB", "--depths", "4", "--json", str(tmp_path / "out.json"), *more]
    try:
        return cli.main(["bench", *flags])
    except SystemExit as stop:
        assert isinstance(stop.code, int)
        return stop.code


@pytest.mark.parametrize("io_bytes, exit_code", [(1000, 0), (10**15, 1)])
def test_exit_code_says_whether_fio_was_reached(
    tmp_path: Path, fake_fio: Path, io_bytes: int, exit_code: int
) -> None:
    # Its processor time for each byte is far above ours.
    ways = {way: {"io_bytes": io_bytes, "runtime": 1000} for way in ("read", "write")}
    fake_fio.write_text(job(**ways, usr_cpu=1e15))
    assert bench(tmp_path, "--tiers", "ssd", "--require") == exit_code


def test_without_fio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fio.shutil, "which", lambda name: None)
    assert bench(tmp_path, "--tiers", "ssd", "--require") == 1
    assert "no comparison with fio: fio is not installed" in capsys.readouterr().out
    result = json.loads((tmp_path / "out.json").read_text())
    assert set(result["tiers"]["ssd"].values()) == {None}


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_a_tiny_benchmark(tmp_path: Path) -> None:
    assert bench(tmp_path, "--tiers", "ssd") == 0
    result = json.loads((tmp_path / "out.json").read_text())
    assert all(ratio for ratio in result["tiers"]["ssd"].values())
    for each in result["figures"]:
        assert each["rounds"][0]["ours"]["num_bytes"] == 48 * MIB
        assert each["rounds"][0]["reference"]["num_bytes"] == 48 * MIB
    assert list((tmp_path / "drive").iterdir()) == []


@pytest.mark.slow
def test_every_tier_is_shown(
    tmp_path: Path, fake_fio: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "out.png"
    assert bench(tmp_path, "--io", "buffered", "--plot", str(picture)) == 0
    assert picture.stat().st_size > 0
    result = json.loads((tmp_path / "out.json").read_text())
    assert list(result["tiers"]) == ["ssd", "host", "tiered", "ssd-buffered"]
    assert len(result["figures"]) == 4 * 3
    shown = capsys.readouterr().out
    assert "fio-9: libaio, direct=1" in shown
    assert format_table(result["figures"][-3:]) in shown


def test_timed_pieces_end_in_time(tmp_path: Path, fake_fio: Path) -> None:
    assert bench(tmp_path, "--seconds", "0.02", "--tiers", "ssd,host") == 0
    result = json.loads((tmp_path / "out.json").read_text())
    for each in result["figures"]:
        assert each["rounds"][0]["ours"]["num_bytes"] > 0


@pytest.mark.parametrize(
    "flags, complaint",
    [
        (["--tiers", "ssd,tape"], "unknown tape"),
        (["--size", "16MiB"], "--size must be at least 48 MiB"),
        (["--pairs", "0"], "must be above 0"),
        (["--depths", "1", "--require"], "--require needs"),
        (["--plot", "nowhere/out.png"], "no such folder"),
        (["--io", "gds"], "add --device cuda"),
        (["--device", "cuda"], "torch sees no CUDA device; use --device cpu"),
    ],
)
def test_bad_flags(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    complaint: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench(tmp_path, *flags) == 2
    assert complaint in capsys.readouterr().err


def test_it_starts_again_with_the_allocator_once(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, str]] = []
    monkeypatch.setattr(command.os, "execve", lambda *a: started.append(a[2]))
    for name in allocator_environment():
        monkeypatch.delenv(name, raising=False)
    command.restart_with_allocator()
    assert len(started) == 1
    assert started[0].items() >= allocator_environment().items()
    monkeypatch.setattr(command.os, "environ", started[0])
    command.restart_with_allocator()
    assert len(started) == 1


def test_a_picture_without_matplotlib_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert bench(tmp_path, "--plot", str(tmp_path / "out.png")) == 2
    assert "--plot needs matplotlib, which is not installed" in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()
