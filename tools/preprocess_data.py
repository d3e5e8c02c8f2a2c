#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Turns text into the .bin/.idx files that megatron-core's datasets read.

    preprocess_data.py --input book.txt --output-prefix data/book/corpus --append-eod
    preprocess_data.py --input src/ --suffix .py,.md --output-prefix data/src/corpus --append-eod
    preprocess_data.py --input docs.jsonl --json-keys text --output-prefix data/docs/corpus \
        --tokenizer-model path/to/tokenizer.json --append-eod

Writes PREFIX_KEY_document.bin and .idx per key ("text" where the input is not jsonl). Without
--tokenizer-model a byte-level BPE tokenizer is trained on the input and saved as tokenizer.json in
the same folder. The same input gives the same bytes. Files get their names only when complete.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import sysconfig
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tqdm import tqdm

if TYPE_CHECKING:
    from tokenizers import Tokenizer

EOD_TOKEN = "<|endoftext|>"
# Looked for, in this order, in a tokenizer that the user brings.
EOD_CANDIDATES = (EOD_TOKEN, "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>")
# The alphabet of a byte-level tokenizer and the end-of-document token: no vocabulary is smaller.
MIN_VOCAB_SIZE = 256 + 1
BATCH_CHARS = 4_000_000
QUICKSTART_MAX_BYTES = 40_000_000


class InputError(Exception):
    """Something that the user can put right; the message is the sentence to print."""


