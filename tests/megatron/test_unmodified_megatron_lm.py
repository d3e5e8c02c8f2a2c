# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's own pretrain_gpt.py, as it is in a checkout, with and without offload.
BERT's and T5's scripts are in `test_unmodified_bert_and_t5.py`.

    MEGATRON_LM_PATH=/path/to/Megatron-LM pytest -s tests/megatron/test_unmodified_megatron_lm.py

The interpreter needs what Megatron-LM imports: six, pyyaml, pydantic, einops, regex, triton, and
pybind11, a C++ compiler and make for its data sets. Each run is a process of torchrun's.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.offload.activations.placement.plan_file import load_plans
from megatron.offload.planner.profile.stage_profile import StageProfile
from tests.support.megatron_lm_checkout import CHECKOUT, Run, needs_a_checkout, offload, run_script

pytestmark = needs_a_checkout

# Attention scores are not fused on a CPU, so a sequence of 256 gives activations worth moving.
MODEL = """
    --num-layers 8 --hidden-size 128 --num-attention-heads 8 --seq-length 256
    --max-position-embeddings 256 --micro-batch-size 2 --global-batch-size 4
    --mock-data --tokenizer-type NullTokenizer --vocab-size 128 --split 8,1,1 --num-workers 0
    --train-iters 4 --lr 1e-3 --min-lr 1e-4 --eval-interval 2 --eval-iters 1 --log-interval 1
    --ckpt-format torch --save-interval 2
"""
LAYOUTS = {
    "tensor": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pipeline": (2, "--pipeline-model-parallel-size 2"),
    "interleaved": (
        2,
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2",
    ),
    "sharded": (2, "--use-distributed-optimizer"),
    "distributed optimizer": (
        2,
        "--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    ),
}

FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def pretrain(layout: str, directory: Path, *flags: str, succeeds: bool = True) -> Run:
    """Runs pretrain_gpt.py in a layout, to its end."""
    num_ranks, parallel = LAYOUTS[layout]
    flags = (*MODEL.split(), *parallel.split(), *flags)
    return run_script(CHECKOUT / "pretrain_gpt.py", num_ranks, directory, *flags, succeeds=succeeds)


Runs = Callable[..., Run]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Whole runs by layout, mode and flags of Megatron's, each made once."""

    @functools.cache
    def run(layout: str, mode: str, more: str = "") -> Run:
        directory = tmp_path_factory.mktemp("run")
        flags = [*more.split(), "--save", str(directory), *offload(mode, directory)]
        return pretrain(layout, directory, *flags)

    return run


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_weights_and_optimizer_are_bit_identical(runs: Runs, layout: str) -> None:
    off, ssd = runs(layout, "off"), runs(layout, "ssd")
    # 4 steps, evaluations after the 2nd and the 4th and at the end (validation, test).
    assert len(off.losses()) == 8
    assert ssd.losses() == off.losses()
    expected = off.checkpoints()
    assert list(expected) == ["iter_0000002", "iter_0000004"]
    assert ssd.checkpoints() == expected


@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
def test_a_chunked_loss_is_the_same_within_rounding(
    runs: Runs, layout: str, tmp_path: Path
) -> None:
    """Without offload, as `off` is then what it is compared with."""
    chunked = pretrain(layout, tmp_path, "--activation-chunked-loss", "100")
    own = [float(loss) for loss in runs(layout, "off").losses()]
    assert [float(loss) for loss in chunked.losses()] == pytest.approx(own, rel=1e-5)
    assert len(own) == 8 and chunked.offloaded() == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_log_says_what_was_offloaded(runs: Runs, layout: str) -> None:
    off, ssd = runs(layout, "off"), runs(layout, "ssd")
    assert off.offloaded() == []
    assert len(ssd.offloaded()) == 4 and "0 B" not in ssd.offloaded()
    assert ssd.output.count(f"activation offload to {ssd.save} ") == 1


@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
def test_auto_plans_after_the_first_steps_and_changes_no_bit(runs: Runs, layout: str) -> None:
    off, auto = runs(layout, "off"), runs(layout, "auto")
    assert auto.losses() == off.losses()
    assert auto.checkpoints() == off.checkpoints()
    stages = 2 if layout == "pipeline" else 1
    plans = load_plans(auto.save / "plan.json")
    assert sorted(plans) == list(range(stages))
    layers = {one.layer for plan in plans.values() for one in plan.parts}
    assert layers == {f"decoder.{number}" for number in range(1, 9)}
    for stage in range(stages):
        profile = StageProfile.load(auto.save / f"activation-profile-stage{stage}.json")
        assert profile.position.num_stages == stages and profile.num_micro_batches == 2
    # Of four steps two are measured; the others' lines say what was expected of them.
    planned = re.findall(r"step: (\S+) s \(predicted (\S+) s\) \| planned peak: ", auto.output)
    assert len(planned) == 2
    assert all(float(seconds) > 0 for line in planned for seconds in line)
    assert "activation plan of stage 0" in auto.output


@pytest.mark.parametrize("layout", ["tensor", "pipeline", "interleaved"])
def test_the_inputs_of_full_recomputation_move_and_change_no_bit(runs: Runs, layout: str) -> None:
    off, ssd = runs(layout, "off"), runs(layout, "ssd", FULL)
    assert ssd.losses() == off.losses()
    assert ssd.checkpoints() == off.checkpoints()
    assert len(ssd.offloaded()) == 4 and "0 B" not in ssd.offloaded()


# In bf16 a CPU's own temporary memory is larger than the activations of this small model.
@pytest.mark.parametrize("layout", ["tensor", "pipeline", "interleaved"])
def test_memory_falls(runs: Runs, layout: str) -> None:
    off, ssd = runs(layout, "off"), runs(layout, "ssd")
    print(f"\n{layout}: peak {off.peak_mib()} MiB off, {ssd.peak_mib()} MiB ssd")
    assert ssd.peak_mib() < 0.6 * off.peak_mib()


@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
def test_a_checkpoint_resumes_to_the_same_bits_with_and_without_offload(
    runs: Runs, layout: str, tmp_path: Path
) -> None:
    whole = runs(layout, "ssd")
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / "iter_0000002").symlink_to(whole.save / "iter_0000002")
    (begun / "latest_checkpointed_iteration.txt").write_text("2\n")
    load = ["--load", str(begun)]
    expected = whole.checkpoints()["iter_0000004"]
    for mode in ("ssd", "off"):
        save = tmp_path / mode
        save.mkdir()
        resumed = pretrain(layout, save, *load, "--save", str(save), *offload(mode, save))
        assert resumed.checkpoints() == {"iter_0000004": expected}
        # The log line of step 4 is of two steps on average; the evaluations are as they were.
        assert resumed.losses()[-3:] == whole.losses()[-3:]


