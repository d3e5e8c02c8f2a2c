# SPDX-License-Identifier: Apache-2.0
"""`megatron-offload longest`: the longest sequence that fits into a memory, from short runs."""
