# SPDX-License-Identifier: Apache-2.0
"""What only CUDA has: `CudaPlatform`. The only file that calls `torch.cuda` by its name.

The rest of the package calls the functions here for what it asks of CUDA without a `Device`.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from megatron.offload.device.platform import PeakReader
from megatron.offload.errors import OffloadError
from megatron.offload.machine.shared_peak import shared_counters


class CudaPlatform:
    """See `Platform` for the calls."""

    def pin(self, address: int, num_bytes: int) -> None:
        """Page-locks a range of host memory, for the device that the calling thread is on.

        Raises:
            RuntimeError: the system or the driver refuses.
        """
        try:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0))
        except RuntimeError:
            _forget_error()
            raise

    def unpin(self, address: int) -> None:
        """Ends what `pin` began at this address."""
        # What it returns changes nothing: at exit the driver may be gone already.
        torch.cuda.cudart().cudaHostUnregister(address)

    def new_event(self) -> torch.cuda.Event:
        """An event for which a thread sleeps instead of spinning; torch.Event may not know that."""
        return torch.cuda.Event(blocking=True)

    def annotate(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """A range with this name in NVTX (Nsight), as a context."""
        return torch.cuda.nvtx.range(name)

    def peak_reader(self, device: torch.device) -> PeakReader:
        """Shares torch's counters with trainers that read and reset them."""
        return shared_counters(torch.cuda).reader(device.index)


def _forget_error() -> None:
    """CUDA remembers a failed call, and torch would raise it at its next kernel: raise it here.

    It remembers it for the thread, so a kernel on the thread's own device finds it.
    """
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")


# -- Without a device -----------------------------------------------------------------------------


def has_cuda() -> bool:
    """Whether torch sees a CUDA device."""
    return torch.cuda.is_available()


def is_captured() -> bool:
    """Whether the current stream is captured into a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def check_not_captured(prefix: str, what: str, remedy: str) -> None:
    """Makes sure that the current stream is not captured into a CUDA graph.

    Args:
        prefix: of the sentence.
        what: would be captured; its bytes come and go.
        remedy: what to do instead.

    Raises:
        OffloadError: it is.
    """
    if is_captured():
        raise OffloadError(
            f"{prefix}a CUDA graph captures {what} on a tier, and each replay would use memory "
            f"that others have by then; {remedy}"
        )


def is_graphed(module: torch.nn.Module) -> bool:
    """Whether a module's forward replays a CUDA graph, of torch or of Transformer Engine."""
    return getattr(vars(module).get("forward"), "__module__", None) in _GRAPHS


_GRAPHS = ("torch.cuda.graphs", "transformer_engine.pytorch.graph")  # of make_graphed_callables


def all_properties() -> list[Any]:
    """What torch tells of each CUDA device. Raises whatever a broken driver raises."""
    return [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]


def segments_expand() -> bool | None:
    """Whether torch's own allocator expands segments, by its settings; None: it does not say."""
    if not torch.cuda.is_initialized() or torch.cuda.memory.get_allocator_backend() != "native":
        return None
    try:
        return bool(torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"])
    except (AttributeError, KeyError, RuntimeError):  # a version without it
        return None
