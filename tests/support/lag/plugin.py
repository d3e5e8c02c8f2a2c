# SPDX-License-Identifier: Apache-2.0
"""`pytest -p tests.support.lag.plugin`: tests that know nothing of a device run on the accelerator.

Tensors that tests make without naming a device are made there, and engines that are made without
one offload from there, while kernels and copies are late by random parts of what is set below.
`tests/run.sh --lag` runs tests/behaviour and tests/autograd so.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron.offload import OffloadEngine
from megatron.offload.device.platform import register_platform
from tests.support.lag import load
from tests.support.lag.build import why_not
from tests.support.lag.module import LagModule
from tests.support.lag.platform import LagPlatform

KERNEL_DELAY_US = 200.0
COPY_DELAY_US = 1000.0
_OUR_THREADS = ("activation-offload", "micro-batch ")  # the latter have the modes of their caller

_SIMULATED = "has a simulated device of its own, in host memory"
_KIND = "a kind of tensor that the test accelerator does not cover"
_HOST = "needs its tensors in host memory"
_WINDOW = "on an accelerator the window of states is a tier in host memory"
_BEHIND = "a wait of the host is none of a device that is behind it"
_AUTOCAST = "autocast of a CPU, which casts nothing on an accelerator"
_NOISE = "dropout on an accelerator saves a mask, and no noise"
_FORKED = "a process that was forked from one that uses the accelerator cannot"
_RANDOM = "its numbers are other ones on an accelerator, and skip a whole unit, which is refused"
_LATER = "an accelerator tells of it when it has come to it, which the host does not wait for"
_ELSEWHERE = "backward runs in a thread of autograd, which hears no signals"
_BROUGHT = "on an accelerator parameters that are shown come to memory, and none are mapped"
_SHOWN = "states that an accelerator's optimizer shows are in host memory, and so are their copies"
# Parts of the names of tests that say nothing here, and why.
NOT_COVERED = {
    "test_ordering_on_an_asynchronous_device.py": _SIMULATED,
    "test_masks_as_bits.py::test_on_a_device_that_lags_behind": _SIMULATED,
    "test_masks_as_bits.py::test_a_mask_used_on_another_stream": _SIMULATED,
    "test_memory_and_space_are_bounded.py::test_by_default_two_layers_are_in_flight": _SIMULATED,
    "test_memory_and_space_are_bounded.py::test_calls_of_one_layer": _SIMULATED,
    "test_waiting_for_reads.py::test_a_read_that_is_waited_for_is_a_stall": _HOST,
    "test_sparse_inputs.py::test_a_layer_may_have_a_sparse_input": _KIND,
    "test_what_never_moves.py::test_tensors_that_cannot_move_exactly": _KIND,
    "test_what_never_moves.py::test_what_no_allocator_would_get_back": _HOST,
    "test_what_never_moves.py::test_a_device_in_host_memory": _HOST,
    "test_without_a_file_descriptor_what_is_shown_is_in_memory[parameters": _HOST,
    "test_memory_and_space_are_bounded.py::test_forward_waits_while": _BEHIND,
    "test_slow_disk.py::test_a_write_limit_holds_forward_up": _BEHIND,
    "test_casts_of_weights.py::test_a_llama_moves_its_activations_and_no_weight": _AUTOCAST,
    "test_casts_of_weights.py::test_the_memory_of_a_cast_is_free": _AUTOCAST,
    "test_casts_of_weights.py::test_gradients_have_the_same_bits": _AUTOCAST,
    "test_casts_of_weights.py::test_a_weight_that_is_changed_in_place": _AUTOCAST,
    "test_casts_of_weights.py::test_other_weights_may_change_before_backward": _AUTOCAST,
    "test_casts_of_weights.py::test_graphs_that_outlive_the_handle": _AUTOCAST,
    "test_casts_of_weights.py::test_layer_major_steps_make_them_again_too": _AUTOCAST,
    "test_casts_of_weights.py::test_parameters_that_wait_on_a_tier_are_cast_again": _AUTOCAST,
    "test_half_the_bytes_are_saved[wide_by_autocast": _AUTOCAST,
    "test_logits_that_are_written_to_behind_autograds_back_raise": _LATER,
    "test_replay_of_copies.py::test_in_other_lengths_what_is_written_over": _LATER,
    "test_what_is_written_over_unseen_is_not_computed_again[relu-False]": _LATER,
    "test_what_is_written_over_unseen_is_not_computed_again[silu_-False]": _LATER,
    "test_noise_as_bits.py": _NOISE,
    "test_replay.py::test_random_numbers_are_not_drawn_again": _NOISE,
    "test_a_model_that_skips_layers_at_random_meets_the_same_dropout[0.5]": _RANDOM,
    "test_every_stream_alike.py::test_a_forked_child_hears_whose_it_is": _FORKED,
    "test_every_stream_alike.py::test_what_a_child_changes_is_its_own": _FORKED,
    "test_where_the_host_refuses_memory_the_disk_is_not_blamed[weights]": _HOST,
    "test_what_a_handler_raises_is_not_taken_for_a_failed_read[activations]": _ELSEWHERE,
    "test_what_is_changed_through_data_while_it_is_shown_stays_so[ssd-numpy]": _HOST,
    "test_what_is_changed_through_data_while_it_is_shown_stays_so[host-numpy]": _HOST,
    "test_states_may_be_moved_to_where_they_belong[ssd-text]": _HOST,
    "test_states_may_be_moved_to_where_they_belong[ssd-cpu]": _HOST,
    "test_states_may_be_moved_to_where_they_belong[host-text]": _HOST,
    "test_states_may_be_moved_to_where_they_belong[host-cpu]": _HOST,
    "test_parameter_codec.py::test_a_saved_model_does_not_come_to_memory": _BROUGHT,
    "test_parameter_codec.py::test_a_model_that_is_saved_often_is_written_once[ssd]": _BROUGHT,
    "test_parameter_codec.py::test_a_copy_that_was_changed_behind_is_not_shown_again": _BROUGHT,
    "test_parameter_codec.py::test_a_changed_block_is_noticed_before_it_is_shown": _HOST,
    "test_what_is_away_is_nan_beneath_and_shown_when_it_is_touched": _BROUGHT,
    "test_touching_a_parameter_shows_its_unit_and_no_other": _BROUGHT,
    "test_recipes_that_write_parameters.py::test_what_asks_for_no_bytes_reads_none": _HOST,
    "test_mapped_files_that_fail.py::test_a_mapping_that_is_gone_has_no_sentence": _HOST,
    "test_parameters_that_were_not_replaced_are_lost_with_a_sentence": _BROUGHT,
    "test_parameters_that_were_changed_in_place_are_lost_with_a_sentence": _BROUGHT,
    "test_what_was_shown_and_is_lost_is_nan_after_closing[True]": _BROUGHT,
    "test_views_of_parameters.py::test_an_array_of_numpy": _HOST,
    "test_a_view_that_is_held_over_a_step_is_told_of_once[on a tier]": _BROUGHT,
    "test_gradients_that_are_away.py::test_waits_for_writes_are_counted": _BEHIND,
    "test_every_view_comes_back[of NumPy": _HOST,
    "test_every_view_comes_back[in a mapped file": _HOST,
    "test_what_is_more_than_its_bytes_is_unsupported[sparse": _KIND,
    "test_what_is_more_than_its_bytes_is_unsupported[oneDNN": _KIND,
    "test_what_is_more_than_its_bytes_is_unsupported[quantised": _KIND,
    "test_what_is_more_than_its_bytes_is_unsupported[DTensor": _KIND,
    "test_what_is_more_than_its_bytes_is_unsupported[zero without bytes": _KIND,
    "test_shared_storages.py::test_an_input_of_a_layer_without_a_storage": _KIND,
    # torch swaps the data of made-up tensors and others on the devices that it knows alone.
    "test_a_mode_that_makes_tensors_up_leaves_nothing_behind": _KIND,
    "test_a_file_is_as_large_and_has_as_many_parts_as_without": _SHOWN,
    "test_a_copy_of_an_optimizer_has_its_states": _SHOWN,
    "test_loaded_states_are_on_their_tier_before_the_next_step": _WINDOW,
    "test_states_loaded_in_place_take_no_second_place": _WINDOW,
    "test_buckets_of_any_sizes_fit_what_was_reserved": _WINDOW,
    "test_states_stay_in_memory_when_no_tier_takes_them": _WINDOW,
    "test_what_is_not_lost_is_back_in_memory_after_close": _WINDOW,
    "[sparse.sampled_addmm]": _KIND,
    "[sparse.mm.reduce]": _KIND,
    "[to_sparse]": _KIND,
    "test_nested_strided_tensors_are_unsupported": "torch aborts with such tensors here",
}


def pytest_configure(config: pytest.Config) -> None:
    """Before any test module is imported: some make tensors then."""
    if reason := why_not():
        raise pytest.UsageError(f"the test accelerator cannot be used: {reason}")
    register_platform("lag", LagPlatform(load()))
    _engines_offload_from_lag()
    _threads_make_tensors_on_lag()
    _clipping_is_by_foreach()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what is not covered, and says why."""
    for item in items:
        for name, reason in NOT_COVERED.items():
            if name in item.nodeid:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module", autouse=True)
