# SPDX-License-Identifier: Apache-2.0
"""The command line of a tool, whose errors are one sentence: `OneSentenceParser`."""

from __future__ import annotations

import argparse
from typing import NoReturn


class OneSentenceParser(argparse.ArgumentParser):
    """Reports a bad flag in one line, without the usage text.

    Args:
        prog: name of the tool.
        description: its docstring, shown as it is.
        epilog: what stands below the flags, likewise.
    """

    def __init__(self, prog: str, description: str | None, epilog: str | None = None) -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")
