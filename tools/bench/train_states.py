#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a GPT with its optimizer's states in one place, a step for each line on its input.

`states.py` starts it and reads its metrics. Tokens are random, the same in every way. Resident
sets are the process's own, from the kernel.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
import xxhash

from megatron.offload import offload_activations
from megatron.offload.device.open import open_device
from megatron.offload.integration.torch.optimizer import offload_optimizer
from megatron.offload.machine import vector_math

VOCABULARY, SEQUENCE, BATCH = 8192, 512, 4  # of a micro-batch
MAX_NORM = 1.0
ADAM = {"lr": 1e-4, "weight_decay": 0.01}
_STATES_SHOWN_AT = 2  # the step after which they are compared


def make_model(args: argparse.Namespace) -> Any:
    """A new model, from a fixed seed, without dropout."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=args.layers,
        n_embd=args.hidden,
        n_head=args.hidden // 64,
        n_positions=SEQUENCE,
        vocab_size=VOCABULARY,
        use_cache=False,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    )
    return transformers.GPT2LMHeadModel(config).train()


class Plain:
    """A loop of torch: AdamW's fused kernel, gradients that stay allocated, clipping.

    Args:
        model: to train.
        args: see `main`.
    """

    def __init__(self, model: Any, args: argparse.Namespace) -> None:
        self.model = model
        self.activations = offload_activations(model, args.activation_offload_dir)
        self.optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAM)
        self.states: Any = None
        self._waits = args.way == "serial"
        if args.way in ("ssd", "host", "serial"):
            sizes = {"bucket_bytes": args.bucket, "window_bytes": args.window}
            if args.way == "serial":  # without a window nothing is read ahead
                sizes["window_bytes"] = 0
            directory = None if args.way == "host" else args.activation_offload_dir
            given = {name: size for name, size in sizes.items() if size is not None}
            self.states = offload_optimizer(self.optimizer, directory, **given).states
        for param in model.parameters():
            param.grad = torch.zeros_like(param)

    def begin_step(self, num_micro_batches: int) -> None:
        """Before the first forward pass of a step."""
        self._share = 1 / num_micro_batches
        self.optimizer.zero_grad(set_to_none=False)

    def micro_batch(self, tokens: torch.Tensor) -> torch.Tensor:
        """Adds the gradients of a micro-batch; its loss."""
        loss: torch.Tensor = self.model(input_ids=tokens, labels=tokens).loss
        (loss * self._share).backward()
        return loss.detach()

    def step(self) -> Any:
        """Updates the weights; the gradients' norm before they were clipped."""
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        if self._waits:
            self.states.wait_for_writes()
        return norm.item()

    def digest_of_states(self) -> str:
        """Differs if any bit does of what a checkpoint would have."""
        states = self.optimizer.state_dict()["state"]
        return digest([states[i][key] for i in states for key in ("exp_avg", "exp_avg_sq")])

    def traffic(self) -> dict[str, int]:
        """Bytes that states have moved so far."""
        if self.states is None:
            return {}
        every = [tier.statistics for tier in self.states.tiers]
        return {
            "states_written": sum(one.writes.total_bytes for one in every),
            "states_read": sum(one.reads.total_bytes for one in every),
        }


class DeepSpeed:
    """DeepSpeed's ZeRO 3 with its optimizer's states on the drive, and our activations.

    Args:
        model: to train.
        args: see `main`.
    """

    def __init__(self, model: Any, args: argparse.Namespace) -> None:
        deepspeed = importlib.import_module("deepspeed")
        rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
        os.environ.update(rank | {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"})
        # Its collectives in shared memory would be compiled first, which takes a minute.
        # As an attribute, `deepspeed.comm.torch` is torch.
        importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
        self._engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=deepspeed_config(args)
        )
        self.model = self._engine.module
        self.activations = offload_activations(self._engine, args.activation_offload_dir)

    def begin_step(self, num_micro_batches: int) -> None:
        """Before the first forward pass of a step."""
        self._engine.set_train_batch_size(BATCH * num_micro_batches)

    def micro_batch(self, tokens: torch.Tensor) -> torch.Tensor:
        """Adds the gradients of a micro-batch; its loss. The last one's step is `step`."""
        self._is_last = self._engine.is_gradient_accumulation_boundary()
        loss: torch.Tensor = self._engine(input_ids=tokens, labels=tokens).loss
        self._engine.backward(loss)
        if not self._is_last:
            self._engine.step()
        return loss.detach()

    def step(self) -> Any:
        """Updates the weights; the gradients' norm before they were clipped."""
        self._engine.step()
        norm = self._engine.get_global_grad_norm()
        return norm.item() if isinstance(norm, torch.Tensor) else norm

    def digest_of_states(self) -> str:
        """It has other bits."""
        return ""

    def traffic(self) -> dict[str, int]:
        """It counts none."""
        return {}


def deepspeed_config(args: argparse.Namespace) -> dict[str, Any]:
    """With read and write in pipelines, and about as many states at a time as ours has."""
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": MAX_NORM,
        "optimizer": {"type": "AdamW", "params": ADAM},
        "steps_per_print": 10**9,
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": False,
            "sub_group_size": args.sub_group,
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": str(args.metrics_file.parent),
                "buffer_count": args.buffers,
                "pipeline_read": True,
                "pipeline_write": True,
            },
        },
        "aio": {"block_size": 1 << 20, "queue_depth": 8, "overlap_events": True},
    }


