# SPDX-License-Identifier: Apache-2.0
"""Errors in how bytes are read back: who starts a read, what is waited for and counted."""

from __future__ import annotations

from tests.mutation_tables import Mutation, table_of

MUTATIONS: list[Mutation] = []

WAITING = "behaviour/test_waiting_for_reads.py::"
STALL = WAITING + "test_a_read_that_is_waited_for_is_a_stall"
NO_STALL = WAITING + "test_a_read_that_has_arrived_is_no_stall_before_its_tensors_are_built"
AT_ONCE = WAITING + "test_what_compute_and_the_read_ahead_want_at_once_is_read_once"
LATE = WAITING + "test_bytes_that_others_used_and_let_go_meanwhile_are_read_again"
READY = WAITING + "test_what_was_read_ahead_is_handed_out_ready_made"
DIED = WAITING + "test_a_record_that_died_meanwhile_is_not_made_ready"
STARTERS_ALONE = WAITING + "test_the_starters_thread_alone_moves_the_read_ahead"
PREFETCH = "behaviour/test_prefetch.py::"
WINDOW = PREFETCH + "test_the_window_opens_at_the_first_use_and_moves_in_reverse_order"
ENDS = "behaviour/test_engine_ends_what_it_began.py::"
OVERTAKES = ENDS + "test_the_read_that_compute_waits_for_overtakes_those_that_are_ahead"
READ_FAILS = "behaviour/test_failed_transfers.py::"

engine = table_of("engine.py", MUTATIONS)
reader = table_of("transfer/reader.py", MUTATIONS)

# -- What compute needs ----------------------------------------------------------------------------
reader(
    "a read error is swallowed and undefined memory handed out",
    """
            return memory
        except Exception as error:
""",
    """
            return memory
        except Exception as error:
            return self._device.new_storage(record.num_bytes)
""",
    READ_FAILS + "test_a_failed_read_names_rank_scope_place_and_errno[True]",
)
reader(
    "only an OSError of a read is named",
    """
            return memory
        except Exception as error:
""",
    """
            return memory
        except OSError as error:
""",
    ENDS + "test_any_error_of_a_read_names_the_place",
)
reader(
    "restored memory is handed out without waiting for its read",
    """
                if not record.has_arrived:
                    self._stall(record)
                memory = record.end_reading()
""",
    """
                memory = record._memory
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
reader(
    "the read that compute waits for queues up behind the others",
    """
                    self.begin(record, _NOW)
""",
    """
                    self.begin(record, float("inf"))
""",
    OVERTAKES,
)
reader(
    "who comes late is handed nothing",
    """
            while memory is None:
                if record.state is State.ON_TIER:
""",
    """
            if memory is None:
                if record.state is State.ON_TIER:
""",
    LATE,
)
reader(
    "who comes late waits for a read that nobody begins",
    """
            while memory is None:
                if record.state is State.ON_TIER:
                    self.begin(record, _NOW)
""",
    """
            if record.state is State.ON_TIER:
                self.begin(record, _NOW)
            while memory is None:
""",
    LATE,
    hangs=True,
)
reader(
    "reads have no deadline",
    """
                memory, transfer = record.block.tier.begin_read(record.block, deadline)
""",
    """
                memory, transfer = record.block.tier.begin_read(record.block)
""",
    OVERTAKES,
)
reader(
    "memory is of the queue of the thread that starts the read",
    """
            with self._device.use_stream(record.stream):
                memory, transfer = record.block.tier.begin_read(record.block, deadline)
""",
    """
            memory, transfer = record.block.tier.begin_read(record.block, deadline)
""",
    "behaviour/test_ordering_on_an_asynchronous_device.py::"
    "test_operations_may_be_on_several_streams_at_once[host]",
)
reader(
    "compute and the read-ahead begin one read at once",
    """
        with self._beginning:
""",
    """
        if True:
""",
    AT_ONCE,
)
reader(
    "a read that somebody else began is begun again",
    """
            if record.state is not State.ON_TIER:
                return False
""",
    "",
    WAITING + "test_only_who_starts_a_read_says_so",
)
reader(
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
reader(
    "a read that was begun is said not to be",
    """
        transfer.add_done_callback(self._end_of_read(weakref.ref(record)))
        return True
""",
    """
        transfer.add_done_callback(self._end_of_read(weakref.ref(record)))
        return False
""",
    WINDOW,
)

# -- What was read ahead ---------------------------------------------------------------------------
reader(
    "nobody hears of the end of a read",
    """
        transfer.add_done_callback(self._end_of_read(weakref.ref(record)))
""",
    "",
    READY,
)
reader(
    "the end of a read builds nothing",
    """
                self._dispatcher.submit(functools.partial(_make_ready, reference, transfer))
""",
    """
                pass
""",
    READY,
)
reader(
    "the thread that read builds the tensors",
    """
                self._dispatcher.submit(functools.partial(_make_ready, reference, transfer))
""",
    """
                _make_ready(reference, transfer)
""",
    READY,
)
reader(
    "a read under way holds its record",
    """
        transfer.add_done_callback(self._end_of_read(weakref.ref(record)))
""",
    """
        transfer.add_done_callback(self._end_of_read(lambda: record))
""",
    DIED,
)
reader(
    "what a record that died should hold is built",
    """
    record = reference()
    if record is not None:
        record.make_ready(ended)
""",
    """
    record = reference()
    record.make_ready(ended)
""",
    DIED,
)
reader(
    "tensors are built of what could not be read",
    """
            if not transfer.cancelled() and transfer.exception() is None:
""",
    """
            if not transfer.cancelled():
""",
    WAITING + "test_a_read_ahead_that_failed_makes_nothing_ready",
)
for error, line in (
    ("is asked for its error", "            if transfer.exception() is None:"),
    ("counts as done", "            if transfer.cancelled() or transfer.exception() is None:"),
):
    reader(
        f"a read that was cancelled {error}",
        """
            if not transfer.cancelled() and transfer.exception() is None:
""",
        line,
        WAITING + "test_a_read_that_was_cancelled_makes_nothing_ready",
    )

# -- Stalls ----------------------------------------------------------------------------------------
reader(
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
reader(
    "a read that is waited for is no stall",
    """
                if not record.has_arrived:
                    self._stall(record)
""",
    "",
    STALL + "[True]",
)
reader(
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
reader(
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
            self._dispatcher.submit(functools.partial(self._prefetcher.waited, waited_s, rate))
""",
    "",
    STALL + "[True]",
)
engine(
    "who waited widens the window while the read-ahead looks at it",
    """
            self._dispatcher.submit(functools.partial(self._prefetcher.waited, waited_s, rate))
""",
    """
            self._prefetcher.waited(waited_s, rate)
""",
    STARTERS_ALONE,
)

