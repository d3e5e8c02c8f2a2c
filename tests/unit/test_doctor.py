# SPDX-License-Identifier: Apache-2.0
"""The `doctor` command: what it calls a problem, a warning, or fine; text and JSON."""

from __future__ import annotations

import importlib.machinery
import json
import sys
from pathlib import Path

import pytest

import megatron.offload
from megatron.offload import cli
from megatron.offload.commands.doctor import directory as directory_part
from megatron.offload.commands.doctor.check import Check, Diagnosis, Section, Status
from megatron.offload.commands.doctor.gpu import (
    Cuda,
    Gpu,
    cuda_checks,
    direct_storage_check,
    find_cuda,
)
from megatron.offload.commands.doctor.machine import (
    megatron_check,
    megatron_version,
    memory_checks,
    version_checks,
)
from megatron.offload.commands.doctor.produced import produced_check
from megatron.offload.commands.progress import progress
from megatron.offload.machine.memory_limit import MemoryLimit
from megatron.offload.machine.mounts import BlockDevice, Mount
from megatron.offload.planner.projection.hardware import GpuSpec
from megatron.offload.sizes import GIB, MIB
from megatron.offload.tiers import file as file_part
from megatron.offload.tiers.file import UnlinkedFile
from megatron.offload.tiers.gds_status import GdsStatus
from megatron.offload.tiers.probe import BLOCK_BYTES, has_fallocate, measure_bandwidth

EXAMINE = "megatron.offload.commands.doctor.examine"
GPU = Gpu("Large GPU", 80 * GIB, numa_node=0)


@pytest.fixture(autouse=True)
def a_machine_without_gpu(monkeypatch):
    monkeypatch.setattr(f"{EXAMINE}.find_cuda", Cuda)


@pytest.fixture
def on_a_disk(monkeypatch):
    """Temporary directories may be in memory, which is not measured."""
    monkeypatch.setattr(f"{EXAMINE}._mount_of", lambda directory: None)


@pytest.fixture
def diagnose(capsys):
    """Runs the command with --json: the exit code and the checks by name."""

    def run(*flags):
        code = cli.main(["doctor", "--json", "--no-bandwidth", *map(str, flags)])
        document = json.loads(capsys.readouterr().out)
        assert document["works"] == (code == 0)
        assert document["format"] == 1 and document["version"] == megatron.offload.__version__
        assert document["host"] and document["time"].endswith("+00:00")
        for check in document["checks"]:
            assert check["advice"] or check["status"] in ("ok", "info"), check
        return code, {check["name"]: check for check in document["checks"]}

    return run


@pytest.fixture
def no_direct_io(monkeypatch):
    monkeypatch.setattr(file_part, "direct_alignment", lambda fd: None)


