#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains every family of transformers with each of our doors and compares it with itself.

    tools/check/families.py --json families.json --markdown docs/results/families.md
    tools/check/families.py --quick --json quick.json            a dozen, under 5 minutes on 2 cores
    tools/check/families.py --only llama,t5 --columns ssd,recompute --json some.json
    tools/check/families.py --json families.json --resume        goes on with a run that was cut

A family is a model type of the transformers that is installed, of a causal, seq2seq, vision, audio
or multimodal model, which builds from a small configuration of its own class: every default is
untouched but for sizes. Inputs follow the signature of its forward. It trains two steps with eager
and with sdpa attention, and is compared bit by bit (losses, gradients, weights, buffers):

  ssd           what autograd saves moves
  replay        what is a cheap function of other saved tensors is computed again; the rest moves
  recompute     all layers are recomputed
  parameters    those of layers wait on the SSD
  states        those of AdamW wait there
  layer-major   steps of two micro-batches, beside the same ones one after the other
  auto          plans by itself, for so slow a disk that it recomputes; with one kind of attention
  chunked loss  of causal models: within rounding, beside fp64

A cell is identical, refused (in a sentence of ours), a crash (any other exception, or no end),
different, or does not apply. Families whose plain training differs from itself are left out. Each
family has a process of its own.

Exit code: 0 no crash and no difference, 1 there is one, 2 nothing could be run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import sys
import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT / "tools", ROOT):  # nothing has to be installed
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import torch  # noqa: E402
import transformers  # noqa: E402
from tqdm import tqdm  # noqa: E402

import megatron.offload  # noqa: E402
from check.family.catalogue import KINDS, Family, chosen, families  # noqa: E402
from check.family.cells import Cell, Left, Outcome, summary_of  # noqa: E402
from check.family.columns import COLUMNS  # noqa: E402
from check.family.pool import Work, run_families  # noqa: E402
from check.family.report import failures_table, page, summary_table  # noqa: E402

ATTENTIONS = ("sdpa", "eager")
# Each has found something: caches, sliding windows, states between layers, soft caps, experts,
# encoders, running statistics, random numbers that are not torch's.
QUICK = (
    *("llama", "mistral", "gemma2", "qwen3_next", "mixtral", "falcon_h1", "bloom"),
    *("t5", "vit", "resnet", "whisper", "qwen3_vl"),
)
_LOADED = ("llama", "mixtral", "t5", "whisper", "vit", "qwen2_vl", "mamba2")


def works_of(
    wanted: Iterable[Family], columns: Sequence[str], attentions: Sequence[str]
) -> list[Work]:
    """What is to be run."""
    return [
        Work(family, attention, tuple(columns), is_second=number > 0)
        for family in wanted
        for number, attention in enumerate(attentions)
    ]


def load() -> None:
    """Imports once what most families need, before there are processes."""
    import importlib

    from transformers import PreTrainedModel  # noqa: F401

    for name in _LOADED:
        importlib.import_module(f"transformers.models.{name}.modeling_{name}")


