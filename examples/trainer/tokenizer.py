# SPDX-License-Identifier: Apache-2.0
"""Tokenizers, as megatron-core's datasets ask for them.

The datasets read no text: they need the vocabulary's size, the end-of-document id and a stable
identity for their caches; those of BERT and T5 the special tokens that they put into the text. A
model's task makes its tokenizer once, before the datasets are built.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
from collections import OrderedDict
from pathlib import Path
from typing import Any, ClassVar

from .errors import UserError

END_OF_DOCUMENT = "<|endoftext|>"
_NULL_VOCAB_SIZE = 4096


class Tokenizer:
    """What every tokenizer here has in common.

    Attributes:
        vocab_size: Number of ids, end of document included, before padding.
        eod: Id of the end-of-document token.
        unique_identifiers: Names the tokenizer in the datasets' cache keys.
    """

    def __init__(self, vocab_size: int, eod: int, **identity: str) -> None:
        self.vocab_size = vocab_size
        self.eod = eod
        self.unique_identifiers: OrderedDict[str, Any] = OrderedDict(
            {"class": type(self).__name__, "vocab_size": vocab_size, "eod": eod, **identity}
        )

    def padded_vocab_size(self, divisible_by: int, tensor_parallel_size: int) -> int:
        """Vocabulary size of the model: a multiple of divisible_by x tensor_parallel_size."""
        multiple = divisible_by * tensor_parallel_size
        return -(-self.vocab_size // multiple) * multiple


class NullTokenizer(Tokenizer):
    """Ids without text; the last id ends a document."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size=vocab_size, eod=vocab_size - 1)


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json` of the Hugging Face `tokenizers` library.

    Attributes:
        special_tokens: Names of attributes that hold an id, and the tokens looked for, in order.
        end: Which of them ends a document.
        purpose: What a user is told where one is missing.
        inv_vocab: Text of each id.

    Raises:
        UserError: The file is missing, unreadable, or lacks a special token.
    """

    special_tokens: ClassVar[dict[str, tuple[str, ...]]] = {"eod": (END_OF_DOCUMENT,)}
    end: ClassVar[str] = "eod"
    purpose: ClassVar[str] = "documents end with it"

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as Backend

        if not path.is_file():
            raise UserError(f"--tokenizer-model {path} does not exist; expected a tokenizer.json")
        try:
            self._backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"--tokenizer-model {path} is not a tokenizer.json: {error}") from error
        ids = {name: self._find(tokens) for name, tokens in self.special_tokens.items()}
        missing = [self.special_tokens[name][0] for name, number in ids.items() if number is None]
        if missing:
            raise UserError(
                f"--tokenizer-model {path} has no {', no '.join(missing)} token; {self.purpose}"
            )
        vars(self).update(ids)
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        size = self._backend.get_vocab_size(with_added_tokens=True)
        super().__init__(vocab_size=size, eod=getattr(self, self.end), sha256=content)
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        # In order: BERT's dataset draws random words from it, and the library's order is random.
        self.inv_vocab = dict(sorted((number, text) for text, number in vocabulary.items()))

    def _find(self, tokens: tuple[str, ...]) -> int | None:
        numbers = (self._backend.token_to_id(token) for token in tokens)
        return next((int(number) for number in numbers if number is not None), None)

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text."""
        return list(self._backend.encode(text).ids)

    def detokenize(self, ids: list[int]) -> str:
        """Text of token ids."""
        return str(self._backend.decode(ids))

    def describe(self) -> str:
        """The identity as JSON, for logs."""
        return json.dumps(self.unique_identifiers)


class MaskedTokenizer(HuggingFaceTokenizer):
    """A tokenizer for core's datasets of masked language modelling.

    Raises:
        UserError: As above, or padding has an id that the datasets cannot take.
    """

    cls: int | None = None
    sep: int | None = None
    mask: int
    pad: int

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        if self.pad != 0:
            # They write it where a mask should have 0, and 0 where it should stand.
            raise UserError(
                f"--tokenizer-model {path} has {self.inv_vocab[self.pad]} at id {self.pad}; "
                "megatron-core's datasets need it at id 0"
            )


class BertTokenizer(MaskedTokenizer):
    """WordPiece as BERT has it: pieces inside a word begin with "##"."""

    special_tokens: ClassVar[dict[str, tuple[str, ...]]] = {
        "cls": ("[CLS]",),
        "sep": ("[SEP]",),
        "mask": ("[MASK]",),
        "pad": ("[PAD]",),
    }
    end: ClassVar[str] = "sep"
    purpose: ClassVar[str] = (
        "train one for BERT with tools/preprocess_data.py --tokenizer-type BertWordPieceLowerCase"
    )


class T5Tokenizer(MaskedTokenizer):
    """A tokenizer with sentinels, which stand in the encoder's text for what the decoder is to say.

    Attributes:
        additional_special_tokens_ids: Ids of <extra_id_0>, <extra_id_1> and so on.
    """

    special_tokens: ClassVar[dict[str, tuple[str, ...]]] = {
        "bos": ("<s>", "<bos>", "[BOS]"),
        "eos": ("</s>", "<eos>", "[EOS]"),
        "mask": ("<mask>", "[MASK]"),
        "pad": ("<pad>", "[PAD]"),
        "first_sentinel": ("<extra_id_0>",),
    }
    end: ClassVar[str] = "eos"
    purpose: ClassVar[str] = "train one for T5 with tools/preprocess_data.py --vocab-extra-ids 100"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        sentinels = (self._find((f"<extra_id_{number}>",)) for number in itertools.count())
        self.additional_special_tokens_ids = list(
            itertools.takewhile(lambda number: number is not None, sentinels)
        )


def build_tokenizer(args: argparse.Namespace) -> Tokenizer:
    """The tokenizer that --tokenizer-type and --tokenizer-model name."""
    if args.tokenizer_type == "NullTokenizer":
        return NullTokenizer(args.vocab_size or _NULL_VOCAB_SIZE)
    return HuggingFaceTokenizer(Path(args.tokenizer_model))
