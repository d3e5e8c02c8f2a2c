# SPDX-License-Identifier: Apache-2.0
"""Settings of the C library's allocator that let offloaded memory go: `ALLOCATOR_ENV`.

On a CPU, memory that a tensor gives up lowers the process's resident set only if malloc returns it
to the system. These variables must be set before the process starts, so launch scripts and
benchmarks read them from here.
"""

from __future__ import annotations

# Blocks from 64 KiB up are mapped on their own and unmapped when freed; huge pages keep the page
# faults that this costs few.
ALLOCATOR_ENV: dict[str, str] = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
