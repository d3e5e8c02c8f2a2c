# SPDX-License-Identifier: Apache-2.0
"""The mode `auto`: measures a run, simulates it, and decides where activations live."""
