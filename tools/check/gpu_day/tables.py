# SPDX-License-Identifier: Apache-2.0
"""The results of a day as Markdown: `page`. Reads results, measures nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tabulate import tabulate

from check.gpu_day.job import NOT_BEGUN, OK, Result
from check.gpu_day.results import Day
from megatron.offload.sizes import GIB, format_size

_DRY = "A dry run on the CPU, at sizes that prove nothing about a GPU."
_BESIDE_AUTO = "4096 none"  # of the part stack: the same tokens
_TRAINING = (
    *("step s", "forward s", "backward s", "optimizer s", "launching s"),
    *("tokens/s", "TFLOP/s", "of none", "peak", "base", "reserved", "retries"),
)


def page(day: Day) -> str:
    """Everything that a person reads."""
    parts = ["# GPU day", day.machine, f"```bash\n{day.command}\n```"]
    parts += [_DRY] if day.is_dry else []
    parts += [day.note] if day.note else []
    parts.append(_overview(day))
    for title, section in {
        "Facts": _facts,
        "Bits": _bits,
        "Stack": _stack,
        "Auto": _auto,
        "Full 8B": lambda day: _trainings(day.of("full8b")),
        "LoRA": lambda day: _trainings(day.of("lora")),
        "Timeline": _timeline,
        "Recompute, offload, keep": lambda day: _trainings(day.of("rok")),
        "Long sequences": lambda day: _trainings(day.of("long")),
        "Forward passes": _forward,
        "Loss": _loss,
    }.items():
        if text := section(day):
            parts += [f"## {title}", text]
    return "\n\n".join(parts) + "\n"


def _overview(day: Day) -> str:
    """How every job ended, with the reason where it did not go well, and what has not begun."""
    counts: dict[str, int] = {}
    for result in day.results.values():
        counts[result.status] = counts.get(result.status, 0) + 1
    head = ", ".join(f"{count} {status}" for status, count in counts.items())
    rows = [
        [name, result.status, f"{result.wall_s:.0f}", result.reason.replace("|", "/")]
        for name, result in day.results.items()
        if result.status != NOT_BEGUN
    ]
    late = [name for name, result in day.results.items() if result.status == NOT_BEGUN]
    heads = ["job", "ended", "s", "why"]
    table = tabulate(rows, heads, "github", colalign=["left", "left", "right", "left"])
    return "\n\n".join(
        ["## Overview", head, table, *([f"Not begun: {', '.join(late)}."] if late else [])]
    )


def _facts(day: Day) -> str:
    rows = []
    for name, result in day.of("facts").items():
        for key, value in _flat(result.found):
            rows.append([name, key, _cell(value)])
    return _table(["what", "figure", "value"], [row for row in rows if len(row[2]) < 200])


def _flat(values: Mapping[str, Any], before: str = "") -> list[tuple[str, Any]]:
    """Names and plain values of nested ones; lists and long texts are in the JSON alone."""
    found: list[tuple[str, Any]] = []
    for name, value in values.items():
        if isinstance(value, dict):
            found += _flat(value, f"{before}{name}: ")
        elif isinstance(value, (bool, int, float, str)) and "\n" not in str(value):
            found.append((before + name, value))
    return found


def _bits(day: Day) -> str:
    rows = []
    for name, result in day.of("bits").items():
        if result.found.get("identical"):
            moved = result.found["moved"].get("activations", {})
            moved_bytes = moved.get("offloaded_bytes", moved.get("offload/offloaded_bytes"))
            if (of_trainer := moved.get("offload/offloaded_gib")) is not None:
                moved_bytes = of_trainer * GIB
            rows.append([name, "identical", _size(moved_bytes)])
    return _table(["door", "against none", "activations of a step"], rows)


def _stack(day: Day) -> str:
    by_length: dict[str, dict[str, Result]] = {}
    for name, result in day.of("stack").items():
        length, _, way = name.partition(" ")
        by_length.setdefault(length, {})[way] = result
    return "\n\n".join(
        f"{_shape(results)}\n\n{_trainings(results)}" for results in by_length.values()
    )


def _shape(results: Mapping[str, Result]) -> str:
    shape = next(iter(results.values())).found["shape"]
    return (
        f"{shape['layers']} layers, hidden {shape['hidden']}, batch {shape['batch']} x "
        f"{shape['seq']} tokens, vocabulary {shape['vocab']}; peak is above the base, which is "
        "weights, gradients and states."
    )


def _trainings(results: Mapping[str, Result], more: Sequence[str] = ()) -> str:
    """A row for each way; `of none` where `none` stands beside it."""
    none = results.get("none")
    rows = []
    for name, result in results.items():
        found = result.found
        seconds = [found[f"{part}_s"] for part in ("step", "forward", "backward", "optimizer")]
        ratio = found["step_s"] / none.found["step_s"] if none is not None else None
        peak = max(found["peak_bytes"] - found["base_bytes"], 0)
        rows.append(
            [
                *(name, *(f"{value:.4f}" for value in seconds), f"{found['launched_s']:.4f}"),
                *(f"{found['tokens_per_s']:,.0f}", _cell(found["TFLOP_per_s"])),
                "-" if ratio is None else f"{ratio:.3f}",
                *(_size(peak), _size(found["base_bytes"]), _size(found.get("reserved_bytes"))),
                str(found.get("alloc_retries", "-")),
                *(_cell(found.get(key)) for key in more),
            ]
        )
    return _table(["way", *_TRAINING, *more], rows)


def _auto(day: Day) -> str:
    results = {n: r for n, r in day.of("auto").items() if "step_s" in r.found}
    if not results:
        return ""
    rows = []
    for name, result in results.items():
        found, counted = result.found, result.found["statistics"]
        rows.append(
            [
                *(
                    name,
                    _size(found["budget_bytes"]),
                    _size(found["peak_bytes"] - found["base_bytes"]),
                ),
                *(_size(counted.get(f"{what}_peak_bytes")) for what in ("predicted", "measured")),
                _cell(counted.get("predicted_step_s")),
                *(_cell(found["step_s"]), _cell(counted.get("plans")), str(found["first_steps"])),
            ]
        )
    heads = ["share", "budget", "peak", "predicted peak", "its own peak"]
    heads += ["predicted step s", "step s", "plans", "steps before"]
    plans = [f"{name}:\n\n```text\n{r.found.get('report', '')}\n```" for name, r in results.items()]
    none = day.of("stack").get(_BESIDE_AUTO)
    beside = results if none is None else {"none": none, **results}
    return "\n\n".join([_trainings(beside), _table(heads, rows), *plans])


def _timeline(day: Day) -> str:
    rows = []
    for name, result in day.of("timeline").items():
        spans = result.found["spans"]
        busy = [f"{share:.0%}" for share in spans["busy"].values()]
        rows.append([name, f"{spans['step_ms']:.1f}", *busy])
    heads = ["way", "ms", "compute busy", "copies to host", "copies from host"]
    return _table(heads, rows)


def _forward(day: Day) -> str:
    """Seconds of a batch or an epoch; what both ways gave is the same, or the job has failed."""
    rows = []
    for name, result in day.of("forward").items():
        for way in ("loop", "evaluate"):
            if (one := result.found.get(way)) is not None:
                sizes = [_size(one[f"{key}_bytes"]) for key in ("read", "base", "peak")]
                rows.append([f"{name}: {way}", str(one["batches"]), _cell(one["batch_s"]), *sizes])
        for way in ("without", "with"):
            for number, one in enumerate(result.found.get(way, []), 1):
                rows.append([f"{name}, epoch {number} {way}", "-", _cell(one["seconds"]), *"---"])
    heads = ["what", "batches", "s of each", "read", "memory before", "peak"]
    return _table(heads, rows)


def _loss(day: Day) -> str:
    rows = []
    for result in day.of("loss").values():
        for found in result.found["ways"]:
            errors = [f"{found['errors'][name]:.2e}" for name in ("loss", "hidden", "weight")]
            rows.append(
                [found["way"], _cell(found["seconds"]), _size(found["peak_bytes"]), *errors]
            )
        rows += [[way, reason, *["-"] * 4] for way, reason in result.found["left_out"].items()]
    heads = ["way", "s", "peak", "error of the loss", "of its input's gradient", "of weight's"]
    return _table(heads, rows)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    align = ["left", *["right"] * (len(rows[0]) - 1)]
    return tabulate(rows, heads, tablefmt="github", colalign=align, disable_numparse=True)


def _size(num_bytes: float | None) -> str:
    return "-" if num_bytes is None else format_size(int(num_bytes))


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else str(value)


def in_words(result: Result) -> str:
    """A result in a line, as it is printed when the job has ended."""
    if result.status != OK:
        return f"{result.status}: {result.reason}"
    found = result.found
    if "step_s" in found:
        peak = max(found["peak_bytes"] - found["base_bytes"], 0)
        return (
            f"step {found['step_s']:.4f} s, {found['tokens_per_s']:,.0f} tokens/s, "
            f"{found['TFLOP_per_s']:.4g} TFLOP/s, peak {format_size(peak)}"
        )
    if found.get("identical") and "tensors" in found:
        return f"identical, {found['tensors']} tensors"
    figures = [f"{name} {_cell(value)}" for name, value in _flat(found) if len(str(value)) < 60]
    return ("; ".join(figures) or OK)[:240]


def ends(day: Day) -> str:
    """The last lines of a run: what went wrong, what was skipped, what has not begun."""
    lines = []
    for name, result in day.results.items():
        if result.status != OK:
            lines.append(f"{result.status}: {name}: {result.reason}")
    good = sum(result.status == OK for result in day.results.values())
    return "\n".join([f"{good} of {len(day.results)} jobs went well", *lines])
