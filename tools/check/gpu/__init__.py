# SPDX-License-Identifier: Apache-2.0
"""The sections of tools/gpu_check.py: each is a module with `run(settings, section)`.

Reading order: settings, result; delays, ordering, two_gpus; models, parity; stack, memory. A file
imports only from those before it.
"""
