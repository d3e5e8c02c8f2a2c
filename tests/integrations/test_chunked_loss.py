# SPDX-License-Identifier: Apache-2.0
"""Causal language models of transformers with a chunked loss: the same within rounding, through the
door with and without offload. How close to fp64 chunks are: tests/unit/test_chunked_loss.py.
"""

from __future__ import annotations

import collections.abc
import copy
import operator
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.offload import ConfigurationError, LayerMajor, offload_activations
from megatron.offload.integration.pending_logits import PendingLogits
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
def test_layer_major_steps_change_no_bit_of_it(
    model: Model, tmp_path: Path, one_compute_thread: None
) -> None:
    """Micro-batches end while others have not come to their loss: each has its own arguments."""
    batches = text_batches()
    assert len(batches) > 2
    found: list[Any] = []
    for units in (None, 2):
        torch.manual_seed(5)
        one = model().train()
        with offload_activations(one, tmp_path, chunked_loss=13) as offload:
            layer_major = None if units is None else LayerMajor(one, units, offload=offload)
            outputs: list[Any] = []

            def loss_of(
                given: dict[str, torch.Tensor],
                one: torch.nn.Module = one,
                outputs: list[Any] = outputs,
            ) -> torch.Tensor:
                outputs.append(one(**given))
                loss: torch.Tensor = outputs[-1].loss
                return loss

            for _ in range(2):  # the first step runs one micro-batch after the other
                if layer_major is None:
                    for given in batches:
                        loss_of(given).backward()
                else:
                    layer_major.step(batches, loss_of)
            assert all(isinstance(output.logits, PendingLogits) for output in outputs)
            losses = [output.loss.detach() for output in outputs]
        found.append([*losses, *(p.grad for p in one.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


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


@pytest.mark.rare
@pytest.mark.parametrize("make", [llama, lambda: scaled("Gemma2")], ids=["plain", "capped"])
def test_a_model_compiled_as_a_whole_has_it_too(make: Model) -> None:
    own = passes(make)
    torch.manual_seed(5)
    model = make().train()
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


# -- scale, soft cap, words that are left out ------------------------------------------------------

# What is not in here is as the class has it; a soft cap is small enough to bend the logits.
SCALED = {
    "Cohere": {},
    "Cohere2": {},
    "Granite": {"logits_scaling": 8.0},
    "GraniteMoe": {"logits_scaling": 6.0, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Gemma2": {"final_logit_softcapping": 8.0, "head_dim": 8},
    "Gemma3Text": {"final_logit_softcapping": 5.0, "head_dim": 8},
    "RecurrentGemma": {"logits_soft_cap": 8.0, "lru_width": 32, "num_hidden_layers": 3},
    "FalconH1": {
        "lm_head_multiplier": 0.3,
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
    },
    "NanoChat": {},
    "Mamba": {"state_size": 8},  # `.float()`
    "OPT": {"word_embed_proj_dim": 32, "ffn_dim": 64},  # `.contiguous()`
    "InklingText": {
        "vocab_size": WORDS + 5,
        "unpadded_vocab_size": WORDS,
    },  # `[..., :words]`, `.shape`
}


def scaled(name: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """A small model of that configuration, whose logits are large."""
    config = getattr(transformers, f"{name}Config", None)
    if config is None:
        pytest.skip(f"this transformers has no {name}")
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": WORDS,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    model = transformers.AutoModelForCausalLM.from_config(config(**{**sizes, **SCALED[name]}))
    torch.nn.init.normal_(model.get_output_embeddings().weight, std=1.5)
    return model.to(dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCALED)
def test_what_models_do_with_their_logits_is_carried_into_the_chunks(name: str) -> None:
    own = passes(lambda: scaled(name))
    found = passes(lambda: scaled(name), chunked_loss=13)
    most = max(float(one.norm()) for one in own[1].values() if one is not None)
    assert float((found[0] - own[0]).abs() / own[0]) < 1e-6
    for parameter, gradient in own[1].items():
        if gradient is None:
            assert found[1][parameter] is None
        else:  # some are zero but for rounding: keys' biases
            bound = 2e-6 * float(gradient.norm()) + 1e-8 * most
            assert float((found[1][parameter] - gradient).norm()) <= bound, parameter


@pytest.mark.slow
def test_words_that_are_left_out_have_no_bias() -> None:
    def padded() -> torch.nn.Module:
        model = scaled("InklingText")
        model.lm_head = torch.nn.Linear(32, WORDS + 5)
        return model

    assert_close(passes(padded, chunked_loss=13), passes(padded), 2e-6)


@pytest.mark.parametrize("name", ["Gemma2", "Granite", "FalconH1"])
def test_under_autocast_they_are_as_close_to_fp64_as_the_models_own(name: str) -> None:
    exact = passes(lambda: scaled(name, torch.float64))
    own = passes(lambda: scaled(name), torch.bfloat16)
    found = passes(lambda: scaled(name), torch.bfloat16, chunked_loss=13)

    def error(of: Any) -> float:
        squares = [float((of[1][key] - one).double().norm() ** 2) for key, one in exact[1].items()]
        return sum(squares) ** 0.5

    assert error(found) <= 1.5 * error(own)
    assert abs(float(found[0] - exact[0])) <= 1.5 * abs(float(own[0] - exact[0])) + 1e-3


def test_offload_changes_no_bit_of_a_capped_loss(tmp_path: Path) -> None:
    def model() -> torch.nn.Module:
        return scaled("Gemma2")

    chunked = train(model, text_batches(), tmp_path, mode="off", chunked_loss=13)
    assert train(model, text_batches(), tmp_path, chunked_loss=13, min_bytes="1KiB") == chunked


# -- probes and uses ------------------------------------------------------------------------------


def pending() -> Any:
    """What the output of a training pass has in place of its logits."""
    model = llama().train()
    with offload_activations(model, mode="off", chunked_loss="auto"):
        return model(**batch()).logits


def test_probes_find_no_tensor_and_go_on() -> None:
    logits = pending()
    assert not torch.is_tensor(logits) and not isinstance(logits, torch.Tensor)
    for name in ("dtype", "is_cuda", "grad_fn", "requires_grad", "_version", "__iter__", "data"):
        assert not hasattr(logits, name)
        assert getattr(logits, name, "none") == "none"
    kinds = (collections.abc.Iterable, collections.abc.Mapping, collections.abc.Sequence, list)
    assert not isinstance(logits, kinds)
    assert not (logits is None or logits == None) and logits != None  # noqa: E711
    assert logits in {logits} and "chunked_loss" in repr(logits)
    seen = []
    torch.utils._pytree.tree_map(seen.append, {"logits": [logits]})
    assert seen[0] is logits
    assert copy.copy(logits) is logits
    assert copy.deepcopy({"logits": logits})["logits"] is logits
    again = pickle.loads(pickle.dumps(logits))
    with pytest.raises(ConfigurationError, match="not only for its loss"):
        again.argmax(-1)


IDS = torch.zeros(2, 64, dtype=torch.long)
USES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "method": ("argmax", lambda one: one.argmax(-1)),
    "attribute": ("dtype", lambda one: one.dtype),
    "torch": ("argmax", lambda one: torch.argmax(one, -1)),
    "lists": ("cat", lambda one: torch.cat([one, one])),
    "keyword": ("softmax", lambda one: torch.softmax(input=one, dim=-1)),
    "loss": ("cross_entropy", lambda one: torch.nn.functional.cross_entropy(one, IDS)),
    "log_softmax": ("log_softmax", lambda one: torch.nn.functional.log_softmax(one, -1)),
    "module": ("cross_entropy", lambda one: torch.nn.CrossEntropyLoss()(one, IDS)),
    "sum": ("add", lambda one: one + 1),
    "reflected": ("rsub", lambda one: 1 - one),
    "in place": ("add", lambda one: operator.iadd(one, 1)),
    "of a tensor": ("mul", lambda one: torch.ones(1) * one),
    "with a tensor": ("mul with what is no number", lambda one: one * torch.ones(2)),
    "with zero": ("truediv with 0.0", lambda one: one / 0),
    "power": ("pow", lambda one: one**2),
    "product": ("matmul", lambda one: one @ one),
    "minus": ("neg", lambda one: -one),
    "abs": ("abs", abs),
    "index": ("indexing", lambda one: one[0]),
    "slice": ("indexing", lambda one: one[..., :-1, :]),
    "assignment": ("setitem", lambda one: operator.setitem(one, 0, 1)),
    "length": ("len", len),
    "loop": ("indexing", lambda one: next(iter(one))),
    "list": ("len", list),
    "membership": ("indexing", lambda one: 1 in one),
    "reversed": ("len", lambda one: list(reversed(one))),
    "truth": ("bool", bool),
    "number": ("float", float),
    "equal": ("eq", lambda one: one == 1),
    "unequal": ("ne", lambda one: one != 1),
    "equal to a tensor": ("eq", lambda one: torch.ones(1) == one),
    "greater": ("gt", lambda one: one > 0),
    "numpy": ("numpy", lambda one: one.__array__()),
    "array": ("numpy", lambda one: np.asarray(one)),
    "numpy's function": ("exp", lambda one: np.exp(one)),
    "another type": ("to", lambda one: one.to(torch.long)),
    "two caps": ("a second tanh", lambda one: one.tanh().tanh()),
}


@pytest.mark.parametrize("use", USES)
def test_every_use_of_the_logits_is_an_error_that_names_it(use: str) -> None:
    name, function = USES[use]
    logits = PendingLogits(torch.randn(2, 64, 8), torch.randn(WORDS, 8), "chunked_loss")
    sentence = rf"logits of this model are used \(_*{name}_*\) and not only .* Drop chunked_loss"
    with pytest.raises(ConfigurationError, match=sentence):
        function(logits)


def test_logits_that_a_training_uses_are_an_error_and_not_wrong() -> None:
    with pytest.raises(ConfigurationError, match=r"used \(argmax\) and not only for its loss"):
        pending().argmax(-1)
    with pytest.raises(AttributeError):
        pending().argmax(-1)


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
        with pytest.raises(ConfigurationError, match="has a forward already that is not"):
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
