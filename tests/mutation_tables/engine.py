# SPDX-License-Identifier: Apache-2.0
"""Errors in the engine: what it takes over, whom it tells, what it ends."""

from __future__ import annotations

from tests.mutation_tables import Mutation, table_of

MUTATIONS: list[Mutation] = []

PREFETCH = "behaviour/test_prefetch.py::"
WINDOW = PREFETCH + "test_the_window_opens_at_the_first_use_and_moves_in_reverse_order"
NEVER = "behaviour/test_what_never_moves.py::"
NEVER_SPARSE = "behaviour/test_sparse_inputs.py::test_a_layer_may_have_a_sparse_input"
ENDS = "behaviour/test_engine_ends_what_it_began.py::"
OTHERS = "behaviour/test_hooks_of_others.py::"
READ_FAILS = "behaviour/test_failed_transfers.py::"

engine = table_of("engine.py", MUTATIONS)

engine(
    "inputs that are leaves move",
    """
            if storage is not None and storage._cdata not in held:
""",
    """
            if storage is not None:
""",
    NEVER + "test_parameters_and_views_of_them_stay",
)
engine(
    "all inputs are held back, though only leaves are held by others",
    """
        leaves = [t for t in inputs if node_of(t) is None and t.layout is torch.strided]
""",
    """
        leaves = [t for t in inputs if t.layout is torch.strided]
""",
    ENDS + "test_an_input_that_an_earlier_layer_made_moves",
)
engine(
    "an input without a storage is looked into",
    """
        leaves = [t for t in inputs if node_of(t) is None and t.layout is torch.strided]
""",
    """
        leaves = [t for t in inputs if node_of(t) is None]
""",
    NEVER_SPARSE,
)
engine(
    "nothing is excluded",
    """
        self._cache.exclude(tensors)
""",
    """
        pass
""",
    NEVER + "test_parameters_and_views_of_them_stay",
)
engine(
    "the step ends without learning what outlives it",
    """
            self.statistics.long_lived_bytes = self._cache.end_step()
""",
    "",
    NEVER + "test_a_table_that_outlives_the_step_is_learned",
)
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
                return record.end_reading()
""",
    """
                return record._memory
""",
    "behaviour/test_ordering_on_an_asynchronous_device.py::"
    "test_large_storages_striped_over_directories_come_back",
)
engine(
    "any RuntimeError of register_hooks is swallowed",
    """
            if _HAS_HOOKS not in str(error):
                raise
""",
    "",
    OTHERS + "test_an_error_in_our_own_hook_is_not_taken_for_that",
)
engine(
    "a tensor with hooks of somebody else's is an error",
    """
            if _HAS_HOOKS not in str(error):
                raise
""",
    """
            raise
""",
    OTHERS + "test_a_saved_tensor_that_has_hooks_already_is_counted_and_left_alone[False]",
)
engine(
    "a tensor with hooks of somebody else's is not counted",
    """
                self.statistics.foreign_hooks += saved.unpack_hook != self._hooks.unpack
""",
    "",
    OTHERS + "test_a_saved_tensor_that_has_hooks_already_is_counted_and_left_alone[True]",
)
engine(
    "our own hooks count as somebody else's",
    """
                self.statistics.foreign_hooks += saved.unpack_hook != self._hooks.unpack
""",
    """
                self.statistics.foreign_hooks += 1
""",
    OTHERS + "test_our_own_hooks_of_an_earlier_capture_are_not_counted_and_nothing_is_read",
)
engine(
    "what captured layers lose by hooks is not looked for",
    """
            storage = self._cache.movable_if_saved(tensor)
""",
    """
            storage = self._cache.movable(tensor)
""",
    "autograd/test_kinds_of_tensors.py::test_attributes_of_a_captured_tensor_come_back",
)
engine(
    "what was left alone is counted over all steps",
    """
            self.statistics.left_alone, self._cache.num_left_alone = self._cache.num_left_alone, 0
""",
    """
            self.statistics.left_alone = self._cache.num_left_alone
""",
    NEVER + "test_what_is_more_than_its_bytes_stays_and_is_counted_step_by_step",
)
engine(
    "no save is noted on the tape",
    """
            self._tape.append(record)
