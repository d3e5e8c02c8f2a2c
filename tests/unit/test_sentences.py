# SPDX-License-Identifier: Apache-2.0
"""Where a sentence ends, which paragraphs are prose, and that our own sentences name who acts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from preprocessing.docstrings import Prose, keep_prose
from preprocessing.sentences import split_sentences

ROOT = Path(__file__).resolve().parents[2]
# Words that stand for an actor whom a sentence does not name: the optimizer, the caller, a thread.
UNNAMED = re.compile(
    r"nobody|whoever|somebody|someone\b|anybody|everybody|everyone|\bas ever\b", re.IGNORECASE
)
# Lines of the package, README.md and docs that may have such a word, each with its reason.
ALLOWED: dict[str, str] = {}


@pytest.mark.parametrize(
    "marked",
    [
        "",
        "No mark at the end",
        "One.|Two!|Three?|Four",
        'He said "stop."|Then (at once.)|"Why?"|Silence.',
        "It is 3.5 times faster.|Yes.",
        "Dr. Smith met J. R. Jones, e.g. Monday.|Then he left.",
        "Use a list, a tuple, etc. and go on.|Or not.",
        "Lists, tuples, etc.|They all work.",
        "Wait... what?|It ended...|Now.",
        "Between you and I.|No. 5 is next.",
        "1. First step.|2. Second.",
        "\u00c0 demain.|\u00c9t\u00e9 2024.",
    ],
)
def test_sentences_end_where_a_reader_ends_them(marked: str) -> None:
    """`marked` has a bar where a sentence ends; the text has a space there."""
    assert split_sentences(marked.replace("|", " ")) == [part for part in marked.split("|") if part]


def test_full_width_marks_need_no_space() -> None:
    sentences = ["\u6211\u4eec\u8d70\u3002", "\u4f60\u597d\uff01"]
    assert split_sentences("".join(sentences)) == sentences


def test_line_breaks_go_and_paragraphs_and_list_items_end_sentences() -> None:
    text = "A sentence\n  over lines. A title\n \nBody\n- item one\n  goes on\n* two\n3) three\n"
    assert split_sentences(text) == [
        "A sentence over lines.",
        "A title",
        "Body",
        "- item one goes on",
        "* two",
        "3) three",
    ]


def test_no_word_is_lost() -> None:
    text = Path(__file__).read_text() + Path(split_sentences.__code__.co_filename).read_text()
    assert " ".join(split_sentences(text)).split() == text.split()


def test_prose_is_kept_and_code_and_tables_are_left_out() -> None:
    prose = "This function does one thing only.\nIt does it well."
    code = ">>> f(1)\n2\n\n    return x + 1\n\nParameters:"
    table = "+-----+------+ | = | == | . . . . . . . ."
    assert keep_prose(f"{prose}\n\n{code}\n\n{table}\n\n{prose}") == f"{prose}\n\n{prose}"


def test_a_module_is_a_document_of_its_docstrings(tmp_path: Path) -> None:
    sentence = "This is the {} of a module in a test."
    (tmp_path / "a.py").write_text(
        f'"""{sentence.format("docstring")}"""\n'
        f'class A:\n    """{sentence.format("class")}"""\n'
        f'    async def f(self):\n        """{sentence.format("method")}"""\n'
        f'x = "{sentence.format("value")}"\n'
    )
    (tmp_path / "b.py").write_text("def broken(:\n")
    (tmp_path / "topics.py").write_text(
        f"topics = {{'one': '{sentence.format('topic')}', 'two': 'No.', 'n': 3}}\n"
    )
    corpus = Prose(sorted(tmp_path.iterdir()), ["text"], None)
    assert [document.text for document in corpus.documents()] == [
        "\n\n".join(sentence.format(name) for name in ("docstring", "class", "method")),
        sentence.format("topic"),
    ]
    assert corpus.num_bytes == corpus.total_bytes


def unnamed_actors(text: str, allowed: Mapping[str, str]) -> list[str]:
    """The lines that leave their actor unnamed, without those that are allowed."""
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if UNNAMED.search(line) and line not in allowed]


@pytest.mark.parametrize(
    "line",
    ["NOBODY = -1", "None: nobody does.", "Whoever calls it", "of somebody else's", "as ever."],
)
def test_an_actor_without_a_name_is_found_unless_its_line_is_allowed(line: str) -> None:
    text = f"The optimizer waits.\n    {line}\nAs everything does."
    assert unnamed_actors(text, {}) == [line]
    assert unnamed_actors(text, {line: "a quotation"}) == []


def _checked_files() -> list[Path]:
    package = ROOT / "megatron" / "offload"
    sources = sorted(package.rglob("*.py"))
    docs = [path for ending in ("md", "json") for path in sorted(ROOT.glob(f"docs/**/*.{ending}"))]
    return [*sources, *docs, ROOT / "README.md"]


def test_sentences_name_who_acts() -> None:
    """Say "the optimizer", "the caller", "a thread of the tier", or what is so without an actor."""
    found = {
        str(path.relative_to(ROOT)): lines
        for path in _checked_files()
        if (lines := unnamed_actors(path.read_text(), ALLOWED))
    }
    assert not found


def test_allowed_lines_are_still_there() -> None:
    lines = {line.strip() for path in _checked_files() for line in path.read_text().splitlines()}
    assert not ALLOWED.keys() - lines
