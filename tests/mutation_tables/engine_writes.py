# SPDX-License-Identifier: Apache-2.0
"""Errors in how the engine has bytes written: what the starter does, how a write ends."""

from __future__ import annotations

from tests.mutation_tables import Mutation, table_of

MUTATIONS: list[Mutation] = []

WHEN = "behaviour/test_what_is_handed_over_when.py::"
BOUNDED = "behaviour/test_memory_and_space_are_bounded.py::"
HOWEVER = BOUNDED + "test_however_a_write_ends_its_bytes_are_no_longer_in_flight"
ORDERED = "behaviour/test_transfers_and_memory_are_ordered.py::"
DROPPED = ORDERED + "test_a_graph_dropped_without_backward_cancels_its_queued_writes"
ENDS = "behaviour/test_engine_ends_what_it_began.py::"
GIVEN_UP = "behaviour/test_storage_moves_once.py::test_the_memory_is_really_given_up"
STREAMS = (
    "behaviour/test_ordering_on_an_asynchronous_device.py::"
    "test_operations_may_be_on_several_streams_at_once"
)

engine = table_of("engine.py", MUTATIONS)

# -- In the dispatcher's thread -----------------------------------------------------------------------
for end in ("used", "dropped"):
    engine(
        f"what was {end} before its write began stays in flight",
        """
        if record is None or memory is None:  # nobody needs it any more, or somebody already does
            self._inflight.release(outgoing.num_bytes)
            return
""",
        f"""
        if record is None or memory is None:
            if record is {"not " if end == "dropped" else ""}None:
                self._inflight.release(outgoing.num_bytes)
            return
""",
        HOWEVER + f"[{end}]",
    )
engine(
    "a write waits for the queue of the thread that starts it",
    """
            with self._device.use_stream(record.stream):
                started = outgoing.tier.begin_write(memory)
""",
    """
            started = outgoing.tier.begin_write(memory)
""",
    STREAMS + "[ssd]",
)
engine(
    "what no tier takes is still to be written",
    """
                record.stay()
""",
    "",
    HOWEVER + "[refused]",
)
engine(
    "what no tier takes stays in flight",
    """
                self._num_refused += 1
                self._inflight.release(outgoing.num_bytes)
""",
    """
                self._num_refused += 1
""",
    HOWEVER + "[refused]",
)
engine(
    "what could not be started stays in flight",
    """
        started = None
        try:
            with self._device.use_stream(record.stream):
                started = outgoing.tier.begin_write(memory)
        finally:
            if started is None:
""",
    """
        with self._device.use_stream(record.stream):
            started = outgoing.tier.begin_write(memory)
        if True:
            if started is None:
""",
    HOWEVER + "[not started]",
)
engine(
    "bytes that no tier takes are not counted",
    """
                self._refused_bytes += outgoing.num_bytes
""",
    "",
    HOWEVER + "[refused]",
)
engine(
    "storages that no tier takes are not counted",
    """
                self._num_refused += 1
""",
    "",
    HOWEVER + "[refused]",
)
engine(
    "what no tier takes counts as offloaded",
    """
        self.statistics.offloaded_bytes -= self._refused_bytes
""",
    "",
    HOWEVER + "[refused]",
)
engine(
    "storages that no tier takes count as offloaded",
    """
        self.statistics.offloaded_storages -= self._num_refused
""",
    "",
    HOWEVER + "[refused]",
)
engine(
    "what no tier takes is counted over all steps",
    """
        self.statistics = StepStatistics()
        self._refused_bytes = self._num_refused = 0
""",
    """
        self.statistics = StepStatistics()
""",
    BOUNDED + "test_what_no_tier_took_is_counted_step_by_step",
)
engine(
    "a record is not told that its write began",
    """
            record.begin_writing(block, transfer)
""",
    "",
    GIVEN_UP,
)

