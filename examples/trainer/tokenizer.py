# SPDX-License-Identifier: Apache-2.0
"""Tokenizers, as megatron-core's datasets ask for them.

The datasets read no text: they need the vocabulary's size, the end-of-document id and a stable
identity for their caches. `build_tokenizer` is called once, before the datasets are built.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

from .arguments import UserError

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

    Raises:
        UserError: The file is missing, unreadable, or lacks the end-of-document token.
    """

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as Backend

        if not path.is_file():
            raise UserError(f"--tokenizer-model {path} does not exist; expected a tokenizer.json")
        try:
            self._backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"--tokenizer-model {path} is not a tokenizer.json: {error}") from error
        eod = self._backend.token_to_id(END_OF_DOCUMENT)
        if eod is None:
            raise UserError(
                f"--tokenizer-model {path} has no {END_OF_DOCUMENT} token; documents end with it"
            )
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        size = self._backend.get_vocab_size(with_added_tokens=True)
        super().__init__(vocab_size=size, eod=eod, sha256=content)

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text."""
        return list(self._backend.encode(text).ids)

    def detokenize(self, ids: list[int]) -> str:
        """Text of token ids."""
        return str(self._backend.decode(ids))

    def describe(self) -> str:
        """The identity as JSON, for logs."""
        return json.dumps(self.unique_identifiers)


def build_tokenizer(args: argparse.Namespace) -> Tokenizer:
    """The tokenizer that --tokenizer-type and --tokenizer-model name."""
    if args.tokenizer_type == "NullTokenizer":
        return NullTokenizer(args.vocab_size or _NULL_VOCAB_SIZE)
    return HuggingFaceTokenizer(Path(args.tokenizer_model))
