# SPDX-License-Identifier: Apache-2.0
"""Recipes of Lightning, PEFT and torch with parameters on a tier: the same bits as without."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import (
    LayerMajor,
    offload_activations,
    offload_optimizer,
    offload_parameters,
)
from megatron.offload.parameters.unit import Where
from tests.support.same_training import digest

pytest.importorskip("transformers", reason="transformers is not installed")

from tests.integrations.test_adapters import METHODS, new_llama  # noqa: E402
from tests.support.text_models import text_batches  # noqa: E402

STATES = {"bucket_bytes": 1 << 14, "window_bytes": 1 << 14}
DOORS = ("parameters", "parameters states", "parameters states activations")
TIERS = ("ssd", "host")


def weights(model: torch.nn.Module) -> dict[str, str]:
    return {name: digest(one) for name, one in model.named_parameters()}


@contextlib.contextmanager
def doors(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    which: str,
    directory: Path,
    **settings: Any,
) -> Iterator[Any]:
    """Opens what `which` names; of parameters it says that they have moved."""
    with contextlib.ExitStack() as stack:
        if "activations" in which:
            stack.enter_context(offload_activations(model, directory, min_bytes="4KiB"))
        if not which:
            yield None
            return
        at = None if "host" in which else directory
        handle = stack.enter_context(offload_parameters(model, at, **settings))
        if "states" in which:
            stack.enter_context(offload_optimizer(optimizer, at, **STATES))
        yield handle
        assert handle.statistics["read_bytes"] > handle.statistics["parameter_bytes"]


# -- PEFT -----------------------------------------------------------------------------------------


def adapted(method: str) -> Any:
    """With a base model that has another random start for each adapter's weights."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    return peft.get_peft_model(new_llama(), METHODS[method]()).train()


def trained_adapter(
    method: str, which: str, directory: Path, between: Callable[[Any, list[str]], None]
) -> tuple[list[str], dict[str, str], dict[str, str]]:
    """What was seen, the weights while the adapter is there, and those of the merged model."""
    torch.manual_seed(4)
    model = adapted(method)
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    seen: list[str] = []
    torch.manual_seed(6)
    with doors(model, optimizer, which, directory):
        for step, batch in enumerate(text_batches(num_steps=3)):
            loss = model(**batch).loss
            loss.backward()
            seen.append(digest(loss))
            optimizer.step()
            if hasattr(model.base_model, "update_and_allocate"):
                model.base_model.update_and_allocate(step)  # AdaLoRA's own call
            optimizer.zero_grad()
            between(model, seen)
        adapter = weights(model)
        merged = model.merge_and_unload(safe_merge=True)
        seen.append(digest(merged(**text_batches(5)[0]).loss))
    return seen, adapter, weights(merged)


def evaluate_merged(model: Any, seen: list[str]) -> None:
    """As the RL loop does: generates with merged weights, and takes them apart again."""
    prompt = text_batches(3)[0]["input_ids"][:, :8]
    model.eval()
    model.merge_adapter()
    with torch.no_grad():
        tokens = model.generate(input_ids=prompt, max_new_tokens=4, do_sample=True)
        seen.append(digest(model(**text_batches(9)[0]).logits))
    seen.append(digest(tokens))
    model.unmerge_adapter()
    model.train()


@pytest.mark.parametrize("method", ["LoRA", "DoRA", "AdaLoRA", "IA3", "OFT", "LoHa"])
def test_an_adapter_is_merged_for_each_evaluation_and_at_the_end(
    method: str, tmp_path: Path
) -> None:
    expected = trained_adapter(method, "", tmp_path, evaluate_merged)
    for door in (*DOORS, "host parameters"):
        assert trained_adapter(method, door, tmp_path, evaluate_merged) == expected, door


# -- Lightning ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["EMA", "SWA"])
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("states", [False, True], ids=["", "states"])
def test_averages_of_lightning_have_the_same_weights(
    kind: str, is_first: bool, states: bool, tmp_path: Path
) -> None:
    """An exponential average is swapped in for validation, a stochastic one at the end."""
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    from megatron.offload.integration.lightning import OffloadCallback
    from tests.integrations.test_lightning import Parameters, fitted

    kinds = {
        "EMA": lightning.callbacks.EMAWeightAveraging,
        "SWA": lambda: lightning.callbacks.StochasticWeightAveraging(1e-3, swa_epoch_start=1),
    }
    plain, _ = fitted(tmp_path, [])
    expected, wanted = fitted(tmp_path, [kinds[kind]()])
    callback = Parameters()
    callbacks: list[Any] = [callback]
    if states:
        callbacks.append(OffloadCallback(tmp_path, optimizer_states=STATES, min_bytes="4KiB"))
    average = [kinds[kind]()]
    found, trainer = fitted(tmp_path, callbacks + average if is_first else average + callbacks)
    assert found.losses == expected.losses and callback.read_bytes > 0
    assert trainer.callback_metrics["valid"] == wanted.callback_metrics["valid"]
    assert weights(found) == weights(expected) != weights(plain)


# -- torch ----------------------------------------------------------------------------------------


def stepped(
    which: str,
    directory: Path,
    change: Callable[[Any], Any] = lambda model: model,
    between: Callable[[Any, int], None] = lambda model, step: None,
    **settings: Any,
) -> tuple[list[str], dict[str, str]]:
    model = new_llama()
    change(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seen = []
    torch.manual_seed(6)
    with doors(model, optimizer, which, directory, **settings):
        for step, batch in enumerate(text_batches(num_steps=3)):
            loss = model(**batch).loss
            loss.backward()
            seen.append(digest(loss))
            optimizer.step()
            optimizer.zero_grad()
            between(model, step)
    return seen, weights(model)


@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
def test_a_checkpoint_is_loaded_between_steps(assign: bool, tmp_path: Path) -> None:
    """With `assign` parameters are others, and an optimizer has those of before, as without."""

    def between(model: Any, step: int) -> None:
        if step == 1:
            torch.manual_seed(9)
            other = {k: torch.randn_like(v) * 0.02 for k, v in model.state_dict().items()}
            model.load_state_dict(other, assign=assign)

    expected = stepped("", tmp_path, between=between)
    for door in (*DOORS, "host parameters"):
        assert stepped(door, tmp_path, between=between) == expected, door


def compile_layers(model: Any) -> None:
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")


@pytest.mark.parametrize(
    "change",
    [compile_layers, lambda model: model.gradient_checkpointing_enable()],
    ids=["compiled by layer", "checkpointed"],
)
@pytest.mark.parametrize("door", [*DOORS, "host parameters"])
def test_a_changed_model_trains_the_same(
    change: Callable[[Any], None], door: str, tmp_path: Path
) -> None:
    expected = stepped("", tmp_path, change)
    assert stepped(door, tmp_path, change) == expected
