# SPDX-License-Identifier: Apache-2.0
"""Errors in the hooks that autograd calls, and in the walk of its graph."""

from __future__ import annotations

from tests.mutation_tables import Mutation, table_of

MUTATIONS: list[Mutation] = []

VIEWS = "behaviour/test_storage_moves_once.py::"
ONE_STORAGE = VIEWS + "test_views_of_one_storage_are_written_once_and_come_back_in_shape"
GATHERED = "behaviour/test_copied_spans.py::"
IN_PLACE = "behaviour/test_in_place_changes_raise.py::"
STAYS = IN_PLACE + "test_change_of_what_stays_raises_in_a_context_too"
TWO_PARTS = GATHERED + "test_two_small_parts_of_one_storage_come_back_each_with_its_own_bytes"
IN_PLACE = "behaviour/test_in_place_changes_raise.py::"
CHANGED = IN_PLACE + "test_change_after_capture_raises_and_names_the_layer[True]"

MODES = "behaviour/test_hooks_of_others.py::test_a_mode_of_somebody_else_sees_no_call_of_ours"

# -- capture/hooks.py --------------------------------------------------------------------------------
# Left out: `capture` does not ask `tier_for`, which `pack` asks again: what stays then has hooks
# that do nothing. And it takes `pack` for `pack_found`, which asks once more what it has asked.

hooks = table_of("capture/hooks.py", MUTATIONS)

hooks(
    "unpack does not look for changes in place",
    """
                packed.check_unchanged()
""",
    "",
    CHANGED,
)
hooks(
    "unpack does not say that a view was used",
    """
        self._mover.used(packed)
""",
    "",
    "behaviour/test_prefetch.py::test_the_window_opens_at_the_first_use_and_moves_in_reverse_order",
)
hooks(
    "unpack says that a view was used only if it had to bring it back",
    """
                    tensor = packed.rebuild(self._mover.bring_back(packed.saved))
        self._mover.used(packed)
""",
    """
                    tensor = packed.rebuild(self._mover.bring_back(packed.saved))
                self._mover.used(packed)
""",
    "behaviour/test_waiting_for_reads.py::test_the_use_of_what_is_ready_is_a_use",
)
hooks(
    "unpack builds what is ready",
    """
            tensor = packed.take_ready()
            if tensor is None:
""",
    """
            if True:
""",
    "behaviour/test_waiting_for_reads.py::test_what_was_read_ahead_is_handed_out_ready_made",
)
hooks(
    "a view is used before its memory is held",
    """
                with self._one_at_a_time:
                    tensor = packed.rebuild(self._mover.bring_back(packed.saved))
        self._mover.used(packed)
""",
    """
                self._mover.used(packed)
                with self._one_at_a_time:
                    tensor = packed.rebuild(self._mover.bring_back(packed.saved))
""",
    "behaviour/test_waiting_for_reads.py::test_a_use_is_told_once_its_memory_is_held",
)
hooks(
    "several threads bring a storage back at once",
    """
                with self._one_at_a_time:
""",
    """
                if True:
""",
    "behaviour/test_transfers_and_memory_are_ordered.py::"
    "test_threads_that_need_one_storage_at_once_bring_it_back_one_by_one",
)
hooks(
    "modes of others see what pack calls",
    """
        with PLAIN_TORCH():
            storage = self._cache.movable(tensor)
            return self._keep(tensor) if storage is None else self._take(tensor, storage)
""",
    """
        storage = self._cache.movable(tensor)
        return self._keep(tensor) if storage is None else self._take(tensor, storage)
""",
    MODES + "[context]",
)
hooks(
    "modes of others see what unpack calls",
    """
        with PLAIN_TORCH():
            tensor = packed.take_ready()
""",
    """
        if True:
            tensor = packed.take_ready()
""",
    MODES + "[capture]",
)
hooks(
    "a storage that is needed whole moves in pieces",
    """
        return self._take(tensor, tensor.untyped_storage(), moves_whole=True)
""",
    """
        return self._take(tensor, tensor.untyped_storage())
""",
    GATHERED + "test_parts_that_cover_a_storage_move_as_one",
)
hooks(
    "a storage moves whole if a small part of it is found",
    """
        return self._take(tensor, tensor.untyped_storage())
""",
    """
        return self._take(tensor, tensor.untyped_storage(), moves_whole=True)
""",
    GATHERED + "test_a_part_that_a_layer_saved_moves_alone",
)
hooks(
    "what the policy leaves in memory is recorded",
    """
            if tier is None:
                return self._keep(tensor)
""",
    "",
    "behaviour/test_what_never_moves.py::test_parameters_and_small_storages_stay_in_a_context_too",
)
hooks(
    "only the first save of a storage is told",
    """
        self._mover.saved(record, tier)
""",
    """
        if tier is not None:
            self._mover.saved(record, tier)
""",
    "behaviour/test_prefetch.py::test_a_storage_saved_twice_is_brought_back_for_its_last_save",
)
hooks(
    "a storage moves once for each view",
    """
        record, tier = self._cache.find(storage, span, tensor), None
""",
    """
        record, tier = None, None
""",
    ONE_STORAGE,
)
hooks(
    "what stays is not looked at when it is needed",
    """
                return packed.tensor() if isinstance(packed, ResidentTensor) else packed
""",
    """
                return packed._tensor if isinstance(packed, ResidentTensor) else packed
""",
    STAYS + "[small]",
)
hooks(
    "what is too small to move after a capture stands for itself",
    """
            if tier is None:
                return self._keep(tensor)
""",
    """
            if tier is None:
                return tensor
""",
    IN_PLACE + "test_change_of_a_part_that_is_too_small_to_move_raises_after_a_capture",
)
hooks(
    "what never moves stands for itself",
    """
            return self._keep(tensor) if storage is None else self._take(tensor, storage)
""",
    """
            return tensor if storage is None else self._take(tensor, storage)
""",
    STAYS + "[excluded]",
)
hooks(
    "the whole is recorded under the span of a part",
    """
            span = span_of(tensor)
            record = self._cache.find(storage, span, tensor)
""",
    """
            record = self._cache.find(storage, span_of(tensor), tensor)
""",
    TWO_PARTS,
)

