# SPDX-License-Identifier: Apache-2.0
"""The command `megatron-offload rok`: the recompute-offload-keep curve of this machine."""
