# SPDX-License-Identifier: Apache-2.0
"""Tokenizers: training them on a corpus, reading them from a file, their special tokens.

`Recipe` says what is trained: byte-level BPE for GPT, the same with sentinels for T5
(`--vocab-extra-ids`), WordPiece for BERT. The special tokens are those that the trainer in
`examples/trainer/tokenizer.py` looks for. Padding has id 0, which megatron-core's datasets for BERT
and T5 rely on.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from preprocessing.corpus import Corpus, InputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

EOD_TOKEN = "<|endoftext|>"
# Looked for, in this order, in a tokenizer that the user brings.
EOD_CANDIDATES = (EOD_TOKEN, "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>")
BERT_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
T5_TOKENS = ("<pad>", "</s>", "<s>", "<mask>")
WORD_PIECE_TYPES = ("BertWordPieceLowerCase", "BertWordPieceCase")
TOKENIZER_TYPES = ("HuggingFaceTokenizer", *WORD_PIECE_TYPES)
_NUM_BYTES = 256  # the alphabet of a byte-level tokenizer


@dataclass(frozen=True)
class Recipe:
    """A tokenizer to train.

    Attributes:
        kind: one of `TOKENIZER_TYPES`.
        vocab_size: special tokens and sentinels included.
        extra_ids: number of sentinels; above 0 the tokenizer is one for T5.
    """

    kind: str
    vocab_size: int
    extra_ids: int

    def check(self) -> None:
        """Raises InputError where no such tokenizer can be made."""
        if self.is_word_piece and self.extra_ids:
            raise InputError(
                f"--vocab-extra-ids is for T5, {self.kind} is for BERT; leave out one of the two"
            )
        smallest = len(self.special_tokens) + (0 if self.is_word_piece else _NUM_BYTES)
        if self.vocab_size < smallest:
            raise InputError(f"--vocab-size must be at least {smallest}, got {self.vocab_size}")

    @property
    def is_word_piece(self) -> bool:
        """Whether words are cut into pieces of characters, and not texts into pieces of bytes."""
        return self.kind in WORD_PIECE_TYPES

    @property
    def special_tokens(self) -> list[str]:
        """In the order of their ids, which begin at 0."""
        if self.is_word_piece:
            return list(BERT_TOKENS)
        if self.extra_ids:
            return [*T5_TOKENS, *(f"<extra_id_{number}>" for number in range(self.extra_ids))]
        return [EOD_TOKEN]

    def train(self, texts: list[str]) -> Tokenizer:
        """A new tokenizer; the same texts give the same one."""
        return self._word_piece(texts) if self.is_word_piece else self._byte_level(texts)

    def _byte_level(self, texts: list[str]) -> Tokenizer:
        """BPE over bytes. Nothing is normalised: decoding gives back the exact text.

        T5 concatenates sentences, so each begins with a space; elsewhere none is added.
        """
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=self.extra_ids > 0)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=self.vocab_size,
            special_tokens=self.special_tokens,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        return tokenizer

    def _word_piece(self, texts: list[str]) -> Tokenizer:
        """BERT's: words and punctuation; pieces inside a word begin with "##".

        The library numbers "##a", "##b" ... in the order in which a hash table yields the words,
        another in each run, and so decides ties. Numbered beforehand, as if they were special, they
        are always the same; the tokenizer is then made again from the vocabulary alone.
        """
        from tokenizers import trainers

        tokenizer = self._word_piece_of({})
        inside = set()
        for text in texts:
            normalized = tokenizer.normalizer.normalize_str(text)
            for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normalized):
                inside.update(word[1:])
        pieces = [f"##{character}" for character in sorted(inside)]
        trainer = trainers.WordPieceTrainer(
            vocab_size=self.vocab_size,
            special_tokens=[*self.special_tokens, *pieces],
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        tokenizer = self._word_piece_of(tokenizer.get_vocab())
        tokenizer.add_special_tokens(self.special_tokens)
        return tokenizer

    def _word_piece_of(self, vocabulary: dict[str, int]) -> Tokenizer:
        from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

        tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
        lowercase = self.kind == "BertWordPieceLowerCase"
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        return tokenizer


def train_tokenizer(corpus: Corpus, recipe: Recipe, sample_bytes: int) -> Tokenizer:
    """Trains on every n-th document, about `sample_bytes` of text."""
    stride = max(1, -(-corpus.total_bytes // sample_bytes))
    return recipe.train([doc.text for i, doc in enumerate(corpus.documents()) if i % stride == 0])


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
