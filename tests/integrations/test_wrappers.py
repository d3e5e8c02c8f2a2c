# SPDX-License-Identifier: Apache-2.0
"""Wrappers that hand attributes on to what they wrap: Fabric, PEFT, torch.compile, Accelerate."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import offload_activations, offload_optimizer, offload_parameters
from tests.support.same_training import digest

pytest.importorskip("transformers", reason="transformers is not installed")

from tests.support.text_models import llama, text_batches

STATES = {"bucket_bytes": "64KiB", "window_bytes": "64KiB"}


class HandsOn(torch.nn.Module):
    """Sets every attribute on the module in it as well, as Fabric's wrapper does."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if "_modules" in vars(self) and "inner" in self._modules and name != "inner":
            setattr(self.inner, name, value)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        delattr(self.inner, name)

    def forward(self, **batch: Any) -> Any:
        return self.inner(**batch)


def weights(model: torch.nn.Module) -> list[str]:
    return [digest(one) for one in model.parameters()]


def new_llama() -> Any:
    torch.manual_seed(5)
    return llama(attention_dropout=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrap",
    [HandsOn, lambda model: torch.compile(model, backend="eager"), torch.nn.Sequential],
    ids=["hands on", "compiled", "Sequential"],
)
def test_a_wrapped_model_trains_the_same_and_is_left_as_it_was(
    wrap: Callable[[torch.nn.Module], Any], tmp_path: Path
) -> None:
    found = []
    for directory in (None, tmp_path):
        model = new_llama()
        wrapped = wrap(model)
        call = wrapped if not isinstance(wrapped, torch.nn.Sequential) else wrapped[0]
        before = [set(vars(module)) for module in (wrapped, model)]
        offload: Any = contextlib.nullcontext()
        if directory is not None:
            offload = offload_activations(wrapped, directory, min_bytes="4KiB")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        torch.manual_seed(6)
        with offload as handle:
            for batch in text_batches():
                call(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            assert handle is None or handle.statistics["offloaded_storages"] > 5
        found.append(weights(model))
        for module, names in zip((wrapped, model), before, strict=True):
            assert vars(module).get("_compiled_call_impl") is None
            assert set(vars(module)) - {"_compiled_call_impl"} == names
    assert found[0] == found[1]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("moves_parameters", [False, True], ids=["", "parameters"])
def test_fabric_trains_saves_and_loads_the_same(
    precision: Any, moves_parameters: bool, tmp_path: Path
) -> None:
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")
    batches = text_batches()

    def run(is_offloaded: bool) -> list[str]:
        fabric = lightning.Fabric(accelerator="cpu", devices=1, precision=precision)
        plain = new_llama()
        model, optimizer = fabric.setup(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3))
        with contextlib.ExitStack() as stack:
            if is_offloaded:
                stack.enter_context(offload_activations(model, tmp_path, min_bytes="4KiB"))
                if moves_parameters:
                    stack.enter_context(offload_parameters(model, tmp_path))
                stack.enter_context(offload_optimizer(optimizer, tmp_path, **STATES))

            def train(own: list[Any], seed: int) -> None:
                torch.manual_seed(seed)
                for batch in own:
                    fabric.backward(model(**batch).loss)
                    fabric.clip_gradients(model, optimizer, max_norm=0.5)
                    optimizer.step()
                    optimizer.zero_grad()

            train(batches[:2], seed=6)
            if is_offloaded:
                saved = {"model": model, "optimizer": optimizer}
                fabric.save(tmp_path / "saved.ckpt", saved)
                train(batches[2:], seed=8)
                fabric.load(tmp_path / "saved.ckpt", saved)
            train(batches[2:], seed=7)
        return weights(plain)

    assert run(is_offloaded=True) == run(is_offloaded=False)


