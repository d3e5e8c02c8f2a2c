# SPDX-License-Identifier: Apache-2.0
"""What is counted of activations: traffic, waits of compute, what a peak of memory is made of."""
