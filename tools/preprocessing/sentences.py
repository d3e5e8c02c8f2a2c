# SPDX-License-Identifier: Apache-2.0
"""Text into sentences by rules: `split_sentences`, for `--split-sentences`.

BERT and T5 need sentences as units, not perfect ones: a sentence ends where a full stop, a question
or an exclamation mark is followed by a space and by what can begin a sentence. No model, no
download, the same text gives the same sentences. Made for languages with capital letters; of others
it knows the full-width marks.
"""

from __future__ import annotations

import re

# A blank line, or the beginning of a list item: what is beyond is another paragraph.
_PARAGRAPH = re.compile(r"\n[^\S\n]*\n|\n(?=[^\S\n]*(?:[-*\u2022]|\d+[.)])\s)")
# The mark with what closes after it, before a space; full-width marks need none.
_END = re.compile(
    r"""[.!?\u2026]+["'\u201d\u2019)\]]*(?=\s)|[\u3002\uff01\uff1f]+[\u201d\u300d]*"""
)
_FULL_WIDTH = "\u3002\uff01\uff1f"
_OPENING = "\"'\u201c\u2018([\u00ab*_`"
_BEFORE_WORD = re.compile(f"[ {re.escape(_OPENING)}]*")
# Without the last full stop. Words that end sentences too ("etc") are not among them: what follows
# them decides.
_ABBREVIATION = re.compile(
    r"mr|mrs|ms|dr|prof|st|jr|sr|vs|cf|e\.g|i\.e|eg|ie|viz|al|figs?|eq|sec|ch|vol|no|pp?|eds?|u\.s|"
    r"u\.k|approx|resp|incl|jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec",
    re.IGNORECASE,
)


def split_sentences(text: str) -> list[str]:
    """The sentences of a text, in order, each with single spaces and without line breaks."""
    sentences: list[str] = []
    for paragraph in _PARAGRAPH.split(text):
        line = " ".join(paragraph.split())
        begin = 0
        for end in _END.finditer(line):
            if _ends_here(line, begin, end):
                sentences.append(line[begin : end.end()].strip())
                begin = end.end()
        sentences.append(line[begin:].strip())
    return [sentence for sentence in sentences if sentence]


def _ends_here(line: str, begin: int, end: re.Match[str]) -> bool:
    """Whether a mark ends the sentence that starts at `begin`."""
    mark = end.group()
    if mark[0] in _FULL_WIDTH:
        return True
    after = _BEFORE_WORD.match(line, end.end())
    following = line[after.end() : after.end() + 1] if after else ""
    if not following or following.islower():
        return False
    if mark[0] != "." or mark.startswith(".."):
        return True
    word_begin = max(begin, line.rfind(" ", begin, end.start()) + 1)
    word = line[word_begin : end.start()].lstrip(_OPENING)
    is_initial = len(word) == 1 and word.isupper() and word != "I"
    is_list_number = word.isdecimal() and not line[begin:word_begin].strip()
    return not (is_initial or is_list_number or _ABBREVIATION.fullmatch(word))
