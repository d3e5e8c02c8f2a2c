# SPDX-License-Identifier: Apache-2.0
"""Random programs compute the same to the bit, or fail alike, with what autograd saved moved.

Hypothesis draws the programs (`programs.py`): views and in-place changes of them, joins, custom
functions, checkpoints, regions without gradients, several graphs at once and their backward passes
in any order, again, in part, on another thread. Each runs plain and under both ways of capture.
AUTOGRAD_PROGRAMS=5000 runs that many, other ones every time; else the suite runs the same 200.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.autograd.programs import BACKWARDS, NAMES, Graph, Outcome, Program, run
from tests.autograd.roundtrip import (
    CHANGED,
    WAYS,
    Coverage,
    Failure,
    PromptEngine,
    Watch,
    attempt,
    difference,
    on_own_thread,
    open_engine,
    seed,
    tensors_in,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # torch on odd programs

ENGINES = {
    "ssd": {},
    "ssd, little in flight": {"inflight_bytes": 64},
    "ssd, direct I/O where it works": {"io": "auto", "verify": "checksum"},
    "host": {"mode": "host"},
    "tiered, little in flight": {"mode": "tiered", "inflight_bytes": 4096},
}

WITHOUT_REPLAY = "without replay"

small = st.integers(0, 7)
instructions = st.tuples(st.sampled_from(NAMES), small, small, small)
graphs = st.builds(
    Graph,
    instructions=st.lists(instructions, min_size=3, max_size=16).map(tuple),
    layers=st.sampled_from([0, 0, 2, 5]),
    keeps=st.sampled_from([0, 0, 1, 3]),
    backward=st.sampled_from(BACKWARDS),
    times=st.sampled_from([1, 1, 2, 3]),
    on_thread=st.booleans(),
    watched=st.booleans(),
)
programs = st.builds(
    Program,
    shape=st.sampled_from([(4, 6), (3, 4, 2), (5,), (), (24, 50)]),
    graphs=st.lists(graphs, min_size=1, max_size=3).map(tuple),
    order=st.tuples(small, small, small),
    settles=st.booleans(),
    is_prompt=st.booleans(),
)


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, PromptEngine]]:
    """One engine of each kind, for all programs, and one that computes nothing again."""
    logging.getLogger("megatron.offload").setLevel(logging.ERROR)
    with contextlib.ExitStack() as stack:
        kinds = {**ENGINES, WITHOUT_REPLAY: {"mode": "host", "replay": "off"}}
        yield {name: stack.enter_context(open_engine(**s)) for name, s in kinds.items()}
    logging.getLogger("megatron.offload").setLevel(logging.NOTSET)


@pytest.fixture(scope="module")
def ran(coverage: Coverage) -> Counter[str]:
    """What the programs did."""
    counts: Counter[str] = Counter()
    coverage.lines["random programs"] = lambda: [
        "random programs: " + ", ".join(f"{n} {what}" for what, n in sorted(counts.items()))
    ]
    return counts


def compute(program: Program, watch: Watch) -> Outcome | Failure:
    """What the program computed. An error is kept without its traceback, which keeps graphs."""
    seed(1)
    return on_own_thread(lambda: attempt(lambda: run(program, watch)))


def met_a_change(ours: Outcome, plain: Outcome) -> bool:
    """Whether a backward pass found something changed in place where plain autograd did not.

    A replay needs its operands, which autograd alone may not need, or needs later: a pass raises
    that would not, or not yet (docs/replay.md).
    """
    pairs = zip(ours.gradients, plain.gradients, strict=False)
    return any(_is_change(found) and not _is_change(wanted) for found, wanted in pairs)


def _is_change(found: object) -> bool:
    return isinstance(found, Failure) and found == CHANGED


@pytest.mark.slow
@settings(settings.get_profile("autograd"))
@given(program=programs, kind=st.sampled_from(sorted(ENGINES)))
def test_values_gradients_and_errors_are_those_of_plain_autograd(
    engines, ran, coverage, program, kind
):
    plain = compute(program, Watch())
    assert isinstance(plain, Outcome), plain
    engine = engines[kind]
    engine.is_prompt = program.is_prompt
    for way in WAYS:
        left_bytes = engine.used_bytes
        with engine.step():
            ours = compute(program, Watch(engine, way))
        assert isinstance(ours, Outcome), f"{way} on {kind}: {ours}"
        found = difference(ours.tree(), plain.tree())
        if found is not None and met_a_change(ours, plain):
            ran["replays that met a change"] += 1
            exact = engines[WITHOUT_REPLAY]
            with exact.step():
                found = difference(compute(program, Watch(exact, way)).tree(), plain.tree())
        assert found is None, f"{way} on {kind}: {found}"
        if engine.used_bytes_in_the_end(left_bytes, timeout_s=2.0) > left_bytes:
            # A tensor that was saved and then changed in place may hold its own graph for ever.
            by_torch_too = any(mark() is not None for mark in plain.marks)
            is_late = not by_torch_too and engine.used_bytes_in_the_end(left_bytes) <= left_bytes
            assert by_torch_too or is_late, f"{way} on {kind}: something is left"
            ran["graphs that torch never frees"] += by_torch_too
        coverage.count(engine.statistics)
    ran["programs"] += 1
    ran["graphs"] += len(program.graphs)
    ran["gradients"] += len(tensors_in(plain.gradients))
    ran["operations that raised"] += len(plain.failures)
    failed = [found for found in plain.gradients if isinstance(found, Failure)]
    ran["backward passes that raised"] += len(failed)
    for failure in failed + plain.failures:
        event(failure.message)
    event(kind)
