# SPDX-License-Identifier: Apache-2.0
"""`megatron-offload tune`: micro-batch size, micro-batches and units of a step, from short runs."""