# -- The read-ahead --------------------------------------------------------------------------------
engine(
    "a used storage stays in the window",
    """
        if self._prefetcher.used(view.saved):
            self._dispatcher.submit(self._prefetcher.advance)
""",
    """
        self._dispatcher.submit(self._prefetcher.advance)
""",
    WINDOW,
)
engine(
    "the window does not move",
    """
        if self._prefetcher.used(view.saved):
            self._dispatcher.submit(self._prefetcher.advance)
""",
    """
        self._prefetcher.used(view.saved)
""",
    WINDOW,
)
engine(
    "the thread that computes does what follows a use",
    """
            self._dispatcher.submit(self._prefetcher.advance)
""",
    """
            self._prefetcher.advance()
""",
    STARTERS_ALONE,
)
engine(
    "a view that was used is not told to its record",
    """
        view.saved.view_used(view)
""",
    "",
    "behaviour/test_every_way_through_a_step.py::test_backward_twice_through_one_graph",
)
engine(
    "nothing is read before the first use",
    """
        self._dispatcher.submit(start, self._prefetcher.advance)
""",
    """
        self._dispatcher.submit(start)
""",
    WINDOW,
)
engine(
    "the read-ahead looks at a save_order that it has not been given",
    """
        self._dispatcher.submit(start, self._prefetcher.advance)
""",
    """
        self._dispatcher.submit(self._prefetcher.advance)
""",
    WINDOW,
)
engine(
    "a save_order is given to the read-ahead while it looks at another",
    """
        self._dispatcher.submit(start, self._prefetcher.advance)
""",
    """
        start()
        self._dispatcher.submit(self._prefetcher.advance)
""",
    STARTERS_ALONE,
)
engine(
    "the read-ahead goes on after the backward pass",
    """
        self.prefetch(save_order)
        try:
            yield
        finally:
            self._dispatcher.submit(self._prefetcher.stop)
""",
    """
        self.prefetch(save_order)
        yield
""",
    ENDS + "test_after_a_backward_pass_or_a_step_nothing_more_is_read_ahead[backward]",
)
engine(
    "the read-ahead goes on after an error in the backward pass",
    """
        self.prefetch(save_order)
        try:
            yield
        finally:
            self._dispatcher.submit(self._prefetcher.stop)
""",
    """
        self.prefetch(save_order)
        yield
        self._dispatcher.submit(self._prefetcher.stop)
""",
    ENDS + "test_after_a_backward_pass_or_a_step_nothing_more_is_read_ahead[error]",
)
engine(
    "the backward pass ends while the read-ahead looks",
    """
        self.prefetch(save_order)
        try:
            yield
        finally:
            self._dispatcher.submit(self._prefetcher.stop)
""",
    """
        self.prefetch(save_order)
        try:
            yield
        finally:
            self._prefetcher.stop()
""",
    STARTERS_ALONE,
)
engine(
    "the read-ahead goes on after the step",
    """
            self._dispatcher.submit(self._prefetcher.stop)
            self._dispatcher.drain()
""",
    """
            self._dispatcher.drain()
""",
    ENDS + "test_after_a_backward_pass_or_a_step_nothing_more_is_read_ahead[step]",
)
engine(
    "the step ends while the read-ahead looks",
    """
            self._dispatcher.submit(self._prefetcher.stop)
            self._dispatcher.drain()
""",
    """
            self._prefetcher.stop()
            self._dispatcher.drain()
""",
    STARTERS_ALONE,
)

reader(
    "what compute has used is read ahead once more",
    """
            if deadline != _NOW and record.num_unused_views <= 0:
                return False  # compute has had it read itself meanwhile, and is done with it
""",
    "",
    WAITING + "test_what_compute_has_used_meanwhile_is_not_read_ahead_any_more",
)
