# SPDX-License-Identifier: Apache-2.0
"""Errors in the CUDA device. Their tests need a GPU: without one nothing is shown of them.

Left out: an event that is not blocking, with which threads spin instead of sleeping.
"""

from __future__ import annotations

from tests.mutation_tables import Mutation, table_of

MUTATIONS: list[Mutation] = []

CUDA = "unit/test_cuda_device.py::"
WAITS_FOR_PRODUCER = (
    CUDA + "test_a_copy_to_the_host_waits_for_what_was_queued_before_its_mark[False-True]"
)
ON_A_QUEUE = CUDA + "test_a_thread_that_is_put_on_a_queue_sets_its_marks_there"

cuda = table_of("device/cuda.py", MUTATIONS)

cuda(
    "a copy does not wait for its mark",
    """
            stream.wait_event(after)
""",
    "",
    WAITS_FOR_PRODUCER,
)
cuda(
    "a copy from the host does not wait for its mark",
    """
        self._copy(content, _bytes_at(address, content.nbytes), self._load, after)
""",
    """
        nothing = torch.cuda.Event()
        self._copy(content, _bytes_at(address, content.nbytes), self._load, nothing)
""",
    CUDA
    + "test_a_copy_from_the_host_leaves_memory_to_its_former_user_until_that_one_is_done[True]",
)
cuda(
    "a copy returns before it is done",
    """
            done.synchronize()
""",
    "",
    CUDA + "test_copies_of_several_threads_keep_their_bytes_apart",
)
cuda(
    "a copy waits for an event that was recorded before it was queued",
    """
            target.copy_(source, non_blocking=True)
            done = torch.cuda.Event(blocking=True)  # the thread sleeps instead of spinning
            done.record(stream)
""",
    """
            done = torch.cuda.Event(blocking=True)  # the thread sleeps instead of spinning
            done.record(stream)
            target.copy_(source, non_blocking=True)
""",
    CUDA + "test_copies_of_several_threads_keep_their_bytes_apart",
)
cuda(
    "a mark is of the default stream, whatever the current one is",
    """
        event.record(torch.cuda.current_stream(self.device))
""",
    """
        event.record(torch.cuda.default_stream(self.device))
""",
    CUDA + "test_a_copy_to_the_host_waits_for_what_was_queued_before_its_mark[True-True]",
)
cuda(
    "a mark is of no stream",
    """
        event.record(torch.cuda.current_stream(self.device))
""",
    "",
    WAITS_FOR_PRODUCER,
)
cuda(
    "all threads are on one queue",
    """
        return torch.cuda.current_stream(self.device)
""",
    """
        return torch.cuda.default_stream(self.device)
""",
    ON_A_QUEUE,
)
cuda(
    "a thread that is put on a stream stays where it was",
    """
        return torch.cuda.stream(stream)
""",
    """
        return contextlib.nullcontext()
""",
    ON_A_QUEUE,
)
cuda(
    "copies run on the stream that computes",
    """
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            stream.wait_event(after)
""",
    """
        stream = torch.cuda.current_stream(self.device)
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            stream.wait_event(after)
""",
    CUDA + "test_copies_wait_for_nothing_that_was_queued_after_their_mark",
)
cuda(
    "copies in both directions share a stream",
    """
        self._load = torch.cuda.Stream(self.device)  # host to device, while backward computes
""",
    """
        self._load = self._store
""",
    CUDA + "test_a_copy_from_the_host_does_not_wait_behind_copies_to_it",
)
cuda(
    "new memory belongs to the stream that loads",
    """
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device).untyped_storage()
""",
    """
        with torch.cuda.stream(self._load):
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.device).untyped_storage()
""",
    CUDA + "test_memory_is_never_reused_before_those_who_use_it_are_done",
)
cuda(
    "nobody waits for an event",
    """
            event.synchronize()
""",
    """
            pass
""",
    CUDA + "test_who_waits_for_a_mark_returns_when_the_gpu_has_passed_it",
)
