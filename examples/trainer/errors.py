# SPDX-License-Identifier: Apache-2.0
"""How a bad flag or file is reported: one sentence and exit code 2: `UserError`, `fail`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import NoReturn

from megatron.offload.integration.torchrun_report import record_sentence

# The other ranks wait this long before they leave: a launcher that sees one rank fail kills the
# rest, and rank 0 must have said why by then.
_EXIT_DELAY_S = 2.0


class UserError(Exception):
    """What the user can put right; the message is one sentence."""


def program() -> str:
    """The script that was started, as its messages call it."""
    return Path(sys.argv[0]).name


def fail(message: str) -> NoReturn:
    """Prints one sentence and leaves with exit code 2.

    torchrun's report shows it too. Other ranks than 0 first give it time to say the same: then a
    launcher has ended them.
    """
    rank = int(os.environ.get("RANK", "0"))
    where = "" if rank == 0 else f" on rank {rank}"
    sentence = " ".join(message.split())
    record_sentence(
        f"{program()}: error{where}: {sentence}", leaves_in_s=_EXIT_DELAY_S if rank > 0 else 0.0
    )
    if rank > 0:
        time.sleep(_EXIT_DELAY_S)
    print(f"{program()}: error{where}: {sentence}", file=sys.stderr, flush=True)
    sys.exit(2)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one sentence, without the usage text."""

    def error(self, message: str) -> NoReturn:
        fail(message)
