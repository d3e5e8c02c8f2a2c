# SPDX-License-Identifier: Apache-2.0
"""What HiGHS prints by itself reaches nobody, and what others print still gets where it should."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from typing import Any

import pytest

from megatron.offload.planner.solver import milp
from megatron.offload.planner.solver.solve import solve
from tests.support.processes import finish, start_python
from tests.support.stages import stage

LIBRARY = ctypes.CDLL(None)
FULLY_BUFFERED, UNBUFFERED = 0, 2  # <stdio.h>


def chatter() -> None:
    """As a library does it: through C's buffer, and straight to the descriptor."""
    LIBRARY.printf(b"from the library's buffer\n")
    os.write(1, b"from the library\n")


def test_a_plan_is_made_without_a_word_of_the_solvers(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    milp_of_scipy, asked = milp.milp, []

    def talking(*args: Any, **more: Any) -> Any:
        chatter()
        asked.append(1)
        return milp_of_scipy(*args, **more)

    monkeypatch.setattr(milp, "milp", talking)
    print("before", flush=True)
    solve(stage(4), budget_bytes=20)
    os.write(1, b"after\n")
    assert asked and capfd.readouterr().out == "before\nafter\n"


@pytest.fixture
def buffered_stdout() -> Iterator[None]:
    """C keeps what is printed until it is flushed, whatever PYTHONUNBUFFERED says."""
    stdout = ctypes.c_void_p.in_dll(LIBRARY, "stdout")
    buffer = ctypes.create_string_buffer(4096)
    assert LIBRARY.setvbuf(stdout, buffer, FULLY_BUFFERED, ctypes.c_size_t(4096)) == 0
    yield
    LIBRARY.fflush(None)
    LIBRARY.setvbuf(stdout, None, UNBUFFERED, ctypes.c_size_t(0))


@pytest.mark.usefixtures("buffered_stdout")
def test_what_was_printed_before_is_not_lost(capfd: pytest.CaptureFixture[str]) -> None:
    LIBRARY.printf(b"before\n")  # it is in C's buffer still
    with milp._silent_output():
        chatter()
    LIBRARY.printf(b"after\n")
    LIBRARY.fflush(None)
    assert capfd.readouterr().out == "before\nafter\n"


def test_output_comes_back_after_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ArithmeticError), milp._silent_output():
        raise ArithmeticError
    os.write(1, b"after\n")
    assert capfd.readouterr().out == "after\n"


CLOSED = """
    import os
    from megatron.offload.planner.solver import milp
    os.close(1)
    with milp._silent_output():
        print("said", file=__import__("sys").stderr)
"""


def test_a_process_without_standard_output_is_no_error() -> None:
    code, _, errors = finish(start_python(CLOSED))
    assert code == 0 and errors == "said\n", errors
