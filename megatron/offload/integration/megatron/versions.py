# SPDX-License-Identifier: Apache-2.0
"""Which releases of megatron-core the hooks are known to fit: `check_version`."""

from __future__ import annotations

from megatron.offload.errors import ConfigurationError

# The last one is what `pip install megatron-offload[megatron]` brings.
# 0.19.1: the tag core_v0.19.0 of Megatron-LM; PyPI has 0.19.0 and 0.19.2.
SUPPORTED_VERSIONS = ("0.19.2", "0.19.1", "0.19.0", "0.16.1")


def check_version() -> None:
    """Raises ConfigurationError if the hooks are not known to fit the imported megatron-core."""
    import megatron.core

    # Not the installed wheel's metadata: a checkout on PYTHONPATH wins over the wheel. Its version
    # may name its commit as well: 0.19.1+5be9626709.
    version = megatron.core.__version__
    if version.partition("+")[0] not in SUPPORTED_VERSIONS:
        raise ConfigurationError(
            f"megatron-core {version} is not supported, only {', '.join(SUPPORTED_VERSIONS)}; "
            f"pip install megatron-core=={SUPPORTED_VERSIONS[-1]}, or use such a checkout"
        )
