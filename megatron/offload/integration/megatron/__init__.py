# SPDX-License-Identifier: Apache-2.0
"""Activation offload in Megatron: flags, hooks, and the CPU runtime.

Import order matters to nobody here: `install` imports megatron-core only when it is called.
"""

from megatron.offload.integration.megatron import arguments, cpu_runtime
from megatron.offload.integration.megatron.install import MegatronOffload, check, install

__all__ = ["MegatronOffload", "arguments", "check", "cpu_runtime", "install"]
