# SPDX-License-Identifier: Apache-2.0
"""Recipes of Lightning, PEFT and torch with parameters on a tier: the same bits as without."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import (
    ConfigurationError,
    LayerMajor,
    offload_activations,
    offload_optimizer,
    offload_parameters,
)
from tests.behaviour.test_parameters_that_others_write import Net, batch
from tests.support.copies import COPIES
from tests.support.same_training import digest

pytest.importorskip("transformers", reason="transformers is not installed")

from tests.integrations.test_adapters import METHODS, new_llama
from tests.support.text_models import text_batches

STATES = {"bucket_bytes": 1 << 14, "window_bytes": 1 << 14}
DOORS = ("parameters", "parameters states activations", "host parameters states")


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
                model.base_model.update_and_allocate(step + 1)  # AdaLoRA's own call
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


@pytest.mark.slow
@pytest.mark.parametrize("method", ["LoRA", "DoRA", "AdaLoRA", "IA3", "OFT"])
def test_an_adapter_is_merged_for_each_evaluation_and_at_the_end(
    method: str, tmp_path: Path
) -> None:
    expected = trained_adapter(method, "", tmp_path, evaluate_merged)
    for door in DOORS if method == "LoRA" else DOORS[1:2]:
        assert trained_adapter(method, door, tmp_path, evaluate_merged) == expected, door


# -- Lightning ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["EMA", "SWA"])
def test_averages_of_lightning_have_the_same_weights(kind: str, tmp_path: Path) -> None:
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
    for states in (False, True):
        callback, average = Parameters(), kinds[kind]()
        callbacks = [callback, average]
        if states:
            own = OffloadCallback(tmp_path, optimizer_states=STATES, min_bytes="4KiB")
            callbacks = [average, own, callback]
        found, trainer = fitted(tmp_path, callbacks)
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
def test_a_checkpoint_is_loaded_between_steps(
    assign: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With `assign` parameters are others, and an optimizer has those of before, as without."""

    def between(model: Any, step: int) -> None:
        if step == 1:
            torch.manual_seed(9)
            other = {k: torch.randn_like(v) * 0.02 for k, v in model.state_dict().items()}
            model.load_state_dict(other, assign=assign)

    expected = stepped("", tmp_path, between=between)
    said = "q_proj.weight of a Linear is another parameter than the one that was offloaded"
    for door in DOORS:
        caplog.clear()
        assert stepped(door, tmp_path, between=between) == expected, door
        assert (said in caplog.text) is assign


def compile_layers(model: Any) -> None:
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        compile_layers,
        pytest.param(lambda model: model.compile(backend="aot_eager"), marks=pytest.mark.rare),
        lambda model: model.gradient_checkpointing_enable(),
        lambda model: model.gradient_checkpointing_enable({"use_reentrant": True}),
    ],
    ids=["compiled by layer", "compiled", "checkpointed", "checkpointed reentrant"],
)
def test_a_changed_model_trains_the_same(change: Callable[[Any], None], tmp_path: Path) -> None:
    number = torch.get_num_threads()
    torch.set_num_threads(1)  # what is compiled adds up gradients in an order that threads decide
    try:
        expected = stepped("", tmp_path, change)
        for door in DOORS[1:]:
            assert stepped(door, tmp_path, change) == expected, door
    finally:
        torch.set_num_threads(number)