# -- saved/autograd_graph.py --
graph = table_of("saved/autograd_graph.py", MUTATIONS)

graph(
    "the walk goes behind the inputs",
    """
    seen: set[Any] = {node_of(tensor) for tensor in inputs}
""",
    """
    seen: set[Any] = set()
""",
    "unit/test_autograd_graph.py::test_the_walk_does_not_go_behind_the_inputs",
)
graph(
    "saved tensors come in the order of backward",
    """
    nodes.sort(key=lambda node: node._sequence_nr())
""",
    """
    nodes.sort(key=lambda node: -node._sequence_nr())
""",
    "unit/test_autograd_graph.py::test_saved_tensors_come_in_forward_order",
)
graph(
    "saved tensors come in the order of the walk",
    """
    nodes.sort(key=lambda node: node._sequence_nr())
""",
    """
    nodes.reverse()
""",
    "unit/test_autograd_graph.py::test_saved_tensors_come_in_forward_order",
)
graph(
    "a node reached in two ways is told twice",
    """
        if node is None or node in seen:
""",
    """
        if node is None or node in {node_of(tensor) for tensor in inputs}:
""",
    "unit/test_autograd_graph.py::test_a_node_that_is_reached_in_two_ways_is_told_once",
)
graph(
    "tensors changed since they were saved are taken over as they are",
    """
            tensor = getattr(node, name)  # unlike `SavedTensor.data`, this checks versions
""",
    """
            tensor = [r.data for r in raw] if isinstance(raw, tuple | list) else raw.data
""",
    "behaviour/test_in_place_changes_raise.py::test_change_before_capture_is_left_to_autograd",
)
graph(
    "a view that autograd refuses to use again is an error",
    """
    except RuntimeError:  # its base was changed in place
""",
    """
    except KeyError:
""",
    "unit/test_autograd_graph.py::test_a_view_that_autograd_refuses_to_use_again_is_no_error",
)
graph(
    "hooks of others are called",
    """
    return getattr(saved, "unpack_hook", None) is not None
""",
    """
    return False
""",
    "unit/test_autograd_graph.py::test_what_has_hooks_is_told_and_not_looked_at",
)
graph(
    "what has hooks is not told",
    """
            yield from ((saved, None) for saved in hooked)
""",
    "",
    "unit/test_autograd_graph.py::test_what_has_hooks_is_told_and_not_looked_at",
)
graph(
    "a function is looked into if the first tensor that it saved has no hooks",
    """
        hooked = [saved for saved in (raw if is_list else (raw,)) if _has_hooks(saved)]
""",
    """
        hooked = [saved for saved in (raw[:1] if is_list else (raw,)) if _has_hooks(saved)]
""",
    "unit/test_autograd_graph.py::test_what_has_hooks_is_told_and_not_looked_at",
)
graph(
    "a node that was freed ends the capture of its layer",
    """
        except RuntimeError:  # another backward pass has freed it
            continue
""",
    """
        except RuntimeError:  # another backward pass has freed it
            raise
""",
    "autograd/test_hooks_modes_and_compilers.py::"
    "test_a_part_that_another_backward_pass_has_freed_is_unsupported",
)
graph(
    "types of nodes are kept for ever",
    """
_attributes_of_node_type: MutableMapping[type, list[tuple[str, str]]] = WeakKeyDictionary()
""",
    """
_attributes_of_node_type: MutableMapping[type, list[tuple[str, str]]] = {}
""",
    "behaviour/test_engine_ends_what_it_began.py::"
    "test_types_of_nodes_that_are_defined_in_forward_are_freed",
)
