# SPDX-License-Identifier: Apache-2.0
"""How activations leave device memory and come back in time."""
