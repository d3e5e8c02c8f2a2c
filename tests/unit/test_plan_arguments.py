# SPDX-License-Identifier: Apache-2.0
"""Flags of `megatron-offload plan`: what they ask for, and what they answer when they cannot."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

import pytest

from megatron.offload import cli
from megatron.offload.commands.plan.arguments import add_arguments, read_launch_command
from megatron.offload.commands.plan.request import Request, request_of
from megatron.offload.errors import ConfigurationError
from megatron.offload.planner.projection.model import Experts
from megatron.offload.planner.projection.projection import project

MODEL = (
    "--hardware a100 --bf16 --num-layers 8 --hidden-size 1024 --num-attention-heads 16 "
    "--seq-length 512 --micro-batch-size 2 --global-batch-size 16"
)


def request(line: str) -> Request:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return request_of(parser.parse_args(shlex.split(line)))


@pytest.mark.parametrize(
    ("flags", "num_bytes"),
    [
        ("", 512 << 20),
        ("--activation-offload-inflight 1GiB", 1 << 30),
        ("--hidden-size 8192 --seq-length 8192 --micro-batch-size 8", None),
    ],
)
def test_as_much_is_in_flight_as_in_a_run(flags: str, num_bytes: int | None) -> None:
    profile = request(f"{MODEL} {flags}").profile
    largest = max(layer.movable_bytes for layer in profile.layers)
    assert profile.inflight_bytes == (2 * largest if num_bytes is None else num_bytes)
    assert num_bytes is not None or largest > 512 << 20


def test_a_profile_has_its_own_model(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(project(request(MODEL).projections[0]).to_json())
    assert request(f"--profile {path}").projections == ()
    with pytest.raises(ConfigurationError, match="drop --num-layers, --seq-length"):
        request(f"--profile {path} --num-layers 4 --seq-length 128")


def test_sizes_and_division_reach_the_projection() -> None:
    of = request(
        f"{MODEL} --swiglu --group-query-attention --num-query-groups 4 --num-gpus 16"
        " --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel"
        " --num-layers-per-virtual-pipeline-stage 2 --global-batch-size 64 --pipeline-stage 1"
        " --position-embedding-type rope --use-distributed-optimizer --ssds 0.5 --ssd pm1743"
    ).projection
    assert of is not None and of.stage == 1 and of.distributed_optimizer
    model, parallel = of.model, of.parallel
    assert (model.num_query_groups, model.ffn_size, model.gated, model.rope) == (
        4,
        2688,
        True,
        True,
    )
    assert (parallel.tensor, parallel.pipeline, parallel.data, parallel.virtual) == (2, 2, 4, 2)
    assert parallel.num_micro_batches == 8
    assert (of.hardware.drive.name, of.hardware.num_drives) == ("pm1743", 0.5)


def test_without_flash_attention_scores_are_saved_or_made_again() -> None:
    def saved(flags: str) -> int:
        return sum(layer.movable_bytes for layer in request(f"{MODEL} {flags}").profile.layers)

    flash, scores, again = (
        saved(flags)
        for flags in (
            "",
            "--attention-backend unfused",
            "--attention-backend unfused --recompute-granularity selective",
        )
    )
    assert scores > again
    # Flash attention saves one log-sum-exp a head and token, too small to move here.
    assert again == flash


def test_the_element_type_is_that_of_megatron() -> None:
    dtypes = [
        found.model.dtype
        for flags in (MODEL, MODEL.replace("--bf16", "--fp16"), MODEL.replace("--bf16", ""))
        if (found := request(flags).projection)
    ]
    assert dtypes == ["bf16", "fp16", "fp32"]


def test_products_may_reach_another_part_of_peak() -> None:
    slow, fast = (
        request(f"{MODEL} --matmul-fraction {part}").profile.layers[0].forward_s
        for part in (0.2, 0.6)
    )
    assert 2 < slow / fast < 3


def test_without_a_goal_a_step_may_be_two_percent_slower() -> None:
    assert request(MODEL).max_slowdown == 0.02 and request(MODEL).budget_bytes is None
    with_budget = request(f"{MODEL} --activation-memory-budget 2GiB")
    assert with_budget.max_slowdown is None and with_budget.budget_bytes == 2 << 30


def test_a_measured_profile_needs_no_description(tmp_path: Path) -> None:
    described = request(MODEL)
    assert described.projection is not None
    file = tmp_path / "profile.json"
    file.write_text(project(described.projection).to_json())
    measured = request(f"--profile {file} --ssd p5800x --ssds 2")
    assert measured.profile == described.profile and measured.projection is None
    assert measured.rated_bytes == 2 * 292e15
    assert request(f"--profile {file}").rated_bytes is None
    rated = request(f"--profile {file} --activation-offload-drive-tbw 600TB")
    assert rated.rated_bytes == 600e12


@pytest.mark.parametrize("name", ["345m", "1.3b", "7b", "22b", "175b"])
def test_example_models_can_be_described(name: str) -> None:
    """Their flags of sizes and division; that the bytes fit is `test_projection_bytes`."""
    root = Path(__file__).resolve().parents[2]
    lines = (root / "examples" / "gpt" / f"{name}.sh").read_text().splitlines()
    known = {
        option
        for action in _parser()._actions
        for option in action.option_strings
        if option.startswith("--")
    }
    flags = [line.split("#")[0].strip() for line in lines if line.startswith("    --")]
    taken = " ".join(flag for flag in flags if flag.split()[0] in known)
    found = request(f"--hardware h100 --bf16 {taken}").projection
    assert found is not None
    billions = {"345m": 0.345, "1.3b": 1.3, "7b": 6.7, "22b": 22, "175b": 175}[name]
    assert found.model.parameters / 1e9 == pytest.approx(billions, rel=0.06)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--hardware a100", "give --num-layers, --hidden-size"),
        (f"{MODEL} --num-gpus 3 --tensor-model-parallel-size 2", "--num-gpus 3"),
        (f"{MODEL} --pipeline-stage 1", "choose 0 to 0"),
        (f"{MODEL} --num-query-groups 4", "--group-query-attention"),
        (f"{MODEL} --global-batch-size 2000000000", "8 layers, 1 stages and 1000000000 micro"),
        (
            f"{MODEL} --attention-backend unfused --seq-length 2000000000",
            "the largest value that can be planned",
        ),
        (
            f"{MODEL} --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3",
            "--num-layers-per-virtual-pipeline-stage 3",
        ),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(flags: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        request(flags)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("", "one of the arguments --profile --hardware"),
        (f"{MODEL} --profile x", "not allowed with"),
        (f"{MODEL} --ssds -1", "'-1' is no number from 0 to 1024"),
        (f"{MODEL} --ssds nan", "'nan' is no number from 0 to 1024"),
        (f"{MODEL} --ssds inf", "'inf' is no number from 0 to 1024"),
        (f"{MODEL} --hidden-dropout nan", "'nan' is no number from 0 to 0.999"),
        (f"{MODEL} --attention-dropout -5", "'-5' is no number from 0 to 0.999"),
        (f"{MODEL} --matmul-fraction 1.5", "'1.5' is no number from 0.001 to 1"),
        (f"{MODEL} --activation-offload-max-slowdown -0.1", "'-0.1' is no slowdown"),
        (f"{MODEL} --activation-memory-budget {'9' * 400}", "more than any disk or memory"),
        (f"{MODEL} --global-batch-size {'9' * 400}", "the largest value is 2147483647"),
        (f"{MODEL} --num-layers 1000000", "the largest value is 10000"),
        (f"{MODEL} --pipeline-model-parallel-size 1000000", "the largest value is 10000"),
        (f"{MODEL} --layer-major-units 1000000", "the largest value is 10000"),
        ("--hardware z80", "invalid choice"),
        (f"{MODEL} --activation-memory-budget much", "'much' is not a size"),
        (f"{MODEL} --num-layers 0", "smallest value is 1"),
    ],
)
def test_bad_values_end_with_exit_code_2(
    flags: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        request(flags)
    assert ended.value.code == 2 and words in capsys.readouterr().err


# -- A launch command -----------------------------------------------------------------------------

SIZES = MODEL.removeprefix("--hardware a100 ")
LAUNCHED = f"torchrun --nproc-per-node 8 -m megatron.offload.launch m/pretrain_gpt.py {SIZES}"


def launched(line: str, before: str = "") -> tuple[list[str], argparse.Namespace]:
    """What is said of a launch command, and the flags with it."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(shlex.split(f"--hardware a100 {before}"))
    return read_launch_command(args, shlex.split(line)), args


