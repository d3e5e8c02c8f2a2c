# SPDX-License-Identifier: Apache-2.0
"""Section `compare`: step time, stall and peak memory of the ways to place activations.

A GPT of megatron-core in bf16, without dropout, with torch's fused attention and no linear bias. A
step is forward and backward of two micro-batches; the optimizer, equal for all, is left out. All
variants run in one process on the same weights; each round runs every variant once, in an order
that rotates. Figures are medians over the rounds; ratios are taken within a round first.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from gpu_sections.models import Trainee, config_of, fused_attention, start_megatron
from gpu_sections.result import Section, gib
from gpu_sections.settings import Settings, Size
from gpu_sections.variants import KEEP, VARIANTS, Variant, activation_bytes, applied
from megatron.offload.device.memory_limit import memory_limit
from megatron.offload.device.open import open_device
from megatron.offload.stats.memory import PeakMemory

_NUM_MICROBATCHES = 2
_GPU_VOCABULARY, _CPU_VOCABULARY = 32_768, 128
_SHARE_OF_LIMIT = 0.8  # of a section's time; then no new round begins
_VARIANT_S = 25.0  # of a round; then no new step of it begins
_HEADERS = (
    "placement",
    "loss",
    "step s",
    "/ keep",
    "peak GiB",
    "/ keep",
    "stall s",
    "offloaded GiB",
    "tokens/s",
    "model TFLOP/s",
)


@dataclass(frozen=True)
class Run:
    """One variant in one round."""

    variant: str
    round: int
    times_s: list[float]  # of the timed steps
    peak_bytes: int
    stall_s: float  # a step's, median
    offloaded_bytes: int  # a step's
    losses: list[float]
    failure: str = ""

    @property
    def step_s(self) -> float:
        """Median of the steps."""
        return median(self.times_s)


@dataclass(frozen=True)
class Row:
    """One variant over all rounds; None: it did not run, or there is no keep."""

    variant: str
    failure: str
    same_loss: bool | None = None  # as keep's; without it, as the first one's
    step_s: float | None = None
    time_ratio: float | None = None
    peak_bytes: float | None = None
    peak_ratio: float | None = None
    stall_s: float | None = None
    offloaded_bytes: float | None = None
    tokens_per_s: float | None = None
    flops_per_s: float | None = None


def model_flops(size: Size, vocab_size: int) -> float:
    """Floating-point operations of forward and backward of one micro-batch, nothing recomputed.

    Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM" (2021), section 5.1: 96 B s l h^2 (1 + s/6h + V/16lh) with recomputation of the
    layers, of which 72 B s l h^2 (1 + s/6h) + 6 B s h V remain without.
    """
    hidden, layers, length = size.hidden, size.num_layers, size.seq_length
    per_token = 72 * layers * hidden**2 * (1 + length / (6 * hidden)) + 6 * hidden * vocab_size
    return size.tokens * per_token


def within_rounds(runs: Sequence[Run], base: Sequence[Run], value: str) -> float | None:
    """Median over the rounds of `value` / that of the base in the same round."""
    of_round = {run.round: getattr(run, value) for run in base}
    ratios = [getattr(run, value) / of_round[run.round] for run in runs if of_round.get(run.round)]
    return median(ratios) if ratios else None


def summarize(
    variants: Sequence[Variant], runs: Sequence[Run], tokens: int, flops: float
) -> list[Row]:
    """A row for each variant that ran.

    Args:
        variants: in the order of the rows.
        runs: all of them.
        tokens: of a step.
        flops: of a step.
    """
    keep = [run for run in runs if run.variant == KEEP.name and not run.failure]
    reference = [run.losses for run in [*keep, *runs] if not run.failure][:1]
    rows = []
    for variant in variants:
        own = [run for run in runs if run.variant == variant.name]
        failures = [run.failure for run in own if run.failure]
        if failures or not own:
            rows.append(Row(variant.name, failures[0] if failures else "it did not run"))
            continue
        step_s = median(run.step_s for run in own)
        rows.append(
            Row(
                variant.name,
                "",
                same_loss=all([run.losses] == reference for run in own),
                step_s=step_s,
                time_ratio=within_rounds(own, keep, "step_s"),
                peak_bytes=median(run.peak_bytes for run in own),
                peak_ratio=within_rounds(own, keep, "peak_bytes"),
                stall_s=median(run.stall_s for run in own),
                offloaded_bytes=median(run.offloaded_bytes for run in own),
                tokens_per_s=tokens / step_s,
                flops_per_s=flops / step_s,
            )
        )
    return rows


def cells(row: Row) -> list[str]:
    """As it is printed."""
    if row.failure or row.step_s is None:
        return [row.variant, row.failure, *[""] * (len(_HEADERS) - 2)]
    loss = {True: "identical", False: "DIFFERENT", None: ""}[row.same_loss]

    def shown(value: float | None, digits: int, scale: float = 1.0) -> str:
        return "" if value is None else f"{value / scale:,.{digits}f}"

    return [
        row.variant,
        loss,
        shown(row.step_s, 3),
        shown(row.time_ratio, 3),
        gib(row.peak_bytes or 0),
        shown(row.peak_ratio, 3),
        shown(row.stall_s, 3),
        gib(row.offloaded_bytes or 0),
        shown(row.tokens_per_s, 0),
        shown(row.flops_per_s, 1, 1e12),
    ]


class Comparison:
    """All variants of one model."""

    def __init__(self, size: Size, settings: Settings) -> None:
        self._settings = settings
        self._size = size
        self._vocab_size = _GPU_VOCABULARY if settings.on_gpu else _CPU_VOCABULARY
        model = self._build().to(settings.device)
        self._trainee = Trainee("GPT", model, size, self._vocab_size)
        self._batches = self._trainee.batches(_NUM_MICROBATCHES, settings.seed)
        self.runs: list[Run] = []

    def _build(self) -> Any:
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel

        spec = get_gpt_layer_local_spec()
        spec.submodules.self_attention.submodules.core_attention = fused_attention()
        dtype = torch.bfloat16 if self._settings.on_gpu else torch.float32
        return GPTModel(
            config=config_of(self._size, dtype, 0.0, add_bias_linear=False),
            transformer_layer_spec=spec,
            vocab_size=self._vocab_size,
            max_sequence_length=self._size.seq_length,
            share_embeddings_and_output_weights=True,
        )

    def run(self, variant: Variant, round_: int) -> None:
        """One variant in one round; running out of memory is a result."""
        failure = self._reason_to_skip(variant)
        if not failure:
            try:
                self.runs.append(self._run(variant, round_))
                return
            except torch.OutOfMemoryError:
                failure = "out of device memory"
            self._trainee.chunk.zero_grad_buffer()
            gc.collect()
            torch.cuda.empty_cache()
        self.runs.append(Run(variant.name, round_, [], 0, 0.0, 0, [], failure))

    def rows(self) -> list[Row]:
        """What is known by now."""
        tokens = _NUM_MICROBATCHES * self._size.tokens
        flops = _NUM_MICROBATCHES * model_flops(self._size, self._vocab_size)
        return summarize(VARIANTS, self.runs, tokens, flops)

    def _run(self, variant: Variant, round_: int) -> Run:
        settings, trainee = self._settings, self._trainee
        times_s, stalls_s, offloaded = [], [], 0
        gc.collect()
        peak, peak_bytes = PeakMemory(open_device(settings.device)), 0
        with applied(variant, trainee, settings.directory) as offload:
            began_s = time.perf_counter()
            for step in range(settings.num_steps + 1):
                late = time.perf_counter() - began_s > _VARIANT_S
                if step > 1 and late:
                    break
                settings.synchronize()
                peak.begin_step()
                step_began_s = time.perf_counter()
                with offload.step():
                    losses = trainee.step(self._batches)
                settings.synchronize()
                seconds, step_peak = time.perf_counter() - step_began_s, peak.end_step()
                if step == 0:
                    continue  # pools and files grow
                times_s.append(seconds)
                peak_bytes = max(peak_bytes, step_peak)
                stalls_s.append(float(offload.statistics.get("stall_s", 0.0)))
                offloaded = int(offload.statistics.get("offloaded_bytes", 0))
            return Run(
                variant.name,
                round_,
                times_s,
                peak_bytes,
                median(stalls_s),
                offloaded,
                losses.tolist(),
            )

    def _reason_to_skip(self, variant: Variant) -> str:
        """Torch rounds pinned memory up to powers of two, and keeps it."""
        if not variant.saves_on_cpu:
            return ""
        saved = activation_bytes(self._trainee) + 2 * self._trainee.num_parameters
        available = memory_limit().available_bytes
        if 2 * saved > 0.8 * available:
            return f"skipped: may need {gib(2 * saved)} of {gib(available)} GiB of host memory"
        return ""


def order_of_round(round_: int) -> list[Variant]:
    """Rotated, so that each variant is first and last in turn."""
    shift = round_ % len(VARIANTS)
    return [*VARIANTS[shift:], *VARIANTS[:shift]]


def run(settings: Settings, section: Section) -> None:
    """All sizes in turn."""
    try:
        start_megatron(settings.device, settings.seed)
    except ImportError as error:
        section.check("megatron-core", False, f"it cannot be imported: {error}")
        return
    section.data["sizes"] = {}
    deadline_s = time.monotonic() + _SHARE_OF_LIMIT * settings.limit_s
    for place, size in enumerate(settings.sizes):
        share_s = (deadline_s - time.monotonic()) / (len(settings.sizes) - place)
        try:
            _compare(size, settings, section, place, time.monotonic() + share_s)
        except Exception as error:  # the next size may work
            section.check(str(size), False, f"{type(error).__name__}: {error}")
        gc.collect()
        if settings.on_gpu:
            torch.cuda.empty_cache()


def _compare(size: Size, settings: Settings, section: Section, place: int, end_s: float) -> None:
    """Rounds of one size until they are done, or the time is."""
    section.progress.show(place / len(settings.sizes), f"{size}: building the model")
    comparison = Comparison(size, settings)
    rows: list[Row] = []
    for round_ in range(settings.rounds):
        round_began_s = time.monotonic()
        for index, variant in enumerate(order_of_round(round_)):
            done = (round_ + index / len(VARIANTS)) / settings.rounds
            section.progress.show(
                (place + done) / len(settings.sizes), f"{size} round {round_ + 1} {variant.name}"
            )
            comparison.run(variant, round_)
        rows = comparison.rows()
        section.data["sizes"][str(size)] = {
            "num_rounds": round_ + 1,
            "rows": [asdict(row) for row in rows],
            "runs": [asdict(run) for run in comparison.runs],
        }
        title = f"GPT {size} (hidden x layers x sequence x micro-batch), {_NUM_MICROBATCHES} micro-"
        title += f"batches, rounds: {round_ + 1}"
        section.tables = [t for t in section.tables if not t.title.startswith(f"GPT {size} ")]
        section.table(title, _HEADERS, [cells(row) for row in rows])
        now_s = time.monotonic()
        if now_s + (now_s - round_began_s) > end_s:
            break
    _check_rows(size, rows, settings.on_gpu, section)


def _check_rows(size: Size, rows: Sequence[Row], on_gpu: bool, section: Section) -> None:
    """Losses are equal; what is offloaded leaves the device."""
    different = [row.variant for row in rows if row.same_loss is False]
    ran = [row.variant for row in rows if row.step_s is not None]
    section.check(
        f"{size}: losses are identical",
        not different and len(ran) > 1,
        f"{', '.join(different) or 'no placement'} differs; {len(ran)} of {len(rows)} ran",
    )
    peaks = {row.variant: row.peak_bytes for row in rows if row.peak_bytes is not None}
    ours = {variant.name: variant for variant in VARIANTS if variant.mode != "off"}
    for row in rows:
        if row.variant not in ours:
            continue
        if row.step_s is None:
            section.check(f"{size}: {row.variant}", False, row.failure)
        elif KEEP.name in peaks and on_gpu:  # a model small enough for a CPU shows nothing
            section.check(
                f"{size}: {row.variant} takes less device memory than keep",
                peaks[row.variant] < peaks[KEEP.name],
                f"{gib(peaks[row.variant])} against {gib(peaks[KEEP.name])} GiB, "
                f"step time / keep {row.time_ratio:.3f}",
            )
