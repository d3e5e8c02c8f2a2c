# SPDX-License-Identifier: Apache-2.0
"""tools/preprocess_data.py: text comes back exactly, same input gives same bytes, clear errors."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sysconfig
from pathlib import Path

import numpy
import preprocess_data
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset
from preprocessing.vocabulary import BERT_TOKENS, EOD_TOKEN, T5_TOKENS
from tokenizers import Tokenizer

TEXTS = [
    "def double(x):\n    return 2 * x\n" * 20,
    "Grüße, 世界! \U0001f600\t tabs\tand  two  spaces, <|endoftext|> as plain text\r\n",
    "one line without an end",
]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "src"
    (folder / "inner").mkdir(parents=True)
    for name, text in zip(["a.txt", "inner/b.txt", "inner/c.txt"], TEXTS, strict=True):
        (folder / name).write_bytes(text.encode())
    (folder / "ignored.log").write_text("not this one")
    return folder


def run(*flags: object) -> int:
    """The exit code of the tool."""
    try:
        return preprocess_data.main([str(flag) for flag in flags])
    except SystemExit as stop:
        assert isinstance(stop.code, int)
        return stop.code


def decode(prefix: Path, tokenizer_file: Path) -> list[str]:
    """The documents as text, with special tokens spelled out."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    dataset = IndexedDataset(str(prefix))
    return [
        tokenizer.decode(numpy.asarray(dataset[i]).tolist(), skip_special_tokens=False)
        for i in range(len(dataset))
    ]


def error_of(capsys: pytest.CaptureFixture[str], *flags: object) -> str:
    """The sentence of a run that must fail with exit code 2."""
    assert run(*flags) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("preprocess_data.py: error: ")
    return last


