# SPDX-License-Identifier: Apache-2.0
"""Errors in how the engine hands over what is to be written: when, what, and how much at once.

Left out:
- a batch without writes is submitted all the same: nothing happens;
- an operation is handed over again with the next one: what has begun is not begun again;
- `_collecting` puts None back instead of what was there: nothing that is collected from nests.
"""

from __future__ import annotations

from tests.mutation_tables import Mutation, table_of

MUTATIONS: list[Mutation] = []

WHEN = "behaviour/test_what_is_handed_over_when.py::"
LAYER = WHEN + "test_a_layer_is_handed_over_at_its_end_and_in_one_go"
CONTEXT = WHEN + "test_in_a_context_an_operation_is_handed_over_when_the_next_one_saves"
BOUNDED = "behaviour/test_memory_and_space_are_bounded.py::"
HOWEVER = BOUNDED + "test_however_a_write_ends_its_bytes_are_no_longer_in_flight"
IN_PARTS = BOUNDED + "test_a_layer_larger_than_the_inflight_budget_is_handed_over_in_parts"
FORWARD_WAITS = BOUNDED + "test_forward_waits_while_too_many_bytes_are_in_flight"
BY_DEFAULT = (
    BOUNDED + "test_by_default_a_layer_is_in_flight_as_a_whole_and_the_next_one_waits_for_it"
)
SAVED_TWICE = (
    "behaviour/test_prefetch.py::test_a_storage_saved_twice_is_brought_back_for_its_last_save"
)
GIVEN_UP = "behaviour/test_storage_moves_once.py::test_the_memory_is_really_given_up"

engine = table_of("engine.py", MUTATIONS)
context = table_of("capture/context.py", MUTATIONS)

# -- What is collected, and when it is handed over --
engine(
    "each storage of a layer is handed over by itself",
    """
            with self._collecting(captured):
""",
    """
            with contextlib.nullcontext():
""",
    LAYER,
)
engine(
    "what a layer saved is not handed over",
    """
            self._scope = outer
            self._hand_over(captured)
""",
    """
            self._scope = outer
""",
    LAYER,
)
engine(
    "what a layer saved before an error is not handed over",
    """
        finally:
            self._scope = outer
            self._hand_over(captured)
""",
    """
        finally:
            self._scope = outer
        self._hand_over(captured)
""",
    WHEN + "test_what_a_layer_saved_before_an_error_is_written",
)
engine(
    "collecting goes on after a layer",
    """
            self._captured.outgoing = outer
""",
    """
            pass
""",
    LAYER,
)
engine(
    "what threads save is collected in one list",
    """
class _Captured(threading.local):
""",
    """
class _Captured:
""",
    WHEN + "test_threads_hand_over_what_they_saved_themselves",
)
context(
    "an operation is handed over while it saves",
    """
        if node_number != self._node_number:
            self._hand_over()
            self._node_number = node_number
        with self._collecting(self._saved):
            return self._hooks.pack(tensor)
""",
    """
        return self._hooks.pack(tensor)
""",
    CONTEXT,
)
context(
    "each save of an operation hands the one before over",
    """
            self._node_number = node_number
""",
    "",
    CONTEXT,
)
context(
    "operations are handed over at the end of the context only",
    """
        if node_number != self._node_number:
            self._hand_over()
            self._node_number = node_number
""",
    "",
    CONTEXT,
)
context(
    "the last operation of a context is not handed over",
    """
        super().__exit__(*error)
        self._hand_over()
""",
    """
        super().__exit__(*error)
""",
    CONTEXT,
)
context(
    "in a context everything is taken for movable",
    """
            return self._hooks.pack(tensor)
""",
    """
            return self._hooks.pack_found(tensor)
""",
    "behaviour/test_what_never_moves.py::test_parameters_and_small_storages_stay_in_a_context_too",
)
context(
    "a context does not end",
    """
        super().__exit__(*error)
        self._hand_over()
""",
    """
        self._hand_over()
""",
    CONTEXT,
)
engine(
    "a new record is not to be written",
    """
        record.queue_write()
""",
    "",
    GIVEN_UP,
)
engine(
    "what was saved again is written again",
    """
            self.statistics.deduplicated_bytes += record.num_bytes
            return
""",
    """
            self.statistics.deduplicated_bytes += record.num_bytes
""",
    SAVED_TWICE,
)
engine(
    "what was saved again is not counted",
    """
            self.statistics.deduplicated_bytes += record.num_bytes
""",
    "",
    SAVED_TWICE,
)
engine(
    "what is handed over keeps its record alive",
    """
        outgoing = Outgoing(weakref.ref(record), record.num_bytes, tier)
""",
    """
        outgoing = Outgoing(lambda: record, record.num_bytes, tier)
""",
    HOWEVER + "[dropped]",
)
engine(
    "offloaded bytes are not counted",
    """
        self.statistics.offloaded_bytes += record.num_bytes
""",
    "",
    HOWEVER + "[done]",
)
engine(
    "offloaded storages are not counted",
    """
        self.statistics.offloaded_storages += 1
""",
    "",
    HOWEVER + "[done]",
)

