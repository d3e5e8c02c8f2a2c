# SPDX-License-Identifier: Apache-2.0
"""`megatron-offload report --memory`: what the peak of a step is made of."""
