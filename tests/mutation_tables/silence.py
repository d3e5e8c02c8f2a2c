# SPDX-License-Identifier: Apache-2.0
"""Errors in what keeps a library quiet, and in what shares a GPU's counters of peak memory."""

from __future__ import annotations

from tests.mutation_tables import Mutation, table_of

MUTATIONS: list[Mutation] = []

SILENCE = "unit/test_silence.py::"
PEAK = "unit/test_cuda_peak.py::"

silence = table_of("placement/silence.py", MUTATIONS)

silence(
    "output does not come back",
    """
        stack.callback(os.dup2, kept, _STDOUT)
""",
    "",
    SILENCE + "test_output_comes_back_after_an_error",
)
silence(
    "what was printed before is lost",
    """
        library.fflush(None)  # what was printed before goes where it should
""",
    "",
    SILENCE + "test_what_was_printed_before_is_not_lost",
)
silence(
    "what the library has not yet printed is seen later",
    """
        stack.callback(library.fflush, None)  # while it still goes nowhere
""",
    "",
    SILENCE + "test_what_was_printed_before_is_not_lost",
)
silence(
    "threads are silent in each other's way",
    """
    with _one_at_a_time, contextlib.ExitStack() as stack:
""",
    """
    with contextlib.ExitStack() as stack:
""",
    SILENCE + "test_threads_that_are_silent_together_leave_the_output_as_it_was",
)

rows = table_of("placement/rows.py", MUTATIONS)

rows(
    "HiGHS is heard",
    """
        with silent_output():
""",
    """
        if True:
""",
    SILENCE + "test_a_plan_is_made_without_a_word_of_the_solvers",
)

program = table_of("placement/program.py", MUTATIONS)

program(
    "the program fills the room of an allocator's fragments",
    """
            most /= 1 + self._profile.allocator_slack
""",
    "",
    "unit/test_solver.py::test_the_program_leaves_room_for_fragments",
)

peak = table_of("storage/cuda_peak.py", MUTATIONS)

peak(
    "what others saw is forgotten at a reset",
    """
            self._of_others[reader.index] = _with_peaks(stats, self._of_others.get(reader.index))
""",
    "",
    PEAK + "test_a_trainer_reads_the_peak_of_the_run",
)
peak(
    "what others saw before the last reset but one is forgotten",
    """
            self._of_others[reader.index] = _with_peaks(stats, self._of_others.get(reader.index))
""",
    """
            self._of_others[reader.index] = stats
""",
    PEAK + "test_a_trainer_reads_the_peak_of_the_run",
)
peak(
    "others cannot reset",
    """
            self._of_others.pop(index, None)
""",
    "",
    PEAK + "test_a_trainer_that_resets_the_counters_gets_what_it_asked_for",
)
peak(
    "readers lose their peak when others reset",
    """
            index = _index(device)
            self._remember(index)
""",
    """
            index = _index(device)
""",
    PEAK + "test_a_trainer_that_resets_the_counters_gets_what_it_asked_for",
)
peak(
    "a reader keeps the peak from before its reset",
    """
            reader.remembered_bytes = 0
""",
    "",
    PEAK + "test_two_readers_do_not_see_each_other",
)
peak(
    "readers of one GPU remember another's peak",
    """
            if one.index == index:
""",
    """
            if True:
""",
    PEAK + "test_each_gpu_has_its_own",
)
