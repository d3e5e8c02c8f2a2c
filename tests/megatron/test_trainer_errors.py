# SPDX-License-Identifier: Apache-2.0
"""Every bad input gets one sentence and exit code 2 before any training. Flags that do not fit
together are in `test_refusals.py`."""

from __future__ import annotations

import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from trainer.checkpointing import check_buckets
from trainer.errors import UserError
from trainer.gpt import GPT
from trainer.training import pretrain

from tests.support.launch import TINY, Run, run_trainer

PREFIX = "error: "


def sentence_of(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    *lines: str,
) -> str:
    """Runs the checks in this process; returns the sentence."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit) as exit_info:
        pretrain(GPT(), [*shlex.split(" ".join(lines)), "--validate-only"])
    assert exit_info.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line.split(PREFIX, 1)[1]


def write_corpus(prefix: Path, documents: list[list[int]]) -> str:
    """Writes a .bin/.idx corpus; returns its prefix."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for document in documents:
        builder.add_document(np.array(document), [len(document)])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--tokenizer-model /no/such.json", "--tokenizer-model /no/such.json does not exist"),
        ("--load /no/such/directory", "--load /no/such/directory has no checkpoint"),
    ],
)
def test_missing_file(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    flags: str,
    expected: str,
) -> None:
    assert expected in sentence_of(capsys, monkeypatch, TINY, flags)


def with_corpus(prefix: Path | str) -> str:
    """The tiny model's flags with a corpus instead of mock data."""
    return TINY.replace("--mock-data", f"--data-path {prefix}")


def test_missing_corpus(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    flags = with_corpus(tmp_path / "corpus")
    assert "corpus.bin does not exist" in sentence_of(capsys, monkeypatch, flags)


@pytest.mark.parametrize(
    ("documents", "expected"),
    [
        ([], "is empty; give it some text"),
        ([[1] * 32], "has 32 tokens; one sample of --seq-length 32 needs 33"),
        # Half of the documents are for training, and they are the short ones.
        ([[1], [1], [1] * 99, [1] * 99], "the training part of --split 1,1,0 holds less"),
    ],
    ids=["empty", "short", "short-training-part"],
)
def test_corpus_without_a_whole_sample(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    documents: list[list[int]],
    expected: str,
) -> None:
    prefix = write_corpus(tmp_path / "corpus", documents)
    flags = f"{with_corpus(prefix)} --split 1,1,0"
    assert expected in sentence_of(capsys, monkeypatch, flags)


def test_unreadable_corpus(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for suffix in ("bin", "idx"):
        (tmp_path / f"corpus.{suffix}").write_bytes(b"not an index")
    flags = with_corpus(tmp_path / "corpus")
    assert "is not a Megatron index" in sentence_of(capsys, monkeypatch, flags)


def test_tokenizer_without_end_of_document(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(path))
    sentence = sentence_of(capsys, monkeypatch, TINY, f"--tokenizer-model {path}")
    assert "has no <|endoftext|> token" in sentence


@pytest.mark.slow
def test_valid_flags_exit_with_0() -> None:
    outcome = run_trainer(TINY, "--validate-only", fresh=True)
    assert outcome.exit_codes == [0]
    # Nor does any import say anything, but torch of a build for CUDA that finds a compiler alone.
    lines = outcome.errors.splitlines()
    assert [line for line in lines if "No CUDA runtime is found" not in line] == []
    assert outcome.metrics == []


@pytest.mark.slow
def test_all_ranks_leave_and_one_speaks() -> None:
    outcome = run_trainer(TINY, "--pipeline-model-parallel-size 3", world_size=2)
    assert outcome.exit_codes == [2, 2]
    assert outcome.output.count(PREFIX) == 1


def test_unsupported_megatron_core_is_refused_before_it_is_imported(tmp_path: Path) -> None:
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (core / "package_info.py").write_text("__version__ = '0.99.0'\n")
    outcome = run_trainer(TINY, environment={"PYTHONPATH": str(tmp_path)})
    assert outcome.exit_codes == [2]
    assert outcome.errors == (
        "pretrain_gpt.py: error: megatron-core 0.99.0 is not supported; expected 0.16.1; "
        "install megatron-core==0.16.1\n"
    )


@pytest.mark.slow
def test_what_one_rank_refuses_the_first_one_says(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()  # and rank 1's is missing
    with Run(
        TINY,
        "--tensor-model-parallel-size 2 --activation-offload ssd",
        "--activation-offload-dir ~",
        world_size=2,
        of_rank=lambda rank: {"HOME": str(tmp_path / str(rank))},
    ) as run:
        outcome = run.wait()
    assert outcome.exit_codes == [2, 2]
    assert str(tmp_path / "1") in outcome.errors and "does not exist" in outcome.errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--save {file}", "--save has no place: {file} is a file"),
        ("--save {file}/deep/er", "{file} is a file"),
        ("--metrics-file {folder}", "--metrics-file has no place: {folder} is a directory"),
        ("--metrics-file {file}/metrics.jsonl", "{file} is a file"),
        ("--data-cache-path {file}", "--data-cache-path has no place: {file} is a file"),
        ("--tensorboard-dir {file}", "--tensorboard-dir has no place"),
        (
            "--activation-offload auto --activation-offload-dir {folder} "
            "--activation-offload-plan {folder}",
            "{folder} is a directory",
        ),
        (
            "--activation-offload auto --activation-offload-dir {folder} "
            "--activation-offload-plan {file}/plan.json",
            "{file} is a file",
        ),
    ],
)
def test_what_a_run_writes_must_have_a_place(flags: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    places = {"file": tmp_path / "file", "folder": tmp_path}
    outcome = run_trainer(TINY, flags.format(**places))
    assert outcome.exit_codes == [2]
    assert words.format(**places) in outcome.errors and "Traceback" not in outcome.output


def chunk_of(*buckets: tuple[int, int], is_sharded: bool = True) -> Any:
    """A model chunk with buckets of so many elements, and so many with padding."""
    made = [
        SimpleNamespace(numel_unpadded=own, grad_data=torch.empty(padded))
        for own, padded in buckets
    ]
    return SimpleNamespace(
        ddp_config=SimpleNamespace(use_distributed_optimizer=is_sharded),
        buffers=[SimpleNamespace(buckets=made)],
        expert_parallel_buffers=[],
    )


def test_a_checkpoint_of_padded_buckets_is_refused() -> None:
    """Megatron-core would save states at the wrong places, without a word."""
    check_buckets([chunk_of((256, 256), (100, 128))])  # nothing comes after the padding
    check_buckets([chunk_of((100, 128), (256, 256), is_sharded=False)])
    with pytest.raises(UserError, match="100 gradients is padded to 128; choose another"):
        check_buckets([chunk_of((100, 128), (256, 256))])