def test_a_launch_command_has_the_model_and_its_division() -> None:
    line = f"{LAUNCHED} --tensor-model-parallel-size 2 --vocab-size 1000 --activation-offload ssd"
    said, args = launched(f"{line} --lr 1e-4 --min-lr=1e-5 --seed -1 --lr 2e-4")
    assert said == ["not looked at: --activation-offload, --lr, --min-lr, --seed"]
    assert (
        request_of(args).projections
        == request(
            f"{MODEL} --tensor-model-parallel-size 2 --vocab-size 1000 --num-gpus 8"
        ).projections
    )


def test_divisions_of_one_are_none_and_virtual_stages_may_be_given_by_their_number() -> None:
    line = f"{LAUNCHED} --context-parallel-size 1 --expert-model-parallel-size=1 --vocab-size 1000"
    pipeline = "--pipeline-model-parallel-size 2 --global-batch-size 32"
    number = "--num-virtual-stages-per-pipeline-rank 2"
    group = "--microbatch-group-size-per-virtual-pipeline-stage 4"
    said, args = launched(f"{line} {pipeline} {number} {group}")
    assert said == []
    found = request_of(args).projections
    assert {one.parallel.virtual for one in found} == {2} and len(found) == 2
    assert {one.parallel.group_size for one in found} == {4}
    layers = f"--num-layers-per-virtual-pipeline-stage {found[0].model.num_layers // 4}"
    _, same = launched(f"{line} {pipeline} {layers} {group}")
    assert request_of(same).projections == found