def on_lag() -> Iterator[None]:
    """The device that tensors are made on, also by fixtures that several tests have in common."""
    torch.set_default_device("lag")
    yield
    torch.set_default_device(None)


@pytest.fixture(autouse=True)
def late(loaded_lag: LagModule) -> Iterator[None]:
    """By a random part of the delays."""
    torch.set_default_device("lag")  # should the test before have set another one
    loaded_lag.set_delays(KERNEL_DELAY_US, COPY_DELAY_US)
    yield
    loaded_lag.reset()
    loaded_lag.synchronize()


def _engines_offload_from_lag() -> None:
    plain = OffloadEngine.__init__

    def init(self: OffloadEngine, config: Any, device: Any = "cpu", **options: Any) -> None:
        if config.pinned_bytes is None:  # what these tests say of writes is true of the drives'
            config = dataclasses.replace(config, pinned_bytes=0)
        plain(self, config, "lag" if device == "cpu" else device, **options)

    OffloadEngine.__init__ = init  # type: ignore[method-assign]


def _threads_make_tensors_on_lag() -> None:
    """The default device is a thread's own. Threads of ours get by without it, as on a GPU."""
    plain = threading.Thread.run

    def run(self: threading.Thread) -> None:
        if torch.get_default_device().type == "cpu" and not self.name.startswith(_OUR_THREADS):
            torch.set_default_device("lag")
        plain(self)

    threading.Thread.run = run  # type: ignore[method-assign]


def _clipping_is_by_foreach() -> None:
    """As whoever has gradients on a tier must ask for it on an accelerator."""
    clip = torch.nn.utils.clip_grad_norm_
    torch.nn.utils.clip_grad_norm_ = functools.partial(clip, foreach=True)
