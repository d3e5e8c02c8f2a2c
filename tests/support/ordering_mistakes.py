# SPDX-License-Identifier: Apache-2.0
"""Wrong waits, reuses and streams that the ordering stress has to find: `MISTAKES`, `made`.

Each is made in the package's own lines, so that nothing else differs, and in this process: `made`
compiles a function anew and puts it in the place of the right one. A mistake that only makes
training slow, such as copies on the stream that computes, is none of these.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from tests.mutation_tables import PACKAGE, Mutation

_ROOT = Path(__file__).resolve().parents[2]
_DRIVE, _POOL = ("ssd", "tiered"), ("ssd, pinned", "tiered, pinned")
_WHOLE = ("host", *_POOL)  # storages that are copied in one piece
_ALL = (*_WHOLE, *_DRIVE)
_BOUNDARY = ("boundary, ssd", "boundary, host")
_PARAMETERS = ("parameters, ssd", "parameters, host")
_STATES, _TWINS = ("states, ssd", "states, host"), ("states, step on the host",)

Change = tuple[str, str, str, str]  # file, function, old text, new text, as in `Mutation`


@dataclass(frozen=True)
class Mistake:
    """One mistake.

    Attributes:
        what: goes wrong, in words.
        modes: of the stress in which that shows; runs take them in turn. Where pieces are copied,
            I/O threads wait on the host, for one storage after the other, and hide some.
        changes: to the package's lines.
    """

    what: str
    modes: tuple[str, ...]
    changes: tuple[Change, ...]

    def mutations(self) -> list[Mutation]:
        """Its changes, each of which can be applied to a file's text."""
        return [
            Mutation(file, function, self.what, old, new, "", "")
            for file, function, old, new in self.changes
        ]


@contextmanager
def made(mistake: Mistake) -> Iterator[None]:
    """The package makes the mistake, in whatever is called from now on until the end."""
    with ExitStack() as undo:
        for mutation in mistake.mutations():
            module = importlib.import_module(f"{PACKAGE}/{mutation.file[:-3]}".replace("/", "."))
            name, _, method = mutation.function.partition(".")
            assert method, f"{mutation}: only methods can be exchanged"
            owner = getattr(module, name)
            wrong = _method(mutation.apply(source_of(mutation)), owner, method, vars(module))
            undo.enter_context(mock.patch.object(owner, method, wrong))
        yield


def source_of(mutation: Mutation) -> str:
    """The file that it changes."""
    return (_ROOT / PACKAGE / mutation.file).read_text()


def _method(source: str, owner: type, name: str, names: dict[str, Any]) -> Any:
    """A method as a file has it, for a class that is there already."""
    parts = next(
        node.body
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == owner.__name__
    )
    function = next(
        node for node in parts if isinstance(node, ast.FunctionDef) and node.name == name
    )
    # `super()` without arguments asks for a name that only stands in a class, or in a function.
    around = ast.parse(f"from __future__ import annotations\ndef make(__class__): return {name}")
    make = around.body[1]
    assert isinstance(make, ast.FunctionDef)
    make.body.insert(0, function)
    found: dict[str, Any] = {}
    exec(compile(ast.fix_missing_locations(around), str(names["__file__"]), "exec"), names, found)
    return found["make"](owner)


_ACCELERATOR, _ACCESS = "device/accelerator.py", "tiers/access.py"
_READER, _WRITER, _BOUNCE = (
    "activations/transfer/reader.py",
    "activations/transfer/writer.py",
    "tiers/bounce.py",
)
_STORAGE, _ONLY_COPY = "moving/storage.py", "moving/only_copy.py"
_STEP_ON_HOST = "states/step_on_host.py"
_ASIDE, _GRADIENTS = "activations/capture/tensor_swapper.py", "parameters/gradients.py"
_MEMORY = "moving/memory.py"
_UNIT = "parameters/unit.py"
_COPY_TO_HOST = (
    "_bytes_at(address, content.nbytes).copy_(content, non_blocking=True)\n"
    "        return self.record_event(stream)"
)
_COPY_FROM_HOST = (
    "content.copy_(_bytes_at(address, content.nbytes), non_blocking=True)\n"
    "        return self.record_event(self._load)"
)

