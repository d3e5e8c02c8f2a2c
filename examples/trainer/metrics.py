# SPDX-License-Identifier: Apache-2.0
"""What a person and a program see of a run: progress, metrics.jsonl, TensorBoard, the summary.

`Reporter` lives on rank 0 alone. It shows numbers that others measured; it measures nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tabulate import tabulate
from tqdm import tqdm

from megatron.offload.stats.metrics_file import MetricsFile, StepRecord

_MIB, _GIB = 1 << 20, 1 << 30


def _tensorboard_writer(directory: Path | None) -> Any:
    """A SummaryWriter, or None where none is asked for or TensorBoard is not installed."""
    if directory is None:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        print("TensorBoard is not installed: --tensorboard-dir is ignored", file=sys.stderr)
        return None
    return SummaryWriter(log_dir=str(directory))


class Reporter:
    """Shows a run: a bar on a terminal, a line per --log-interval elsewhere.

    Args:
        args: The flags.
        first_step: The step after which this run begins.
    """

    def __init__(self, args: argparse.Namespace, first_step: int) -> None:
        self._args = args
        self._records: list[StepRecord] = []
        self._validation: tuple[int, float] | None = None
        self._file = None
        if args.metrics_file is not None:
            self._file = MetricsFile(args.metrics_file, first_step)
        self._tensorboard = _tensorboard_writer(args.tensorboard_dir)
        self._bar = tqdm(
            total=args.train_iters,
            initial=first_step,
            unit="step",
            dynamic_ncols=True,
            disable=not sys.stderr.isatty(),
        )

    def report_step(self, record: StepRecord) -> None:
        """Takes one finished step."""
        self._records.append(record)
        if self._file is not None:
            self._file.write(record)
        if self._tensorboard is not None:
            for name, value in self._scalars(record).items():
                self._tensorboard.add_scalar(name, value, record.step)
        shown = self._describe(record)
        self._bar.set_postfix_str(shown, refresh=False)
        self._bar.update()
        first, interval = len(self._records) == 1, self._args.log_interval
        if self._bar.disable and (first or record.step % interval == 0):
            print(f"step {record.step}/{self._args.train_iters}  {shown}", flush=True)

    def report_validation(self, step: int, loss: float) -> None:
        """Takes a validation loss."""
        self._validation = (step, loss)
        if self._tensorboard is not None:
            self._tensorboard.add_scalar("validation loss", loss, step)
        self._bar.write(f"validation at step {step}  loss {loss:.4f}", file=sys.stdout)

    def close(self, offload_summary: str = "") -> None:
        """Prints the summary and closes the files."""
        self._bar.close()
        if self._file is not None:
            self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._records:
            print(self._summary(), flush=True)
        if offload_summary:
            print(offload_summary, flush=True)

    def _describe(self, record: StepRecord) -> str:
        shares = ", ".join(f"{name} {value:.4f}" for name, value in record.losses.items())
        parts = [
            f"loss {record.loss:.4f}" + (f" ({shares})" if shares else ""),
            f"{record.step_time_s:.3f} s/step",
            f"{record.tokens_per_s:,.0f} tokens/s",
            f"peak {record.peak_activation_bytes / _MIB:,.0f} MiB",
        ]
        if record.offload:
            parts.append(f"offloaded {record.offload['offloaded_bytes'] / _GIB:.2f} GiB")
        if record.offload.get("predicted_step_s"):
            predicted_s = record.offload["predicted_step_s"]
            predicted_bytes = record.offload["predicted_peak_bytes"]
            parts.append(f"predicted {predicted_s:.3f} s, {predicted_bytes / _MIB:,.0f} MiB")
        return "  ".join(parts)

    @staticmethod
    def _scalars(record: StepRecord) -> dict[str, float]:
        values = asdict(record)
        groups = {name: values.pop(name) for name in ("offload", "losses", "states", "parameters")}
        del values["step"], values["model"]
        return values | {
            f"{group}/{name}": value for group in groups for name, value in groups[group].items()
        }

    def _summary(self) -> str:
        records = self._records
        # The first step also pays for what libraries allocate once.
        steady = records[1:] or records
        median_s = statistics.median(record.step_time_s for record in steady)
        tokens_per_s = statistics.median(record.tokens_per_s for record in steady)
        peak = max(record.peak_activation_bytes for record in steady)
        rows = [
            ("steps", f"{records[0].step} to {records[-1].step}"),
            ("first loss", f"{records[0].loss:.4f}"),
            ("last loss", f"{records[-1].loss:.4f}"),
            ("median step time", f"{median_s:.3f} s"),
            ("tokens per second", f"{tokens_per_s:,.0f}"),
            ("peak activation memory", f"{peak / _MIB:,.0f} MiB"),
        ]
        if self._validation is not None:
            step, loss = self._validation
            rows.insert(3, (f"validation loss at step {step}", f"{loss:.4f}"))
        if self._args.metrics_file is not None:
            rows.append(("metrics", str(self._args.metrics_file)))
        return str(tabulate(rows, tablefmt="simple", disable_numparse=True))
