# SPDX-License-Identifier: Apache-2.0
"""Megatron's loss over chunks of tokens: as close to fp64 as its own, whatever the layout, and its
own again when it is off. How chunks are computed: tests/unit/test_chunked_loss.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel import ColumnParallelLinear

from megatron.offload import ConfigurationError
from megatron.offload.integration.megatron.chunked_loss import ChunkedLoss
from tests.support.launch import Outcome, assert_auto_changes_no_bit, assert_same_bits, train
from tests.support.offload_flags import ssd
from tests.support.ranks import run_ranks

SCRIPT = Path(__file__).parent / "chunked_loss_ranks.py"
MOST = 1.5  # times the error of Megatron's own loss
CHUNKED = "--activation-chunked-loss 7"
TP2 = "--tensor-model-parallel-size 2"


@pytest.mark.slow
def test_the_error_against_fp64_is_that_of_megatrons_own(tmp_path: Path) -> None:
    """In fp32 and bf16, tied, untied and with a bias, TP1, TP2 and TP2 with sequence parallelism.

    A fifth of the tokens is masked, and chunks of 20 tokens divide nothing.
    """
    cases: dict[str, Any] = run_ranks(SCRIPT, tmp_path)
    assert len(cases) == 6 + 10
    for case, errors in cases.items():
        for name, error in errors["chunked"].items():
            assert error <= MOST * max(errors["usual"][name], 2.0**-24), (case, name, errors)
        assert errors["differs"] and errors["restored"], case


# ------------------------------------------------------------------ whole trainings


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layout", "world_size"),
    [
        ("gpt", "--pipeline-model-parallel-size 2", 2),
        pytest.param(
            "gpt",
            f"{TP2} --untie-embeddings-and-output-weights --bf16",
            2,
            marks=pytest.mark.rare,
        ),
        ("bert", f"{TP2} --make-vocab-size-divisible-by 256 --sequence-parallel", 2),
        ("t5", "--bf16", 1),
    ],
    ids=["GPT-PP2", "GPT-TP2-untied-bf16", "BERT-TP2+SP", "T5-bf16"],
)
def test_a_training_is_the_same_within_rounding_and_with_offload_bit_for_bit(
    model: str, layout: str, world_size: int, tiny: dict[str, str], tmp_path: Path
) -> None:
    more: dict[str, Any] = {"model": model, "world_size": world_size}
    if model != "gpt":
        more["tiny"] = tiny[model]
    flags = f"{layout} --train-iters 3 --eval-interval 3 --eval-iters 1"
    own, chunked = train(flags, **more), train(flags, CHUNKED, **more)
    offloaded = train(flags, CHUNKED, ssd(tmp_path), **more)
    # The first step is within the rounding of one pass. What bf16 rounds away of an update differs
    # from then on, by 1 % of the third gradient norm on one kind of processor.
    first, close = (1e-3, 2e-2) if "bf16" in layout else (1e-5, 1e-4)
    for name in ("loss", "grad_norm"):
        own_values, values = own.values(name), chunked.values(name)
        assert values[0] == pytest.approx(own_values[0], rel=first), name
        assert values == pytest.approx(own_values, rel=close), name
    assert validations(chunked) == pytest.approx(validations(own), rel=close)
    assert chunked.model != own.model  # it is another order of sums: chunks were computed
    assert_same_bits(offloaded, chunked, 3)
    assert min(step["offloaded_bytes"] for step in offloaded.values("offload")) > 0


@pytest.mark.rare
def test_auto_plans_around_it_and_changes_no_bit(tmp_path: Path) -> None:
    assert_auto_changes_no_bit(CHUNKED, tmp_path)


def validations(outcome: Outcome) -> list[float]:
    """The validation losses in the output."""
    lines = [one for one in outcome.output.splitlines() if one.startswith("validation at")]
    assert lines
    return [float(line.rsplit(maxsplit=1)[1]) for line in lines]


# ------------------------------------------------------------------ what it takes the place of


class Layer(ColumnParallelLinear):
    """An output layer of [3, 2], with the attributes that are looked at."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.weight = torch.nn.Parameter(torch.arange(6.0).reshape(3, 2))
        self.bias = None
        self.gather_output = self.explicit_expert_comm = self.disable_grad_reduce = False
        self.skip_bias_add = self.sequence_parallel = self.gradient_accumulation_fusion = False
        self.tp_group = None

    def forward(
        self, input_: Any, weight: Any = None, runtime_gather_output: Any = None
    ) -> tuple[torch.Tensor, None]:
        return input_ @ self.weight.t(), None