MISTAKES: tuple[Mistake, ...] = (
    # -- On the way to the host -------------------------------------------------------------------
    Mistake(
        "a copy to the host does not wait for its producer",
        _WHOLE,
        ((_ACCELERATOR, "AcceleratorDevice.copy_to_host", "stream.wait_event(after)", "pass"),),
    ),
    Mistake(
        "an I/O thread does not wait for the producer of a piece",
        _DRIVE,
        (
            (
                _ACCESS,
                "_StagedView.pieces_to_write",
                "self._device.wait_for_event(self._after)",
                "",
            ),
        ),
    ),
    Mistake(
        "the producer's event is lost on the way to the tier",
        _ALL,
        (
            (
                _WRITER,
                "Writer._dispatch",
                "produced.get(one.stream)",
                "None",
            ),
        ),
    ),
    Mistake(
        "the producer's event is recorded in the main stream, whatever produced",
        _WHOLE,
        (
            (
                _WRITER,
                "Writer.write",
                "self._device.current_stream()",
                "self._device._module.default_stream()",
            ),
        ),
    ),
    Mistake(
        "the producer's event is recorded in the stream of copies",
        _ALL,
        (
            (
                _WRITER,
                "Writer._dispatch",
                "self._device.record_event(s)",
                "self._device.record_event(self._device._load)",
            ),
        ),
    ),
    Mistake(
        "the producer's event is recorded before masks are packed and parts are copied",
        _WHOLE,
        (
            (
                _WRITER,
                "Writer.submit",
                "fitting: list[Outgoing] = []\n",
                "fitting: list[Outgoing] = []\n"
                "    self.early = {one.stream: self._device.record_event(one.stream) "
                "for one in outgoing}\n",
            ),
            (_WRITER, "Writer._dispatch", "self._device.record_event(s)", "self.early[s]"),
        ),
    ),
    Mistake(
        "masks are packed and parts copied on another stream",
        _ALL,
        (
            (
                _WRITER,
                "Writer.submit",
                "self._device.use_stream(one.stream)",
                "self._device.use_stream(self._device._pieces)",
            ),
        ),
    ),
    Mistake(
        "the event of a copy to the host is recorded before the copy",
        _ALL,
        (
            (
                _ACCELERATOR,
                "AcceleratorDevice.copy_to_host",
                _COPY_TO_HOST,
                "copied = self.record_event(stream)\n"
                "        _bytes_at(address, content.nbytes).copy_(content, non_blocking=True)\n"
                "        return copied",
            ),
        ),
    ),
    Mistake(
        "the event of a copy to the host is recorded in another stream",
        _ALL,
        (
            (
                _ACCELERATOR,
                "AcceleratorDevice.copy_to_host",
                "return self.record_event(stream)",
                "return self.record_event(self._load)",
            ),
        ),
    ),
    Mistake(
        "memory is let go when its copy to the host is queued",
        _WHOLE,
        (
            ("tiers/copies.py", "CopyWatcher.watch", "self._device.wait_for_event(after)", ""),
            ("tiers/copies.py", "CopyWatcher.watch", "self._device.wait_for_event(copied)", ""),
        ),
    ),
    Mistake(
        "the drive gets a piece before its copy has ended",
        _DRIVE,
        ((_ACCESS, "_StagedView.pieces_to_write", "self._device.wait_for_event(copied)", ""),),
    ),
    # -- On the way back --------------------------------------------------------------------------
    Mistake(
        "compute does not wait for what was copied back",
        _ALL,
        ((_ACCELERATOR, "AcceleratorDevice.wait_on_stream", "stream.wait_event(event)", "pass"),),
    ),
    Mistake(
        "the main stream waits for what was copied back, whatever stream uses it",
        _ALL,
        (
            (
                _ACCELERATOR,
                "AcceleratorDevice.wait_on_stream",
                "self.current_stream()",
                "self._module.default_stream(self.device)",
            ),
        ),
    ),
    Mistake(
        "compute does not wait for a tensor that was built ahead of its use",
        _ALL,
        ((_READER, "Reader.use_built", "view.ready is not None", "False"),),
    ),
    Mistake(
        "compute does not wait for a tensor that was built when it was used",
        _ALL,
        ((_READER, "Reader.wait_for_read", "ready is not None:", "False:"),),
    ),
    Mistake(
        "a mask that one stream has unpacked is used by another without a wait",
        _ALL,
        (
            (
                _READER,
                "Reader._unpacked",
                "record.ready = (self._device.record_event(),)",
                "pass",
            ),
        ),
    ),
    Mistake(
        "restored memory is reused while compute is still to read it",
        _ALL,
        (
            (
                _ACCELERATOR,
                "AcceleratorDevice.use_after",
                "_bytes_of(storage).record_stream(self.current_stream())",
                "",
            ),
        ),
    ),
    Mistake(
        "restored memory is compute's, and no stream waits for its former use",
        _ALL,
        (
            (
                _ACCELERATOR,
                "AcceleratorDevice.new_restored",
                "self.use_stream(self._load)",
                "self._on_device()",
            ),
        ),
    ),
    Mistake(
        "the event of a copy from the host is recorded before the copy",
        _ALL,
        (
            (
                _ACCELERATOR,
                "AcceleratorDevice.copy_from_host",
                _COPY_FROM_HOST,
                "copied = self.record_event(self._load)\n"
                "        content.copy_(_bytes_at(address, content.nbytes), non_blocking=True)\n"
                "        return copied",
            ),
        ),
    ),
    Mistake(
        "a copy from the host runs in another stream than its event",
        _ALL,
        (
            (
                _ACCELERATOR,
                "AcceleratorDevice.copy_from_host",
                "self.use_stream(self._load)",
                "self.use_stream(self._store)",
            ),
        ),
    ),
    Mistake(
        "compute waits for the first piece of what was copied back",
        _DRIVE,
        (
            (
                _ACCESS,
                "_StagedView.pieces_to_fill",
                "copied = self._device.copy_from_host(buffer.address, self._storage, piece)\n"
                "            buffer.event = copied",
                "buffer.event = self._device.copy_from_host(buffer.address, self._storage, piece)\n"
                "            copied = copied or buffer.event",
            ),
        ),
    ),
    Mistake(
        "a read has ended before the drive has delivered",
        _DRIVE,
        (
            (
                "tiers/ssd.py",
                "SsdTier.begin_read",
                "transfer.events = view.events\n",
                "transfer = when_all([])\n    transfer.events = view.events\n",
            ),
        ),
    ),
    # -- Memory of the host -----------------------------------------------------------------------
    Mistake(
        "a staging buffer is taken again while a copy reads it",
        _DRIVE,
        ((_ACCESS, "_StagedView.pieces_to_fill", "buffer.event = copied", ""),),
    ),
    Mistake(
        "a thread that takes a staging buffer waits for the event of another one",
        _DRIVE,
        (
            (
                "tiers/staging.py",
                "StagingPool.buffer",
                "self._device.wait_for_event(buffer.event)",
                "self._device.wait_for_event(self._device.record_event(self._device._pieces))",
            ),
        ),
    ),
    Mistake(
        "two staging buffers are one",
        _DRIVE,
        (
            (
                "tiers/staging.py",
                "StagingPool.__init__",
                "number * piece_bytes",
                "number // 2 * piece_bytes",
            ),
        ),
    ),
    Mistake(
        "a block of host memory is free when its copy is queued",
        ("host", "tiered"),
        (
            (
                "tiers/host.py",
                "HostTier.begin_write",
                "address = self._arena.address(offset)\n",
                "address = self._arena.address(offset)\n    self._arena.free(offset)\n",
            ),
            ("tiers/host.py", "HostTier.free", "offset is not None", "False"),  # nor a second time
        ),
    ),
    Mistake(
        "memory of the pool is free when its bytes go to the drives",
        _POOL,
        (
            (
                _BOUNCE,
                "BouncingTier._in_pool",
                "block.write = write\n",
                "block.write = write\n    block.in_pool = None\n",
            ),
            (
                _BOUNCE,
                "_PoolView.__init__",
                "self._in_pool = in_pool",
                "self._in_pool = in_pool.address",
            ),
            (
                _BOUNCE,
                "_PoolView.pieces_to_write",
                "self._in_pool.address",
                "self._in_pool",
            ),
        ),
    ),
    Mistake(
        "a read comes from the drives although they have not got it yet",
        _POOL,
        ((_BOUNCE, "BouncingTier.begin_read", "if in_pool is None:", "if True:"),),
    ),
    Mistake(
        "the drives get what is in the pool before it has arrived there",
        _POOL,
        (
            (
                _BOUNCE,
                "BouncingTier.begin_write",
                "copy.add_done_callback(lambda copied: self._in_pool(reference, extents, copied))",
                "self._in_pool(reference, extents, Transfer(lambda: None))",
            ),
            (
                _BOUNCE,
                "BouncingTier._in_pool",
                "copied.cancelled() or copied.exception() is not None",
                "False",
            ),
        ),
    ),
    # -- Streams and events -----------------------------------------------------------------------
    Mistake(
        "an event is recorded again while a stream or thread waits for it",
        _ALL,
        (
            (
                _ACCELERATOR,
                "AcceleratorDevice.record_event",
                "event = self.platform.new_event()\n",
                "event = self.event = getattr(self, 'event', None) or self.platform.new_event()\n",
            ),
        ),
    ),
    Mistake(
        "copies from the host run in a stream of another device",
        _ALL,
        (
            (
                _ACCELERATOR,
                "AcceleratorDevice.__init__",
                "self._load = self._module.Stream(self.device)",
                "self._load = self._module.Stream(torch.device(device.type, 0))",
            ),
        ),
    ),
    Mistake(
        "copies to the host run in streams of another device",
        _ALL,
        (
            (
                _ACCELERATOR,
                "AcceleratorDevice.__init__",
                "self._store = self._module.Stream(self.device)\n"
                "    self._pieces = self._module.Stream(self.device)",
                "self._store = self._pieces = self._module.Stream(torch.device(device.type, 0))",
            ),
        ),
    ),
    # -- Optimizer states -------------------------------------------------------------------------
    Mistake(
        "the optimizer does not wait for states that were copied back",
        _STATES,
        (
            (
                _STORAGE,
                "MovingStorage.use_here",
                "self._memory.use_after(self._device, self._events)",
                "pass",
            ),
        ),
    ),
    Mistake(
        "states are copied to the host before they are updated",
        _STATES,
        (
            (
                _ONLY_COPY,
                "OnlyCopy.put_away",
                "None if self._device.is_host else self._device.record_event()",
                "None",
            ),
        ),
    ),
    Mistake(
        "the event of an update is recorded in the stream of copies",
        _STATES,
        (
            (
                _ONLY_COPY,
                "OnlyCopy.put_away",
                "self._device.record_event()",
                "self._device.record_event(self._device._load)",
            ),
        ),
    ),
    Mistake(
        "states are let go and read again before their write has ended",
        _STATES,
        (
            (
                _STORAGE,
                "MovingStorage.begin_write",
                "self.watch()",
                "self.where, self._transfer = Where.ON_TIER, None\n    self._memory.release()",
            ),
        ),
    ),
    Mistake(
        "gradients are copied to the host before they are there",
        _TWINS,
        ((_STEP_ON_HOST, "_Twins.__init__", "device.record_event()", "None"),),
    ),
    Mistake(
        "the step on the host does not wait for gradients",
        _TWINS,
        (
            (
                _STEP_ON_HOST,
                "_Twins.wait_for_copies",
                "self._device.wait_for_event(event)",
                "pass",
            ),
        ),
    ),
    Mistake(
        "gradients arrive in the memory of those that the step works on",
        _TWINS,
        (
            (
                _STEP_ON_HOST,
                "StepOnHost._begin_next",
                "self._memory.append(self._memory.pop(0))",
                "",
            ),
        ),
    ),
    Mistake(
        "parameters are copied back on a stream that compute does not wait for",
        _TWINS,
        (
            (
                _STEP_ON_HOST,
                "_Twins.copy_back",
                "param.copy_(self._views[index, _VALUE], non_blocking=True)",
                "with self._device.use_stream(self._device._load):\n"
                "                param.copy_(self._views[index, _VALUE], non_blocking=True)",
            ),
        ),
    ),
    # -- What waits between two units of a layer-major step ----------------------------------------
    Mistake(
        "what waits between two units is written before it is computed",
        _BOUNDARY,
        (
            (
                _ASIDE,
                "TensorSwapper.put",
                "self._writer.submit([self._writer.write(record, self._tier)])",
                "with self._writer._device.use_stream(self._writer._device._load):\n"
                "            self._writer.submit([self._writer.write(record, self._tier)])",
            ),
        ),
    ),
    Mistake(
        "a unit takes hidden states that have not come back",
        _BOUNDARY,
        (
            (
                _ASIDE,
                "TensorSwapper.fill",
                "memory = self._reader.wait_for_read(record, for_good=False)",
                "with self._writer._device.use_stream(self._writer._device._load):\n"
                "                memory = self._reader.wait_for_read(record, for_good=False)",
            ),
        ),
    ),
    Mistake(
        "memory of hidden states is reused while a unit is still to read it",
        _BOUNDARY,
        (
            (
                _ASIDE,
                "TensorSwapper.fill",
                "memory = self._reader.wait_for_read(record, for_good=False)",
                "with self._writer._device.use_stream(self._writer._device._load):\n"
                "                memory = self._reader.wait_for_read(record, for_good=False)\n"
                "            for event in record.ready or ():\n"
                "                self._writer._device.current_stream().wait_event(event)",
            ),
        ),
    ),
    Mistake(
        "a unit takes a gradient that has not come back",
        _BOUNDARY,
        (
            (
                _ASIDE,
                "TensorSwapper.take",
                "return self._hooks.unpack(waiting)",
                "with self._writer._device.use_stream(self._writer._device._load):\n"
                "        return self._hooks.unpack(waiting)",
            ),
        ),
    ),
    # -- Parameters of units ----------------------------------------------------------------------
    Mistake(
        "parameters or gradients are used before they have arrived",
        _PARAMETERS,
        (
            (
                _STORAGE,
                "MovingStorage.use_here",
                "self._memory.use_after(self._device, self._events)",
                "pass",
            ),
        ),
    ),
    Mistake(
        "a unit or gradients are written before the device has made them",
        _PARAMETERS,
        ((_ONLY_COPY, "OnlyCopy.put_away", "else self._device.record_event()", "else None"),),
    ),
    Mistake(
        "the event of a unit or of gradients is recorded in the stream of copies",
        _PARAMETERS,
        (
            (
                _ONLY_COPY,
                "OnlyCopy.put_away",
                "else self._device.record_event()",
                "else self._device.record_event(self._device._load)",
            ),
        ),
    ),
    Mistake(
        "a unit or gradients are let go before their write has ended",
        _PARAMETERS,
        (
            (
                _STORAGE,
                "MovingStorage.begin_write",
                "self.watch()",
                "self.where, self._transfer = Where.ON_TIER, None\n    self._memory.release()",
            ),
        ),
    ),
    Mistake(
        "a unit's memory is reused while layers are still to read it",
        _PARAMETERS,
        ((_MEMORY, "_DeviceMemory.leave", "self._device.refill_after(streams)", "pass"),),
    ),
    Mistake(
        "a unit's memory is compute's, and no stream waits for its former use",
        _PARAMETERS,
        (
            (
                _ACCELERATOR,
                "AcceleratorDevice.alloc_storage",
                "self.use_stream(self._load)",
                "self._on_device()",
            ),
        ),
    ),
    # -- Gradients of units -----------------------------------------------------------------------
    Mistake(
        "small gradients are packed on another stream",
        _PARAMETERS,
        (
            (
                _GRADIENTS,
                "Gradients._put_away",
                "layout.store(tensors.items(), storage)",
                "with self._device.use_stream(self._device._pieces):\n"
                "            layout.store(tensors.items(), storage)",
            ),
        ),
    ),
)
