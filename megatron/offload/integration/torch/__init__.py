# SPDX-License-Identifier: Apache-2.0
"""Activation offload in any PyTorch model: `offload_activations`. Reading order: `door.py`."""