class Model(LanguageModule):
    """Hidden states to logits or to a loss."""

    def __init__(self, post_process: bool = True) -> None:
        torch.nn.Module.__init__(self)
        self.post_process = post_process
        if post_process:
            self.output_layer = Layer()

    def forward(
        self, hidden: torch.Tensor, labels: Any = None, looks: bool = False, **more: Any
    ) -> Any:
        logits, _ = self.output_layer(hidden)
        if looks:
            logits = logits.argmax(-1)
        return logits if labels is None else self.compute_language_model_loss(labels, logits)

    def compute_language_model_loss(self, labels: torch.Tensor, logits: torch.Tensor) -> Any:
        return "its own"


HIDDEN, LABELS = torch.ones(4, 1, 2), torch.zeros(1, 4, dtype=torch.long)


@pytest.fixture(autouse=True)
def stands_for_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.core.tensor_parallel.ColumnParallelLinear", Layer)


@pytest.fixture
def model() -> Iterator[Model]:
    """A model with a chunked loss."""
    one = Model()
    loss = ChunkedLoss([torch.nn.Sequential(one)], 3)
    loss.connect()
    yield one
    loss.close()
    assert one(HIDDEN, LABELS) == "its own"


def test_a_loss_has_the_shape_of_its_labels(model: Model) -> None:
    exact = (HIDDEN @ model.output_layer.weight.t()).log_softmax(-1)[:, :, 0].t()
    found = model(HIDDEN, labels=LABELS)
    torch.testing.assert_close(found, -exact)
    assert found.is_contiguous()


def test_without_labels_there_are_logits(model: Model) -> None:
    model(HIDDEN, LABELS)
    assert torch.equal(model(HIDDEN), HIDDEN @ model.output_layer.weight.t())
    assert isinstance(model.output_layer(HIDDEN)[0], torch.Tensor)


def test_logits_that_are_used_before_the_loss_are_an_error_and_not_wrong(model: Model) -> None:
    with pytest.raises(ConfigurationError, match=r"used \(argmax\) and not only for its loss"):
        model(HIDDEN, LABELS, looks=True)


def test_stages_without_an_output_layer_are_left_alone() -> None:
    first = Model(post_process=False)
    before = dict(vars(first))
    loss = ChunkedLoss([first])
    loss.connect()
    assert vars(first) == before
    loss.close()


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("gather_output", True, "gathers its output"),
        ("explicit_expert_comm", True, "gathers its output, or reduces no gradients"),
        ("disable_grad_reduce", True, "or reduces no gradients"),
        ("gtp_remat_size", 2, "divided once more"),
    ],
)
def test_output_layers_that_compute_something_else_are_refused(
    name: str, value: Any, sentence: str
) -> None:
    model = Model()
    setattr(model.output_layer, name, value)
    with pytest.raises(ConfigurationError, match=sentence):
        ChunkedLoss([model])


def test_another_class_of_output_layer_is_refused() -> None:
    model = Model()
    model.output_layer = torch.nn.Linear(2, 3)
    with pytest.raises(ConfigurationError, match="the output layer of Model is Linear"):
        ChunkedLoss([model])


def test_a_model_whose_labels_have_another_name_is_refused() -> None:
    class Other(Model):
        def forward(self, hidden: torch.Tensor, targets: Any = None) -> Any:
            raise NotImplementedError

    with pytest.raises(ConfigurationError, match="has no parameter labels or lm_labels"):
        ChunkedLoss([Other()])
