# SPDX-License-Identifier: Apache-2.0
"""Errors in the thread that starts transfers: order, errors of its work, its end."""

from __future__ import annotations

from tests.mutation_tables import Mutation, table_of

MUTATIONS: list[Mutation] = []

STARTER = "unit/test_dispatcher.py::"
IN_ORDER = STARTER + "test_work_is_done_in_order_and_in_another_thread"
ERRORS = STARTER + "test_an_error_is_said_once_and_the_next_work_is_done"

dispatcher = table_of("transfer/dispatcher.py", MUTATIONS)

dispatcher(
    "work is done by the thread that submits it",
    """
            self._work.put(work)
""",
    """
            self._do(work)
""",
    IN_ORDER,
)
dispatcher(
    "what is submitted after the end waits for ever",
    """
        if self._is_closed:
""",
    """
        if False:
""",
    STARTER + "test_after_the_end_who_submits_does_the_work",
)
dispatcher(
    "what was submitted last is done first",
    """
        self._work: queue.SimpleQueue[Sequence[Callable[[], None]] | None] = queue.SimpleQueue()
""",
    """
        self._work: queue.LifoQueue[Sequence[Callable[[], None]] | None] = queue.LifoQueue()
""",
    IN_ORDER,
)
dispatcher(
    "the thread keeps a process alive",
    """
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
""",
    """
        self._thread = threading.Thread(target=self._run, name=name)
""",
    IN_ORDER,
)
dispatcher(
    "draining does not wait",
    """
        while not done.wait(_LOOK_S) and self._thread.is_alive():
            pass
""",
    "",
    STARTER + "test_draining_and_closing_wait_for_what_was_submitted[drain]",
)
dispatcher(
    "draining waits for one look only",
    """
        while not done.wait(_LOOK_S) and self._thread.is_alive():
            pass
""",
    """
        done.wait(_LOOK_S)
""",
    STARTER + "test_draining_and_closing_wait_for_what_was_submitted[drain]",
)
dispatcher(
    "draining waits for a thread that has ended",
    """
        while not done.wait(_LOOK_S) and self._thread.is_alive():
            pass
""",
    """
        done.wait()
""",
    STARTER + "test_closing_does_what_was_submitted_first",
    hangs=True,
)
dispatcher(
    "closing ends no thread",
    """
        self._work.put(None)
        self._thread.join()
""",
    "",
    STARTER + "test_closing_does_what_was_submitted_first",
)
dispatcher(
    "closing does not wait",
    """
        self._thread.join()
""",
    "",
    STARTER + "test_draining_and_closing_wait_for_what_was_submitted[close]",
)
dispatcher(
    "of work that was submitted together the last is done first",
    """
        for piece in work:
""",
    """
        for piece in reversed(work):
""",
    IN_ORDER,
)
dispatcher(
    "an error ends the thread",
    """
            except BaseException as error:  # also from outside: nobody could take this one's place
""",
    """
            except GeneratorExit as error:
""",
    ERRORS,
)
dispatcher(
    "an error from outside ends the thread",
    """
            except BaseException as error:  # also from outside: nobody could take this one's place
""",
    """
            except Exception as error:
""",
    ERRORS,
)
dispatcher(
    "an error keeps the rest of what was submitted with it back",
    """
        for piece in work:
            try:
                piece()
""",
    """
        if True:
            try:
                for piece in work:
                    piece()
""",
    ERRORS,
)
dispatcher(
    "an error is said each time",
    """
                    self._reported.add(type(error))
""",
    "",
    ERRORS,
)
dispatcher(
    "an error is not said",
    """
                    logger.warning("activation offload: a transfer could not start: %s", reason)
""",
    "",
    ERRORS,
)
dispatcher(
    "after one error no other kind is said",
    """
                if type(error) not in self._reported:
""",
    """
                if not self._reported:
""",
    ERRORS,
)
dispatcher(
    "the log record holds the error",
    """
                    logger.warning("activation offload: a transfer could not start: %s", reason)
""",
    """
                    logger.warning("activation offload: a transfer could not start: %r", error)
""",
    STARTER + "test_an_error_that_was_said_keeps_nothing_alive",
)
dispatcher(
    "a thread that waits keeps its last work alive",
    """
            work = None  # while this thread waits, it keeps nothing alive
""",
    "",
    STARTER + "test_a_dispatcher_that_waits_keeps_nothing_alive",
)