@pytest.mark.parametrize("wraps_first", [True, False])
def test_ddp_trains_the_same(wraps_first: bool, tmp_path: Path) -> None:
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:

        def run(which: str) -> tuple[list[str], dict[str, str]]:
            model, wrap = new_llama(), torch.nn.parallel.DistributedDataParallel
            wrapped = wrap(model) if wraps_first else None
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            seen = []
            with doors(model, optimizer, which, tmp_path):
                wrapped = wrapped or wrap(model, gradient_as_bucket_view=True)
                for step, batch in enumerate(text_batches(num_steps=4)):
                    # Accumulates over two micro-batches.
                    with wrapped.no_sync() if step % 2 == 0 else contextlib.nullcontext():
                        loss = wrapped(**batch).loss
                        loss.backward()
                    seen.append(digest(loss))
                    if step % 2:
                        torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 0.5)
                        optimizer.step()
                        optimizer.zero_grad()
            return seen, weights(model)

        expected = run("")
        for door in DOORS:
            assert run(door) == expected, door
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("gradients", ["off", "on"])
def test_a_layer_major_step_under_autocast_has_the_same_bits(
    gradients: str, tmp_path: Path
) -> None:
    """`autocast` keeps casts of weights, which come and go meanwhile."""

    def run(which: str) -> tuple[list[str], dict[str, str]]:
        model = new_llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        seen = []
        torch.manual_seed(6)
        settings = {"gradients": gradients} if which else {}
        with doors(model, optimizer, which, tmp_path, **settings):
            layer_major = LayerMajor(model)
            for step in range(2):
                with torch.autocast("cpu", torch.bfloat16):
                    losses = layer_major.step(
                        text_batches(step, 2), lambda batch: model(**batch).loss / 2
                    )
                seen += [digest(loss) for loss in losses]
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            layer_major.close()
        return seen, weights(model)

    expected = run("")
    for door in ("parameters states", "host parameters"):
        assert run(door) == expected, door


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("method", ["", "LoRA"], ids=["model", "adapter"])
def test_a_copy_with_every_door_is_whole_and_another_model(
    copied: Callable[[Any], Any], method: str, tmp_path: Path
) -> None:
    """With a chunked loss too; taken between a forward and its backward pass, and between steps."""

    def run(which: str) -> tuple[list[str], dict[str, str], list[str]]:
        model = adapted(method) if method else new_llama()
        params = [param for param in model.parameters() if param.requires_grad]
        optimizer = torch.optim.AdamW(params, lr=1e-3)
        at: Any = {"mode": "off"} if not which else {"directory": tmp_path, "min_bytes": "4KiB"}
        seen, of_twins = [], []
        torch.manual_seed(6)
        with contextlib.ExitStack() as stack:
            activations = stack.enter_context(offload_activations(model, chunked_loss="auto", **at))
            stack.enter_context(doors(model, optimizer, which, tmp_path))
            for batch in text_batches(num_steps=2):
                loss = model(**batch).loss
                twin = copied(model)
                loss.backward()
                seen.append(digest(loss))
                assert weights(twin) == weights(model)
                optimizer.step()
                optimizer.zero_grad()
                twin = copied(model)
                assert weights(twin) == weights(model)
                before = activations.statistics
                twin.train()(**text_batches(9)[0]).loss.backward()
                assert activations.statistics == before
                of_twins += [digest(p.grad) for p in twin.parameters() if p.grad is not None]
                assert all(param.grad is None for param in model.parameters())
                twin = copied(model)
        assert type(next(twin.parameters())) is torch.nn.Parameter
        return seen, weights(twin), of_twins

    assert run("parameters states") == run("")


def penalty(params: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([param.square().sum() for param in params]).sum()


@pytest.mark.slow
def test_what_is_compiled_finds_parameters_in_their_places(tmp_path: Path) -> None:
    """A term of the loss, and the step itself."""

    def run(which: str, compiles_step: bool) -> list[str]:
        torch.compiler.reset()
        compiled = torch.compile(penalty, backend="aot_eager")
        model = Net()
        params = list(model.parameters())[4:10]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step = torch.compile(optimizer.step, backend="aot_eager") if compiles_step else None
        with doors(model, optimizer, which, tmp_path):
            for number in range(3):
                loss = model(batch(number)) + 0.01 * compiled(params)
                loss.backward()
                (step or optimizer.step)()
                optimizer.zero_grad()
        return list(weights(model).values())

    assert run("parameters states", compiles_step=False) == run("", compiles_step=False)
    assert run("parameters", compiles_step=True) == run("", compiles_step=True)


def test_a_compiled_step_by_buckets_is_refused(tmp_path: Path) -> None:
    """It would come to other bits than the same step compiled as a whole."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with offload_optimizer(optimizer, tmp_path, **STATES):
        model(batch(0)).backward()
        with pytest.raises(ConfigurationError, match=r"call optimizer\.step itself"):
            torch.compile(optimizer.step, backend="aot_eager")()
        optimizer.step()


def test_torchs_encoder_evaluates_by_the_same_path(tmp_path: Path) -> None:
    """It looks at the parameters of its first layer before that is called."""

    def run(is_offloaded: bool) -> list[str]:
        torch.manual_seed(4)
        layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        model = torch.nn.TransformerEncoder(layer, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        rows = torch.randn(3, 12, 32)
        padding = torch.arange(12) >= torch.tensor([[12], [9], [5]])
        found = []
        with doors(model, optimizer, "parameters" if is_offloaded else "", tmp_path):
            for _ in range(2):
                loss = model.train()(rows, src_key_padding_mask=padding).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    result = model.eval()(rows, src_key_padding_mask=padding)
                assert not result[2, 5:].any()  # the path of nested tensors fills with zeros
                found += [digest(loss), digest(result)]
        return found

    assert run(is_offloaded=True) == run(is_offloaded=False)