def test_flags_that_do_not_fit_end_with_one_sentence(tmp_path: Path) -> None:
    flags = [*FULL.split(), *offload("auto", tmp_path)]
    refused = pretrain("tensor", tmp_path, *flags, succeeds=False)
    (line,) = re.findall(r"^megatron\.offload\.launch: error: .*$", refused.output, re.M)
    assert "auto decides which layers are recomputed, and so does --recompute-granularity" in line
    assert "exitcode  : 2 " in refused.output  # in torchrun's report
    assert "setup_model_and_optimizer" not in refused.output  # no traceback of ours


@pytest.mark.parametrize("mode", ["off", "ssd"])
@pytest.mark.parametrize("layout", ["tensor", "distributed optimizer"])
def test_layer_major_steps_change_no_bit(
    runs: Runs, layout: str, mode: str, tmp_path: Path
) -> None:
    more = "--untie-embeddings-and-output-weights --global-batch-size 8"
    expected = runs(layout, "off", more)
    flags = ["--layer-major-units", "4", *more.split(), "--save", str(tmp_path)]
    in_units = pretrain(layout, tmp_path, *flags, *offload(mode, tmp_path))
    assert in_units.losses() == expected.losses()
    assert in_units.checkpoints() == expected.checkpoints()


def test_too_many_units_end_with_one_sentence(tmp_path: Path) -> None:
    """Found by all ranks when the model is there."""
    refused = pretrain("tensor", tmp_path, "--layer-major-units", "9", succeeds=False)
    (line,) = set(re.findall(r"^megatron\.offload\.launch: error: .*$", refused.output, re.M))
    assert "--layer-major-units 9: the model has 8 layers that can be divided" in line
    assert "exitcode  : 2 " in refused.output  # in torchrun's report
    assert "setup_model_and_optimizer" not in refused.output  # no traceback of ours


@pytest.mark.parametrize("states", ["off", "ssd"])
def test_parameters_that_move_with_the_distributed_optimizer_change_no_bit(
    runs: Runs, states: str, tmp_path: Path
) -> None:
    expected = runs("sharded", "off")
    flags = ["--parameter-offload", "ssd", "--optimizer-state-offload", states]
    moved = pretrain(
        "sharded", tmp_path, *flags, "--save", str(tmp_path), *offload("ssd", tmp_path)
    )
    assert len(moved.losses()) == 8 and moved.losses() == expected.losses()
    assert moved.checkpoints() == expected.checkpoints()


@pytest.mark.parametrize("states", ["off", "ssd"])
def test_gradients_that_move_in_buckets_change_no_bit(
    runs: Runs, states: str, tmp_path: Path
) -> None:
    more = "--untie-embeddings-and-output-weights --global-batch-size 8 --overlap-grad-reduce"
    more += " --ddp-bucket-size 50000"
    expected = runs("sharded", "off", more)
    flags = ["--layer-major-units", "4", "--gradient-offload", "on", *more.split()]
    flags += ["--parameter-offload", "ssd", "--optimizer-state-offload", states]
    moved = pretrain(
        "sharded", tmp_path, *flags, "--save", str(tmp_path), *offload("ssd", tmp_path)
    )
    assert len(moved.losses()) == 8 and moved.losses() == expected.losses()
    assert moved.checkpoints() == expected.checkpoints()
