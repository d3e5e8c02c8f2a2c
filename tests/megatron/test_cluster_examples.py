# SPDX-License-Identifier: Apache-2.0
"""Every settings file for clusters fits its name, its layout and the trainer; the scripts start it.

Nothing here trains: the commands are looked at, and their flags given to the trainer's own checks.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from tokenizers import AddedToken, Tokenizer, models

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "examples" / "cluster" / "train.sh"
BATCH = ROOT / "examples" / "cluster" / "train.sbatch"
MODELS = ("gpt", "bert", "t5")
SETTINGS = sorted(path for model in MODELS for path in (ROOT / "examples" / model).glob("*.sh"))
each_settings = pytest.mark.parametrize(
    "settings", SETTINGS, ids=[f"{path.parent.name}-{path.stem}" for path in SETTINGS]
)


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a script with nothing of the caller's environment that it would read."""
    clean = {
        "PATH": os.environ["PATH"],
        "MEGATRON_OFFLOAD_PYTHON": sys.executable,  # installs nothing
        "OFFLOAD_DIR": "/nvme0/offload",
        "DATA_PATH": "/data/text",
        "NODE_RANK": "0",
        "MASTER_ADDR": "first",
    }
    return subprocess.run(
        [str(part) for part in command],
        env={**clean, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@functools.cache
def command_of(settings: Path, *flags: str, **environment: str) -> tuple[str, ...]:
    """The command that train.sh would run on this node."""
    outcome = run(TRAIN, "--print", settings, *flags, **environment)
    assert outcome.returncode == 0, outcome.stderr
    return tuple(shlex.split(outcome.stdout))


def test_a_command_is_shown_without_an_environment(tmp_path: Path) -> None:
    """On a machine with neither: nothing is installed, and nothing is looked for."""
    for name in ("examples/cluster/train.sh", "examples/gpt/345m.sh", "tools/bootstrap.sh"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    outcome = run(
        tmp_path / "examples/cluster/train.sh",
        "--print",
        tmp_path / "examples/gpt/345m.sh",
        MEGATRON_OFFLOAD_PYTHON="",
        PYTHON="/no/such/python",
    )
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout.startswith(f"{tmp_path}/.venv/bin/python -m torch.distributed.run ")
    assert not (tmp_path / ".venv").exists()


def times_the_nodes(settings: Path, times: int) -> dict[str, str]:
    """Environment for a multiple of the nodes that the settings ask for."""
    nodes = int(values(command_of(settings)).get("--nnodes", "1"))
    return {"NNODES": str(times * nodes)} if times > 1 else {}


def trainer_of(command: Sequence[str]) -> tuple[Path, list[str]]:
    """The training script in a command, and its flags."""
    place = next(i for i, part in enumerate(command) if "/pretrain_" in part)
    return Path(command[place]), list(command[place + 1 :])


def values(flags: Sequence[str]) -> dict[str, str]:
    """Flags with their (last) values; "" for those that have none."""
    following = [*flags[1:], "--"]
    return {
        flag: "" if value.startswith("--") else value
        for flag, value in zip(flags, following, strict=True)
        if flag.startswith("--")
    }


def world_size(command: Sequence[str]) -> int:
    """Processes of all nodes."""
    launch = values(command)
    return int(launch["--nproc-per-node"]) * int(launch.get("--nnodes", "1"))


def num_parameters(model: str, flags: dict[str, str]) -> int:
    """Weights and biases of megatron-core's models, from the flags alone."""

    def size(name: str, default: int) -> int:
        return int(flags.get(name, default))

    hidden, layers = int(flags["--hidden-size"]), int(flags["--num-layers"])
    ffn = size("--ffn-hidden-size", 4 * hidden)
    biases = "--disable-bias-linear" not in flags
    norm = hidden if flags.get("--normalization") == "RMSNorm" else 2 * hidden
    multiple = 128 * int(flags["--tensor-model-parallel-size"])
    vocabulary = -(-int(flags["--vocab-size"]) // multiple) * multiple

    def linear(inputs: int, outputs: int) -> int:
        return inputs * outputs + biases * outputs

    attention = linear(hidden, 3 * hidden) + linear(hidden, hidden) + norm
    mlp = linear(hidden, (2 if "--swiglu" in flags else 1) * ffn) + linear(ffn, hidden) + norm
    embedding = vocabulary * hidden
    if flags.get("--position-embedding-type") != "rope":
        embedding += int(flags["--max-position-embeddings"]) * hidden
    if model == "gpt":
        untied = "--untie-embeddings-and-output-weights" in flags
        return embedding + layers * (attention + mlp) + norm + untied * vocabulary * hidden
    if model == "bert":
        # Segments; the head of masked words, the pooler and the head of following sentences.
        heads = 2 * hidden + 2 * linear(hidden, hidden) + norm + vocabulary + linear(hidden, 2)
        return embedding + layers * (attention + mlp) + norm + heads
    # Two blocks, which end without a norm; the decoder's layers attend twice.
    return embedding + layers * (attention + mlp + 2 * attention + mlp) + vocabulary


@each_settings
def test_parameter_count_is_close_to_the_name(settings: Path) -> None:
    _, flags = trainer_of(command_of(settings))
    number, unit = re.fullmatch(r"([\d.]+)([mb])", settings.stem).groups()  # type: ignore[union-attr]
    named = float(number) * {"m": 1e6, "b": 1e9}[unit]
    assert abs(num_parameters(settings.parent.name, values(flags)) / named - 1) < 0.1


@each_settings
@pytest.mark.parametrize("times", [1, 2], ids=["nodes", "twice-the-nodes"])
def test_sizes_divide(settings: Path, times: int) -> None:
    command = command_of(settings, **times_the_nodes(settings, times))
    _, flags = trainer_of(command)
    value = {name: int(text) for name, text in values(flags).items() if re.fullmatch(r"\d+", text)}
    tensor, stages = (value[f"--{kind}-model-parallel-size"] for kind in ("tensor", "pipeline"))
    ranks, rest = divmod(world_size(command), tensor * stages)
    assert rest == 0
    micro_batches, rest = divmod(value["--global-batch-size"], value["--micro-batch-size"] * ranks)
    assert rest == 0
    assert value["--hidden-size"] % value["--num-attention-heads"] == 0
    assert value["--num-attention-heads"] % tensor == 0
    assert value.get("--ffn-hidden-size", 0) % tensor == 0
    assert value["--num-layers"] % stages == 0
    assert value["--seq-length"] <= value["--max-position-embeddings"]
    # Tensor parallelism never leaves a node; and with it goes sequence parallelism.
    assert tensor <= int(values(command)["--nproc-per-node"])
    assert ("--sequence-parallel" in flags) == (tensor > 1)
    for length in ("--seq-length", "--decoder-seq-length"):
        assert value.get(length, 0) % tensor == 0
    if "--num-layers-per-virtual-pipeline-stage" in value:
        per_stage = value["--num-layers"] // stages
        assert per_stage % value["--num-layers-per-virtual-pipeline-stage"] == 0
        assert micro_batches % stages == 0


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A corpus of sentences and a tokenizer that have what every model asks for."""
    directory = tmp_path_factory.mktemp("data")
    words = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "<s>", "</s>", "<|endoftext|>"]
    words += [f"<extra_id_{number}>" for number in range(100)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "[PAD]"))
    tokenizer.add_special_tokens([AddedToken(word) for word in words])
    tokenizer.save(str(directory / "tokenizer.json"))
    builder = IndexedDatasetBuilder(str(directory / "text.bin"), dtype=np.uint16)
    for _ in range(100):
        builder.add_document(np.ones(200), [20] * 10)
    builder.finalize(str(directory / "text.idx"))
    return {
        "DATA_PATH": str(directory / "text"),
        "TOKENIZER_MODEL": str(directory / "tokenizer.json"),
    }


@each_settings
@pytest.mark.parametrize("times", [1, 2], ids=["nodes", "twice-the-nodes"])
def test_flags_pass_the_trainers_checks(
    settings: Path,
    times: int,
    data: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes = times_the_nodes(settings, times)
    command = command_of(settings, **nodes, **data, OFFLOAD_DIR=str(tmp_path))
    script, flags = trainer_of(command)
    if not script.exists():
        pytest.skip(f"there is no {script.name} yet")
    # The test machine's disk is smaller than a cluster's.
    flags += ["--validate-only", "--activation-offload-ssd-budget", "1MiB"]
    for name, value in {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": world_size(command),
        "LOCAL_WORLD_SIZE": 8,
    }.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(sys, "argv", [str(script), *flags])
    level = logging.getLogger("megatron.core").level
    with warnings.catch_warnings(), pytest.raises(SystemExit) as exit_info:
        runpy.run_path(str(script), run_name="__main__")
    logging.getLogger("megatron.core").setLevel(level)
    assert exit_info.value.code == 0


def test_one_machine_and_one_of_several_nodes() -> None:
    settings = ROOT / "examples" / "gpt" / "22b.sh"
    several = command_of(settings, NNODES="4", NODE_RANK="3", MASTER_PORT="1234")
    expected = "--nproc-per-node 8 --nnodes 4 --node-rank 3 --master-addr first --master-port 1234"
    assert shlex.join(several).startswith(
        f"{sys.executable} -m torch.distributed.run {expected} {ROOT}/examples/pretrain_gpt.py "
    )
    one = command_of(settings, NNODES="1", NPROC_PER_NODE="4")
    assert shlex.join(one).startswith(
        f"{sys.executable} -m torch.distributed.run --nproc-per-node 4 --standalone "
        f"--local-addr 127.0.0.1 {ROOT}/examples/pretrain_gpt.py "
    )


def test_a_megatron_lm_checkout_gets_the_same_flags_through_the_launcher() -> None:
    for model, size, more in (("gpt", "7b", []), ("t5", "3b", ["--vocab-extra-ids", "100"])):
        settings = ROOT / "examples" / model / f"{size}.sh"
        bundled = command_of(settings)
        checkout = command_of(settings, MEGATRON_LM="/src/Megatron-LM")
        place = checkout.index(f"/src/Megatron-LM/pretrain_{model}.py")
        assert checkout[place - 2 : place] == ("-m", "megatron.offload.launch")
        assert trainer_of(checkout)[1] == trainer_of(bundled)[1] + more


@pytest.mark.parametrize(
    ("own", "gathers_ahead"),
    [
        ((), True),
        (("--parameter-offload", "ssd"), False),
        (("--parameter-offload=ssd",), False),
        (("--parameter-offload-dir", "/nvme0"), True),
    ],
)
def test_parameters_on_a_tier_are_not_gathered_ahead(
    own: tuple[str, ...], gathers_ahead: bool
) -> None:
    command = command_of(ROOT / "examples/gpt/345m.sh", *own)
    assert ("--overlap-param-gather" in command) == gathers_ahead


def test_environment_becomes_flags_and_flags_come_last(tmp_path: Path) -> None:
    settings = ROOT / "examples" / "gpt" / "345m.sh"
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7\n")
    _, flags = trainer_of(
        command_of(
            settings,
            "--train-iters",
            "5",
            TOKENIZER_MODEL="/data/tokenizer.json",
            SAVE=str(tmp_path),
            OFFLOAD="host",
        )
    )
    value = values(flags)
    assert flags[-2:] == ["--train-iters", "5"]
    assert value["--data-path"] == "/data/text" and "--mock-data" not in value
    assert value["--tokenizer-model"] == "/data/tokenizer.json" and "--vocab-size" not in value
    assert value["--save"] == value["--load"] == str(tmp_path)
    assert value["--activation-offload"] == "host" and "--activation-offload-dir" not in value
    _, flags = trainer_of(command_of(settings, SAVE=str(tmp_path / "new"), DATA_PATH=""))
    assert "--load" not in flags  # there is nothing yet to go on from
    assert "--mock-data" in flags and "--data-path" not in flags
    assert values(flags)["--activation-offload-dir"] == "/nvme0/offload"


@pytest.mark.parametrize(
    ("settings", "environment", "expected"),
    [
        ("examples/gpt/1b.sh", {}, "there are no settings 'examples/gpt/1b.sh'"),
        ("examples/gpt/345m.sh", {"OFFLOAD_DIR": ""}, "set OFFLOAD_DIR to a directory"),
        ("examples/t5/3b.sh", {"DATA_PATH": ""}, "only GPT has mock data; set DATA_PATH"),
        (
            "examples/gpt/345m.sh",
            {"NNODES": "none"},
            "must be positive whole numbers, got 8 and none",
        ),
        ("examples/gpt/175b.sh", {"NODE_RANK": ""}, "8 nodes need NODE_RANK (0 to 7)"),
    ],
)
def test_errors_are_one_sentence(settings: str, environment: dict[str, str], expected: str) -> None:
    outcome = run(TRAIN, settings, **environment)
    assert outcome.returncode == 2
    (sentence,) = outcome.stderr.splitlines()
    assert sentence.startswith("train.sh: error: ") and expected in sentence


@pytest.mark.parametrize(
    ("container", "expected"),
    [
        ({}, "--kill-on-bad-exit=1"),
        (
            {"CONTAINER_IMAGE": "/shared/image.sqsh", "CONTAINER_MOUNTS": "/nvme0:/nvme0"},
            "--kill-on-bad-exit=1 --container-image /shared/image.sqsh "
            "--container-workdir /srv/megatron-offload --container-mounts /nvme0:/nvme0",
        ),
    ],
    ids=["host", "container"],
)
def test_a_slurm_job_starts_each_node_with_its_number(
    tmp_path: Path, container: dict[str, str], expected: str
) -> None:
    """Stand-ins for Slurm's commands: srun runs its command once for each of two nodes."""
    (tmp_path / "srun").write_text(
        "#!/bin/bash\n"
        'while [[ "$1" != bash ]]; do printf "%s " "$1"; shift; done; echo\n'
        'for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@" || exit; done\n'
    )
    (tmp_path / "scontrol").write_text(
        '#!/bin/bash\n[[ "$*" == "show hostnames list" ]] && printf \'one\\ntwo\\n\'\n'
    )
    for command in ("srun", "scontrol"):
        (tmp_path / command).chmod(0o755)
    outcome = run(
        "bash",
        BATCH,
        "--print",
        "examples/gpt/22b.sh",
        PATH=f"{tmp_path}:{os.environ['PATH']}",
        NODE_RANK="",
        MASTER_ADDR="",
        SLURM_SUBMIT_DIR=str(ROOT),
        SLURM_JOB_NUM_NODES="2",
        SLURM_JOB_NODELIST="list",
        SLURM_JOB_ID="123456",
        **container,
    )
    assert outcome.returncode == 0, outcome.stderr
    srun, *commands = outcome.stdout.splitlines()
    assert srun.strip() == expected
    assert len(commands) == 2
    for rank, command in enumerate(commands):
        assert f"--nnodes 2 --node-rank {rank} --master-addr one --master-port 23456 " in command
