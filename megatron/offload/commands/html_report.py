# SPDX-License-Identifier: Apache-2.0
"""Runs as one page for a browser: `write_html`, pictures over steps above the table of `report`.

The page is one file without scripts, fonts or links to elsewhere, so it can be sent and kept.
"""

from __future__ import annotations

import contextlib
import html
import io
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from tabulate import tabulate

from megatron.offload.activations.placement.atomic_file import write_atomically
from megatron.offload.commands.drawing import PALETTE, figure
from megatron.offload.packages import check_packages
from megatron.offload.sizes import GIB, MIB
from megatron.offload.version import __version__

_LINES = ("-", "--", "-.", ":")  # of the runs, whose colours differ as well
_MOST = 4  # medians that an axis ends at: one step that plans, or warms up, would hide all others
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em;
       color: #1a1a1a; background: #fff }
table { border-collapse: collapse; margin: 1em 0 }
th, td { padding: .3em .8em; border-bottom: 1px solid #ccc; text-align: right }
th:first-child, td:first-child { text-align: left }
svg { width: 100%; height: auto }
footer { color: #666; margin-top: 2em }
"""


class Curve(NamedTuple):
    """A figure over the steps of a run.

    Args:
        values: one for each step; None: the step has none.
        is_predicted: the planner's, drawn thin and dotted.
    """

    values: Sequence[float | None]
    is_predicted: bool = False


class _Panel(NamedTuple):
    title: str
    curves: Callable[[Sequence[Any], float], Sequence[Curve]]  # of a run's steps, in a unit


def write_html(
    path: Path,
    names: Sequence[str],
    runs: Sequence[Sequence[Any]],
    rows: Sequence[Sequence[str]],
    traces: Iterable[Path] = (),
) -> None:
    """Writes the page.

    Args:
        path: of the page.
        names: of the runs.
        runs: their steps, as `report.read_steps` gives them.
        rows: of the table, the first one its head.
        traces: files of timelines, which the page names.

    Raises:
        ConfigurationError: matplotlib is not installed.
        OSError: the page cannot be written.
    """
    check_packages("report --html", "matplotlib")
    head, *body = rows
    table = tabulate(body, headers=head, tablefmt="html", disable_numparse=True)
    title = "megatron-offload: " + ", ".join(names)
    parts = [
        "<!doctype html>",
        f'<html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>',
        f"<style>{_STYLE}</style>",
        f"<h1>{html.escape(title)}</h1>",
        "<p>Each row is a run; medians are over all steps but the first. In the pictures, what is "
        f"beyond {_MOST} times the median of all steps is cut off.</p>",
        str(table),
        _picture(names, runs),
        _notes(names, runs),
        _links(traces),
        f"<footer>Made by <code>megatron-offload report</code> {__version__}.</footer></html>",
    ]
    write_atomically(path, "\n".join(part for part in parts if part) + "\n")


def timelines(metrics: Iterable[Path]) -> list[Path]:
    """Files of `--activation-offload-trace` in the folders of runs."""
    found = []
    for folder in dict.fromkeys(path.parent for path in metrics):
        for file in sorted(folder.glob("*.json")):
            with contextlib.suppress(OSError), file.open("rb") as opened:
                if b'"ph":' in opened.read(4096):  # the phase that each event has
                    found.append(file)
    return found


# -- Pictures -------------------------------------------------------------------------------------


def _measured(name: str) -> Callable[[Sequence[Any], float], Sequence[Curve]]:
    return lambda steps, unit: [Curve([getattr(step, name) / unit for step in steps])]


def _with_prediction(
    name: str, predicted: str
) -> Callable[[Sequence[Any], float], Sequence[Curve]]:
    def curves(steps: Sequence[Any], unit: float) -> list[Curve]:
        planned = [getattr(step, predicted) for step in steps]
        found = [Curve([getattr(step, name) / unit for step in steps])]
        if any(planned):
            found.append(Curve([one / unit if one else None for one in planned], True))
        return found

    return curves


_TIMES = (
    _Panel("step time, s", _with_prediction("step_time_s", "predicted_step_s")),
    _Panel("time that compute waited for reads, s", _measured("stall_s")),
)
_BYTES = (
    _Panel(
        "peak activation memory", _with_prediction("peak_activation_bytes", "predicted_peak_bytes")
    ),
    _Panel("peak of the whole device", _measured("peak_device_bytes")),
    _Panel("written to SSDs in a step", _measured("written_bytes")),
    _Panel("read from SSDs in a step", _measured("read_bytes")),
)


def _picture(names: Sequence[str], runs: Sequence[Sequence[Any]]) -> str:
    """All panels as SVG; the first step, which warms up, has its place but no say in the axes."""
    buffer = io.StringIO()
    with figure(rows=3, columns=2, figsize=(11, 9), constrained_layout=True) as (drawn, axes):
        for place, panel in zip(axes.flat, (*_TIMES, *_BYTES), strict=True):
            unit, suffix = (1.0, "") if panel in _TIMES else _unit_of(panel, runs)
            seen: list[float] = []
            for index, (name, steps) in enumerate(zip(names, runs, strict=True)):
                at = [step.step for step in steps]
                for curve in panel.curves(steps, unit):
                    values = [math.nan if one is None else one for one in curve.values]
                    seen += [one for one in values[1:] or values if not math.isnan(one)]
                    place.plot(
                        at,
                        values,
                        color=PALETTE[index % len(PALETTE)],
                        linestyle=":" if curve.is_predicted else _LINES[index % len(_LINES)],
                        linewidth=1 if curve.is_predicted else 1.8,
                        label=f"{name}, planned" if curve.is_predicted else name,
                    )
            place.set_title(panel.title + suffix, fontsize=10)
            usual = [one for one in seen if one > 0] or [1.0]
            place.set_ylim(0, 1.15 * min(max(usual), _MOST * median(usual)))
            place.set_xlabel("step")
            place.grid(alpha=0.3)
        handles, labels = axes.flat[2].get_legend_handles_labels()
        drawn.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 4))
        drawn.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _unit_of(panel: _Panel, runs: Sequence[Sequence[Any]]) -> tuple[float, str]:
    values = [one for steps in runs for curve in panel.curves(steps, 1.0) for one in curve.values]
    is_large = max((one for one in values if one is not None), default=0) >= GIB
    return (float(GIB), ", GiB") if is_large else (float(MIB), ", MiB")


# -- Sentences ------------------------------------------------------------------------------------


def _notes(names: Sequence[str], runs: Sequence[Sequence[Any]]) -> str:
    """What was planned, and how far off it was."""
    said = []
    for name, steps in zip(names, runs, strict=True):
        last = steps[-1] if steps else None
        if last is None or not last.plans:
            continue
        said.append(
            f"<li>{html.escape(name)}, plan {last.plans}: "
            f"expected {last.predicted_step_s:.3f} s and {last.predicted_peak_bytes / MIB:.0f} MiB "
            f"at most, the last step took {last.step_time_s:.3f} s and "
            f"{last.peak_activation_bytes / MIB:.0f} MiB.</li>"
        )
    return f"<h2>Plans of auto</h2><ul>{''.join(said)}</ul>" if said else ""


def _links(traces: Iterable[Path]) -> str:
    files = "".join(f"<li><code>{html.escape(str(one))}</code></li>" for one in traces)
    where = '<a href="https://ui.perfetto.dev">ui.perfetto.dev</a>'
    return f"<h2>Timelines</h2><p>Open them at {where}.</p><ul>{files}</ul>" if files else ""
