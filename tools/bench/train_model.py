#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a model of transformers in one way, a step for each line on its input.

`models.py` starts it and reads its metrics. Tokens are random, the same in every way.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import importlib.util
import json
import logging
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from megatron.offload import offload_activations
from megatron.offload.device.clock import Clock
from megatron.offload.device.open import open_device
from megatron.offload.machine import vector_math
from megatron.offload.stats.memory import PeakMemory

_DIGESTED_STEPS = 4
Context = Callable[[], contextlib.AbstractContextManager[Any]]


def make_model(args: argparse.Namespace) -> Any:
    """A new model, from a seed: 0, or what `args.seed` says."""
    torch.manual_seed(getattr(args, "seed", 0))
    model = _MODELS[args.model](args)
    return model.to(getattr(torch, args.dtype))


def _gpt2(args: argparse.Namespace) -> Any:
    config = transformers.GPT2Config(
        n_layer=args.layers,
        n_embd=args.hidden,
        n_head=args.hidden // 64,
        n_positions=args.sequence,
        vocab_size=args.vocabulary,
    )
    return transformers.GPT2LMHeadModel(config)


def _sizes(args: argparse.Namespace) -> dict[str, int]:
    return {
        "num_hidden_layers": args.layers,
        "hidden_size": args.hidden,
        "intermediate_size": 8 * args.hidden // 3,
        "num_attention_heads": args.hidden // 64,
        "vocab_size": args.vocabulary,
    }


def _llama(args: argparse.Namespace) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_sizes(args)))


def _qwen3(args: argparse.Namespace) -> Any:
    heads = args.hidden // 64
    config = transformers.Qwen3Config(**_sizes(args), num_key_value_heads=heads, head_dim=64)
    return transformers.Qwen3ForCausalLM(config)


def _olmo(args: argparse.Namespace) -> Any:
    config = transformers.OlmoConfig(**_sizes(args), pad_token_id=0)
    return transformers.OlmoForCausalLM(config)


def _mixtral(args: argparse.Namespace) -> Any:
    heads = args.hidden // 64
    sizes = _sizes(args) | {"intermediate_size": 2 * args.hidden}  # its products want such widths
    config = transformers.MixtralConfig(
        **sizes, num_key_value_heads=heads, num_local_experts=4, num_experts_per_tok=2
    )
    return transformers.MixtralForCausalLM(config)


