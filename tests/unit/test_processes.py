# SPDX-License-Identifier: Apache-2.0
"""What tests drop of a process's output is other libraries', and nothing of ours."""

from __future__ import annotations

from tests.support.processes import finish, our_lines, start_python

NANOBIND = """\
nanobind: leaked 2 instances!
 - leaked instance 0x7f08ad0c9568 of type "triton._C.libtriton.ir.attribute"
nanobind: leaked 64 types!
 - leaked type "triton._C.libtriton.ir.builder"
 - ... skipped remainder
nanobind: leaked 514 functions!
 - leaked function ""
nanobind: this is likely caused by a reference counting issue in the binding code.
See https://nanobind.readthedocs.io/en/latest/refleaks.html"""


def test_a_report_of_nanobind_is_dropped_and_every_other_line_stays() -> None:
    ours = "megatron-offload: error: leaked 2 instances!\n\n - leaked, see nanobind\nno end"
    assert our_lines(f"{NANOBIND}\n{ours}") == ours
    assert our_lines(f"{ours}\n{NANOBIND}") == f"{ours}\n"


def test_a_finished_process_has_said_what_is_left() -> None:
    script = "import sys; sys.stderr.write(sys.argv[1]); sys.exit(3)"
    assert finish(start_python(script, f"ours\n{NANOBIND}")) == (3, "", "ours\n")
