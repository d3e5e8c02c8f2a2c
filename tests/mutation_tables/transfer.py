# SPDX-License-Identifier: Apache-2.0
"""Errors in transfers: how they end, who is told, what is kept."""

from __future__ import annotations

from tests.mutation_tables import Mutation, table_of

MUTATIONS: list[Mutation] = []

TRANSFER = "unit/test_transfer.py::"
CANCELLED_OR_ABANDONED = TRANSFER + "test_gathered_parts_are_cancelled_or_abandoned_together"
KEEPS_NOTHING = TRANSFER + "test_finished_work_keeps_nothing_alive"
ENDS = "unit/test_how_transfers_end.py::"

transfer = table_of("tiers/transfer.py", MUTATIONS)

transfer(
    "an error is lost",
    """
            self.set_exception(error.with_traceback(None))
""",
    """
            self.set_result(None)
""",
    TRANSFER + "test_an_error_surfaces_in_wait_and_the_thread_goes_on",
)
transfer(
    "wait does not raise",
    """
            self.result()
""",
    """
            self.exception()
""",
    TRANSFER + "test_an_error_surfaces_in_wait_and_the_thread_goes_on",
)
transfer(
    "wait does not wait",
    """
            self.result()
""",
    """
            pass
""",
    ENDS + "test_wait_returns_when_the_work_is_done",
)
transfer(
    "a transfer that was abandoned runs",
    """
        if self._abandoned:
            self.cancel()
""",
    "",
    CANCELLED_OR_ABANDONED,
)
transfer(
    "a transfer that was cancelled runs",
    """
        if not self.set_running_or_notify_cancel():
            return
""",
    "",
    ENDS + "test_a_cancelled_transfer_leaves_its_thread_alone",
)
transfer(
    "work that was done is kept",
    """
        else:
            self._work = None
            self.set_result(None)
""",
    """
        else:
            self.set_result(None)
""",
    KEEPS_NOTHING + "[False]",
)
transfer(
    "whoever waits is told before the work is let go",
    """
        else:
            self._work = None
            self.set_result(None)
""",
    """
        else:
            self.set_result(None)
            self._work = None
""",
    ENDS + "test_work_is_let_go_before_anybody_is_told[False]",
)
transfer(
    "work that failed is kept",
    """
        except Exception as error:
            self._work = None
""",
    """
        except Exception as error:
""",
    KEEPS_NOTHING + "[True]",
)
transfer(
    "whoever waits is told of an error before the work is let go",
    """
            self._work = None
            # The traceback, and that of an error behind this one, would keep the frame of `work`
            # alive, and with it the buffer.
            error.__context__ = error.__cause__ = None
            self.set_exception(error.with_traceback(None))
""",
    """
            error.__context__ = error.__cause__ = None
            self.set_exception(error.with_traceback(None))
            self._work = None
""",
    ENDS + "test_work_is_let_go_before_anybody_is_told[True]",
)
transfer(
    "an error keeps the frames that it came through",
    """
            self.set_exception(error.with_traceback(None))
""",
    """
            self.set_exception(error)
""",
    KEEPS_NOTHING + "[True]",
)
transfer(
    "an error keeps the one behind it, and its frames",
    """
            error.__context__ = error.__cause__ = None
""",
    "",
    ENDS + "test_an_error_behind_an_error_keeps_nothing_alive",
)
transfer(
    "whoever has waited keeps the transfer in a cycle with its error",
    """
            self = None  # type: ignore[assignment]  # an error refers to this frame, and we to it
""",
    """
            pass
""",
    ENDS + "test_a_failed_transfer_dies_with_its_error",
)
transfer(
    "work of a transfer that was failed is kept",
    """
        self._work = None
        if not self.done():
""",
    """
        if not self.done():
""",
    ENDS + "test_a_transfer_whose_thread_died_keeps_nothing_and_tells_it_once",
)
transfer(
    "a transfer that ended well can still be failed",
    """
        if not self.done():
            self.set_exception(OSError(errno.ECANCELED, reason))
""",
    """
        self.set_exception(OSError(errno.ECANCELED, reason))
""",
    ENDS + "test_a_transfer_whose_thread_died_keeps_nothing_and_tells_it_once",
)
transfer(
    "cancelled work is kept",
    """
        if cancelled:
            self._work = None
""",
    "",
    ENDS + "test_a_cancelled_transfer_gives_its_buffer_up_at_once",
)
transfer(
    "a gathered transfer is done with its first part",
    """
            if self._num_left:
                return
""",
    """
            if self.done():
                return
            self.set_result(None)
            return
""",
    TRANSFER + "test_gathered_parts_are_done_together",
)
transfer(
    "a gathered transfer fails before all of its parts have ended",
    """
            if self._num_left:
                return
""",
    """
            if self._num_left:
                if not _.cancelled() and (error := _.exception()) is not None:
                    self.set_exception(error)
                return
            if self.done():
                return
""",
    TRANSFER + "test_gathered_parts_fail_if_one_does_and_only_when_all_have_ended",
)
transfer(
    "a gathered transfer hides the error of a part",
    """
        if errors:
""",
    """
        if False:
""",
    TRANSFER + "test_gathered_parts_fail_if_one_does_and_only_when_all_have_ended",
)
transfer(
    "a gathered transfer is done though a part was cancelled",
    """
            Future.cancel(self)
""",
    """
            self.set_result(None)
""",
    CANCELLED_OR_ABANDONED,
)
transfer(
    "the parts of an abandoned transfer run",
    """
            part.abandon()
""",
    """
            pass
""",
    CANCELLED_OR_ABANDONED,
)
transfer(
    "the parts of a cancelled transfer run",
    """
        cancelled = [part.cancel() for part in self._parts]
""",
    """
        cancelled = [False for part in self._parts]
""",
    ENDS + "test_cancelling_a_gathered_transfer_cancels_all_that_are_queued",
)