def _qwen3_moe(args: argparse.Namespace) -> Any:
    """With the proportions of Qwen3-30B-A3B: each token goes to 8 experts."""
    # Else several threads add up the gradients of a token in any order.
    torch.use_deterministic_algorithms(True)
    heads = args.hidden // 64
    config = transformers.Qwen3MoeConfig(
        **_sizes(args),
        num_key_value_heads=max(heads // 8, 1),
        head_dim=64,
        moe_intermediate_size=3 * args.hidden // 8,
        num_experts=32,
        num_experts_per_tok=8,
    )
    return transformers.Qwen3MoeForCausalLM(config)


def _bert(args: argparse.Namespace) -> Any:
    sizes = _sizes(args) | {"intermediate_size": 4 * args.hidden}
    config = transformers.BertConfig(
        **sizes,
        max_position_embeddings=args.sequence,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForMaskedLM(config)


def _llama_lora(args: argparse.Namespace) -> Any:
    from peft import LoraConfig, get_peft_model

    linear = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return get_peft_model(_llama(args), LoraConfig(r=8, target_modules=linear))


_MODELS: dict[str, Callable[[argparse.Namespace], Any]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "llama-lora": _llama_lora,
    "qwen3": _qwen3,
    "olmo": _olmo,
    "bert": _bert,
    "mixtral": _mixtral,
    "qwen3-moe": _qwen3_moe,
}


def prepare(model: Any, args: argparse.Namespace) -> tuple[Context, Any]:
    """Has the model train in the wanted way: a context for each forward pass, and our handle."""
    if args.way in ("offload", "eager", "auto", "chunked", "chunked_offload"):
        settings: dict[str, Any] = json.loads(args.settings)
        if is_compiled(args):
            settings["inside_graphs"] = True
        if args.way.startswith("chunked"):
            settings["chunked_loss"] = "auto"
            settings |= {"mode": "off"} if args.way == "chunked" else {}
        if args.way == "auto":
            settings |= {"mode": "auto", "memory_budget_bytes": args.budget}
        return contextlib.nullcontext, offload_activations(
            model, args.activation_offload_dir, **settings
        )
    if args.way == "checkpointing":
        model.gradient_checkpointing_enable()
    elif args.way in ("save_on_cpu", "save_on_pinned"):
        pinned = args.way == "save_on_pinned"
        return functools.partial(torch.autograd.graph.save_on_cpu, pin_memory=pinned), None
    elif args.way == "trl":
        from trl.models.activation_offloading import OffloadActivations

        offloading = OffloadActivations()
        return lambda: offloading, None
    elif args.way == "torchtune":
        module = _peer(args.peers, "torchtune/training/_activation_offloading.py")
        offloading = module.OffloadActivations()
        return lambda: offloading, None
    elif args.way == "axolotl_disk":
        # The file asks for nothing else of its package.
        sys.modules["axolotl.utils.logging"] = types.ModuleType("axolotl.utils.logging")
        sys.modules["axolotl.utils.logging"].get_logger = logging.getLogger  # type: ignore[attr-defined]
        disk = _peer(args.peers, "axolotl/monkeypatch/gradient_checkpointing/offload_disk.py")
        for layer in model.modules():
            if isinstance(layer, transformers.modeling_layers.GradientCheckpointingLayer):
                layer.gradient_checkpointing = True
                layer._gradient_checkpointing_func = disk.Disco.apply
    return contextlib.nullcontext, None


def is_compiled(args: argparse.Namespace) -> bool:
    """Whether the model is compiled as a whole."""
    return getattr(args, "compiled", None) is not None and args.way != "eager"


def _peer(folder: Path | None, file: str) -> Any:
    if folder is None or not (folder / file).is_file():
        sys.exit(f"it is not installed here: no {file} in --peers")
    sys.path.append(str(folder))
    spec = importlib.util.spec_from_file_location("peer", folder / file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def digest(tensors: list[torch.Tensor]) -> str:
    """Differs if any bit does."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def train(args: argparse.Namespace) -> None:
    """Until the input ends."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    vector_math.first_call()  # as offload's door does: the other ways are to have the same bits
    model = make_model(args).to(device).train()
    context, handle = prepare(model, args)
    call = model
    if args.compiled is not None:  # an embedding's gradient is added up in any order otherwise
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    if is_compiled(args):
        call = torch.compile(model, backend=args.compiled)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    opened = open_device(device)
    memory, clock = PeakMemory(opened), Clock(opened)
    shape = (args.batch, args.sequence)
    with args.metrics_file.open("w") as metrics:
        step = 0
        while sys.stdin.readline():
            step += 1
            generator = torch.Generator().manual_seed(step)
            tokens = torch.randint(0, args.vocabulary, shape, generator=generator).to(device)
            torch.manual_seed(step)  # of dropout
            took_s: list[float] = []  # on the device, which may be behind
            with clock.timed(took_s.append):
                memory.begin_step()
                with context():
                    loss = call(input_ids=tokens, labels=tokens).loss
                loss.backward()
                peak_bytes = memory.end_step()
            line: dict[str, Any] = {"step": step, "loss": loss.item()}
            parameters = list(model.parameters())
            if step <= _DIGESTED_STEPS:
                line["gradients"] = digest([p.grad for p in parameters if p.grad is not None])
            with clock.timed(took_s.append):
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)  # gradients are no activations
            clock.wait()
            seconds = sum(took_s)
            if step <= _DIGESTED_STEPS:
                line["weights"] = digest(parameters)
            line |= {
                "step_time_s": seconds,
                "tokens_per_s": tokens.numel() / seconds,
                "peak_activation_bytes_rank0": peak_bytes,
            }
            if handle is not None and handle.statistics:
                line["offload"] = handle.statistics
                line["unreplayed"] = handle.engine.statistics.unreplayed_by_operation
            metrics.write(json.dumps(line) + "\n")
            metrics.flush()


def main() -> None:
    """Reads the flags and trains."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=(*_MODELS,), required=True)
    parser.add_argument("--dtype", default="float32", help="of the weights")
    parser.add_argument("--way", required=True)
    parser.add_argument("--settings", default="{}", help="of offload_activations, as JSON")
    parser.add_argument("--budget", type=int)
    parser.add_argument("--compiled", help="the backend of torch.compile; default: eager")
    parser.add_argument("--peers", type=Path)
    for name in ("layers", "hidden", "sequence", "batch", "vocabulary"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--activation-offload-dir", type=Path, required=True)
    parser.add_argument("--metrics-file", type=Path, required=True)
    parser.add_argument("--wait-for-input", action="store_true")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
