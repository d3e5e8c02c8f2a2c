# SPDX-License-Identifier: Apache-2.0
"""How the bytes of an activation move: buffers, I/O threads, tiers."""
