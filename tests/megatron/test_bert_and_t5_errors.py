# SPDX-License-Identifier: Apache-2.0
"""What BERT and T5 cannot train on: one sentence and exit code 2 before any training."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from tokenizers import Tokenizer, models
from trainer.bert import BERT
from trainer.t5 import T5
from trainer.training import pretrain

TASKS = {"bert": BERT, "t5": T5}


def check(
    model: str, flags: str, monkeypatch: pytest.MonkeyPatch, world_size: int = 1
) -> int | str | None:
    """Runs the checks in this process as rank 0; returns the exit code, None if all is well."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    try:
        pretrain(TASKS[model](), [*shlex.split(flags), "--validate-only"])
    except SystemExit as stop:
        return stop.code
    return None


@pytest.mark.parametrize("model", TASKS)
def test_valid_flags(model: str, tiny: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(model, tiny[model], monkeypatch) is None


@pytest.mark.parametrize(
    ("model", "flags", "world_size", "expected"),
    [
        ("t5", "--pipeline-model-parallel-size 2", 2, "has no pipeline parallelism for T5"),
        ("t5", "--group-query-attention", 1, "has no query groups"),
        ("t5", "--decoder-seq-length 33", 1, "--decoder-seq-length (33) must not exceed"),
        ("t5", "--decoder-seq-length 8", 1, "is too short for what is hidden of --seq-length 32"),
        (
            "t5",
            "--tensor-model-parallel-size 2 --sequence-parallel --decoder-seq-length 15",
            2,
            "--decoder-seq-length (15) must be divisible by",
        ),
        ("t5", "--seq-length 512 --decoder-seq-length 256", 1, "has 16 sentinels; "),
        ("t5", "--mask-prob 1.0", 1, "--mask-prob must be above 0 and below 1"),
        ("bert", "--mask-prob 1.5", 1, "expected a fraction in [0, 1], got '1.5'"),
        ("bert", "--seq-length 4", 1, "--seq-length must be at least 8, got 4"),
        ("bert", "--num-experts 2", 1, "unrecognized arguments: --num-experts"),
        ("bert", "--expert-model-parallel-size 2", 2, "leave out --expert-model-parallel-size"),
        (
            "t5",
            "--recompute-granularity selective --recompute-modules moe",
            1,
            "T5 has no experts; leave out --recompute-modules moe",
        ),
        ("t5", "--context-parallel-size 2", 2, "--context-parallel-size needs the attention of"),
        ("bert", "--rotary-base 500", 1, "leave out --rotary-base"),
        ("bert", "--decoder-seq-length 8", 1, "unrecognized arguments: --decoder-seq-length"),
        ("bert", "--pipeline-model-parallel-size 2 --num-layers 5", 2, "--num-layers (5)"),
        ("bert", "--tokenizer-type NullTokenizer", 1, "BERT needs --tokenizer-model FILE"),
        ("bert", "--data-path one two", 1, "several corpora need weights for BERT"),
    ],
)
def test_bad_flag(
    model: str,
    flags: str,
    world_size: int,
    expected: str,
    tiny: dict[str, str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert check(model, f"{tiny[model]} {flags}", monkeypatch, world_size) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert expected in line


@pytest.mark.parametrize("model", TASKS)
def test_there_is_no_mock_data(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check(model, "--mock-data", monkeypatch) == 2
    assert f"{TASKS[model].name} has no mock data" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("documents", "expected"),
    [
        ([[40], [40], [40]], "has no document of several sentences"),
        ([[40, 513], [600, 2]], "has one of more than 512 tokens"),
        # The four documents for training are the ones that no sample can be made of.
        ([[40, 513]] * 4 + [[40, 40]], "the training part of --split 80,20,0 holds less"),
    ],
    ids=["no-sentences", "long-sentences", "none-in-the-training-part"],
)
@pytest.mark.parametrize("model", TASKS)
def test_corpus_that_gives_no_sample(
    model: str,
    documents: list[list[int]],
    expected: str,
    tiny: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    builder = IndexedDatasetBuilder(f"{tmp_path}/corpus.bin", dtype=np.uint16)
    for lengths in documents:
        builder.add_document(np.full(sum(lengths), 7), lengths)
    builder.finalize(f"{tmp_path}/corpus.idx")
    assert check(model, f"{tiny[model]} --data-path {tmp_path}/corpus", monkeypatch) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert expected in line


@pytest.mark.parametrize(
    ("model", "tokens", "expected"),
    [
        ("bert", [], "has no [CLS], no [SEP], no [MASK], no [PAD] token; train one for BERT"),
        ("bert", ["[PAD]", "[CLS]", "[SEP]"], "has no [MASK] token"),
        ("bert", ["[CLS]", "[SEP]", "[MASK]", "[PAD]"], "has [PAD] at id 3"),
        ("t5", ["<pad>", "</s>", "<extra_id_0>"], "has no <s>, no <mask> token; train one for T5"),
        ("t5", ["<pad>", "</s>", "<s>", "<mask>"], "has no <extra_id_0> token"),
        ("t5", ["<pad>", "</s>", "<s>", "<mask>", "<extra_id_0>"], "has 1 sentinels; "),
    ],
)
def test_tokenizer_without_what_the_datasets_need(
    model: str,
    tokens: list[str],
    expected: str,
    tiny: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.add_special_tokens(tokens)
    tokenizer.save(f"{tmp_path}/tokenizer.json")
    flags = f"{tiny[model]} --tokenizer-model {tmp_path}/tokenizer.json"
    assert check(model, flags, monkeypatch) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert expected in line
