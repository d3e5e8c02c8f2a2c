# SPDX-License-Identifier: Apache-2.0
"""Errors in how the engine has bytes read: who starts a read, what is waited for and counted."""

from __future__ import annotations

from tests.mutation_tables import Mutation, table_of

MUTATIONS: list[Mutation] = []

WAITING = "behaviour/test_waiting_for_reads.py::"
STALL = WAITING + "test_a_read_that_is_waited_for_is_a_stall"
NO_STALL = WAITING + "test_a_read_that_has_arrived_is_no_stall"
AT_ONCE = WAITING + "test_what_compute_and_the_read_ahead_want_at_once_is_read_once"
PREFETCH = "behaviour/test_prefetch.py::"
WINDOW = PREFETCH + "test_the_window_opens_at_the_first_use_and_moves_in_reverse_order"
ENDS = "behaviour/test_engine_ends_what_it_began.py::"
OVERTAKES = ENDS + "test_the_read_that_compute_waits_for_overtakes_those_that_are_ahead"
READ_FAILS = "behaviour/test_failed_transfers.py::"

engine = table_of("engine.py", MUTATIONS)

# -- What compute needs ----------------------------------------------------------------------------
engine(
    "a read error is swallowed and undefined memory handed out",
    """
            return record.end_reading()
        except Exception as error:
""",
    """
            return record.end_reading()
        except Exception as error:
            return self._device.new_storage(record.num_bytes)
""",
    READ_FAILS + "test_a_failed_read_names_rank_scope_place_and_errno[True]",
)
engine(
    "only an OSError of a read is named",
    """
            return record.end_reading()
        except Exception as error:
""",
    """
            return record.end_reading()
        except OSError as error:
""",
    ENDS + "test_any_error_of_a_read_names_the_place",
)
engine(
    "restored memory is handed out without waiting for its read",
    """
            if not record.has_arrived:
                self._stall(record)
            return record.end_reading()
""",
    """
            return record._memory
""",
    "behaviour/test_ordering_on_an_asynchronous_device.py::"
    "test_large_storages_striped_over_directories_come_back",
)
engine(
    "what is forwarded is not counted",
    """
            self.statistics.forwarded_bytes += record.num_bytes if forwarded else 0
""",
    """
            pass
""",
    "behaviour/test_transfers_and_memory_are_ordered.py::"
    "test_forwarding_gives_the_memory_back_and_cancels_the_queued_write",
)
engine(
    "what a read restored counts as forwarded",
    """
            self.statistics.forwarded_bytes += record.num_bytes if forwarded else 0
""",
    """
            self.statistics.forwarded_bytes += record.num_bytes
""",
    WAITING + "test_memory_that_a_read_brought_back_is_not_counted_as_forwarded",
)
engine(
    "the read that compute waits for queues up behind the others",
    """
            self._begin_read(record, _NOW)
""",
    """
            self._begin_read(record, float("inf"))
""",
    OVERTAKES,
)
engine(
    "reads have no deadline",
    """
                memory, transfer = record.block.tier.begin_read(record.block, deadline)
""",
    """
                memory, transfer = record.block.tier.begin_read(record.block)
""",
    OVERTAKES,
)
engine(
    "memory is of the queue of the thread that starts the read",
    """
            with self._device.on(record.queue):
                memory, transfer = record.block.tier.begin_read(record.block, deadline)
""",
    """
            memory, transfer = record.block.tier.begin_read(record.block, deadline)
""",
    "behaviour/test_ordering_on_an_asynchronous_device.py::"
    "test_operations_may_be_on_several_streams_at_once[host]",
)
engine(
    "compute and the read-ahead begin one read at once",
    """
        with self._reading:
""",
    """
        if True:
""",
    AT_ONCE,
)
engine(
    "a read that somebody else began is begun again",
    """
            if record.state is not State.ON_TIER:
                return False
""",
    "",
    WAITING + "test_only_who_starts_a_read_says_so",
)
engine(
    "a read that somebody else began is said to be begun",
    """
            if record.state is not State.ON_TIER:
                return False
""",
    """
            if record.state is not State.ON_TIER:
                return True
""",
    WAITING + "test_only_who_starts_a_read_says_so",
)
engine(
    "a read that was begun is said not to be",
    """
            record.begin_reading(memory, transfer)
            return True
""",
    """
            record.begin_reading(memory, transfer)
            return False
""",
    WINDOW,
)

# -- Stalls ----------------------------------------------------------------------------------------
engine(
    "a read that has arrived is a stall",
    """
            if not record.has_arrived:
                self._stall(record)
""",
    """
            self._stall(record)
""",
    NO_STALL,
)
engine(
    "a read that is waited for is no stall",
    """
            if not record.has_arrived:
                self._stall(record)
""",
    "",
    STALL + "[True]",
)
engine(
    "a stall has no range in profiles",
    """
        with self._device.annotate("activation offload: wait for a read"):
            record.wait_until_arrived()
""",
    """
        record.wait_until_arrived()
""",
    STALL + "[True]",
)
engine(
    "stalls are counted before they have ended",
    """
            record.wait_until_arrived()
        waited_s = time.perf_counter() - began
""",
    """
            waited_s = time.perf_counter() - began
            record.wait_until_arrived()
""",
    STALL + "[True]",
)
engine(
    "stalls are not counted",
    """
        self.statistics.stall_s += waited_s
""",
    "",
    STALL + "[False]",
)
engine(
    "stalls that nobody notices widen the window",
    """
        if waited_s > _NOTICEABLE_S:
""",
    """
        if True:
""",
    STALL + "[False]",
)
engine(
    "stalls do not widen the window",
    """
            self._prefetcher.waited(waited_s, reads.bytes_per_s or 0.0)
""",
    "",
    STALL + "[True]",
)

# -- The read-ahead --------------------------------------------------------------------------------
engine(
    "a used storage stays in the window",
    """
        if self._prefetcher.used(record):
            self._starter.submit(self._prefetcher.advance)
""",
    """
        self._starter.submit(self._prefetcher.advance)
""",
    WINDOW,
)
engine(
    "the window does not move",
    """
        if self._prefetcher.used(record):
            self._starter.submit(self._prefetcher.advance)
""",
    """
        self._prefetcher.used(record)
""",
    WINDOW,
)
engine(
    "nothing is read before the first use",
    """
        self._prefetcher.start(tape, opens_at_once)
        self._starter.submit(self._prefetcher.advance)
""",
    """
        self._prefetcher.start(tape, opens_at_once)
""",
    WINDOW,
)
engine(
    "the read-ahead goes on after the backward pass",
    """
        self.prefetch(tape)
        try:
            yield
        finally:
            self._prefetcher.stop()
""",
    """
        self.prefetch(tape)
        yield
""",
    ENDS + "test_after_a_backward_pass_or_a_step_nothing_more_is_read_ahead[backward]",
)
engine(
    "the read-ahead goes on after an error in the backward pass",
    """
        self.prefetch(tape)
        try:
            yield
        finally:
            self._prefetcher.stop()
""",
    """
        self.prefetch(tape)
        yield
        self._prefetcher.stop()
""",
    ENDS + "test_after_a_backward_pass_or_a_step_nothing_more_is_read_ahead[error]",
)
engine(
    "the read-ahead goes on after the step",
    """
            self._prefetcher.stop()
            self._starter.drain()
""",
    """
            self._starter.drain()
""",
    ENDS + "test_after_a_backward_pass_or_a_step_nothing_more_is_read_ahead[step]",
)
