#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Turns text into the .bin/.idx files that megatron-core's datasets read.

    preprocess_data.py --input book.txt --output-prefix data/book/corpus --append-eod
    preprocess_data.py --input src/ --suffix .py,.md --output-prefix data/src/corpus --append-eod
    preprocess_data.py --input docs.jsonl --json-keys text --output-prefix data/docs/corpus \
        --tokenizer-model path/to/tokenizer.json --append-eod

For BERT and T5, whose datasets want sentences:

    preprocess_data.py --input docs.jsonl --output-prefix data/bert/corpus --split-sentences \
        --tokenizer-type BertWordPieceLowerCase
    preprocess_data.py --input docs.jsonl --output-prefix data/t5/corpus --split-sentences \
        --vocab-extra-ids 100

Writes PREFIX_KEY_document.bin and .idx per key, or PREFIX_KEY_sentence with --split-sentences (KEY
is "text" where the input is not jsonl). Without --tokenizer-model a tokenizer is trained on the
input and saved as tokenizer.json in the same folder: byte-level BPE, with sentinels for T5, or
WordPiece for BERT. The same input gives the same bytes. Files get their names only when complete.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from one_sentence import OneSentenceParser
from preprocessing.corpus import Corpus, InputError, find_files
from preprocessing.docstrings import Prose
from preprocessing.encoding import MAX_SENTENCE_TOKENS, Counts, encode
from preprocessing.vocabulary import (
    TOKENIZER_TYPES,
    Recipe,
    find_eod,
    load_tokenizer,
    train_tokenizer,
)

QUICKSTART_MAX_BYTES = 40_000_000


