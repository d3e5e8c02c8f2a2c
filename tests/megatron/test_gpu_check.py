# SPDX-License-Identifier: Apache-2.0
"""tools/gpu_check.py: what it rejects, what its sections notice, and a dry run on the CPU."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gpu_check
import pytest
import torch
from check.gpu import (
    ordering,
    parameters,
    side_streams,
    stack,
    states,
    transformer_engine,
    two_gpus,
)
from check.gpu.parity import Outcome, same_bits
from check.gpu.result import Check, Section, load, save
from check.gpu.settings import Settings, Size

from megatron.offload import ConfigurationError, offload_optimizer, offload_parameters
from megatron.offload.device.cpu import CpuDevice
from megatron.offload.device.device import WHOLE

pytestmark = pytest.mark.slow


def exit_code(*flags: str) -> int:
    """Of the command, also where it ends in the parser."""
    try:
        return gpu_check.main(list(flags))
    except SystemExit as stop:
        assert isinstance(stop.code, int)
        return stop.code


# -- Refusals -----------------------------------------------------------------------------------


def test_without_a_gpu_it_says_so_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert exit_code("--quick") == 2
    error = capsys.readouterr().err
    assert "needs a CUDA GPU; on a CPU use tools/compare_placements.py" in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--only", "ordering,speed"], "unknown section 'speed'; choose from ordering, two_gpus"),
        (["--stress-seconds", "soon"], "not a positive number of seconds"),
        (["--dry-run-cpu", "--json", "nowhere/out.json"], "no such folder"),
        (["--dry-run-cpu", "--device", "99"], "--device 99: there are"),
    ],
)
def test_bad_flags_are_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    complaint: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert exit_code(*flags) == 2
    error = capsys.readouterr().err
    assert complaint in error and len(error.splitlines()) == 1


# -- What a section finds -------------------------------------------------------------------------


def test_sections_survive_the_way_through_a_file(tmp_path: Path) -> None:
    section = Section("memory")
    section.when_changed = lambda: save([section], tmp_path / "result.json")
    section.data["peak_bytes"] = 7
    section.table("Peaks", ["what", "GiB"], [["off", "1.00"], ["a longer name", "0.25"]])
    section.check("it falls", True, "by a lot")
    section.skip("gds", "no kvikio")
    (found,) = load(tmp_path / "result.json")
    assert asdict(found) == asdict(section) and not found.failed
    assert found.verdict == "pass  1 passed, 0 failed, 1 skipped"
    assert found.tables[0].as_text().splitlines()[-1].split() == ["a", "longer", "name", "0.25"]
    document = found.as_markdown()
    assert (
        "| a longer name | 0.25 |" in " ".join(document.split())
        and "- skip  gds: no kvikio" in document
    )
    assert Section("two_gpus", [Check("engines", None, "one GPU")]).verdict.startswith("skip")
    section.check("it is right", False, "it is not")
    assert section.failed and load(tmp_path / "result.json")[0].failed


def test_a_section_that_dies_leaves_what_it_found_and_a_failed_line() -> None:
    parity = Section("parity")
    parity.check("GPT: ssd", True, "same bits")
    sections = gpu_check.completed(
        ["ordering", "parity", "memory"], [parity], False, "exit code -11", ["", "Segfault"]
    )
    assert [section.name for section in sections] == ["ordering", "parity", "memory"]
    assert [check.passed for check in sections[1].checks] == [True, False]
    assert "exit code -11" in str(sections[1].checks[1]) and "Segfault" in str(
        sections[1].checks[1]
    )
    assert sections[0].failed and sections[2].failed


def test_bits_are_compared_and_not_numbers() -> None:
    nan = torch.tensor([float("nan"), 0.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(nan, torch.tensor([float("nan"), -0.0]))
    good = Outcome([torch.ones(2)] * 2, [{"weight": torch.ones(3)}] * 2)
    last_bit = torch.tensor([1.0, 1.0, 1.0000001])
    bad = Outcome([torch.ones(2)] * 2, [{"weight": torch.ones(3)}, {"weight": last_bit}])
    assert good.first_difference(good) is None
    assert bad.first_difference(good) == "the gradient of weight in step 2"


def settings(tmp_path: Path) -> Settings:
    device = torch.device("cpu")
    return Settings(device, tmp_path, quick=True, seed=1, stress_s=0.1)


class Forgetful(CpuDevice):
    """What it reads back is whatever lay there before."""

    def copy_from_host(
        self, address: int, target: torch.UntypedStorage, part: slice = WHOLE
    ) -> None:
        pass


def test_the_stress_sees_bytes_that_do_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ordering, "_SIZES", (4098, 65_538))
    good = ordering.stress(settings(tmp_path), "host", 0.1)
    assert good.passes and good.compared_bytes and not good.wrong
    monkeypatch.setattr(ordering, "open_device", lambda _: Forgetful())
    bad = ordering.stress(settings(tmp_path), "host", 0.1)
    assert bad.wrong


def test_engines_in_turn_see_bytes_that_do_not_come_back_on_one_of_the_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ordering, "_SIZES", (4098, 65_538))
    monkeypatch.setattr(two_gpus, "_NUM_PASSES", 3)
    devices = iter([CpuDevice(), Forgetful()])
    monkeypatch.setattr(two_gpus, "open_device", lambda _: next(devices))
    good, bad = two_gpus.in_turn([torch.device("cpu")] * 2, "host", tmp_path, seed=1)
    assert good.passes == bad.passes == 3 and good.compared_bytes and not good.wrong
    assert bad.wrong


def test_layers_on_two_streams_see_bytes_that_do_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong, passes, moved = side_streams.compare(settings(tmp_path), "host")
    assert (wrong, passes) == (0, 2) and moved > 0
    monkeypatch.setattr(side_streams, "open_device", lambda _: Forgetful())
    wrong, passes, _ = side_streams.compare(settings(tmp_path), "host")
    assert wrong == passes == 2


def test_states_of_another_training_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_another_rate(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        optimizer.param_groups[0]["betas"] = (0.9, 0.9989)
        return offload_optimizer(optimizer, *args, **kwargs)

    monkeypatch.setattr(states, "offload_optimizer", with_another_rate)
    section = Section("states")
    states.check_case("fp32", "device", Size(64, 1, 8, 1), settings(tmp_path), section)
    lines = lines_of(section)
    assert [line[:4] for line in lines] == ["pass", "FAIL", "FAIL"] and "differs" in lines[1]


def test_parameters_of_another_training_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_other_bytes(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        handle = offload_parameters(model, *args, **kwargs)
        if handle.window is not None:
            with handle.window.changing(handle.window.units[0].params), torch.no_grad():
                handle.window.units[0].params[0].add_(0.5)
        return handle

    monkeypatch.setattr(parameters, "offload_parameters", with_other_bytes)
    section = Section("parameters")
    parameters.check_cases(Size(64, 2, 8, 1), settings(tmp_path), section)
    lines = lines_of(section)
    assert [line[:4] for line in lines] == ["pass", *["FAIL"] * 5] and "differ" in lines[1]


def on_gpu(tmp_path: Path) -> Settings:
    """As on a machine with GPUs, which nothing here may touch."""
    return Settings(torch.device("cuda", 1), tmp_path, quick=True, seed=1, stress_s=15.0)


def lines_of(section: Section) -> list[str]:
    return [str(check) for check in section.checks]


def test_a_context_on_another_gpu_fails_in_the_mode_that_made_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worked: list[str] = []

    def stress(_: Settings, mode: str, seconds: float) -> None:
        if mode == "gds":
            raise ConfigurationError("there is no kvikio")
        worked.append(mode)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(two_gpus, "stress", stress)
    monkeypatch.setattr(two_gpus, "_other_contexts", lambda _: [0] if "host" in worked else [])
    monkeypatch.setattr(two_gpus, "in_turn", lambda *_: [ordering.Tally(offloaded_bytes=1)])
    two_gpus.run(on_gpu(tmp_path), section := Section("two_gpus"))
    assert "pass  ssd direct: no other GPU is touched" in lines_of(section)[0]
    assert "FAIL  host: no other GPU is touched: a rank on cuda:1 has a context on [0]" in (
        lines_of(section)
    )
    (skipped,) = (line for line in lines_of(section) if line.startswith("skip"))
    assert "there is no kvikio" in skipped and section.failed


def test_one_gpu_is_no_reason_to_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    two_gpus.run(on_gpu(tmp_path), section := Section("two_gpus"))
    assert lines_of(section) == ["skip  engines of two GPUs: needs two GPUs, there are 1"]


def test_transformer_engine_is_skipped_where_it_is_missing_and_fails_where_it_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = Section("transformer_engine")
    find_spec = transformer_engine.importlib.util.find_spec
    found: dict[str, object] = {"transformer_engine": None}
    monkeypatch.setattr(
        transformer_engine.importlib.util,
        "find_spec",
        lambda name, *more: found[name] if name in found else find_spec(name, *more),
    )
    transformer_engine.run(on_gpu(tmp_path), section)
    assert lines_of(section) == [
        "skip  layers of Transformer Engine: Transformer Engine is not installed"
    ]
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('built for another CUDA')")
    monkeypatch.syspath_prepend(str(tmp_path))
    found["transformer_engine"] = object()
    with pytest.raises(ImportError, match="built for another CUDA"):  # which becomes a FAIL line
        transformer_engine.run(on_gpu(tmp_path), section)


def test_an_error_of_a_section_is_a_failed_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(_: Settings, section: Section) -> None:
        raise ImportError("built for another CUDA")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(transformer_engine, "run", run)
    result = tmp_path / "result.json"
    flags = ["--dry-run-cpu", "--directory", str(tmp_path), "--result", str(result)]
    num_threads = torch.get_num_threads()
    try:
        assert gpu_check.main([*flags, "--worker", "transformer_engine"]) == 0
    finally:
        torch.set_num_threads(num_threads)
    (section,) = load(result)
    assert lines_of(section) == ["FAIL  no error: ImportError: built for another CUDA"]


def test_experts_without_megatron_core_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: object) -> None:
        raise ImportError("No module named 'megatron.core'")

    monkeypatch.setattr(side_streams, "_MODES", ())
    monkeypatch.setattr(side_streams, "start_megatron", start)
    side_streams.run(on_gpu(tmp_path), section := Section("side_streams"))
    assert section.failed and "FAIL  megatron-core: it cannot be imported" in lines_of(section)[0]


def test_the_first_lines_say_what_will_be_shown_and_how_long_it_takes(tmp_path: Path) -> None:
    head, *lines = gpu_check.announcement(["ordering", "parity"], on_gpu(tmp_path)).splitlines()
    assert head == "on cuda:1, sized for about 1 minute, will be shown:"
    assert [line.split()[0] for line in lines] == ["ordering", "parity"]
    assert "losses and gradients" in lines[1]
    everything = Settings(torch.device("cuda", 0), tmp_path, quick=False, seed=1, stress_s=60.0)
    head, *lines = gpu_check.announcement(tuple(gpu_check.SECTIONS), everything).splitlines()
    assert "about 11 minutes" in head and len(lines) == len(gpu_check.SECTIONS)


def test_the_saved_bytes_of_a_layer_are_counted_right() -> None:
    size = Size(128, 1, 32, 2)
    torch.manual_seed(0)
    layer = stack.Layer(size)
    parameters = {p.untyped_storage()._cdata for p in layer.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = layer(torch.randn(2, 32, 128, requires_grad=True))  # noqa: F841  # its graph lives
    terms = stack.Stack(size, torch.float32, torch.device("cpu")).saved_terms()
    # Attention on a CPU also saves two words for its random numbers.
    assert sum(terms.values()) <= sum(saved.values()) <= sum(terms.values()) + 64


# -- All of it ------------------------------------------------------------------------------------


def test_a_dry_run_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    offload, out, table = tmp_path / "offload", tmp_path / "out.json", tmp_path / "out.md"
    sections = ["two_gpus", "side_streams", "parity", "transformer_engine", "states"]
    sections += ["parameters", "codecs", "memory"]
    flags = ["--dry-run-cpu", "--quick", "--only", ",".join(reversed(sections))]
    flags += ["--directory", str(offload), "--json", str(out), "--markdown", str(table)]
    code = exit_code(*flags)
    printed = capsys.readouterr().out
    assert code == 0, printed
    result = json.loads(out.read_text())
    assert list(result["sections"]) == sections and result["passed"]
    assert printed.splitlines()[1].startswith("a dry run on the CPU, which proves nothing")
    for mode in ("ssd direct", "host", "tiered"):
        assert f"pass  {mode}: a layer on two streams" in printed
    assert "pass  experts bf16: host: losses and gradients are the same bits" in printed
    assert "skip  layers of Transformer Engine: needs a GPU" in printed
    assert result["machine"]["gpu"] is None and result["machine"]["cores"] >= 1
    assert printed.count("skip  engines of two GPUs: needs two GPUs, there are 0") == 1
    for kind in ("GPT", "Llama-like", "BERT", "T5"):
        for mode in ("ssd", "host", "tiered"):
            assert f"pass  {kind} bf16: {mode}: losses and gradients are the same bits" in printed
    for step_on in ("device", "cpu"):
        for mode in ("ssd", "host"):
            found = f"pass  bf16, step on {step_on}: {mode}: weights, gradients and states are the"
            assert found in printed
    for case in ("ssd, layer-major", "host, one after the other", "ssd, made on the CPU"):
        assert f"pass  {case}: gradients and weights are the same bits" in printed
    for mode in ("host", "ssd", "tiered"):
        assert printed.count(f"pass  {mode}: device memory falls below the bound") == 1
    assert f"{gpu_check.ROOT}/" not in out.read_text() + table.read_text()
    assert list(offload.iterdir()) == []


def test_a_section_that_takes_too_long_is_ended_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    flags = ["--dry-run-cpu", "--only", "memory", "--limit-seconds", "0.3"]
    assert exit_code(*flags, "--directory", str(tmp_path)) == 1
    assert "it did not end within 0.3 s (--limit-seconds)" in capsys.readouterr().out


@pytest.mark.gpu
def test_ordering_on_a_gpu(tmp_path: Path) -> None:
    flags = ["--only", "ordering", "--stress-seconds", "10", "--directory", str(tmp_path)]
    assert exit_code(*flags) == 0