class OneSentenceParser(argparse.ArgumentParser):
    """Reports a bad flag in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


@dataclass(frozen=True)
class Document:
    """One document of one source file."""

    key: str
    text: str


@dataclass
class Corpus:
    """The source files and what is counted while reading them."""

    files: list[Path]
    json_keys: list[str]
    max_bytes: int | None
    num_bytes: int = 0
    num_not_utf8: int = 0

    @property
    def total_bytes(self) -> int:
        """Bytes that one pass reads at most, for progress and sampling."""
        total = sum(path.stat().st_size for path in self.files)
        return total if self.max_bytes is None else min(total, self.max_bytes)

    @property
    def keys(self) -> list[str]:
        """Keys that documents carry: one output pair is written for each."""
        keys = set(self.json_keys) if any(_is_jsonl(path) for path in self.files) else set()
        if any(not _is_jsonl(path) for path in self.files):
            keys.add("text")
        return sorted(keys)

    def documents(self) -> Iterator[Document]:
        """Every non-empty document, in sorted file order; restarts the counters.

        Raises:
            InputError: A jsonl line is not JSON or lacks a key.
        """
        self.num_bytes = self.num_not_utf8 = 0
        for path in self.files:
            reader = self._jsonl_documents if _is_jsonl(path) else self._text_document
            for document, size in reader(path):
                if self.max_bytes is not None and self.num_bytes + size > self.max_bytes:
                    return
                self.num_bytes += size
                if document.text:
                    yield document

    def _text_document(self, path: Path) -> Iterator[tuple[Document, int]]:
        content = path.read_bytes()
        try:
            yield Document("text", content.decode("utf-8")), len(content)
        except UnicodeDecodeError:
            self.num_not_utf8 += 1

    def _jsonl_documents(self, path: Path) -> Iterator[tuple[Document, int]]:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except ValueError as error:
                    raise InputError(f"{path}, line {number}: not JSON ({error})") from None
                for key in self.json_keys:
                    text = record.get(key) if isinstance(record, dict) else None
                    if not isinstance(text, str):
                        raise InputError(
                            f"{path}, line {number}: no text under the key {key!r}; "
                            "name the right one with --json-keys"
                        )
                    yield Document(key, text), len(text.encode("utf-8", "surrogatepass"))


def _is_jsonl(path: Path) -> bool:
    return path.suffix in (".jsonl", ".json")


def find_corpus(args: argparse.Namespace) -> Corpus:
    """Lists the source files that the flags name.

    Raises:
        InputError: A path does not exist or no file matches.
    """
    suffixes = tuple(part.strip() for part in args.suffix.split(",") if part.strip())
    excluded = set(args.exclude_dir)
    files: list[Path] = []
    for path in map(Path, args.input):
        if path.is_file():
            files.append(path)
        elif path.is_dir():
            found = [
                Path(folder) / name
                for folder, folders, names in _walk(path, excluded)
                for name in names
                if name.endswith(suffixes)
            ]
            files.extend(sorted(file for file in found if file.is_file()))
        else:
            raise InputError(f"input not found: {path}")
    if not files:
        raise InputError(
            f"empty corpus: no file ending in {args.suffix} under {' '.join(args.input)}; "
            "choose the endings with --suffix"
        )
    return Corpus(files, args.json_keys, args.max_bytes)


def _walk(root: Path, excluded: set[str]) -> Iterator[tuple[str, list[str], list[str]]]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in excluded]
        yield folder, folders, names


def train_tokenizer(corpus: Corpus, vocab_size: int, sample_bytes: int) -> Tokenizer:
    """Trains a byte-level BPE tokenizer on every n-th document, about `sample_bytes` of text.

    Nothing is normalised and no space is added: decoding gives back the exact text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    stride = max(1, -(-corpus.total_bytes // sample_bytes))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOD_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    sample = (doc.text for i, doc in enumerate(corpus.documents()) if i % stride == 0)
    tokenizer.train_from_iterator(sample, trainer)
    return tokenizer


def load_tokenizer(name: str) -> Tokenizer:
    """Reads a tokenizer.json, or the one in a local folder.

    Raises:
        InputError: There is no such file or it is not one.
    """
    from tokenizers import Tokenizer

    path = Path(name)
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        raise InputError(f"tokenizer file not found: {path}")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for every kind of bad content
        raise InputError(f"not a tokenizer file: {path} ({error})") from None


def find_eod(tokenizer: Tokenizer) -> int:
    """The id of the end-of-document token."""
    for token in EOD_CANDIDATES:
        token_id = tokenizer.token_to_id(token)
        if token_id is not None:
            return int(token_id)
    raise InputError(
        f"the tokenizer has none of the tokens {', '.join(EOD_CANDIDATES)}; leave out --append-eod"
    )


def _import_indexed_dataset() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # megatron-core says that TE and apex are not installed
        try:
            from megatron.core.datasets import indexed_dataset
        except ImportError as error:
            raise InputError(f"megatron-core cannot be imported: {error}") from None
    return indexed_dataset


def encode(
    corpus: Corpus, tokenizer: Tokenizer, eod: int | None, prefix_of: Callable[[str], str]
) -> tuple[int, int]:
    """Encodes every document into one .bin/.idx pair per key; returns (documents, tokens)."""
    indexed_dataset = _import_indexed_dataset()
    dtype = indexed_dataset.DType.optimal_dtype(tokenizer.get_vocab_size())
    builders = {
        key: indexed_dataset.IndexedDatasetBuilder(prefix_of(key) + ".bin", dtype=dtype)
        for key in corpus.keys
    }
    tokenizer.encode_special_tokens = True  # "<|endoftext|>" inside a document is just text
    num_documents = num_tokens = 0
    progress = tqdm(
        total=corpus.total_bytes, unit="B", unit_scale=True, desc="encoding", disable=None
    )
    with progress:
        for batch in _batches(corpus.documents()):
            texts = [document.text for document in batch]
            encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            for document, encoding in zip(batch, encodings, strict=True):
                ids = encoding.ids
                if not ids:
                    continue
                if eod is not None:
                    ids.append(eod)
                builders[document.key].add_document(ids, [len(ids)])
                num_documents += 1
                num_tokens += len(ids)
            progress.update(corpus.num_bytes - progress.n)
    for key, builder in builders.items():
        builder.finalize(prefix_of(key) + ".idx")
    return num_documents, num_tokens


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= BATCH_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


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
    if not args.tokenizer_model and args.vocab_size < MIN_VOCAB_SIZE:
        raise InputError(f"--vocab-size must be at least {MIN_VOCAB_SIZE}, got {args.vocab_size}")
    corpus = find_corpus(args)
    tokenizer = load_tokenizer(args.tokenizer_model) if args.tokenizer_model else None
    prefix = Path(args.output_prefix)
    try:
        with partial_folder(prefix) as folder:
            if tokenizer is None:
                sample = min(corpus.total_bytes, args.train_bytes)
                print(
                    f"training a tokenizer on about {sample / 1e6:.1f} of "
                    f"{corpus.total_bytes / 1e6:.1f} MB of text",
                    file=sys.stderr,
                )
                tokenizer = train_tokenizer(corpus, args.vocab_size, args.train_bytes)
                tokenizer.save(str(folder / "tokenizer.json"))
            eod = find_eod(tokenizer) if args.append_eod else None
            documents, tokens = encode(
                corpus, tokenizer, eod, lambda key: str(folder / f"{prefix.name}_{key}_document")
            )
            if documents == 0:
                raise InputError(f"empty corpus: no text in {' '.join(args.input)}")
            publish(folder, prefix, new_tokenizer=not args.tokenizer_model)
    except OSError as error:
        raise InputError(
            f"cannot write {prefix}*: {error.strerror or error} ({error.filename})"
        ) from None
    seconds = time.perf_counter() - started
    skipped = f", {corpus.num_not_utf8} files skipped (not UTF-8)" if corpus.num_not_utf8 else ""
    return (
        f"{documents:,} documents, {tokens:,} tokens from {corpus.num_bytes:,} bytes of text, "
        f"vocabulary {tokenizer.get_vocab_size():,}, {seconds:.1f} s{skipped}\n"
        + "\n".join(f"  {prefix}_{key}_document.bin .idx" for key in corpus.keys)
        + f"\n  tokenizer: {args.tokenizer_model or prefix.parent / 'tokenizer.json'}"
    )


def make_parser() -> argparse.ArgumentParser:
    """The command line; names as in Megatron-LM's tool of the same name where it has them."""
    parser = OneSentenceParser(
        prog="preprocess_data.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    source = parser.add_argument_group("input")
    source.add_argument(
        "--input", nargs="+", help="text files, .jsonl files, or folders searched for --suffix"
    )
    source.add_argument(
        "--stdlib",
        action="store_true",
        help="the Python standard library's own sources as input (the quickstart's corpus)",
    )
    source.add_argument("--json-keys", nargs="+", default=["text"], help="keys to read from jsonl")
    source.add_argument("--suffix", default=".txt", help="file endings in folders, e.g. .py,.md")
    source.add_argument(
        "--exclude-dir", nargs="*", default=[], metavar="NAME", help="folder names to leave out"
    )
    source.add_argument("--max-bytes", type=int, help="stop before more than this much text")
    tokens = parser.add_argument_group("tokenizer")
    tokens.add_argument(
        "--tokenizer-type", default="HuggingFaceTokenizer", choices=["HuggingFaceTokenizer"]
    )
    tokens.add_argument(
        "--tokenizer-model",
        metavar="FILE",
        help="a tokenizer.json or a local folder with one; without it a tokenizer is trained",
    )
    tokens.add_argument("--vocab-size", type=int, default=8192, help="of the trained tokenizer")
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
    if args.workers < 0:
        parser.error(f"--workers must not be negative, got {args.workers}")
    if args.stdlib:
        args.input = [sysconfig.get_paths()["stdlib"]]
        args.suffix = ".py"
        args.exclude_dir = ["site-packages", "dist-packages", "__pycache__"]
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
