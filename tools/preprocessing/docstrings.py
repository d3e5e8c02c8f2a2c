# SPDX-License-Identifier: Apache-2.0
"""The prose of the Python standard library: `Prose`, the quickstart's corpus for BERT and T5.

Every installed Python has it: the docstrings of its modules, and the chapters of the language
reference that `help()` shows (pydoc_data/topics.py; some distributions leave it out). Code
examples, tables and signatures are left out.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from preprocessing.corpus import Corpus, Document

_TOPICS = "topics.py"
_BLANK_LINE = re.compile(r"\n\s*\n")
_SENTENCE_END = re.compile(r"""[.!?:]["')]*$""")
_MIN_WORDS = 5
_MIN_LETTERS = 0.75  # of all that is not a space


@dataclass
class Prose(Corpus):
    """Python files read for their docstrings: one document per module, one per topic."""

    @property
    def total_bytes(self) -> int:
        """Bytes of prose."""
        total = sum(size for _, size in self._texts)
        return total if self.max_bytes is None else min(total, self.max_bytes)

    def _read(self) -> Iterator[tuple[Document, int]]:
        yield from self._texts

    @functools.cached_property
    def _texts(self) -> list[tuple[Document, int]]:
        """Parsing takes much longer than all the rest, and what it finds is small: it is kept."""
        texts = (text for path in self.files for text in _texts_of(path))
        return [(Document("text", text), len(text.encode())) for text in texts]


def _texts_of(path: Path) -> list[str]:
    """The texts of one Python file; none if it cannot be parsed."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return []
    if path.name == _TOPICS:
        constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
        return [
            prose for text in constants if isinstance(text, str) and (prose := keep_prose(text))
        ]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = (
        ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, documented)
    )
    prose = "\n\n".join(text for docstring in docstrings if (text := keep_prose(docstring)))
    return [prose] if prose else []


def keep_prose(text: str) -> str:
    """The paragraphs that consist of sentences, with a blank line between them."""
    return "\n\n".join(
        paragraph.strip() for paragraph in _BLANK_LINE.split(text) if _is_prose(paragraph.strip())
    )


def _is_prose(paragraph: str) -> bool:
    if ">>>" in paragraph or not _SENTENCE_END.search(paragraph):
        return False
    characters = "".join(paragraph.split())
    num_letters = sum(character.isalpha() for character in characters)
    return len(paragraph.split()) >= _MIN_WORDS and num_letters >= _MIN_LETTERS * len(characters)
