# SPDX-License-Identifier: Apache-2.0
"""Errors in the engine: what it takes over, what it ends. For the rest, see the two beside it."""

from __future__ import annotations

from tests.mutation_tables import Mutation, table_of

MUTATIONS: list[Mutation] = []

WINDOW = (
    "behaviour/test_prefetch.py::test_the_window_opens_at_the_first_use_and_moves_in_reverse_order"
)
NEVER = "behaviour/test_what_never_moves.py::"
NEVER_SPARSE = "behaviour/test_sparse_inputs.py::test_a_layer_may_have_a_sparse_input"
LEAVES = "behaviour/test_leaves_that_autograd_keeps.py::"
ENDS = "behaviour/test_engine_ends_what_it_began.py::"
OTHERS = "behaviour/test_hooks_of_others.py::"

engine = table_of("engine.py", MUTATIONS)

engine(
    "inputs that are leaves move",
    """
            if storage is None or storage._cdata in held:
""",
    """
            if storage is None:
""",
    NEVER + "test_an_input_that_wants_no_gradient_stays",
)
engine(
    "leaves that their accumulators hold move",
    """
            if type(node) in self.copying_nodes or not is_kept_by_accumulator(tensor):
""",
    """
            if True:
""",
    LEAVES + "test_a_leaf_stays_because_moving_it_frees_nothing",
)
engine(
    "no leaf moves, whoever has made it",
    """
            if type(node) in self.copying_nodes or not is_kept_by_accumulator(tensor):
""",
    """
            if not is_kept_by_accumulator(tensor):
""",
    LEAVES + "test_a_copy_of_a_functions_own_moves_and_its_memory_is_freed",
)
engine(
    "a copy keeps its memory when it has moved",
    """
                            pack = self._hooks.emptying(pack, tensor)
""",
    """
                            pass
""",
    LEAVES + "test_a_copy_of_a_functions_own_moves_and_its_memory_is_freed",
)
engine(
    "every captured tensor is emptied",
    """
                        if is_kept_by_accumulator(tensor):
""",
    """
                        if True:
""",
    "behaviour/test_results_are_bit_identical.py"
    "::test_loss_and_gradients_equal_with_everything_on_disk",
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
    OTHERS + "test_a_saved_tensor_that_has_hooks_already_is_counted_and_unsupported[False]",
)
engine(
    "a tensor with hooks of somebody else's is not counted",
    """
                self.statistics.already_hooked += saved.unpack_hook != self._hooks.unpack
""",
    "",
    OTHERS + "test_a_saved_tensor_that_has_hooks_already_is_counted_and_unsupported[True]",
)
engine(
    "our own hooks count as somebody else's",
    """
                self.statistics.already_hooked += saved.unpack_hook != self._hooks.unpack
""",
    """
                self.statistics.already_hooked += 1
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
            counted, self._cache.num_unsupported = self._cache.num_unsupported, 0
""",
    """
            self.statistics.unsupported = self._cache.num_unsupported
""",
    NEVER + "test_what_is_more_than_its_bytes_stays_and_is_counted_step_by_step",
)
engine(
    "no save is noted on the save_order",
    """
            self._save_order.append(record)
""",
    """
            pass
""",
    WINDOW,
)
engine(
    "a forward pass leaves its save_order behind",
    """
            self._scope, self._save_order = outer
""",
    """
            pass
""",
    ENDS + "test_a_pass_that_ended_takes_its_save_order_and_its_scope_with_it",
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
    ENDS + "test_a_pass_that_ended_takes_its_save_order_and_its_scope_with_it",
)
engine(
    "a layer's storage that is needed whole moves in pieces",
    """
                        is_whole = storage._cdata in needed_whole
""",
    """
                        is_whole = False
""",
    "behaviour/test_copied_spans.py::test_parts_that_cover_a_storage_move_as_one",
)
engine(
    "each storage of a layer moves whole",
    """
                        is_whole = storage._cdata in needed_whole
""",
    """
                        is_whole = True
""",
    "behaviour/test_copied_spans.py::test_a_part_that_a_layer_saved_moves_alone",
)
engine(
    "what the policy leaves in memory goes to a tier all the same",
    """
        return self._tiers.get(self._policy.place(self._scope, num_bytes))
""",
    """
        return next(iter(self._tiers.values()))
""",
    NEVER + "test_small_storages_stay",
)
engine(
    "the policy has to send everything to a tier",
    """
        return self._tiers.get(self._policy.place(self._scope, num_bytes))
""",
    """
        return self._tiers[self._policy.place(self._scope, num_bytes)]
""",
    NEVER + "test_small_storages_stay",
)
engine(
    "modes of others see what capture calls",
    """
        with PLAIN_TORCH():
            self._capture(scope, outputs, list(inputs))
""",
    """
        self._capture(scope, outputs, list(inputs))
""",
    OTHERS + "test_a_mode_of_somebody_else_sees_no_call_of_ours[capture]",
)
