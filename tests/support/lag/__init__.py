# SPDX-License-Identifier: Apache-2.0
"""A torch device "lag" that lags behind its host as a GPU does, on a CPU: `load` gives `torch.lag`.

Its streams are threads, so an operation that does not wait for another runs too early or too late,
and the bytes are wrong: a missing wait is seen. Tests make a stream as late as they want (`late`,
`held`, `set_delays`). What runs here shows the order of things, not what CUDA's driver does, nor
how fast it is.

As on a GPU:
- operators are queued and return; results have the CPU's bits; an error is raised later;
- 33 streams a device, events, two devices (`LAG_DEVICES`), each with 16 GiB (`LAG_MEMORY_GIB`);
- the allocator caches in the order of streams; `record_stream` keeps memory for another stream;
- copies between pinned memory and the device are queued, those of pageable memory hold the host up;
- looking at a device address from the host ends the process.
Memory that is fresh or freed is poisoned, in the order of its stream. A test may set what launches
cost the host, how long kernels and copies take, and the bandwidth of either direction.

Not covered: sparse, nested, quantised and oneDNN tensors, DTensor, autocast, graphs, processes that
share a device, operators whose CPU kernel is written in Python. Operators whose results' sizes
depend on data wait for the stream, as a GPU's do; so do those without a Meta kernel.

Once loaded it is torch's accelerator until the process ends: tests that use it run after others.
"""

from __future__ import annotations

import atexit
import functools
import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch

from tests.support.lag.build import EXTENSION, build
from tests.support.lag.module import LagModule


@functools.cache
def prepare() -> ModuleType:
    """Builds the extension if need be and imports it; nobody but autograd sees the device yet.

    Must come before the first backward of the process: that is when autograd counts devices.
    """
    loader = importlib.machinery.ExtensionFileLoader(EXTENSION, str(build()))
    spec = importlib.util.spec_from_loader(EXTENSION, loader)
    assert spec is not None
    extension = importlib.util.module_from_spec(spec)
    loader.exec_module(extension)
    return extension


@functools.cache
def load() -> LagModule:
    """Makes the device torch's accelerator, after `prepare`; returns `torch.lag`."""
    extension = prepare()
    extension.become_accelerator()
    torch.utils.rename_privateuse1_backend("lag")
    module = LagModule(extension)
    torch._register_device_module("lag", module)
    torch.utils.generate_methods_for_privateuse1_backend()
    atexit.register(_end, module, extension)
    return module


def _end(module: LagModule, extension: ModuleType) -> None:
    """Waits for the streams and ends them: kernels must not run while torch is taken down."""
    module.reset()
    try:
        for _ in range(2 if _autograd_has_threads() else 0):
            _replace_last_graph(module.device_count())
    except Exception as error:
        print(f"lag: a kernel failed and nobody asked: {error}", file=sys.stderr)
    extension.shut_down()


def _autograd_has_threads() -> bool:
    names = (file.read_text() for file in Path("/proc/self/task").glob("*/comm"))
    return any(name.startswith("pt_autograd") for name in names)


def _replace_last_graph(num_devices: int) -> None:
    """Autograd's thread of a device drops the graph of its last backward when it has the next.

    The graph's Python objects cannot be freed any more once the interpreter ends: a process that
    ends right after its backward would abort.
    """
    for index in range(num_devices):
        torch.ones((), device=f"lag:{index}", requires_grad=True).clone().backward()
