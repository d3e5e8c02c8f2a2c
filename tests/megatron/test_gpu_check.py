# SPDX-License-Identifier: Apache-2.0
"""tools/gpu_check.py: its refusals, its arithmetic on made-up figures, and a dry run on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gpu_check
import pytest
import torch
from gpu_sections import ordering, stack
from gpu_sections.compare import Run, cells, model_flops, order_of_round, summarize, within_rounds
from gpu_sections.overlap import layers_that_fit
from gpu_sections.parity import Outcome, same_bits
from gpu_sections.result import Section, load, save
from gpu_sections.settings import Settings, Size
from gpu_sections.timeline import WAIT, Timeline, common, length, union
from gpu_sections.variants import VARIANTS

from megatron.offload.device.cpu import CpuDevice
from megatron.offload.device.device import WHOLE


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
        (["--only", "ordering,speed"], "unknown section 'speed'; choose from ordering, parity"),
        (["--sizes", "4096x16"], "write hidden x layers x sequence length x micro-batch size"),
        (["--sizes", "100x2x32x2"], "a hidden size that 64 divides"),
        (["--rounds", "0"], "not a positive whole number"),
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


# -- What ran at the same time --------------------------------------------------------------------


def test_unions_and_what_they_have_in_common() -> None:
    assert union([(5, 6), (1, 3), (2, 4), (3, 3), (6, 7)]) == [(1, 4), (5, 7)]
    assert length(union([(5, 6), (1, 3), (2, 4)])) == 4
    assert common([(0, 2), (3, 9)], [(1, 4), (5, 6), (8, 12)]) == [(1, 2), (3, 4), (5, 6), (8, 9)]
    assert common([], [(1, 2)]) == []


def event(category: str, name: str, begin_s: float, end_s: float, **args: Any) -> dict[str, Any]:
    """As torch's profiler writes it."""
    times = {"ts": begin_s * 1e6, "dur": (end_s - begin_s) * 1e6}
    return {"ph": "X", "cat": category, "name": name, "args": args, **times}


STORE, LOAD = "Memcpy DtoH (Device -> Pinned)", "Memcpy HtoD (Pinned -> Device)"


def test_overlap_is_the_part_of_the_copy_time_under_kernels() -> None:
    timeline = Timeline.from_events(
        [
            event("kernel", "gemm", 0, 10),
            event("kernel", "other stream", 8, 12),
            event("gpu_memcpy", STORE, 2, 6, bytes=1 << 20),
            event("gpu_memcpy", LOAD, 11, 15, bytes=1 << 20),
            event("gpu_memcpy", STORE, 30, 40, bytes=8),  # a loss
            event("user_annotation", WAIT, 9, 15),
            event("gpu_user_annotation", WAIT, 0, 40),
            event("cpu_op", "aten::mm", 0, 40),
            {"ph": "M", "name": "process_name"},
        ]
    )
    figures = timeline.figures()
    assert figures["compute_s"] == pytest.approx(12)
    assert figures["span_s"] == pytest.approx(15) and figures["idle_s"] == pytest.approx(3)
    assert (figures["store_overlap"], figures["load_overlap"]) == (
        pytest.approx(1.0),
        pytest.approx(0.25),
    )
    assert figures["overlap"] == pytest.approx(5 / 8)
    assert figures["hidden_s"] == pytest.approx(5) and figures["exposed_s"] == pytest.approx(3)
    # The thread waited for 6 s; for 3 of them the GPU had something else to do.
    assert figures["wait_s"] == pytest.approx(6) and figures["stall_s"] == pytest.approx(3)


def test_without_copies_there_is_no_overlap_to_speak_of() -> None:
    figures = Timeline.from_events([event("kernel", "gemm", 0, 1)]).figures()
    assert figures["overlap"] is None and figures["copy_s"] == 0


def test_layers_fit_while_their_copies_take_half_of_the_forward_pass() -> None:
    off = {"compute_s": 6.0}  # forward: 2 s, half of it: 1 s
    assert layers_that_fit(off, {"store_s": 8.0}, 16) == 2
    assert layers_that_fit(off, {"store_s": 800.0}, 16) == 1
    assert layers_that_fit(off, {"store_s": 0.1}, 16) == 16
    assert layers_that_fit(off, {"store_s": 0.0}, 16) == 1


# -- Comparing ------------------------------------------------------------------------------------


def run(variant: str, round_: int, seconds: float, peak: int = 100, **changes: Any) -> Run:
    values: dict[str, Any] = {"stall_s": 0.0, "offloaded_bytes": 0, "losses": [2.0, 3.0]}
    return Run(variant, round_, [seconds], peak, **{**values, **changes})


def test_ratios_are_taken_within_a_round() -> None:
    # The machine is twice as slow in round 1: unpaired medians would show 1.3 / 1.
    keep = [run("keep", 0, 1.0), run("keep", 1, 2.0), run("keep", 2, 1.0)]
    ssd = [run("ssd", 0, 1.1), run("ssd", 1, 2.4), run("ssd", 2, 1.3)]
    assert within_rounds(ssd, keep, "step_s") == pytest.approx(1.2)
    assert within_rounds(ssd, [], "step_s") is None