# -- The end of a write ----------------------------------------------------------------------------
engine(
    "nobody hears of the end of a write",
    """
            transfer.add_done_callback(self._end_of_write(outgoing))
""",
    "",
    HOWEVER + "[done]",
)
engine(
    "the end of a write is not told to its record",
    """
            if record is not None:
                record.end_writing(failed=transfer.cancelled() or transfer.exception() is not None)
""",
    "",
    GIVEN_UP,
)
engine(
    "bytes that have arrived stay in flight",
    """
            del record  # whoever hears that nothing is in flight may end the step
            self._inflight.release(outgoing.num_bytes)
""",
    """
            del record
""",
    HOWEVER + "[done]",
)
engine(
    "a thread holds the record of a write that counts as ended",
    """
            del record  # whoever hears that nothing is in flight may end the step
""",
    "",
    "behaviour/test_waiting_for_reads.py::test_a_step_ends_when_no_thread_holds_what_it_wrote",
)
engine(
    "bytes of a record that died stay in flight",
    """
                record.end_writing(failed=transfer.cancelled() or transfer.exception() is not None)
            del record  # whoever hears that nothing is in flight may end the step
            self._inflight.release(outgoing.num_bytes)
""",
    """
                record.end_writing(failed=transfer.cancelled() or transfer.exception() is not None)
                self._inflight.release(outgoing.num_bytes)
            del record
""",
    DROPPED,
)
engine(
    "the end of a write is told to a record that died",
    """
            record = outgoing.record()
            if record is not None:
                record.end_writing(failed=transfer.cancelled() or transfer.exception() is not None)
""",
    """
            record = outgoing.record()
            record.end_writing(failed=transfer.cancelled() or transfer.exception() is not None)
""",
    DROPPED,
)
engine(
    "bytes count as arrived while their memory is still held",
    """
            record = outgoing.record()
            if record is not None:
                record.end_writing(failed=transfer.cancelled() or transfer.exception() is not None)
            del record  # whoever hears that nothing is in flight may end the step
            self._inflight.release(outgoing.num_bytes)
""",
    """
            self._inflight.release(outgoing.num_bytes)
            record = outgoing.record()
            if record is not None:
                record.end_writing(failed=transfer.cancelled() or transfer.exception() is not None)
""",
    WHEN + "test_bytes_count_as_in_flight_until_their_record_has_let_them_go",
)
engine(
    "the queue of writes keeps records alive",
    """
        def end(transfer: Future[None]) -> None:
            record = outgoing.record()
""",
    """
        record = outgoing.record()

        def end(transfer: Future[None]) -> None:
""",
    DROPPED,
)
engine(
    "a failed write is told as done",
    """
                record.end_writing(failed=transfer.cancelled() or transfer.exception() is not None)
""",
    """
                record.end_writing(failed=transfer.cancelled())
""",
    "behaviour/test_failed_transfers.py::test_failed_writes_keep_the_bytes_and_warn_once",
)
engine(
    "a cancelled write is told as done",
    """
                record.end_writing(failed=transfer.cancelled() or transfer.exception() is not None)
""",
    """
                cancelled = transfer.cancelled()
                record.end_writing(failed=not cancelled and transfer.exception() is not None)
""",
    ENDS + "test_what_is_still_queued_when_the_engine_is_closed_stays_in_memory",
)

# -- The end of a step, and of the engine ----------------------------------------------------------
engine(
    "a step ends before all of it has been started",
    """
            self._dispatcher.drain()
""",
    "",
    WHEN + "test_a_step_ends_when_all_of_it_has_been_started",
)
engine(
    "the engine is closed and its tiers are not",
    """
            tier.close()
""",
    """
            pass
""",
    ENDS + "test_a_closed_engine_leaves_no_thread_and_no_open_file",
)
engine(
    "the engine is closed and its dispatcher is not",
    """
        self._dispatcher.close()
""",
    "",
    ENDS + "test_a_closed_engine_leaves_no_thread_and_no_open_file",
)
engine(
    "tiers are closed before what was handed over has been started",
    """
        self._dispatcher.close()
        for tier in self.tiers.values():
            tier.close()
""",
    """
        for tier in self.tiers.values():
            tier.close()
        self._dispatcher.close()
""",
    WHEN + "test_closing_starts_what_was_handed_over_before_the_tiers_close",
)
