# SPDX-License-Identifier: Apache-2.0
"""What calls the engine: Megatron, any PyTorch model, and the trainers built on them."""
