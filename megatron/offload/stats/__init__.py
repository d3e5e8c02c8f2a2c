# SPDX-License-Identifier: Apache-2.0
"""What is counted: steps, traffic, memory, the life of drives."""