def test_without_flags_the_current_directory_is_checked(diagnose, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, checks = diagnose()
    assert code == 0
    assert checks["flags"]["facts"]["directories"] == [str(tmp_path)]
    assert "current" in checks["space"]["section"]
    assert checks["space"]["facts"]["free_bytes"] > 0
    assert checks["memory"]["facts"]["available_bytes"] > 0


def test_a_directory_is_taken_for_ssd(diagnose, tmp_path):
    code, checks = diagnose("--activation-offload-dir", tmp_path)
    assert code == 0
    assert (
        checks["flags"]["facts"]["mode"] == "ssd" and "checked as ssd" in checks["flags"]["value"]
    )


def test_flags_that_contradict_each_other_are_a_problem_and_the_rest_is_checked(diagnose):
    code, checks = diagnose("--activation-offload", "ssd")
    assert code == 1
    assert checks["flags"]["status"] == "problem"
    assert "--activation-offload-dir" in checks["flags"]["advice"]
    assert "memory" in checks and "torch" in checks


def test_a_value_that_is_none_ends_with_exit_code_2(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", "--activation-offload-ssd-budget", "much"])
    assert ended.value.code == 2
    assert "much" in capsys.readouterr().err


def test_a_bad_directory_is_one_line(diagnose, tmp_path):
    file = tmp_path / "file"
    file.touch()
    for bad in (tmp_path / "missing", file, Path("/proc")):
        code, checks = diagnose("--activation-offload-dir", bad)
        assert code == 1
        assert (
            checks["directory"]["status"] == "problem" and str(bad) in checks["directory"]["value"]
        )
        assert "space" not in checks


def test_a_directory_that_is_closed_to_us_is_one_line(diagnose, tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(directory_part, "UnlinkedFile", refuse)
    code, checks = diagnose("--activation-offload-dir", tmp_path)
    assert code == 1 and "Permission denied" in checks["directory"]["value"]


def test_a_bad_current_directory_is_only_a_warning(diagnose, monkeypatch):
    monkeypatch.chdir("/proc")
    code, checks = diagnose("--activation-offload-ssd-budget", "1000TiB")
    assert code == 0 and checks["directory"]["status"] == "warning"


@pytest.mark.usefixtures("no_direct_io")
@pytest.mark.parametrize(
    ("io", "status"), [("auto", "warning"), ("direct", "problem"), ("buffered", "info")]
)
def test_missing_direct_io_matters_as_much_as_it_was_asked_for(diagnose, tmp_path, io, status):
    code, checks = diagnose("--activation-offload-dir", tmp_path, "--activation-offload-io", io)
    assert checks["direct I/O"]["status"] == status
    assert code == (1 if status == "problem" else 0)


def test_an_ssd_budget_above_the_free_space_is_a_problem(diagnose, tmp_path):
    flags = ("--activation-offload-dir", tmp_path, "--activation-offload-ssd-budget")
    code, checks = diagnose(*flags, "1000TiB")
    assert code == 1 and checks["SSD budget"]["status"] == "problem"
    code, checks = diagnose(*flags, "1MiB")
    assert code == 0 and checks["SSD budget"]["facts"]["budget_bytes"] == MIB


def test_directories_on_one_disk_share_its_space(diagnose, tmp_path):
    names = [tmp_path / "a", tmp_path / "b"]
    for name in names:
        name.mkdir()
    free_bytes = diagnose("--activation-offload-dir", tmp_path)[1]["space"]["facts"]["free_bytes"]
    budget = f"--activation-offload-ssd-budget={free_bytes * 3 // 2}"
    code, checks = diagnose("--activation-offload-dir", ",".join(map(str, names)), budget)
    assert code == 1 and checks["SSD budget"]["status"] == "problem"


def test_a_limit_of_the_file_size_stops_a_larger_budget(diagnose, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "megatron.offload.commands.doctor.examine.file_size_limit_bytes", lambda: 100 * MIB
    )
    flags = ("--activation-offload-dir", tmp_path, "--activation-offload-ssd-budget", "200MiB")
    code, checks = diagnose(*flags)
    assert code == 1 and "ulimit -f" in checks["SSD budget"]["value"]


def test_a_host_budget_above_memory_is_a_problem(diagnose):
    flags = ("--activation-offload", "host", "--activation-offload-host-budget")
    code, checks = diagnose(*flags, "1000TiB")
    assert code == 1 and checks["host budget"]["status"] == "problem"
    assert "space" not in checks  # no directory is needed
    code, checks = diagnose(*flags, "0.01")
    assert code == 0 and checks["host budget"]["status"] == "ok"


def test_gpudirect_without_a_gpu_is_a_problem(diagnose, tmp_path):
    flags = ("--activation-offload-dir", tmp_path)
    code, checks = diagnose(*flags, "--activation-offload-io", "gds")
    assert code == 1 and checks["GPUDirect"]["status"] == "problem"
    code, checks = diagnose(*flags)
    assert code == 0 and checks["GPUDirect"]["status"] == checks["CUDA"]["status"] == "info"


@pytest.mark.usefixtures("on_a_disk")
def test_bandwidth_is_measured_at_three_depths(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(directory_part, "SAMPLE_BYTES", 4 * BLOCK_BYTES)
    monkeypatch.setattr(directory_part, "_MIN_SAMPLE_BYTES", 0)
    assert cli.main(["doctor", "--json", "--activation-offload-dir", str(tmp_path)]) == 0
    checks = json.loads(capsys.readouterr().out)["checks"]
    rates = {check["name"]: check["facts"] for check in checks}
    for direction in ("write", "read"):
        found = rates[f"{direction} speed"][f"{direction}_bytes_per_s"]
        assert list(found) == ["1", "4", "16"] and min(found.values()) > 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("io", ["auto", "buffered"])
def test_a_measurement_stops_when_its_time_is_up(tmp_path, io):
    file = UnlinkedFile(tmp_path, io)
    assert has_fallocate(file) and file.size_bytes == 0
    passes = []
    figures = measure_bandwidth(
        file, 64 * BLOCK_BYTES, depths=(1, 2), limit_s=0.0, advance=lambda: passes.append(1)
    )
    assert [figure.depth for figure in figures] == [1, 2] and len(passes) == 5
    file.close()


@pytest.mark.usefixtures("on_a_disk")
def test_a_disk_that_fails_while_it_is_measured_is_a_warning(tmp_path, capsys, monkeypatch):
    def fail(*_, **__):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(directory_part, "measure_bandwidth", fail)
    assert cli.main(["doctor", "--activation-offload-dir", str(tmp_path)]) == 0
    assert "not measured: Input/output error" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("file_system", "source", "word"),
    [
        ("nfs4", "server:/export", "network"),
        ("overlay", "overlay", "container"),
        ("tmpfs", "tmpfs", "memory"),
    ],
)
def test_what_is_no_local_disk_is_a_warning(file_system, source, word):
    mount = Mount("0:50", "/", Path("/mnt"), file_system, source, ())
    check = directory_part._file_system_check(mount)
    assert check.status is Status.WARNING and word in check.value


@pytest.mark.parametrize("file_system", ["btrfs", "zfs", "bcachefs", "ext4", "xfs"])
def test_a_file_system_that_copies_on_write_is_said(file_system):
    mount = Mount("0:50", "/", Path("/mnt"), file_system, "/dev/nvme0n1p1", ())
    check = directory_part._file_system_check(mount)
    copies = file_system in ("btrfs", "zfs", "bcachefs")
    assert check.status is (Status.INFO if copies else Status.OK)
    assert ("may find the disk full" in check.value) is copies
    assert ("keep some of the disk free" in check.advice) is copies


def test_drives_are_judged_by_their_kind():
    def judge(is_rotational, is_virtual=False):
        device = BlockDevice("sda", "Some Disk", is_virtual, is_rotational, None)
        return directory_part._device_check(device).status

    assert judge(False) is judge(None) is Status.OK
    assert judge(True) is Status.WARNING
    assert judge(True, is_virtual=True) is Status.INFO


@pytest.mark.parametrize(
    ("num_disks", "threads", "said"),
    [(1, None, None), (8, None, "32, for 8 disks"), (8, 2, None)],
)
def test_threads_are_said_where_a_directory_is_on_several_disks(
    tmp_path, monkeypatch, num_disks, threads, said
):
    disks = [BlockDevice(f"nvme{n}n1", None, False, False, None) for n in range(num_disks)]
    monkeypatch.setattr(directory_part, "block_devices", lambda mount: disks)
    mount = Mount("9:0", "/", Path("/"), "ext4", "/dev/md0", ())
    checks = directory_part.directory_checks(
        tmp_path, mount, io="buffered", threads=threads, gpu_nodes=(), measures_bandwidth=False
    )
    values = [check.value for check in checks if check.name == "I/O threads"]
    assert values == ([f"{said} (--activation-offload-threads)"] if said else [])


def test_a_drive_on_another_node_than_the_gpu_is_a_warning(monkeypatch):
    monkeypatch.setattr(directory_part, "num_numa_nodes", lambda: 2)
    drive = BlockDevice("nvme0n1", None, False, False, numa_node=1)
    assert directory_part._numa_check([drive], [0, 0]).status is Status.WARNING
    assert directory_part._numa_check([drive], [0, 1]).status is Status.INFO
    assert "unknown" in directory_part._numa_check([], [None]).value


def test_a_machine_with_a_gpu_works(diagnose, tmp_path, monkeypatch):
    monkeypatch.setattr(f"{EXAMINE}.find_cuda", lambda: Cuda((GPU,), "580.95", "13.0"))
    monkeypatch.setitem(sys.modules, "kvikio", None)
    code, checks = diagnose("--activation-offload-dir", tmp_path)
    assert code == 0 and checks["CUDA"]["status"] == "ok"
    assert checks["device 0"]["value"] == "Large GPU, 80 GiB; offload runs on this GPU"
    assert checks["GPUDirect"]["status"] == "info" and "not install" in checks["GPUDirect"]["value"]


def test_cuda_devices_and_why_there_are_none():
    working = cuda_checks(Cuda((GPU, GPU), driver="580.95", runtime="13.0"))
    assert [check.status for check in working] == [Status.OK] * 3
    (none,) = cuda_checks(Cuda())
    assert none.status is Status.INFO
    (cpu_build,) = cuda_checks(Cuda(driver="580.95"))
    assert cpu_build.status is Status.WARNING and "built for the CPU" in cpu_build.value
    (old,) = cuda_checks(Cuda(driver="470.1", runtime="13.0", failure="too old."))
    assert old.status is Status.WARNING and "too old" in old.value


def test_what_a_layer_makes_a_second_is_said_against_link_and_drives(diagnose, monkeypatch):
    h100 = Gpu("NVIDIA H100 80GB HBM3", 80 * GIB, numa_node=0)
    monkeypatch.setattr(f"{EXAMINE}.find_cuda", lambda: Cuda((h100,), "580.95", "13.0"))
    _, checks = diagnose("--activation-offload", "host")
    check = checks["activations"]
    made, taken = (check["facts"][f"{one}_bytes_per_s"] for one in ("produced", "taken"))
    assert 150e9 < made < 350e9  # about 25 x 4096 x 2 bytes and 0.47 GFLOP a token
    assert taken == {"the link (PCIe 5.0 x16)": 64e9 * 0.78}
    assert f"({49.92e9 / made:.0%})" in check["value"] and "auto" in check["advice"]
    measured = Check(
        "write speed", Status.OK, "", facts={"write_bytes_per_s": {"1": 4e9, "8": 6e9}}
    )
    both = produced_check(h100, [measured, measured])
    assert both is not None
    assert both.facts["taken_bytes_per_s"]["what the directories write"] == 12e9
    assert produced_check(GPU, []) is None, "no data sheet has it"
    for name, memory_bytes, found in (
        ("NVIDIA A100-SXM4-40GB", 40 * GIB, "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", 80 * GIB, "a100"),
        ("NVIDIA H200", 141 * GIB, "h200"),
    ):
        spec = GpuSpec.of_device(name, memory_bytes)
        assert spec is not None and spec.name == found


def test_the_driver_is_found_in_proc(tmp_path):
    (tmp_path / "driver/nvidia").mkdir(parents=True)
    (tmp_path / "driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n"
        "GCC version:  gcc version 13.3.0\n"
    )
    assert find_cuda(tmp_path).driver == "580.95.05"


def test_missing_gpudirect_matters_as_much_as_it_was_asked_for():
    def judge(available, is_gpudirect, advice):
        found = GdsStatus(available, is_gpudirect, "what was found", advice, {})
        return [direct_storage_check(found, is_wanted).status for is_wanted in (True, False)]

    assert judge(True, True, "") == [Status.OK, Status.OK]
    assert judge(True, False, "do this") == [Status.WARNING, Status.INFO]
    assert judge(False, False, "do this") == [Status.PROBLEM, Status.INFO]


def test_versions_say_what_is_missing_and_what_it_is_for():
    imported = set(sys.modules)
    installed = {"kvikio-cu13": "26.2", "nvidia-dali-cuda130": "2.0", "kvikio-extras": "1"}
    checks = {check.name: check for check in version_checks(installed, ("0.16.1",))}
    assert checks["python"].status is checks["torch"].status is Status.OK
    assert (checks["kvikio"].value, checks["nvidia-dali"].value) == ("26.2", "2.0")
    assert checks["apex"].status is Status.INFO and "optional" in checks["apex"].value
    assert set(sys.modules) == imported  # megatron.core and others take seconds


def test_an_unknown_megatron_is_a_problem_and_a_missing_one_a_warning():
    assert megatron_check("0.16.1", ("0.16.1",)).status is Status.OK
    assert megatron_check("0.15.0", ("0.16.1",)).status is Status.PROBLEM
    assert megatron_check(None, ("0.16.1",)).status is Status.WARNING


def test_a_script_of_ones_own_needs_no_megatron(monkeypatch):
    monkeypatch.setattr("megatron.offload.commands.doctor.machine.megatron_version", lambda _: None)
    for needs, status in ((True, Status.WARNING), (False, Status.INFO)):
        checks = version_checks({}, ("0.16.1",), needs_megatron=needs)
        (megatron,) = (check for check in checks if check.name == "megatron-core")
        assert megatron.status is status


def test_the_version_is_that_of_the_megatron_that_an_import_finds(tmp_path, monkeypatch):
    spec = importlib.machinery.ModuleSpec("megatron.core", None, origin=str(tmp_path / "x.py"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    assert megatron_version({"megatron-core": "0.1"}) == "0.1"
    info = tmp_path / "package_info.py"
    info.write_text('MAJOR = 0\nMINOR = 17\nPATCH = 0\nPRE_RELEASE = "rc1"\nVERSION = (MAJOR,)\n')
    assert megatron_version({"megatron-core": "0.1"}) == "0.17.0rc1"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert megatron_version({}) is None


def test_a_container_limit_is_named():
    limit = MemoryLimit(8 * GIB, 2 * GIB, "cgroup /sys/fs/cgroup/job", 64 * GIB)
    memory = memory_checks(limit, has_gpu=False)[0]
    assert memory.value.startswith("8 GiB, 2 GiB available; limited by cgroup /sys/fs/cgroup/job")


def test_words_carry_the_meaning_and_colours_repeat_it():
    checks = [
        Check("one", Status.OK, "fine"),
        Check("two", Status.WARNING, "so so", "improve it"),
        Check("three", Status.PROBLEM, "bad " * 30, "mend it"),
    ]
    diagnosis = Diagnosis([Section("Heading", checks)])
    plain = diagnosis.as_text()
    assert "\033" not in plain and "\033[31m" in diagnosis.as_text(colour=True)
    assert "-> improve it" in plain and max(map(len, plain.splitlines())) <= 100
    assert plain.splitlines()[-1] == "These flags cannot work on this machine; fix: three"


def test_the_verdict_names_warnings_and_the_next_step():
    section = Section("Heading", [Check("two", Status.WARNING, "so so", "improve it")])
    assert Diagnosis([section]).verdict == "These flags should work on this machine; warnings: two"
    nothing = Diagnosis([], "activation offload", "begin")
    assert nothing.verdict == "Activation offload should work on this machine; begin"


def test_without_tqdm_a_terminal_gets_a_line(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with progress(3, "/mnt/ssd") as advance:
        advance()
    assert capsys.readouterr().err == "measuring /mnt/ssd ...\n"


STATES = ("--optimizer-state-offload", "ssd", "--optimizer-state-dir")


def test_without_flags_of_model_states_nothing_is_said_of_them(diagnose, tmp_path):
    _, checks = diagnose("--activation-offload-dir", tmp_path)
    assert not [name for name in checks if name.startswith("state")]


def test_states_are_told_how_many_parameters_have_room(diagnose, tmp_path):
    code, checks = diagnose(*STATES, tmp_path, "--optimizer-state-ssd-budget", "24MiB")
    assert code == 0
    assert checks["checksums"]["status"] == "ok"
    value = checks["state space"]["value"]
    assert "24 MiB: 0.00315 G parameters in fp32, 0.0021 G in bf16 with main weights" in value


def test_states_go_where_activations_go(diagnose, tmp_path):
    flags = ("--activation-offload-dir", tmp_path, "--optimizer-state-offload", "ssd")
    code, checks = diagnose(*flags)
    assert code == 0 and checks["state space"]["facts"]["free_bytes"] > 0


def test_states_without_the_package_for_checksums_are_a_problem(diagnose, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "xxhash", None)
    code, checks = diagnose(*STATES, tmp_path)
    assert code == 1 and "pip install" in checks["checksums"]["advice"]


def test_states_that_cannot_work_are_a_problem_in_their_own_words(diagnose, tmp_path):
    code, checks = diagnose(*STATES, tmp_path / "missing")
    assert code == 1
    assert "--optimizer-state-dir" in checks["state directory"]["advice"]
    code, checks = diagnose(*STATES, tmp_path, "--optimizer-state-ssd-budget", "1000TiB")
    assert code == 1 and checks["state space"]["status"] == "problem"
    code, checks = diagnose("--optimizer-state-offload", "ssd")
    assert code == 1 and checks["states"]["status"] == "problem"


def test_a_steps_time_on_the_drive_is_said(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "megatron.offload.commands.doctor.states.drive_rates", lambda *_: (1e9, 2e9)
    )
    monkeypatch.setattr(f"{EXAMINE}._disk_sections", lambda *_: [])
    cli.main(["doctor", "--json", *STATES, str(tmp_path)])
    checks = {one["name"]: one for one in json.loads(capsys.readouterr().out)["checks"]}
    assert "1.00 GB/s written, 2.00 GB/s read" in checks["state rate"]["value"]
    assert "takes 18 s here" in checks["state rate"]["value"]


# -- All flags of a run ---------------------------------------------------------------------------


def test_a_whole_launch_command_is_taken(diagnose, on_a_disk, tmp_path):
    code, checks = diagnose(
        "--", "torchrun", "--nproc-per-node", 8, "-m", "megatron.offload.launch", "pretrain_gpt.py",
        "--tensor-model-parallel-size", 2, "--lr=1e-4", "--activation-offload", "ssd",
        "--activation-offload-dir", tmp_path,
    )  # fmt: skip
    assert code == 0
    assert checks["flags"]["facts"] == {"mode": "ssd", "directories": [str(tmp_path)]}
    assert checks["not looked at"]["value"] == "--tensor-model-parallel-size, --lr"


def test_streaming_flags_are_taken(diagnose, on_a_disk, tmp_path):
    flags = ("--parameter-offload", "ssd", "--layer-major-units", 4)
    code, checks = diagnose(*flags, "--activation-offload-dir", tmp_path)
    assert code == 0 and "ssd" in checks["parameters"]["value"]
    assert checks["layer-major steps"]["value"] == "4 units"
    code, checks = diagnose(*flags, "--parameter-offload-dir", tmp_path / "none")
    assert code == 1 and checks["parameters"]["status"] == "problem"
    assert "none" in checks["parameters"]["value"]
    code, checks = diagnose("--gradient-offload", "on")
    assert code == 1 and "needs a place for gradients" in checks["parameters"]["value"]


def test_a_flag_that_is_written_wrong_is_not_passed_over(capsys):
    assert cli.main(["doctor", "--", "x.py", "--optimizer-state-offlod", "ssd"]) == 2
    assert "did you mean --optimizer-state-offload?" in capsys.readouterr().err
    with pytest.raises(SystemExit) as left:
        cli.main(["doctor", "--activation-offlod", "ssd"])
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("usage: megatron-offload doctor ") and len(said.splitlines()) < 6


def test_the_program_alone_shows_its_commands(capsys):
    assert cli.main([]) == 2
    said = capsys.readouterr().err
    assert all(f"    {name} " in said for name in ("doctor", "plan", "rok", "tune", "report"))


def test_the_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"megatron-offload {megatron.offload.__version__}\n"