class Results:
    """What has been found so far; written after each family, so that a run may be cut short.

    Args:
        order: the place of each family.
        columns: in their order.
        facts: date, command and versions.
    """

    def __init__(
        self, order: Mapping[str, int], columns: Sequence[str], facts: dict[str, str]
    ) -> None:
        self.cells: list[Cell] = []
        self.left: list[Left] = []
        self.through: set[tuple[str, str]] = set()  # family and attention
        self._order, self._columns, self._facts = order, columns, facts

    def add(self, found: Cell | Left) -> None:
        """Takes what a process has found."""
        if isinstance(found, Cell):
            self.cells.append(found)
            self.cells.sort(
                key=lambda c: (self._order[c.family], self._columns.index(c.column), c.attention)
            )
        else:
            self.left.append(found)
            self.left.sort(key=lambda one: (self._order[one.family], one.attention))

    def read(self, json_file: Path) -> None:
        """Takes what an earlier run has written, as far as families were through.

        Raises:
            ValueError: it is of other versions or columns.
        """
        content = json.loads(json_file.read_text())
        ours = {"versions": self._facts["versions"], "columns": list(self._columns)}
        for name, expected in ours.items():
            if content.get(name) != expected:
                raise ValueError(
                    f"--resume: {json_file} has the {name} {content.get(name)}, this run has "
                    f"{expected}; give another --json, or leave --resume off"
                )
        self.through = {(family, attention) for family, attention in content["through"]}
        for row in content["rows"]:
            if (row["family"], row["attention"]) in self.through:
                self.add(Cell(**{**row, "outcome": Outcome(row["outcome"])}))
        for row in content["left_out"]:
            if (row["family"], row["attention"]) in self.through:
                self.add(Left(**row))

    def write(self, json_file: Path | None, page_file: Path | None) -> None:
        """As JSON, and as a page."""
        summary = summary_of(self.cells, self.left)
        if json_file is not None:
            content = {
                "summary": summary,
                **self._facts,
                "columns": list(self._columns),
                "through": sorted(self.through),
                "rows": [asdict(cell) for cell in self.cells],
                "left_out": [asdict(one) for one in self.left],
            }
            json_file.write_text(json.dumps(content, indent=1).replace(f"{ROOT}/", "") + "\n")
        if page_file is not None:
            page_file.write_text(page(self.cells, self.left, summary, self._columns, self._facts))

    def show(self) -> int:
        """Prints tables; the exit code."""
        summary = summary_of(self.cells, self.left)
        has_failed = bool(summary["crashes"] + summary["differences"])
        print(f"{summary_table(self.cells, self._columns)}\n")
        if has_failed:
            print(f"{failures_table(self.cells)}\n")
        print(json.dumps(summary))
        if not self.cells:
            reasons = "; ".join(sorted({one.reason for one in self.left})) or "no family was given"
            print(f"families.py: error: nothing was trained: {reasons}", file=sys.stderr)
            return 2
        return 1 if has_failed else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all that is asked for; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--markdown", type=Path, help="write a page there")
    parser.add_argument(
        "--resume", action="store_true", help="what --json has is not run again, but the rest is"
    )
    parser.add_argument("--quick", action="store_true", help="a dozen families")
    parser.add_argument("--only", help="families, by commas; or a kind: " + ", ".join(KINDS))
    parser.add_argument("--columns", help=f"some of {', '.join(COLUMNS)}")
    parser.add_argument("--attention", help="one of sdpa and eager, instead of both")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="at a time")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds of a training (180)")
    parser.add_argument("--dir", type=Path, help="for what moves; default: a temporary one")
    args = parser.parse_args(argv)
    columns = tuple(args.columns.split(",")) if args.columns else COLUMNS
    if unknown := set(columns) - set(COLUMNS):
        parser.error(f"no column {', '.join(sorted(unknown))}; there are {', '.join(COLUMNS)}")
    try:
        wanted = _wanted(args.only, args.quick)
    except ValueError as error:
        parser.error(str(error))
    attentions = (args.attention,) if args.attention else ATTENTIONS
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    load()
    works = works_of(wanted, columns, attentions)
    arguments = sys.argv[1:] if argv is None else argv
    results = Results(
        {work.family.name: number for number, work in enumerate(works)},
        columns,
        {
            "date": datetime.date.today().isoformat(),
            "command": shlex.join([".venv/bin/python", "tools/check/families.py", *arguments]),
            "versions": f"transformers {transformers.__version__}, torch {torch.__version__}, "
            f"Python {platform.python_version()}, megatron-offload {megatron.offload.__version__}",
        },
    )
    if args.resume and args.json is not None and args.json.exists():
        try:
            results.read(args.json)
        except ValueError as error:
            parser.error(str(error))
        works = [w for w in works if (w.family.name, w.attention) not in results.through]
    with tempfile.TemporaryDirectory(prefix="families-", dir=args.dir) as directory:
        tqdm.monitor_interval = 0  # a thread, which forks do not have
        with tqdm(total=len(works), disable=None, unit="model") as bar:

            def ended(work: Work) -> None:
                bar.set_postfix_str(f"{work.family.name} {work.attention}", refresh=False)
                bar.update()
                results.through.add((work.family.name, work.attention))
                results.write(args.json, args.markdown)

            run_families(
                works,
                Path(directory),
                processes=args.processes,
                timeout_s=args.timeout,
                tell=results.add,
                ended=ended,
            )
    return results.show()


def _wanted(only: str | None, quick: bool) -> list[Family]:
    if quick:
        return chosen(QUICK)
    if only is None:
        return list(families().values())
    names = only.split(",")
    if set(names) <= set(KINDS):
        return [one for one in families().values() if one.kind in names]
    return chosen(names)


if __name__ == "__main__":
    sys.exit(main())
