# SPDX-License-Identifier: Apache-2.0
"""The sections of gpu_check.py. Each is a module with `run(settings, section)`.

Reading order: settings, result, progress, machine; delays, ordering; models, parity; stack, memory;
timeline, overlap; bandwidth; variants, compare. A file imports only from those before it.
"""
