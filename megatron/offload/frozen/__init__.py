# SPDX-License-Identifier: Apache-2.0
"""Frozen features on disk: what parts of a model without trainable weights computed, by key."""
