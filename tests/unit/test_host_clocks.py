# SPDX-License-Identifier: Apache-2.0
"""Nothing in the package times compute with the host's clock: on a device that is launch time.

`device/clock.py` times it. Who adds a file to the list says what else it times.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import megatron.offload

PACKAGE = Path(megatron.offload.__file__).parent
HOST_CLOCKS = {
    f"{name}{suffix}"
    for name in ("perf_counter", "monotonic", "process_time", "thread_time", "time")
    for suffix in ("", "_ns")
}

# File of the package: what it times with the host's clock.
ALLOWED = {
    "commands/bench/load.py": "seconds of load on a drive",
    "commands/bench/memcpy.py": "seconds of load on host memory",
    "commands/bench/sample.py": "transfers of a bench, each waited for",
    "commands/training_runs/trainer.py": "how long it waits for another process",
    "commands/tune/runs.py": "how long another process ran",
    "device/cpu.py": "operations that are done when they return: the clock of a CPU",
    "frozen/store.py": "how old a file is",
    "integration/gloo.py": "how long threads may take to fall asleep",
    "integration/torchrun_report.py": "the date of a report, for torchrun",
    "integration/training_steps.py": "wall time, in which drives wear",
    "planner/profile/pass_trace.py": "the moment at which both clocks meet",
    "activations/stats/memory_sampler.py": "when the host allocates",
    "stats/trace.py": "transfers, beside spans that device time was turned into",
    "tiers/bandwidth.py": "transfers of I/O threads",
    "tiers/budget.py": "pauses of I/O threads",
    "tiers/probe.py": "reads and writes, each waited for",
    "tiers/transfer.py": "transfers of I/O threads",
    "activations/transfer/prefetcher.py": "how far the host is to read ahead",
    "activations/transfer/reader.py": "how far the host is to read ahead",
    "activations/transfer/writer.py": "when the host waits, for a timeline",
}


def clock_readings(source: str) -> Iterator[int]:
    """The lines in which a clock of the host is read, or one is imported by its name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "time" and node.attr in HOST_CLOCKS:
                yield node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            yield from (node.lineno for one in node.names if one.name in HOST_CLOCKS)


def files_with_clocks() -> dict[str, list[int]]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if lines := list(clock_readings(path.read_text())):
            found[str(path.relative_to(PACKAGE))] = lines
    return found


def test_the_hosts_clock_is_read_where_it_does_not_stand_for_computes() -> None:
    wrong = {file: lines for file, lines in files_with_clocks().items() if file not in ALLOWED}
    assert not wrong, (
        f"{wrong}: on a device that runs behind, the host's clock times launches; use "
        "device/clock.py, or say in this file what else is timed"
    )


def test_no_file_is_allowed_for_nothing() -> None:
    assert ALLOWED.keys() <= files_with_clocks().keys()


@pytest.mark.parametrize(
    "source",
    [
        "import time\nbegan_s = time.perf_counter()",
        "import time\nclock = time.monotonic_ns",
        "from time import sleep, monotonic",
    ],
)
def test_each_way_to_read_a_clock_is_seen(source: str) -> None:
    assert list(clock_readings(source))


def test_to_sleep_is_no_reading() -> None:
    assert not list(clock_readings("import time\ntime.sleep(1)\nfrom time import sleep"))