def test_experts_are_read_with_their_division() -> None:
    flags = "--num-experts 8 --moe-router-topk 3 --moe-ffn-hidden-size 64 --moe-layer-freq 2"
    flags += " --moe-shared-expert-intermediate-size 32 --expert-model-parallel-size 4"
    said, args = launched(f"{LAUNCHED} {flags} --vocab-size 1000 --moe-grouped-gemm")
    assert said == ["not looked at: --moe-grouped-gemm"]
    (found,) = request_of(args).projections
    assert found.model.experts == Experts(8, 3, 64, 32, 2) and found.parallel.expert == 4


def test_the_plan_says_what_is_assumed_of_experts(capsys: pytest.CaptureFixture[str]) -> None:
    line = f"{LAUNCHED} --num-experts 8 --expert-model-parallel-size 4 --global-batch-size 16"
    assert cli.main(["plan", "--hardware", "a100", "--", *shlex.split(line)]) == 0
    printed = capsys.readouterr().out
    assert "experts 8 in a layer, 2 for each token, on 4 data-parallel ranks; taken" in printed
    assert "mlp-selective" not in printed


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--expert-model-parallel-size 2", "means nothing without --num-experts"),
        ("--num-experts 6 --expert-model-parallel-size 4", "--num-experts 6 is no multiple of"),
        (
            "--num-experts 12 --expert-model-parallel-size 3",
            "3 does not divide the 8 data",
        ),
        ("--num-experts 2 --moe-router-topk 3", "--moe-router-topk 3 is more than --num-experts 2"),
        ("--num-experts 2 --parameter-offload ssd", "does not know how experts stream"),
    ],
)
def test_experts_that_do_not_fit_are_refused(flags: str, words: str) -> None:
    _, args = launched(f"{LAUNCHED} {flags}")
    with pytest.raises(ConfigurationError, match=words):
        request_of(args)


def test_what_a_launch_command_leaves_open_is_said() -> None:
    said, args = launched(f"python x.py {SIZES} --recompute-granularity full", "--num-gpus 4")
    assert said == [
        "not looked at: --recompute-granularity full",
        "the launch command has no --vocab-size; 51200 is taken",
    ]
    assert args.num_gpus == 4  # python starts one process, and says nothing of the others
    assert launched("", "--num-layers 3")[0] == []


def test_flags_alone_are_a_launch_command_too() -> None:
    said, args = launched("--num-layers 3 --vocab-size 7 --bf16 --train-iters 5")
    assert said == ["not looked at: --train-iters"] and (args.num_layers, args.bf16) == (3, True)


def test_steps_whose_parameters_stream_are_read_of_it_too() -> None:
    _, args = launched(f"{LAUNCHED} --parameter-offload ssd --activation-offload host")
    assert (args.parameter_offload, args.activation_offload) == ("ssd", "host")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            "--multi-latent-attention --mtp-num-layers 1",
            r"plan cannot take into account --multi-latent-attention \(it keeps other tensors than "
            r"plan's attention\), --mtp-num-layers \(it adds",
        ),
        ("--num-experts 8 --expert-tensor-parallel-size 4", r"\(plan divides experts as all other"),
        ("--num-experts 8 --moe-layer-freq [0]*1+[1]*3", "every so many layers, and no pattern"),
        ("--context-parallel-size 2", r"into account --context-parallel-size \(plan divides no"),
        ("--decoder-last-pipeline-num-layers 1", r"\(stages then have different numbers of layers"),
        (
            "--num-layers-per-virtual-pipeline-stage 1 --num-virtual-stages-per-pipeline-rank 2",
            "not allowed with argument",
        ),
        ("--normalization Foo", "--normalization: invalid choice: 'Foo'"),
        ("--num-layers", "--num-layers: expected one argument"),
        ("--activation-offlod ssd", "has --activation-offlod, which is no flag \\(did you mean"),
    ],
)
def test_a_launch_command_that_cannot_be_planned_is_refused(flags: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        launched(f"{LAUNCHED} {flags}")
