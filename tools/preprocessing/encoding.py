# SPDX-License-Identifier: Apache-2.0
"""Documents into megatron-core's .bin/.idx files: `encode`, called once per run of the tool.

A document is one sequence of tokens, or one per sentence. It never decides where files go.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from preprocessing.corpus import Corpus, Document, InputError
from preprocessing.sentences import split_sentences

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BATCH_CHARS = 4_000_000
# megatron-core's datasets for BERT and T5 leave out every document that has a longer sentence.
MAX_SENTENCE_TOKENS = 512


@dataclass
class Counts:
    """What was written."""

    documents: int = 0
    several_sentences: int = 0  # documents that have them
    sentences: int = 0
    cut_sentences: int = 0
    tokens: int = 0


def encode(
    corpus: Corpus,
    tokenizer: Tokenizer,
    eod: int | None,
    split: bool,
    prefix_of: Callable[[str], str],
) -> Counts:
    """Encodes every document into one .bin/.idx pair per key.

    Args:
        corpus: what to read.
        tokenizer: any of the `tokenizers` library.
        eod: id that ends every document, or None.
        split: one sequence per sentence instead of one per document.
        prefix_of: path of a key's files, without .bin and .idx.
    """
    indexed_dataset = _import_indexed_dataset()
    dtype = indexed_dataset.DType.optimal_dtype(tokenizer.get_vocab_size())
    builders = {
        key: indexed_dataset.IndexedDatasetBuilder(prefix_of(key) + ".bin", dtype=dtype)
        for key in corpus.keys
    }
    tokenizer.encode_special_tokens = True  # "<|endoftext|>" inside a document is just text
    counts = Counts()
    progress = tqdm(
        total=corpus.total_bytes, unit="B", unit_scale=True, desc="encoding", disable=None
    )
    with progress:
        for batch in _batches(corpus.documents()):
            for document, sequences in zip(batch, _sequences(batch, tokenizer, split), strict=True):
                sentences = [sequence for sequence in sequences if sequence]
                if split:
                    sentences = list(_cut(sentences, counts))
                if not sentences:
                    continue
                if eod is not None:
                    sentences[-1].append(eod)
                lengths = [len(sentence) for sentence in sentences]
                builders[document.key].add_document(
                    [token for sentence in sentences for token in sentence], lengths
                )
                counts.documents += 1
                counts.several_sentences += len(sentences) > 1
                counts.sentences += len(sentences)
                counts.tokens += sum(lengths)
            progress.update(corpus.num_bytes - progress.n)
    for key, builder in builders.items():
        builder.finalize(prefix_of(key) + ".idx")
    return counts


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


def _sequences(batch: list[Document], tokenizer: Tokenizer, split: bool) -> Iterator[list[Any]]:
    """The ids of each document's sentences; a document that is not to be split is one."""
    texts = [split_sentences(doc.text) if split else [doc.text] for doc in batch]
    flat = [text for sentences in texts for text in sentences]
    encodings = iter(tokenizer.encode_batch_fast(flat, add_special_tokens=False))
    for sentences in texts:
        yield [next(encodings).ids for _ in sentences]


def _cut(sentences: list[list[int]], counts: Counts) -> Iterator[list[int]]:
    """Sentences that megatron-core takes: longer ones in pieces."""
    # One token less: there must be room for the end of the document.
    longest = MAX_SENTENCE_TOKENS - 1
    for sentence in sentences:
        counts.cut_sentences += len(sentence) > longest
        for begin in range(0, len(sentence), longest):
            yield sentence[begin : begin + longest]


def _import_indexed_dataset() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # megatron-core says that TE and apex are not installed
        try:
            from megatron.core.datasets import indexed_dataset
        except ImportError as error:
            raise InputError(f"megatron-core cannot be imported: {error}") from None
    return indexed_dataset