def test_text_comes_back_exactly(tree: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "out" / "corpus"
    assert run("--input", tree, "--output-prefix", prefix, "--vocab-size", 300, "--append-eod") == 0
    texts = decode(Path(f"{prefix}_text_document"), prefix.parent / "tokenizer.json")
    assert texts == [text + EOD_TOKEN for text in TEXTS]


def test_eod_inside_a_document_is_ordinary_text(tree: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "corpus"
    assert run("--input", tree, "--output-prefix", prefix, "--vocab-size", 300, "--append-eod") == 0
    eod = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).token_to_id("<|endoftext|>")
    for document in IndexedDataset(f"{prefix}_text_document"):
        assert numpy.flatnonzero(document == eod).tolist() == [len(document) - 1]


def test_same_corpus_gives_same_bytes(tree: Path, tmp_path: Path) -> None:
    outputs = []
    for name, workers in (("first", 1), ("second", 2)):
        folder = tmp_path / name
        assert run("--input", tree, "--output-prefix", folder / "corpus", "--workers", workers) == 0
        outputs.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert set(outputs[0]) == {
        "corpus_text_document.bin",
        "corpus_text_document.idx",
        "tokenizer.json",
    }
    assert outputs[0] == outputs[1]


def test_jsonl_keys_become_separate_datasets(tmp_path: Path) -> None:
    source = tmp_path / "docs.jsonl"
    rows = [{"text": text, "title": f"title {i}"} for i, text in enumerate(TEXTS)]
    source.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    prefix = tmp_path / "corpus"
    assert run("--input", source, "--output-prefix", prefix, "--json-keys", "text", "title") == 0
    tokenizer = tmp_path / "tokenizer.json"
    assert decode(Path(f"{prefix}_text_document"), tokenizer) == TEXTS
    assert decode(Path(f"{prefix}_title_document"), tokenizer) == ["title 0", "title 1", "title 2"]


def test_a_local_tokenizer_file_is_used_as_it_is(tree: Path, tmp_path: Path) -> None:
    assert run("--input", tree, "--output-prefix", tmp_path / "a" / "corpus") == 0
    tokenizer = tmp_path / "a" / "tokenizer.json"
    prefix = tmp_path / "b" / "corpus"
    assert run("--input", tree, "--output-prefix", prefix, "--tokenizer-model", tokenizer) == 0
    assert not (tmp_path / "b" / "tokenizer.json").exists()
    assert decode(Path(f"{prefix}_text_document"), tokenizer) == TEXTS


def test_files_that_are_not_utf8_are_counted_not_guessed(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tree / "latin.txt").write_bytes(b"caf\xe9")
    assert run("--input", tree, "--output-prefix", tmp_path / "corpus") == 0
    summary = capsys.readouterr().out
    assert "3 documents" in summary
    assert "1 files skipped (not UTF-8)" in summary


def test_max_bytes_bounds_the_corpus(tree: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "corpus"
    limit = len(TEXTS[0].encode()) + 1
    assert run("--input", tree, "--output-prefix", prefix, "--max-bytes", limit) == 0
    assert len(IndexedDataset(f"{prefix}_text_document")) == 1


def test_missing_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sentence = error_of(
        capsys, "--input", tmp_path / "nowhere", "--output-prefix", tmp_path / "out" / "corpus"
    )
    assert "input not found" in sentence
    assert not (tmp_path / "out").exists()


def test_no_matching_file(tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--input", tree, "--suffix", ".md", "--output-prefix", tmp_path / "corpus")
    assert "empty corpus" in error_of(capsys, *flags)


def test_empty_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.txt").touch()
    prefix = tmp_path / "out" / "corpus"
    flags = ("--input", tmp_path / "empty.txt", "--output-prefix", prefix)
    assert "empty corpus" in error_of(capsys, *flags)
    assert list(prefix.parent.iterdir()) == []


def test_unwritable_output(tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    flags = ("--input", tree, "--output-prefix", tmp_path / "file" / "corpus")
    assert "cannot write" in error_of(capsys, *flags)


@pytest.mark.parametrize("content", ["", "not json", '{"model": 1}', None])
def test_not_a_tokenizer_file(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    tokenizer = tmp_path / "tokenizer.model"
    if content is not None:
        tokenizer.write_text(content)
    flags = ("--input", tree, "--output-prefix", tmp_path / "corpus")
    sentence = error_of(capsys, *flags, "--tokenizer-model", tokenizer)
    assert ("not found" if content is None else "not a tokenizer file") in sentence


def test_line_that_is_not_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "docs.jsonl"
    source.write_text('{"text": "fine"}\n{"text": \n')
    flags = ("--input", source, "--output-prefix", tmp_path / "out" / "corpus")
    assert "docs.jsonl, line 2: not JSON" in error_of(capsys, *flags)
    assert list((tmp_path / "out").iterdir()) == []


def test_missing_json_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "docs.jsonl"
    source.write_text('{"content": "x"}\n')
    flags = ("--input", source, "--output-prefix", tmp_path / "corpus")
    assert "no text under the key 'text'" in error_of(capsys, *flags)


@pytest.mark.parametrize(
    "flags, complaint",
    [
        (["--vocab-size", "100"], "at least 257"),
        (["--vocab-size", "300", "--vocab-extra-ids", "100"], "at least 360"),
        (["--vocab-extra-ids", "-1"], "must not be negative"),
        (["--vocab-extra-ids", "1", "--tokenizer-type", "BertWordPieceCase"], "is for T5"),
        (["--tokenizer-type", "Words"], "invalid choice"),
        (["--max-bytes", "0"], "must be positive"),
        (["--workers", "-1"], "must not be negative"),
        (["--stdlib"], "either --input or --stdlib"),
        (["--unknown"], "unrecognized arguments"),
    ],
)
def test_bad_flags(
    tree: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    complaint: str,
) -> None:
    prefix = tmp_path / "corpus"
    assert complaint in error_of(capsys, "--input", tree, "--output-prefix", prefix, *flags)


def test_a_tokenizer_that_other_datasets_rely_on_is_not_replaced(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run("--input", tree, "--output-prefix", out / "one", "--vocab-size", 300) == 0
    before = (out / "tokenizer.json").read_bytes()
    flags = ("--input", tree, "--output-prefix", out / "two", "--vocab-size", 280)
    assert "belongs to one_text_document.idx" in error_of(capsys, *flags)
    assert (out / "tokenizer.json").read_bytes() == before
    assert not (out / "two_text_document.idx").exists()


def test_leftovers_of_a_killed_run_are_removed(tree: Path, tmp_path: Path) -> None:
    dead = tmp_path / ".corpus.partial-999999999"
    alive = tmp_path / f".corpus.partial-{os.getppid()}"
    for folder in (dead, alive):
        folder.mkdir()
        (folder / "x.bin").touch()
    assert run("--input", tree, "--output-prefix", tmp_path / "corpus") == 0
    assert not dead.exists()
    assert alive.exists()


# ------------------------------------------------------------------ sentences, BERT and T5

PROSE = ["The first sentence. A second one!\n\nAnd a third", "Only one.", "Two here. Yes, two."]
BERT = ("--split-sentences", "--tokenizer-type", "BertWordPieceLowerCase", "--vocab-size", "200")
T5 = ("--split-sentences", "--vocab-extra-ids", "4", "--vocab-size", "300")


@pytest.fixture
def prose(tmp_path: Path) -> Path:
    """A jsonl file of `PROSE`."""
    source = tmp_path / "docs.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in PROSE))
    return source


def decode_sentences(prefix: Path, tokenizer_file: Path) -> list[list[str]]:
    """The sentences of each document as text."""
    dataset = IndexedDataset(str(prefix))  # alive as long as its index is read
    bounds = dataset.document_indices.tolist()
    sentences = decode(prefix, tokenizer_file)
    return [sentences[begin:end] for begin, end in itertools.pairwise(bounds)]


def test_split_sentences_makes_one_sequence_per_sentence(
    prose: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--input", prose, "--output-prefix", tmp_path / "corpus", *T5) == 0
    prefix, tokenizer = tmp_path / "corpus_text_sentence", tmp_path / "tokenizer.json"
    assert decode_sentences(prefix, tokenizer) == [
        [" The first sentence.", " A second one!", " And a third"],
        [" Only one."],
        [" Two here.", " Yes, two."],
    ]
    assert "3 documents, 6 sentences, " in capsys.readouterr().out


def test_the_tokenizer_of_bert_has_its_special_tokens_and_pieces(
    prose: Path, tmp_path: Path
) -> None:
    assert run("--input", prose, "--output-prefix", tmp_path / "corpus", *BERT) == 0
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert [tokenizer.id_to_token(number) for number in range(5)] == list(BERT_TOKENS)
    assert tokenizer.encode("THE [MASK]").tokens == ["the", "[MASK]"]
    pieces = tokenizer.encode("Theses").tokens
    assert len(pieces) > 1 and all(piece.startswith("##") for piece in pieces[1:])
    assert "".join(piece.removeprefix("##") for piece in pieces) == "theses"


def test_the_tokenizer_of_t5_has_its_special_tokens_and_sentinels(
    prose: Path, tmp_path: Path
) -> None:
    assert run("--input", prose, "--output-prefix", tmp_path / "corpus", *T5) == 0
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    expected = [*T5_TOKENS, *(f"<extra_id_{number}>" for number in range(4))]
    assert [tokenizer.id_to_token(number) for number in range(8)] == expected


def test_a_cased_tokenizer_keeps_capitals(prose: Path, tmp_path: Path) -> None:
    flags = [flag.replace("LowerCase", "Case") for flag in BERT]
    assert run("--input", prose, "--output-prefix", tmp_path / "corpus", *flags) == 0
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("Yes").tokens[0].startswith("Y")


@pytest.mark.slow
@pytest.mark.parametrize("flags", [BERT, T5], ids=["BERT", "T5"])
def test_same_prose_gives_same_bytes(flags: tuple[str, ...], tmp_path: Path) -> None:
    # Many words: their order in the library's hash table must not matter.
    source = tmp_path / "source.txt"
    source.write_text(Path(argparse.__file__).read_text() * 3)
    outputs = []
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        assert run("--input", source, "--output-prefix", folder / "corpus", *flags) == 0
        outputs.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert outputs[0] == outputs[1] == outputs[2]


def test_sentences_that_megatron_core_would_leave_out_are_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "one two three " * 200 + "end. A short one."
    (tmp_path / "long.txt").write_text(text)
    flags = ("--input", tmp_path / "long.txt", "--output-prefix", tmp_path / "corpus", *BERT)
    assert run(*flags) == 0
    lengths = [len(sentence) for sentence in IndexedDataset(f"{tmp_path}/corpus_text_sentence")]
    assert len(lengths) == 3 and max(lengths) <= 512
    (document,) = decode_sentences(tmp_path / "corpus_text_sentence", tmp_path / "tokenizer.json")
    assert " ".join(document).split() == text.lower().split()
    assert "3 sentences (1 cut, longer than 511 tokens)" in capsys.readouterr().out


def test_prose_of_the_standard_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "library"
    (library / "test").mkdir(parents=True)
    for name in ("one.py", "test/two.py"):
        (library / name).write_text(
            '"""A docstring of two sentences. This is the other."""\nx = 1\n'
        )
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(library)})
    assert run("--stdlib", "--output-prefix", tmp_path / "corpus", *T5) == 0
    assert decode_sentences(tmp_path / "corpus_text_sentence", tmp_path / "tokenizer.json") == [
        [" A docstring of two sentences.", " This is the other."]
    ]


def test_a_corpus_without_sentences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "docs.jsonl"
    source.write_text("".join(json.dumps({"text": f"title {i}"}) + "\n" for i in range(9)))
    flags = ("--input", source, "--output-prefix", tmp_path / "out" / "corpus", *BERT)
    assert "no document of several sentences" in error_of(capsys, *flags)
    assert list((tmp_path / "out").iterdir()) == []