@pytest.mark.parametrize("parameters", [False, True], ids=["states", "states and parameters"])
def test_accelerate_saves_and_loads_the_same(parameters: bool, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    batches = text_batches()

    def run(is_offloaded: bool) -> list[str]:
        accelerator = accelerate.Accelerator(cpu=True)
        plain = new_llama()
        model, optimizer = accelerator.prepare(
            plain, torch.optim.AdamW(plain.parameters(), lr=1e-3)
        )
        with contextlib.ExitStack() as stack:
            if is_offloaded:
                stack.enter_context(offload_activations(model, tmp_path, min_bytes="4KiB"))
                stack.enter_context(offload_optimizer(optimizer, tmp_path, **STATES))
                if parameters:
                    stack.enter_context(offload_parameters(plain, tmp_path))

            def train(own: list[Any]) -> None:
                for batch in own:
                    accelerator.backward(model(**batch).loss)
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    optimizer.zero_grad()

            torch.manual_seed(6)
            train(batches[:2])
            if is_offloaded:
                accelerator.save_state(tmp_path / "saved")  # random generators too
                train(batches[2:])
                accelerator.load_state(tmp_path / "saved")
            train(batches[2:])
        return weights(plain)

    assert run(is_offloaded=True) == run(is_offloaded=False)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [4, 8], ids=["of the same rank", "of a larger rank"])
def test_adapters_are_swapped_between_steps(rank: int, tmp_path: Path) -> None:
    """PEFT fills parameters in place, or gives them the memory of others."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    from peft.utils.hotswap import hotswap_adapter

    def adapted(own_rank: int) -> Any:
        config = peft.LoraConfig(r=own_rank, target_modules=["q_proj", "v_proj"])
        config.init_lora_weights = False
        return peft.get_peft_model(new_llama(), config)

    adapted(rank).save_pretrained(tmp_path / "other")

    def run(is_offloaded: bool) -> tuple[list[str], list[str]]:
        model = adapted(4)
        losses = []
        torch.manual_seed(6)
        with contextlib.ExitStack() as stack:
            if is_offloaded:
                stack.enter_context(offload_activations(model, tmp_path, min_bytes="4KiB"))

            def train() -> None:
                trained = [param for name, param in model.named_parameters() if "lora_" in name]
                for param in trained:
                    param.requires_grad_()  # which those of another shape lose
                optimizer = torch.optim.AdamW(trained, lr=1e-2)
                moved: Any = contextlib.nullcontext()
                if is_offloaded:
                    moved = offload_optimizer(optimizer, tmp_path, bucket_bytes=1, window_bytes=0)
                with moved:
                    for batch in text_batches()[:2]:
                        loss = model(**batch).loss
                        loss.backward()
                        losses.append(digest(loss))
                        optimizer.step()
                        optimizer.zero_grad()
                    if rank == 4:  # states fit what is swapped in
                        hotswap_adapter(model, tmp_path / "other", "default")
                        model(**text_batches()[0]).loss.backward()
                        optimizer.step()
                        optimizer.zero_grad()

            train()
            hotswap_adapter(model, tmp_path / "other", "default")
            train()
        return losses, weights(model)

    assert run(is_offloaded=True) == run(is_offloaded=False)


@pytest.mark.parametrize("has_states", [False, True])
@pytest.mark.parametrize("comes_first", [False, True])
def test_accelerate_with_a_gradient_scaler_steps_with_offload(
    comes_first: bool, has_states: bool, tmp_path: Path
) -> None:
    """Its wrapper puts the step on the optimizer that it has found when it was made."""
    optimizers = pytest.importorskip("accelerate.optimizer", reason="accelerate is not installed")
    accelerate = pytest.importorskip("accelerate")

    def run(is_offloaded: bool) -> list[str]:
        accelerate.Accelerator(cpu=True)
        torch.manual_seed(6)
        model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)])
        inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if has_states:
            model(torch.ones(2, 64)).sum().backward()
            inner.step()
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        handles = []
        if is_offloaded and comes_first:
            handles.append(offload_optimizer(inner, tmp_path, **STATES))
        outer = optimizers.AcceleratedOptimizer(inner, device_placement=False, scaler=scaler)
        if is_offloaded and not comes_first:
            handles.append(offload_optimizer(outer, tmp_path, **STATES))

        def train() -> None:
            for scale in (1.0, float("inf"), 3.0):
                loss = model(torch.ones(2, 64)).square().mean() * scale
                scaler.scale(loss).backward()
                outer.step()
                assert outer.step_was_skipped == (scale == float("inf"))
                outer.zero_grad()

        train()
        for handle in handles:
            assert handle.statistics["state_bytes"] > 0
            assert handle.states is not None and handle.states.meter.num_steps == 2
        if not comes_first:  # else the wrapper has found our step
            for handle in handles:
                handle.close()
            train()
        return weights(model)

    assert run(is_offloaded=True) == run(is_offloaded=False)