def test_a_row_has_medians_rates_and_whether_the_loss_is_keeps() -> None:
    runs = [
        *(run("keep", 0, 2.0, peak=100), run("keep", 1, 2.0, peak=100)),
        *(run("ssd", 0, 2.0, peak=30, stall_s=0.5), run("ssd", 1, 3.0, peak=50, stall_s=0.1)),
        *(run("host", 0, 4.0, losses=[2.0, 3.5]), run("host", 1, 4.0)),
        Run("tiered", 0, [], 0, 0.0, 0, [], "out of device memory"),
    ]
    rows = {row.variant: row for row in summarize(VARIANTS, runs, tokens=10, flops=1e12)}
    ssd = rows["ssd"]
    assert (ssd.step_s, ssd.time_ratio, ssd.peak_bytes) == (2.5, 1.25, 40)
    assert ssd.peak_ratio == pytest.approx(0.4) and ssd.stall_s == pytest.approx(0.3)
    assert (ssd.tokens_per_s, ssd.flops_per_s) == (4.0, 4e11)
    assert ssd.same_loss and rows["host"].same_loss is False
    assert cells(rows["host"])[1] == "DIFFERENT"
    assert cells(rows["tiered"])[1] == "out of device memory"
    assert rows["save_on_cpu"].failure == "it did not run"


def test_where_keep_does_not_fit_there_are_no_ratios_and_losses_are_still_compared() -> None:
    runs = [
        Run("keep", 0, [], 0, 0.0, 0, [], "out of device memory"),
        run("ssd", 0, 2.0),
        run("host", 0, 2.0, losses=[9.0]),
    ]
    rows = {row.variant: row for row in summarize(VARIANTS, runs, tokens=10, flops=1.0)}
    assert rows["ssd"].time_ratio is None and rows["ssd"].same_loss
    assert rows["host"].same_loss is False


def test_every_variant_is_first_in_turn() -> None:
    orders = [order_of_round(round_) for round_ in range(len(VARIANTS))]
    assert {order[0] for order in orders} == set(VARIANTS)
    assert all(len(set(order)) == len(VARIANTS) for order in orders)


def test_flops_are_those_of_every_matrix_product() -> None:
    size, vocab = Size(512, 3, 64, 2), 1000
    tokens, h, s = 128, 512, 64
    products = 2 * tokens * (12 * h * h + 2 * s * h) * 3 + 2 * tokens * h * vocab
    assert model_flops(size, vocab) == pytest.approx(3 * products)  # backward is twice forward


# -- What a section finds -------------------------------------------------------------------------


def test_sections_survive_the_way_through_a_file(tmp_path: Path) -> None:
    section = Section("memory")
    section.when_changed = lambda: save([section], tmp_path / "result.json")
    section.data["peak_bytes"] = 7
    section.table("Peaks", ["what", "GiB"], [["off", "1.00"], ["a longer name", "0.25"]])
    section.check("it falls", True, "by a lot")
    section.skip("gds", "no kvikio")
    (found,) = load(tmp_path / "result.json")
    assert found.as_dict() == section.as_dict() and not found.failed
    assert found.verdict == "pass  1 passed, 0 failed, 1 skipped"
    assert "a longer name  0.25" in found.as_text()
    assert (
        "| off | 1.00 |" in found.as_markdown() and "- skip  gds: no kvikio" in found.as_markdown()
    )
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
    return Settings(device, tmp_path, True, 1, 0.1, (), 1, 1, 60.0, None)


class Forgetful(CpuDevice):
    """What it reads back is whatever lay there before."""

    def copy_from_host(
        self, address: int, target: torch.UntypedStorage, after: None, part: slice = WHOLE
    ) -> None:
        pass


def test_the_stress_sees_bytes_that_do_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ordering, "_SIZES", (4098, 65_538))
    good = ordering.stress(settings(tmp_path), "host", 0.1, lambda _: None)
    assert good.passes and good.compared_bytes and not good.wrong
    monkeypatch.setattr(ordering, "open_device", lambda _: Forgetful())
    bad = ordering.stress(settings(tmp_path), "host", 0.1, lambda _: None)
    assert bad.wrong


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
    flags = ["--dry-run-cpu", "--quick", "--only", "compare,parity,memory"]
    flags += ["--directory", str(offload), "--json", str(out), "--markdown", str(table)]
    code = exit_code(*flags)
    printed = capsys.readouterr().out
    assert code == 0, printed
    result = json.loads(out.read_text())
    assert list(result["sections"]) == ["parity", "memory", "compare"] and result["passed"]
    assert result["machine"]["gpu"] is None and result["machine"]["cores"] >= 1
    for kind in ("GPT", "Llama-like", "BERT", "T5"):
        for mode in ("ssd", "host", "tiered"):
            assert f"pass  {kind} bf16: {mode}: losses and gradients are the same bits" in printed
    rows = result["sections"]["compare"]["data"]["sizes"]["64x2x32x2"]["rows"]
    assert [row["variant"] for row in rows] == [variant.name for variant in VARIANTS]
    assert all(row["same_loss"] for row in rows)
    assert f"{gpu_check.ROOT}/" not in out.read_text() + table.read_text()
    assert list(offload.iterdir()) == []


@pytest.mark.gpu
def test_ordering_on_a_gpu(tmp_path: Path) -> None:
    flags = ["--only", "ordering", "--stress-seconds", "10", "--directory", str(tmp_path)]
    assert exit_code(*flags) == 0
