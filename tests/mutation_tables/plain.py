# SPDX-License-Identifier: Apache-2.0
"""A file of the package as the tables quote it, however its lines are broken: `plain`."""

from __future__ import annotations

import functools
import io
import keyword
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass, field

_OPENERS, _CLOSERS = "([{", ")]}"
# Behind these words a formatter puts what is too long for a line into parentheses; behind the
# others a tuple as well, and in two of them commas never mean one.
_BEFORE_ONE = {"assert", "if", "elif", "while", "+=", "-=", "|="}
_BEFORE_MANY = {"=", "return", "with", "import"}
_NO_TUPLE = {"with", "import"}
_BEHIND = {":", ",", ""}  # "": the end of a statement
_NOT_SAID = (tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT)


@dataclass
class _Bracket:
    """One that is open.

    Attributes:
        number: of its token in the statement.
        word: before it.
        wraps: what stands in it could stand there without it.
        commas: those between what stands in it.
        is_generator: which cannot stand without it.
    """

    number: int
    word: str
    wraps: bool
    commas: list[int] = field(default_factory=list)
    is_generator: bool = False

    def is_tuple_of_one(self, opener: str, behind: bool, last: int) -> bool:
        """Of which the comma is all that says so: `behind` a name `[x,]` is one, and `(x,)` not."""
        is_one = self.commas == [last] and self.word not in _NO_TUPLE
        return is_one and (opener == "[") == behind


@functools.lru_cache(maxsize=256)
def plain(source: str) -> str:
    """The same program, with each statement on a line of its own and nothing between them.

    Gone are comments, blank lines, line breaks in brackets, commas behind a last element and
    parentheses that stand there only for a line break.
    """
    lines = source.splitlines()
    statements: list[str] = []
    tokens: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NEWLINE:
            statements.append(" " * tokens[0].start[1] + _one_line(tokens, lines) + "\n")
            tokens = []
        elif token.type not in _NOT_SAID:
            tokens.append(token)
    return "".join(statements)


def _one_line(tokens: Sequence[tokenize.TokenInfo], lines: Sequence[str]) -> str:
    """A statement. Each of its tokens becomes a piece, with the space before it."""
    pieces: list[str] = []
    brackets: list[_Bracket] = []
    for number, token in enumerate(tokens):
        before = tokens[number - 1] if number else None
        behind = tokens[number + 1] if number + 1 < len(tokens) else None
        pieces.append(_gap(before, token, lines) + token.string)
        if token.string in _OPENERS:
            word = before.string if before else ""
            wraps = token.string == "(" and not brackets and word in _BEFORE_ONE | _BEFORE_MANY
            wraps = wraps and behind is not None and behind.start[0] > token.end[0]
            brackets.append(_Bracket(number, word, wraps))
        elif token.string == "," and brackets:
            brackets[-1].commas.append(number)
        elif token.string == "for" and brackets:
            brackets[-1].is_generator = True
        elif token.string in _CLOSERS:
            own = brackets.pop()
            opener = tokens[own.number].string
            if own.is_tuple_of_one(opener, _ends_a_value(tokens[: own.number]), number - 1):
                continue
            if own.commas[-1:] == [number - 1]:
                pieces[own.commas.pop()] = ""
            may_be_bare = not own.is_generator and (own.word in _BEFORE_MANY or not own.commas)
            if own.wraps and may_be_bare and (behind.string if behind else "") in _BEHIND:
                pieces[own.number], pieces[number] = " ", ""
    return "".join(pieces)


def _gap(before: tokenize.TokenInfo | None, token: tokenize.TokenInfo, lines: Sequence[str]) -> str:
    """What stands between two tokens, or one space for a line break where one belongs."""
    if before is None:
        return ""
    if before.end[0] == token.start[0]:
        return lines[token.start[0] - 1][before.end[1] : token.start[1]]
    return "" if before.string in _OPENERS or token.string in (*_CLOSERS, ".") else " "


def _ends_a_value(tokens: Sequence[tokenize.TokenInfo]) -> bool:
    """Whether a bracket behind these is a call or a subscript."""
    if not tokens:
        return False
    last = tokens[-1].string
    return last in _CLOSERS or (last.isidentifier() and not keyword.iskeyword(last))