@contextmanager
def partial_folder(prefix: Path) -> Iterator[Path]:
    """A folder beside the output for files in the making; gone afterwards, whatever happens.

    What a killed run has left there is removed by the next one.
    """
    prefix.parent.mkdir(parents=True, exist_ok=True)
    stem = f".{prefix.name}.partial-"
    for old in prefix.parent.glob(stem + "*"):
        pid = old.name[len(stem) :]
        if pid.isdigit() and not Path("/proc", pid).exists():
            shutil.rmtree(old, ignore_errors=True)
    folder = prefix.parent / f"{stem}{os.getpid()}"
    folder.mkdir(exist_ok=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(folder: Path, prefix: Path, new_tokenizer: bool) -> None:
    """Renames the complete files; the .idx files last, so that one stands for a complete set.

    Raises:
        InputError: A different tokenizer.json is there and other datasets rely on it.
    """
    target = prefix.parent / "tokenizer.json"
    if new_tokenizer:
        ours = {f"{path.name}" for path in folder.glob("*.idx")}
        others = [path for path in prefix.parent.glob("*.idx") if path.name not in ours]
        made = folder / "tokenizer.json"
        if others and target.exists() and target.read_bytes() != made.read_bytes():
            raise InputError(
                f"{target} belongs to {others[0].name}; choose another folder for --output-prefix, "
                "or use that tokenizer with --tokenizer-model"
            )
        os.replace(made, target)
    for path in sorted(folder.glob("*.bin")) + sorted(folder.glob("*.idx")):
        os.replace(path, prefix.parent / path.name)


def preprocess(args: argparse.Namespace) -> str:
    """Does the work and returns the summary to print."""
    started = time.perf_counter()
    recipe = Recipe(args.tokenizer_type, args.vocab_size, args.vocab_extra_ids)
    if not args.tokenizer_model:
        recipe.check()
    kind = Prose if args.stdlib and args.split_sentences else Corpus
    corpus = kind(find_files(args), args.json_keys, args.max_bytes)
    tokenizer = load_tokenizer(args.tokenizer_model) if args.tokenizer_model else None
    prefix = Path(args.output_prefix)
    level = "sentence" if args.split_sentences else "document"
    try:
        with partial_folder(prefix) as folder:
            if tokenizer is None:
                sample = min(corpus.total_bytes, args.train_bytes)
                print(
                    f"training a tokenizer on about {sample / 1e6:.1f} of "
                    f"{corpus.total_bytes / 1e6:.1f} MB of text",
                    file=sys.stderr,
                )
                tokenizer = train_tokenizer(corpus, recipe, args.train_bytes)
                tokenizer.save(str(folder / "tokenizer.json"))
            eod = find_eod(tokenizer) if args.append_eod else None
            counts = encode(
                corpus,
                tokenizer,
                eod,
                args.split_sentences,
                lambda key: str(folder / f"{prefix.name}_{key}_{level}"),
            )
            check_counts(counts, args)
            publish(folder, prefix, new_tokenizer=not args.tokenizer_model)
    except OSError as error:
        raise InputError(
            f"cannot write {prefix}*: {error.strerror or error} ({error.filename})"
        ) from None
    seconds = time.perf_counter() - started
    skipped = f", {corpus.num_not_utf8} files skipped (not UTF-8)" if corpus.num_not_utf8 else ""
    return (
        f"{counts.documents:,} documents, {describe_sentences(counts, args)}"
        f"{counts.tokens:,} tokens from {corpus.num_bytes:,} bytes of text, "
        f"vocabulary {tokenizer.get_vocab_size():,}, {seconds:.1f} s{skipped}\n"
        + "\n".join(f"  {prefix}_{key}_{level}.bin .idx" for key in corpus.keys)
        + f"\n  tokenizer: {args.tokenizer_model or prefix.parent / 'tokenizer.json'}"
    )


def check_counts(counts: Counts, args: argparse.Namespace) -> None:
    """Raises InputError for a corpus that no dataset could use."""
    where = " ".join(args.input)
    if counts.documents == 0:
        raise InputError(f"empty corpus: no text in {where}")
    if args.split_sentences and counts.several_sentences == 0:
        raise InputError(
            f"no document of several sentences in {where}; BERT and T5 need documents of prose, "
            "leave out --split-sentences for GPT"
        )


def describe_sentences(counts: Counts, args: argparse.Namespace) -> str:
    """A part of the summary; empty without --split-sentences."""
    if not args.split_sentences:
        return ""
    cut = f" ({counts.cut_sentences:,} cut, longer than {MAX_SENTENCE_TOKENS - 1} tokens)"
    return f"{counts.sentences:,} sentences{cut if counts.cut_sentences else ''}, "


def make_parser() -> argparse.ArgumentParser:
    """The command line; names as in Megatron-LM's tool of the same name where it has them."""
    parser = OneSentenceParser("preprocess_data.py", __doc__)
    source = parser.add_argument_group("input")
    source.add_argument(
        "--input", nargs="+", help="text files, .jsonl files, or folders searched for --suffix"
    )
    source.add_argument(
        "--stdlib",
        action="store_true",
        help="the Python standard library's own sources as input (the quickstart's corpus); "
        "with --split-sentences the prose of its docstrings",
    )
    source.add_argument("--json-keys", nargs="+", default=["text"], help="keys to read from jsonl")
    source.add_argument("--suffix", default=".txt", help="file endings in folders, e.g. .py,.md")
    source.add_argument(
        "--exclude-dir", nargs="*", default=[], metavar="NAME", help="folder names to leave out"
    )
    source.add_argument("--max-bytes", type=int, help="stop before more than this much text")
    source.add_argument(
        "--split-sentences",
        action="store_true",
        help="one sequence per sentence instead of one per document, for BERT and T5",
    )
    tokens = parser.add_argument_group("tokenizer")
    tokens.add_argument(
        "--tokenizer-type",
        default="HuggingFaceTokenizer",
        choices=TOKENIZER_TYPES,
        help="what to train: byte-level BPE, or WordPiece for BERT (default: %(default)s)",
    )
    tokens.add_argument(
        "--tokenizer-model",
        metavar="FILE",
        help="a tokenizer.json or a local folder with one; without it a tokenizer is trained",
    )
    tokens.add_argument("--vocab-size", type=int, default=8192, help="of the trained tokenizer")
    tokens.add_argument(
        "--vocab-extra-ids",
        type=int,
        default=0,
        help="sentinels <extra_id_0>, <extra_id_1> ... of the trained tokenizer, for T5",
    )
    tokens.add_argument(
        "--train-bytes",
        type=int,
        default=8_000_000,
        help="train the tokenizer on every n-th document, about this much text (default: 8 MB)",
    )
    tokens.add_argument(
        "--append-eod",
        action="store_true",
        help="end every document with the tokenizer's EOD token",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--output-prefix", required=True, help="path, without _KEY_document.bin")
    output.add_argument(
        "--workers", type=int, default=0, help="encoding threads (default: one per core)"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.stdlib == bool(args.input):
        parser.error("give either --input or --stdlib")
    if args.max_bytes is not None and args.max_bytes <= 0:
        parser.error(f"--max-bytes must be positive, got {args.max_bytes}")
    if args.train_bytes <= 0:
        parser.error(f"--train-bytes must be positive, got {args.train_bytes}")
    if args.vocab_extra_ids < 0:
        parser.error(f"--vocab-extra-ids must not be negative, got {args.vocab_extra_ids}")
    if args.workers < 0:
        parser.error(f"--workers must not be negative, got {args.workers}")
    if args.stdlib:
        args.input = [sysconfig.get_paths()["stdlib"]]
        args.suffix = ".py"
        args.exclude_dir = ["site-packages", "dist-packages", "__pycache__"]
        if args.split_sentences:
            args.exclude_dir += ["test", "tests"]
        args.max_bytes = args.max_bytes or QUICKSTART_MAX_BYTES
    # Read when the tokenizers library starts its threads, which is at its first use.
    if args.workers:
        os.environ["RAYON_NUM_THREADS"] = str(args.workers)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    # An exit runs the clean-up that the default action would skip.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        print(preprocess(args))
    except InputError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