class Torchao(Plain):
    """torchao's `CPUOffloadOptimizer`.

    Args:
        model: to train.
        args: see `main`.
    """

    def __init__(self, model: Any, args: argparse.Namespace) -> None:
        kind = importlib.import_module("torchao.optim").CPUOffloadOptimizer
        optimizer = kind(model.parameters(), torch.optim.AdamW, **ADAM)  # or says why it cannot
        super().__init__(model, args)
        self.optimizer = optimizer

    def digest_of_states(self) -> str:
        """It has another layout."""
        return ""


KINDS: dict[str, Any] = {"deepspeed": DeepSpeed, "torchao": Torchao}
PACKAGES = {"deepspeed": "deepspeed", "torchao": "torchao.optim"}


def digest(tensors: list[torch.Tensor]) -> str:
    """Differs if any bit does."""
    found = xxhash.xxh3_128()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def train(args: argparse.Namespace) -> None:
    """Until the input ends."""
    vector_math.first_call()  # as offload's door does: all ways are to have the same bits
    device = open_device(torch.device("cpu"))
    peak = device.peak_reader()
    if args.way in PACKAGES:  # no part of what training takes
        importlib.import_module(PACKAGES[args.way])
    gc.collect()
    base_bytes = device.allocated_bytes()
    model = make_model(args)
    num_params = sum(param.numel() for param in model.parameters())
    way = KINDS.get(args.way, Plain)(model, args)
    schedule = itertools.chain(args.first, itertools.cycle(args.schedule))
    with args.metrics_file.open("w") as metrics:
        for step, num_micro_batches in enumerate(schedule, 1):
            if not sys.stdin.readline():
                return
            generator = torch.Generator().manual_seed(step)
            shape = (num_micro_batches, BATCH, SEQUENCE)
            tokens = torch.randint(0, VOCABULARY, shape, generator=generator)
            # What the allocator keeps for reuse is nobody's. To give it back costs what comes next
            # time, so it is done in each turn's first step, whose time does not count.
            is_for_memory = step <= len(args.first) or not (
                (step - 1 - len(args.first)) % len(args.schedule)
            )
            if is_for_memory:
                device.return_freed_memory()
            before_bytes = device.allocated_bytes()
            peak.reset()
            began_s = time.perf_counter()
            way.begin_step(num_micro_batches)
            losses = [way.micro_batch(one) for one in tokens]
            layers_s = time.perf_counter() - began_s
            layers_bytes = peak.peak_bytes()
            if is_for_memory:
                device.return_freed_memory()
            peak.reset()
            began_s = time.perf_counter()
            norm = way.step()
            optimizer_s = time.perf_counter() - began_s
            line: dict[str, Any] = {
                "step": step,
                "num_micro_batches": num_micro_batches,
                "loss": [loss.item() for loss in losses],
                "grad_norm": norm,
                "step_time_s": layers_s + optimizer_s,
                "optimizer_s": optimizer_s,
                "is_for_memory": is_for_memory,
                "base_bytes": base_bytes,
                "before_bytes": before_bytes,
                "layers_bytes": layers_bytes,
                "optimizer_bytes": peak.peak_bytes(),
                "num_params": num_params,
                **way.traffic(),
            }
            if args.way not in KINDS:
                line["weights"] = digest(list(model.parameters()))
            if step == _STATES_SHOWN_AT:
                line["states"] = way.digest_of_states()
            metrics.write(json.dumps(line) + "\n")
            metrics.flush()


def numbers(text: str) -> list[int]:
    """Whole numbers with commas between."""
    return [int(one) for one in text.split(",")]


def main() -> None:
    """Reads the flags and trains."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--way", required=True)
    parser.add_argument("--hidden", type=int, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--first", type=numbers, required=True, help="micro-batches of first steps")
    parser.add_argument("--schedule", type=numbers, required=True, help="of those after, repeated")
    parser.add_argument("--bucket", type=int)
    parser.add_argument("--window", type=int)
    parser.add_argument("--sub-group", type=int, default=4 << 20, help="parameters; DeepSpeed's")
    parser.add_argument("--buffers", type=int, default=12, help="each of a sub-group; DeepSpeed's")
    parser.add_argument("--activation-offload-dir", type=Path, required=True)
    parser.add_argument("--metrics-file", type=Path, required=True)
    parser.add_argument("--wait-for-input", action="store_true")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
