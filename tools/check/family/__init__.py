# SPDX-License-Identifier: Apache-2.0
"""What tools/check/families.py is made of.

Reading order: catalogue, configurations, inputs, sample; training, cells, columns; pool, report. A
file imports only from those before it.
"""
