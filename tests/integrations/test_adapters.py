# SPDX-License-Identifier: Apache-2.0
"""PEFT's methods and TRL's GRPO with activations and optimizer states on an SSD: the same bits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import offload_activations, offload_optimizer
from tests.support.same_training import digest

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")

from megatron.offload.integration.huggingface import OffloadCallback  # noqa: E402
from tests.integrations.test_trainer import arguments, sentences, tokenizer, weights  # noqa: E402
from tests.support.text_models import HIDDEN, LAYERS, WORDS, text_batches  # noqa: E402

_TASK = "CAUSAL_LM"
_ON = {"target_modules": ["q_proj", "v_proj"], "task_type": _TASK}
METHODS: dict[str, Callable[[], Any]] = {
    "LoRA": lambda: peft.LoraConfig(r=4, lora_dropout=0.1, **_ON),
    "DoRA": lambda: peft.LoraConfig(r=4, use_dora=True, **_ON),
    "rsLoRA": lambda: peft.LoraConfig(r=4, use_rslora=True, init_lora_weights="olora", **_ON),
    "AdaLoRA": lambda: peft.AdaLoraConfig(init_r=6, target_r=4, total_step=10, tinit=1, **_ON),
    "IA3": lambda: peft.IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"],
        feedforward_modules=["down_proj"],
        task_type=_TASK,
    ),
    "VeRA": lambda: peft.VeraConfig(r=8, **_ON),
    "OFT": lambda: peft.OFTConfig(oft_block_size=8, **_ON),
    "BOFT": lambda: peft.BOFTConfig(boft_block_size=8, **_ON),
    "LoHa": lambda: peft.LoHaConfig(r=4, **_ON),
    "LoKr": lambda: peft.LoKrConfig(r=4, **_ON),
    "HRA": lambda: peft.HRAConfig(r=4, **_ON),
    "FourierFT": lambda: peft.FourierFTConfig(n_frequency=32, **_ON),
    "VB-LoRA": lambda: peft.VBLoRAConfig(r=4, num_vectors=8, vector_length=16, **_ON),
    "LayerNorm": lambda: peft.LNTuningConfig(task_type=_TASK),
    "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=4, task_type=_TASK),
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=4, task_type=_TASK),
    "P-tuning": lambda: peft.PromptEncoderConfig(
        num_virtual_tokens=4, encoder_hidden_size=32, task_type=_TASK
    ),
}


def new_llama() -> Any:
    """With its class's own settings, a cache among them."""
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        vocab_size=WORDS,
        bos_token_id=3,
        eos_token_id=1,
        pad_token_id=2,
    )
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("method", list(METHODS))
def test_a_method_trains_the_same(method: str, tmp_path: Path) -> None:
    def run(is_offloaded: bool) -> tuple[list[str], dict[str, str]]:
        model = peft.get_peft_model(new_llama(), METHODS[method]()).train()
        params = [param for param in model.parameters() if param.requires_grad]
        optimizer = torch.optim.AdamW(params, lr=1e-2)
        losses = []
        torch.manual_seed(6)
        with contextlib.ExitStack() as stack:
            if is_offloaded:
                offload = stack.enter_context(offload_activations(model, tmp_path, min_bytes=1))
                settings = {"bucket_bytes": 1, "window_bytes": 0}
                states = stack.enter_context(offload_optimizer(optimizer, tmp_path, **settings))
            for step, batch in enumerate(text_batches(num_steps=2)):
                loss = model(**batch).loss
                loss.backward()
                losses.append(digest(loss))
                optimizer.step()
                if hasattr(model.base_model, "update_and_allocate"):
                    model.base_model.update_and_allocate(step)  # AdaLoRA's own call
                optimizer.zero_grad()
            if is_offloaded:
                assert offload.statistics["offloaded_storages"] > 5
                assert states.states is not None and states.states.num_bytes > 0
        return losses, weights(model)

    assert run(is_offloaded=True) == run(is_offloaded=False)


@pytest.mark.slow(but="LoRA")
@pytest.mark.parametrize("is_lora", [False, True], ids=["", "LoRA"])
def test_grpo_generates_and_trains_the_same(is_lora: bool, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="trl is not installed")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    data = datasets.Dataset.from_dict({"prompt": sentences(16, 8)})

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(one.split()))) for one in completions]

    def run(callbacks: list[Any]) -> tuple[list[Any], dict[str, str]]:
        torch.manual_seed(5)
        settings = arguments(
            tmp_path, max_steps=2, num_generations=2, max_completion_length=8, beta=0.0
        )
        trainer = trl.GRPOTrainer(
            new_llama(),
            reward_funcs=reward,
            args=trl.GRPOConfig(**settings),
            train_dataset=data,
            processing_class=tokenizer(),
            callbacks=callbacks,
            peft_config=peft.LoraConfig(r=4, **_ON) if is_lora else None,
        )
        trainer.train()
        lines = [
            [line.get(name) for name in ("loss", "reward")] for line in trainer.state.log_history
        ]
        return lines, weights(trainer.model)

    states = {"bucket_bytes": "1KiB", "window_bytes": "1KiB"}
    callback = OffloadCallback(tmp_path, optimizer_states=states, min_bytes=1)
    found, expected = run([callback]), run([])
    assert found == expected and any(line[1] for line in expected[0])
    assert callback.offload is not None and callback.offload.statistics["offloaded_storages"] > 5