""",
    """
            pass
""",
    WINDOW,
)
engine(
    "the end of a write is not told to its record",
    """
        transfer.add_done_callback(_end_of_write(record))
""",
    "",
    "behaviour/test_storage_moves_once.py::test_the_memory_is_really_given_up",
)
engine(
    "the queue of writes keeps records alive",
    """
    reference = weakref.ref(record)
""",
    """
    def reference() -> SavedStorage:
        return record

""",
    "behaviour/test_transfers_and_memory_are_ordered.py::"
    "test_a_graph_dropped_without_backward_cancels_its_queued_writes",
)
engine(
    "a failed write is told as done",
    """
            alive.end_writing(failed=transfer.cancelled() or transfer.exception() is not None)
""",
    """
            alive.end_writing(failed=transfer.cancelled())
""",
    READ_FAILS + "test_failed_writes_keep_the_bytes_and_warn_once",
)
engine(
    "a cancelled write is told as done",
    """
            alive.end_writing(failed=transfer.cancelled() or transfer.exception() is not None)
""",
    """
            cancelled = transfer.cancelled()
            alive.end_writing(failed=not cancelled and transfer.exception() is not None)
""",
    ENDS + "test_what_is_still_queued_when_the_engine_is_closed_stays_in_memory",
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
    "a used storage stays in the window",
    """
        self._prefetcher.used(record)
""",
    "",
    WINDOW,
)
engine(
    "the window does not move",
    """
        self._prefetcher.advance()
        return memory
""",
    """
        return memory
""",
    WINDOW,
)
engine(
    "the read that compute waits for queues up behind the others",
    """
            self._begin_read(record, _NOW)
""",
    """
            self._begin_read(record, float("inf"))
""",
    ENDS + "test_the_read_that_compute_waits_for_overtakes_those_that_are_ahead",
)
engine(
    "reads have no deadline",
    """
        memory, transfer = record.block.tier.begin_read(record.block, deadline)
""",
    """
        memory, transfer = record.block.tier.begin_read(record.block)
""",
    ENDS + "test_the_read_that_compute_waits_for_overtakes_those_that_are_ahead",
)
engine(
    "the read-ahead goes on after the backward pass",
    """
        self._prefetcher.start(tape)
        try:
            yield
        finally:
            self._prefetcher.stop()
""",
    """
        self._prefetcher.start(tape)
        yield
""",
    ENDS + "test_after_a_backward_pass_or_a_step_nothing_more_is_read_ahead[backward]",
)
engine(
    "the read-ahead goes on after an error in the backward pass",
    """
        self._prefetcher.start(tape)
        try:
            yield
        finally:
            self._prefetcher.stop()
""",
    """
        self._prefetcher.start(tape)
        yield
        self._prefetcher.stop()
""",
    ENDS + "test_after_a_backward_pass_or_a_step_nothing_more_is_read_ahead[error]",
)
engine(
    "the read-ahead goes on after the step",
    """
        finally:
            self._prefetcher.stop()
            self.statistics.long_lived_bytes = self._cache.end_step()
""",
    """
        finally:
            self.statistics.long_lived_bytes = self._cache.end_step()
""",
    ENDS + "test_after_a_backward_pass_or_a_step_nothing_more_is_read_ahead[step]",
)
engine(
    "a forward pass leaves its tape behind",
    """
            self._scope, self._tape = outer
""",
    """
            pass
""",
    ENDS + "test_a_pass_that_ended_takes_its_tape_and_its_scope_with_it",
)
engine(
    "a captured layer leaves its scope behind",
    """
        finally:
            self._scope = outer
""",
    """
        finally:
            pass
""",
    ENDS + "test_a_pass_that_ended_takes_its_tape_and_its_scope_with_it",
)
engine(
    "a layer's storage that is needed whole moves in pieces",
    """
                    is_whole = storage._cdata in needed_whole
""",
    """
                    is_whole = False
""",
    "behaviour/test_gathered_views.py::test_parts_that_cover_a_storage_move_as_one",
)