# -- Bytes in flight -------------------------------------------------------------------------------
engine(
    "a record does not know the queue of its operation",
    """
        record.stream = self._device.current_stream()
""",
    "",
    "behaviour/test_ordering_on_an_asynchronous_device.py::"
    "test_a_model_may_compute_on_a_stream_of_its_own[ssd]",
)
engine(
    "bytes in flight are not bounded",
    """
                    self._inflight.acquire(one.num_bytes)
""",
    """
                    self._inflight.taken_bytes += one.num_bytes
""",
    FORWARD_WAITS,
)
engine(
    "the default bound is less than a layer",
    """
                    self._allow_in_flight(sum(other.num_bytes for other in outgoing))
""",
    "",
    BY_DEFAULT,
)
engine(
    "the default bound follows one storage instead of a layer",
    """
                    self._allow_in_flight(sum(other.num_bytes for other in outgoing))
""",
    """
                    self._allow_in_flight(one.num_bytes)
""",
    BY_DEFAULT,
)
engine(
    "a bound that was asked for is raised",
    """
        if self.config.inflight_bytes is None and num_bytes > self._inflight.limit_bytes:
""",
    """
        if num_bytes > self._inflight.limit_bytes:
""",
    BOUNDED + "test_a_bound_that_was_asked_for_holds_however_large_a_layer_is",
)
engine(
    "the default bound falls again",
    """
        if self.config.inflight_bytes is None and num_bytes > self._inflight.limit_bytes:
""",
    """
        if self.config.inflight_bytes is None:
""",
    BY_DEFAULT,
)
engine(
    "the default read-ahead has no room for two storages",
    """
        self._allow_in_flight(2 * save_order.largest_bytes)  # one is read while one waits for its use
""",
    "",
    "behaviour/test_prefetch.py::"
    "test_by_default_one_storage_is_read_while_one_waits_however_large_they_are",
)
engine(
    "compute waits for what it has not handed over",
    """
                if not self._inflight.try_acquire(one.num_bytes):
                    self._submit_writes(batch)
                    batch = []
""",
    """
                if not self._inflight.try_acquire(one.num_bytes):
""",
    IN_PARTS,
    hangs=True,
)
engine(
    "what was handed over while compute waits is handed over again",
    """
                    self._submit_writes(batch)
                    batch = []
""",
    """
                    self._submit_writes(list(batch))
""",
    IN_PARTS,
)
engine(
    "what compute waited for is not handed over",
    """
                    self.statistics.write_wait_s += time.perf_counter() - began
""",
    """
                    self.statistics.write_wait_s += time.perf_counter() - began
                    continue
""",
    FORWARD_WAITS,
)
engine(
    "what fitted at once is not handed over",
    """
        finally:  # also where somebody interrupts the wait
            self._submit_writes(batch)
""",
    """
        finally:
            pass
""",
    GIVEN_UP,
)
engine(
    "a layer is written from its end",
    """
            self._dispatcher.submit(*(functools.partial(self._begin_write, one) for one in batch))
""",
    """
            batch.reverse()
            self._dispatcher.submit(*(functools.partial(self._begin_write, one) for one in batch))
""",
    BOUNDED + "test_a_write_that_cannot_start_keeps_no_other_of_its_layer_back",
)
engine(
    "an error of one write keeps the rest of its layer back",
    """
            self._dispatcher.submit(*(functools.partial(self._begin_write, one) for one in batch))
""",
    """
            self._dispatcher.submit(lambda: [self._begin_write(one) for one in batch] and None)
""",
    BOUNDED + "test_a_write_that_cannot_start_keeps_no_other_of_its_layer_back",
)
engine(
    "the wait for bytes in flight is not counted",
    """
                    self.statistics.write_wait_s += time.perf_counter() - began
""",
    "",
    FORWARD_WAITS,
)
engine(
    "the part of a storage that was saved is not gathered",
    """
                    record.gather()
""",
    """
                    pass
""",
    "behaviour/test_copied_spans.py::test_no_more_than_the_part_is_written",
)
engine(
    "what waits to be handed over is lost where the wait is interrupted",
    """
        finally:  # also where somebody interrupts the wait
            self._submit_writes(batch)
""",
    """
        except ZeroDivisionError:
            pass
        self._submit_writes(batch)
""",
    BOUNDED + "test_an_interrupted_wait_leaves_nothing_in_flight",
)
