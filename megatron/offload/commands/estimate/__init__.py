# SPDX-License-Identifier: Apache-2.0
"""`megatron-offload estimate`: the memory that a training needs, without a GPU and weights."""
