# SPDX-License-Identifier: Apache-2.0
"""The machine that trains: limits and allocators of its memory, mounts, processes."""
