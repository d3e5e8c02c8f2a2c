# SPDX-License-Identifier: Apache-2.0
"""Causal language models of transformers with a chunked loss: the same within rounding, through the
door with and without offload. How close to fp64 chunks are: tests/unit/test_chunked_loss.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import ConfigurationError, offload_activations
from tests.support.same_training import train

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from tests.integrations.test_transformers_models import bert, gpt2, mixtral, t5  # noqa: E402
from tests.support.text_models import WORDS, llama, text_batches  # noqa: E402

IGNORED = -100
Model = Callable[[], torch.nn.Module]


def batch() -> dict[str, torch.Tensor]:
    """Tokens, of which some have no label."""
    tokens = text_batches()[0]["input_ids"]
    labels = tokens.clone()
    labels[0, :7] = IGNORED
    return {"input_ids": tokens, "labels": labels}


def passes(make_model: Model, dtype: torch.dtype | None = None, **settings: Any) -> Any:
    """Loss and gradients of one step.

    Args:
        make_model: as for `train`.
        dtype: of autocast.
        settings: of the door, and `num_items_in_batch`; None: without the door.
    """
    given = batch()
    if "num_items_in_batch" in settings:
        given["num_items_in_batch"] = settings.pop("num_items_in_batch")
    torch.manual_seed(5)
    model = make_model().train()
    torch.manual_seed(6)
    with (
        offload_activations(model, **{"mode": "off", **settings}),
        torch.autocast("cpu", dtype, enabled=dtype is not None),
    ):
        loss = model(**given).loss
        loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def assert_close(one: Any, other: Any, most: float) -> None:
    """Loss and every gradient, by their relative distance."""
    assert float((one[0] - other[0]).abs() / other[0]) < most
    for name, gradient in other[1].items():
        assert float((one[1][name] - gradient).norm()) <= most * float(gradient.norm()), name


@pytest.mark.parametrize("model", [gpt2, llama, mixtral])
def test_loss_and_gradients_are_the_same_within_rounding(model: Model) -> None:
    """Chunks of 13 tokens divide nothing; GPT-2 is tied, Llama is not, Mixtral adds a loss."""
    chunked = passes(model, chunked_loss=13)
    own = passes(model)
    assert_close(chunked, own, 2e-6)
    assert any(not torch.equal(chunked[1][name], own[1][name]) for name in own[1])


def test_a_count_that_is_given_divides_the_sum() -> None:
    """As the Trainer gives it, for batches that are accumulated."""
    items = torch.tensor(1000)
    assert_close(
        passes(llama, chunked_loss=13, num_items_in_batch=items),
        passes(llama, num_items_in_batch=items),
        2e-6,
    )


def test_autocast_computes_the_same_products() -> None:
    chunked = passes(llama, torch.bfloat16, chunked_loss=13)
    assert_close(chunked, passes(llama, torch.bfloat16), 2e-2)
    assert chunked[0].dtype is torch.float32


def test_offload_changes_no_bit_of_it(tmp_path: Path) -> None:
    """Over several steps of an optimizer."""
    chunked = train(gpt2, text_batches(), tmp_path, mode="off", chunked_loss=13)
    offloaded = train(gpt2, text_batches(), tmp_path, chunked_loss=13)
    assert offloaded == chunked
    assert all(step["offloaded_bytes"] > 0 for step in offloaded.statistics)
    assert chunked != train(gpt2, text_batches())  # it is another order of sums


@pytest.mark.parametrize("model", [gpt2, llama])
def test_passes_leave_no_hooks_on_the_weight(model: Model, tmp_path: Path) -> None:
    """Each would tell the read-ahead in all later steps that another backward pass begins."""
    one, given = model().train(), batch()
    with offload_activations(
        one, tmp_path, chunked_loss=13, metrics_file=tmp_path / "metrics.jsonl"
    ):
        for _ in range(2):
            one(**given).loss.backward()
            assert not one.get_output_embeddings().weight._backward_hooks


@pytest.mark.slow
def test_a_model_compiled_as_a_whole_has_it_too() -> None:
    own = passes(llama)
    torch.manual_seed(5)
    model = llama().train()
    compiled = torch.compile(model, backend="aot_eager")
    with offload_activations(compiled, mode="off", chunked_loss=13):
        output = compiled(**batch())
        output.loss.backward()
    assert_close(
        (output.loss.detach(), {n: p.grad for n, p in model.named_parameters()}), own, 2e-6
    )
    assert not isinstance(output.logits, torch.Tensor)


def test_evaluation_and_generation_get_their_logits() -> None:
    model = llama().eval()
    with offload_activations(model, mode="off", chunked_loss="auto"):
        with torch.no_grad():
            evaluated = model(**batch())
        assert evaluated.logits.shape == (2, 64, WORDS) and evaluated.loss.isfinite()
        assert model(batch()["input_ids"]).logits.requires_grad
        assert model.generate(torch.ones(1, 2, dtype=torch.long), max_new_tokens=2).shape == (1, 4)


def test_logits_that_a_training_uses_are_an_error_and_not_wrong() -> None:
    model = llama()
    with offload_activations(model, mode="off", chunked_loss="auto"):
        logits = model(**batch()).logits
        with pytest.raises(ConfigurationError, match=r"used \(argmax\) and not only for its loss"):
            logits.argmax(-1)


def test_a_label_that_is_no_token_is_an_error() -> None:
    given = batch()
    given["labels"][1, 3] = WORDS
    model = llama()
    with (
        offload_activations(model, mode="off", chunked_loss="auto"),
        pytest.raises(RuntimeError, match="a label is no token"),
    ):
        model(**given)


def test_close_gives_the_model_its_own_loss_back() -> None:
    model = llama()
    usual = model(**batch())
    offload_activations(model, mode="off", chunked_loss="auto").close()
    again = model(**batch())
    assert torch.equal(again.loss, usual.loss) and torch.equal(again.logits, usual.logits)


def test_t5_whose_loss_is_its_own_says_so_at_its_first_pass() -> None:
    with (
        offload_activations(model := t5(), mode="off", chunked_loss="auto"),
        pytest.raises(ConfigurationError, match=r"are used .* with chunked_loss they are never"),
    ):
        model(**batch())


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (lambda: torch.nn.Linear(2, 2), "Linear has none; drop chunked_loss"),
        (bert, "BertForMaskedLM has none"),
    ],
    ids=["no language model", "masked words"],
)
def test_models_without_such_a_loss_are_refused(model: Model, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        offload_activations(model(), mode="off", chunked_loss="auto")


def test_an_output_layer_that_computes_more_is_refused() -> None:
    class Scaled(torch.nn.Linear):
        pass

    model = llama()
    model.lm_head = Scaled(64, WORDS, bias=False)
    with pytest.raises(ConfigurationError, match=r"is Scaled, not torch\.nn\.Linear"):
        offload_activations(model, mode="off", chunked_loss="auto")


def test_a_second_chunked_loss_is_refused_and_leaves_the_first_alone() -> None:
    model = llama()
    with offload_activations(model, mode="off", chunked_loss="auto"):
        with pytest.raises(ConfigurationError, match="somebody has replaced the forward"):
            offload_activations(model, mode="off", chunked_loss="auto")
        assert not isinstance(model(**batch()).logits, torch.Tensor)


def test_copies_and_pickles_have_the_models_own_loss(tmp_path: Path) -> None:
    model, given = llama(), batch()
    usual = model(**given)
    with offload_activations(model, mode="off", chunked_loss=13):
        torch.save(model, tmp_path / "model.pt")
        loaded = torch.load(tmp_path / "model.pt", weights_only=False)
        copies = [copy.deepcopy(model), loaded]
        torch.nn.init.zeros_(model.lm_head.weight)  # what copies had if they called its layer
        for one in copies:
            found = one(**given)
            assert torch.equal(found.loss, usual.loss) and torch.equal(found.logits, usual.logits)
    for one in copies:
        with offload_activations(one, mode="off", chunked_loss=13):
            assert not isinstance(one(**given).logits, torch.Tensor)
        assert torch.equal(one(**given).logits, usual.logits)


def test_after_a_pass_that_raised_the_output_layer_answers_as_usual() -> None:
    model = llama()

    def fail(*_: Any) -> None:
        raise ValueError("stop")

    with offload_activations(model, mode="off", chunked_loss=13):
        handle = model.lm_head.register_forward_pre_hook(fail)
        with pytest.raises(ValueError, match="stop"):
            model(**batch())
        handle.remove()
        assert isinstance(model.lm_head(torch.ones(1, 64)), torch.Tensor)


def test_a_weight_that_is_gathered_for_its_layer_alone_is_refused() -> None:
    """As FSDP and ZeRO-3 do where the output layer is a unit of its own."""

    def free(layer: Any, *_: Any) -> None:
        layer.weight.untyped_storage().resize_(0)

    model = llama()
    model.lm_head.register_forward_hook(free)
    with (
        offload_activations(model, mode="off", chunked_loss="auto"),
        pytest.raises(ConfigurationError, match="gathered only while it runs"),
    ):
        model(**batch())
