# SPDX-License-Identifier: Apache-2.0
"""Vector kernels read past the end of a tensor: a bucket has a page behind it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes import finish, start_python

# torch 2.13's fused SGD on a CPU reads a vector behind the end of a bfloat16 momentum of so many.
# The last values come of what it finds there: other bits each time, with offload or without.
_TRAINS = """
    import ctypes, mmap, sys, types
    import torch
    from megatron.offload import offload_optimizer
    from megatron.offload.tiers import mapped

    PAGE = mmap.PAGESIZE
    LAST = 64
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    sizes = []

    def guarded(fd, num_bytes, **settings):
        "Pages, and one behind them that nobody may read."
        pages = mmap.mmap(fd, num_bytes + PAGE, **settings)
        address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        assert libc.mprotect(address + num_bytes, PAGE, 0) == 0
        sizes.append(num_bytes)
        return pages

    mapped.mmap = types.SimpleNamespace(**{**vars(mmap), "mmap": guarded})
    for directory in (None, sys.argv[1]):
        found = []
        for is_offloaded in (True, False):
            torch.manual_seed(1)
            params = [torch.nn.Parameter(torch.randn(PAGE // 2).bfloat16()) for _ in range(3)]
            optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True)
            if is_offloaded:
                handle = offload_optimizer(optimizer, directory, bucket_bytes=1, window_bytes=0)
            for _ in range(3):
                for param in params:
                    param.grad = torch.randn(PAGE // 2).bfloat16()
                optimizer.step()
            if is_offloaded:
                assert all(one.num_bytes == PAGE for one in handle.states.buckets)
                handle.close()
            found.append([param[:-LAST] for param in params])
        assert all(map(torch.equal, *found))
    print("steps", len(sizes))
"""


@pytest.mark.slow
def test_a_kernel_that_reads_past_a_buckets_end_finds_memory_there(tmp_path: Path) -> None:
    code, output, errors = finish(start_python(_TRAINS, tmp_path))
    assert code == 0, errors
    name, number = output.split()
    # Three buckets are made on each of two tiers; those that were still on their way are not read.
    assert name == "steps" and int(number) >= 2 * 3
