# SPDX-License-Identifier: Apache-2.0
"""Fused accumulation of weight gradients with overlapped reduction, as GPU runs have it.

The kernel adds to `weight.main_grad` and marks the weight it was handed; both are attributes of the
Parameter, which a default saved-tensor hook replaces by a plain tensor. A stand-in for the kernel
shows on a CPU that per-node capture leaves them alone, and that the default hooks do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import launch
from tests.support.fork_server import ForkServer
from tests.support.launch import TINY, Outcome, rank_environment, run_trainer
from tests.support.offload_flags import ssd

STEPS = 3
# The import that megatron-core tries. Beside the scripts, so that it is found first.
_KERNEL = """\
calls = 0

def wgrad_gemm_accum_fp32(total_input, grad_output, main_grad):
    global calls
    calls += 1
    main_grad.addmm_(grad_output.t().to(main_grad.dtype), total_input.to(main_grad.dtype))
"""
_SCRIPT = """\
import hashlib

import fused_weight_gradient_mlp_cuda as kernel
import torch
from trainer import optimizer
from trainer.gpt import GPT
from trainer.training import pretrain


class FusedGPT(GPT):
    def transformer_config(self, args):
        config = super().transformer_config(args)
        config.gradient_accumulation_fusion = True
        return config

    def forward_step(self, iterator, model):
        if not DEFAULT_HOOKS:
            return super().forward_step(iterator, model)
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
            return super().forward_step(iterator, model)


def build_optimizer(args, chunks, build=optimizer.build_optimizer):
    built = build(args, chunks)
    step = built.step

    def step_after_a_look():
        digest = hashlib.sha256()
        for chunk in chunks:
            for parameter in chunk.parameters():
                digest.update(parameter.main_grad.view(torch.uint8).numpy().data)
        print("GRADIENTS", digest.hexdigest(), kernel.calls, flush=True)
        return step()

    built.step = step_after_a_look
    return built


optimizer.build_optimizer = build_optimizer
pretrain(FusedGPT())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trainer with the stand-in for the kernel, and one with default hooks besides."""
    folder = tmp_path_factory.mktemp("fused")
    (folder / "fused_weight_gradient_mlp_cuda.py").write_text(_KERNEL)
    for name, has_hooks in (("fused", False), ("hooked", True)):
        (folder / f"{name}.py").write_text(f"DEFAULT_HOOKS = {has_hooks}\n{_SCRIPT}")
    return folder


@pytest.fixture(scope="module")
def fused_server(folder: Path) -> Iterator[ForkServer]:
    """Ranks whose megatron-core has found the stand-in."""
    environment = rank_environment({"PYTHONPATH": str(launch.ROOT / "examples")})
    modules = ("trainer.gpt", "trainer.training", "fused_weight_gradient_mlp_cuda")
    started = ForkServer(folder / "fused.py", modules, environment)
    yield started
    started.close()


Runs = Callable[..., Outcome]


@pytest.fixture
def run(folder: Path, fused_server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Trains on two ranks, with flags and one of the scripts."""
    monkeypatch.setattr(launch, "server", lambda: fused_server)

    def run(*lines: str, script: str = "fused") -> Outcome:
        monkeypatch.setitem(launch.SCRIPTS, script, folder / f"{script}.py")
        environment = {"PYTHONPATH": str(launch.ROOT / "examples")}
        flags = f"{TINY} --overlap-grad-reduce --train-iters {STEPS}"
        return run_trainer(flags, *lines, model=script, world_size=2, environment=environment)

    return run


def gradients(outcome: Outcome) -> list[str]:
    """Of every step and rank: a digest of all gradients, and how often the kernel was called."""
    lines = [line for line in outcome.output.splitlines() if line.startswith("GRADIENTS ")]
    assert len(lines) == 2 * STEPS
    return lines


@pytest.mark.slow
@pytest.mark.parametrize(
    "precision", ["", pytest.param("--bf16", marks=pytest.mark.rare)], ids=["fp32", "bf16"]
)
def test_fusion_and_overlap_give_the_same_bits_with_offload(
    run: Runs, precision: str, tmp_path: Path
) -> None:
    off = run(precision)
    assert off.exit_codes == [0, 0], off.output
    # Each micro-batch calls the kernel for two linear layers of attention and two of the MLP in
    # each of four layers, and for the logits: fusion is on.
    calls = [int(line.split()[2]) for line in gradients(off)]
    assert max(calls) == 2 * STEPS * (4 * 4 + 1)
    offloaded = run(precision, ssd(tmp_path))
    assert offloaded.exit_codes == [0, 0], offloaded.output
    assert gradients(offloaded) == gradients(off)
    for name in ("loss", "grad_norm"):
        assert offloaded.values(name) == off.values(name)
    assert offloaded.model == off.model
    assert all(step["offloaded_bytes"] > 0 for step in offloaded.values("offload"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "precision", [pytest.param("", marks=pytest.mark.rare), "--bf16"], ids=["fp32", "bf16"]
)
def test_a_chunked_loss_adds_to_main_grad_what_the_kernel_adds(run: Runs, precision: str) -> None:
    """The embedding is tied: its own gradient must be added besides, and neither twice."""
    own, chunked = run(precision), run(precision, "--activation-chunked-loss 7")
    assert chunked.exit_codes == [0, 0], chunked.output
    # The kernel is called for the layers alone.
    calls = [int(line.split()[2]) for line in gradients(chunked)]
    assert max(calls) == 2 * STEPS * 4 * 4
    for name in ("loss", "grad_norm"):
        close = 1e-2 if precision else 1e-4
        assert chunked.values(name) == pytest.approx(own.values(name), rel=close)
    assert chunked.model != own.model


@pytest.mark.slow
@pytest.mark.parametrize(
    "precision", [pytest.param("", marks=pytest.mark.rare), "--bf16"], ids=["fp32", "bf16"]
)
def test_the_kernel_adds_the_gradients_of_each_tile(
    run: Runs, precision: str, tmp_path: Path
) -> None:
    own, tiled = run(precision), run(precision, "--activation-tiled-mlp 7")
    assert tiled.exit_codes == [0, 0], tiled.output
    # For the MLPs once a tile: a micro-batch of 32 tokens has five.
    calls = [int(line.split()[2]) for line in gradients(tiled)]
    assert max(calls) == 2 * STEPS * (4 * (2 + 2 * 5) + 1)
    for name in ("loss", "grad_norm"):
        close = 1e-2 if precision else 1e-4
        assert tiled.values(name) == pytest.approx(own.values(name), rel=close)
    assert tiled.model != own.model
    offloaded = run(precision, "--activation-tiled-mlp 7", ssd(tmp_path))
    assert gradients(offloaded) == gradients(tiled)
    assert offloaded.model == tiled.model


@pytest.mark.rare
def test_fusion_and_overlap_give_the_same_bits_with_recomputed_layers(
    run: Runs, tmp_path: Path
) -> None:
    lists = " --activation-recompute-layers 1,3 --activation-offload-layers 2"
    off, mixed = run(), run(ssd(tmp_path) + lists)
    assert mixed.exit_codes == [0, 0], mixed.output
    assert gradients(mixed) == gradients(off)
    assert mixed.model == off.model


@pytest.mark.slow
def test_default_saved_tensor_hooks_break_it(run: Runs) -> None:
    """What these tests would see if activations were captured that way."""
    outcome = run(script="hooked")
    assert 0 not in outcome.exit_codes
    assert "param.grad being None is not safe when overlap_grad_reduce is True" in outcome.output
