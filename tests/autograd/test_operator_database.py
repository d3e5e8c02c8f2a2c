# SPDX-License-Identifier: Apache-2.0
"""Every differentiable operator of torch, with all it saves taken to a file and read back.

The operators and their inputs come from torch's own test database. Gradients, and gradients of
gradients, equal those of plain autograd in every bit, under both ways of capture; where plain
autograd raises, so does this. Operators left out are in `SKIPPED`, each with its reason; counts are
printed at the end of the test run. AUTOGRAD_SAMPLES=64 runs that many times as many samples.
"""

from __future__ import annotations

import itertools
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

from megatron.offload.stats.statistics import StepStatistics
from tests.autograd.roundtrip import (
    WAYS,
    Coverage,
    Failure,
    PromptEngine,
    Watch,
    attempt,
    difference,
    gradients,
    leaves_of,
    seed,
)

# Samples are deprecated or odd on purpose; torch says so at length.
pytestmark = pytest.mark.filterwarnings("ignore")

TIMES = int(os.environ.get("AUTOGRAD_SAMPLES", 1))
SAMPLES = {torch.float32: 4 * TIMES, torch.bfloat16: 2 * TIMES, torch.complex64: 2 * TIMES}
IN_PLACE_SAMPLES = 2 * TIMES
SECOND_ORDER_SAMPLES = 1 * TIMES

_CUDA = "has no CPU kernel"
SKIPPED = {
    "torch.ops.aten._flash_attention_forward": _CUDA,
    "torch.ops.aten._efficient_attention_forward": _CUDA,
    "nn.functional.batch_norm.without_cudnn": _CUDA,
    "nn.functional.one_hot": "gives integers, which have no gradient",
}
DIFFERENTIABLE = {op.full_name: op for op in op_db if op.supports_autograd}


def operators(select: Callable[[OpInfo], bool] = lambda op: True) -> list[Any]:
    """Parameters of a test: an operator, and the ways of capture to run it under."""
    parameters = []
    for name, op in DIFFERENTIABLE.items():
        if name in SKIPPED or not select(op):
            continue
        parameters.append(pytest.param(op, WAYS, id=name))
    return parameters


@dataclass
class Counts:
    """What ran, of one kind of test."""

    operators: set[str] = field(default_factory=set)
    moved: set[str] = field(default_factory=set)
    samples: Counter[str] = field(default_factory=Counter)
    failures: int = 0

    def add(self, name: str, kind: str, plain: Any, steps: Sequence[StepStatistics]) -> None:
        """A sample ran plain and on the engine, with equal results."""
        self.operators.add(name)
        self.samples[kind] += 1
        self.failures += isinstance(plain, Failure)
        if any(step.read_bytes for step in steps):
            self.moved.add(name)

    def lines(self) -> Iterable[str]:
        """For people."""
        yield f"  {len(self.operators)} operators ran; {len(self.moved)} saved bytes that were read"
        samples = ", ".join(f"{count} {kind}" for kind, count in self.samples.items())
        yield f"  samples: {samples}; raised as without hooks: {self.failures}"


@pytest.fixture(scope="module")
def first_order(coverage: Coverage) -> Counts:
    """What ran of the gradients."""
    counts = Counts()
    coverage.lines["first order"] = lambda: [
        f"operator database, gradients: {len(DIFFERENTIABLE)} differentiable operators",
        *counts.lines(),
        *(f"  skipped: {name} {reason}" for name, reason in SKIPPED.items()),
    ]
    return counts


@pytest.fixture(scope="module")
def second_order(coverage: Coverage) -> Counts:
    """What ran of the gradients of gradients."""
    counts = Counts()
    coverage.lines["second order"] = lambda: [
        f"operator database, gradients of gradients: {sum(map(has_second, op_db))} operators",
        *counts.lines(),
    ]
    return counts


def has_second(op: OpInfo) -> bool:
    """Whether its gradients have gradients."""
    return op.supports_autograd and op.supports_gradgrad


def samples_of(op: OpInfo, dtype: torch.dtype, num_samples: int) -> list[SampleInput]:
    """So many of the operator's samples, spread over all of them."""
    seed(zlib.crc32(op.full_name.encode()))
    # Past the method that tracks samples for torch's own tests: it looks at the stack each time.
    found = op.sample_inputs_func(op, torch.get_default_device(), dtype, requires_grad=True)
    every = list(itertools.islice(found, 16 * num_samples))
    step = max(len(every) / num_samples, 1)
    return [every[int(i * step)] for i in range(min(num_samples, len(every)))]


@dataclass
class Comparison:
    """Runs samples of one operator plain and on the engine, and counts them."""

    op: OpInfo
    ways: tuple[str, ...]
    engine: PromptEngine
    counts: Counts
    coverage: Coverage

    def run(
        self, function: Callable[..., Any], sample: SampleInput, kind: str, order: int = 1
    ) -> None:
        """Fails if the engine's gradients, or errors, are not those of plain autograd."""
        leaves = leaves_of((sample.input, sample.args, sample.kwargs))

        def call(input: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
            return sample.output_process_fn_grad(function(input, *args, **kwargs))

        def compute(watch: Watch) -> Any:
            seed(7)
            return attempt(lambda: gradients(watch, call, leaves, order=order))

        plain = compute(Watch())
        steps = []
        for way in self.ways:
            with self.engine.step():
                ours = compute(Watch(self.engine, way))
            found = difference(ours, plain)
            assert found is None, f"{way}: {found}; {sample.summary()}"
            assert self.engine.used_bytes_in_the_end() == 0
            steps.append(self.engine.statistics)
            self.coverage.count(self.engine.statistics)
        if plain:  # else no result has a gradient
            self.counts.add(self.op.full_name, kind, plain, steps)


@pytest.mark.parametrize("op, ways", operators())
def test_gradients_equal_those_of_plain_autograd(op, ways, prompt_engine, first_order, coverage):
    comparison = Comparison(op, ways, prompt_engine, first_order, coverage)
    for dtype, num_samples in SAMPLES.items():
        if dtype not in op.supported_backward_dtypes("cpu"):
            continue
        name = str(dtype).removeprefix("torch.")
        for index, sample in enumerate(samples_of(op, dtype, num_samples)):
            comparison.run(op, sample, name)
            if (
                op.inplace_variant is not None
                and op.supports_inplace_autograd
                and not sample.broadcasts_input
                and index < IN_PLACE_SAMPLES
            ):
                comparison.run(op.inplace_variant, sample, f"{name} in place")


@pytest.mark.parametrize("op, ways", operators(has_second))
def test_gradients_of_gradients_equal_too(op, ways, prompt_engine, second_order, coverage):
    comparison = Comparison(op, ways, prompt_engine, second_order, coverage)
    dtype = next(t for t in SAMPLES if t in op.supported_backward_dtypes("cpu"))
    for sample in samples_of(op, dtype, SECOND_ORDER_SAMPLES):
        comparison.run(op, sample, str(dtype).removeprefix("torch."), order=2)


def test_most_operators_really_moved_their_bytes(first_order, second_order, coverage):
    if len(first_order.operators) < len(DIFFERENTIABLE) - len(SKIPPED) - 5:
        pytest.skip("only some of the operators were selected")
    assert len(first_order.moved) > 350 and len(second_order.moved) > 320
    assert coverage.read_bytes > 0.95 * coverage.written_bytes > 0
