# SPDX-License-Identifier: Apache-2.0
"""Why a process failed, where torchrun reads it: `record_sentence`, `recorded_errors`.

torchrun prints 35 lines about its processes after all that these have printed. Its "Root Cause"
shows what a process has written to the file that torchrun names. The launcher and the bundled
trainer do.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

_VARIABLE = "TORCHELASTIC_ERROR_FILE"


def record_sentence(sentence: str, *, leaves_in_s: float = 0.0) -> None:
    """Has torchrun's report show a sentence, without a traceback; without torchrun does nothing.

    Call it on all ranks: each node's torchrun has a report of its own.

    Args:
        leaves_in_s: seconds that this process goes on. The report's root cause is the process that
            failed first.
    """
    path = os.environ.get(_VARIABLE)
    if not path:
        return
    # As torch.distributed.elastic's handler writes it; without a call stack the message is shown.
    detail = {"message": sentence, "extraInfo": {"timestamp": str(int(time.time() + leaves_in_s))}}
    with contextlib.suppress(OSError):
        Path(path).write_text(json.dumps({"message": detail}))


@contextlib.contextmanager
def recorded_errors() -> Iterator[None]:
    """Has torchrun's report show an exception that leaves this context, with its traceback."""
    try:
        yield
    except Exception as error:
        if os.environ.get(_VARIABLE):
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            with contextlib.suppress(OSError):
                get_error_handler().record_exception(error)
        raise
