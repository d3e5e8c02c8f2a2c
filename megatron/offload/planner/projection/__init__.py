# SPDX-License-Identifier: Apache-2.0
"""What a training step should take and need, from descriptions of a model and of hardware."""
