# SPDX-License-Identifier: Apache-2.0
"""A timeline of a run's first steps for Perfetto or chrome://tracing: `Tracer`.

The engine, `Writer`, `Reader`, `OnlyCopy` and the profiler add spans; the engine writes them to
the file after each step. It decides nothing, and a step waits for it only to write the file. The
format is Chrome's "JSON Array Format" (Google, "Trace Event Format"), which may end anywhere: what
was written before a run died can be opened.
"""

from __future__ import annotations

import json
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from megatron.offload.errors import ConfigurationError
from megatron.offload.tiers.tier import Tier
from megatron.offload.tiers.transfer import Transfer

logger = logging.getLogger(__name__)

NUM_STEPS = 16  # that are traced: a step of a large model has thousands of spans
_BETWEEN_SAMPLES_S = 0.001  # of memory
_MIB = 1 << 20

# From top to bottom, as a person reads them.
COMPUTE, WAIT = "compute", "wait for the tiers"


_Sample = tuple[float, Mapping[str, float]]  # when, and bytes by what takes them


class _Span(NamedTuple):
    track: str
    name: str
    began_s: float
    ended_s: float
    details: dict[str, Any]


class Tracer:
    """Collects the spans of the steps of one rank and appends them to a file.

    Adding is safe in any thread: a list takes one element at a time. Seconds are those of
    `time.perf_counter`.

    Args:
        path: of rank 0; `-rank1` and so on is added before the ending for others.
        rank: global rank: the trace's process.
        tiers: whose transfers are to be seen, by the name of their tracks.
        sample: memory in bytes by name, for the counters.

    Raises:
        ConfigurationError: the file cannot be written.
    """

    def __init__(
        self,
        path: Path,
        rank: int,
        tiers: Mapping[str, Tier],
        sample: Callable[[], Mapping[str, float]],
    ) -> None:
        self.path = path_of_rank(path, rank)
        self._rank = rank
        self._names = {id(tier): name for name, tier in tiers.items()}
        self._sample = sample
        self._num_steps = 0
        self._began_s: float | None = None  # of the step under way; None: nothing is traced now
        self._zero_s = time.perf_counter()
        self._spans: list[_Span] = []
        self._samples: list[_Sample] = []
        self._lanes: dict[str, list[float]] = {}  # of each track: when each of its lanes gets free
        tracks = [COMPUTE, WAIT, *(f"{d} {name}" for name in tiers for d in ("write", "read"))]
        self._order = {track: 100 * number for number, track in enumerate(tracks, 1)}
        self._named: set[int] = set()  # threads that the file has the names of
        self._has_ended = False
        Tracer._current = weakref.ref(self)
        event = {"ph": "M", "name": "process_name", "args": {"name": f"rank {rank}"}}
        try:
            self.path.write_text(f"[\n{self._line(event)}")
        except OSError as error:
            raise ConfigurationError(
                f"--activation-offload-trace {self.path} cannot be written: {error.strerror}; "
                "give a file in a directory that exists and can be written to"
            ) from None

    @property
    def is_on(self) -> bool:
        """Whether the step under way is traced."""
        return self._began_s is not None

    # -- What happens in a step -----------------------------------------------------------------

    def begin_step(self) -> None:
        """A step begins; it is traced if it is one of the first."""
        if self._num_steps < NUM_STEPS:
            self._began_s = time.perf_counter()

    def span(
        self, track: str, name: str, began_s: float, ended_s: float | None = None, **details: Any
    ) -> None:
        """Something took from one moment until another, by default until now."""
        if self._began_s is not None:
            ended_s = time.perf_counter() if ended_s is None else ended_s
            self._spans.append(_Span(track, name, began_s, ended_s, details))

    _current: ClassVar[weakref.ref[Tracer] | None] = None

    @classmethod
    def current(cls) -> Tracer | None:
        """The one of this process that was made last, until it has traced its steps."""
        tracer = None if cls._current is None else cls._current()
        return tracer if tracer is not None and tracer._num_steps < NUM_STEPS else None

    def transfer(
        self,
        direction: str,
        tier: Tier,
        name: str,
        transfer: Transfer,
        num_bytes: int,
        **details: Any,
    ) -> None:
        """As `moved`, in the track of a tier."""
        if (track := self._names.get(id(tier))) is not None:
            self.moved(direction, track, name, transfer, num_bytes, **details)

    def moved(
        self,
        direction: str,
        track: str,
        name: str,
        transfer: Transfer,
        num_bytes: int,
        **details: Any,
    ) -> None:
        """A `write` or `read` of something with a name has ended just now, well or badly.

        Also between two steps, where the optimizer's may be.
        """
        if transfer.began_s is None or self._num_steps >= NUM_STEPS:
            return  # it never ran
        if transfer.cancelled():
            name += " (given up)"
        elif transfer.exception() is not None:
            name += " (failed)"
        details |= {"MiB": round(num_bytes / _MIB, 3)}
        ended_s = time.perf_counter()
        self._spans.append(_Span(f"{direction} {track}", name, transfer.began_s, ended_s, details))

    def sample_memory(self) -> None:
        """Notes how much memory is taken, unless that was noted a moment ago."""
        now_s = time.perf_counter()
        if self._began_s is None:
            return
        if not self._samples or now_s - self._samples[-1][0] >= _BETWEEN_SAMPLES_S:
            self._samples.append((now_s, self._sample()))

    def end_step(self) -> None:
        """Writes what the step has shown. Call when its transfers have ended."""
        if self._began_s is None:
            return
        self._num_steps += 1
        self.span(COMPUTE, f"step {self._num_steps}", self._began_s)
        self._began_s = None
        spans, self._spans = self._spans, []
        samples, self._samples = self._samples, []
        self._write_step(spans, samples)

    def close(self) -> None:
        """Ends the file. Nothing is traced any more."""
        self._num_steps, self._began_s = NUM_STEPS, None
        spans, self._spans = self._spans, []
        self._write_step(spans, [])
        self._append("\n]\n")
        self._has_ended = True  # a second `close` writes nothing

    # -- How it is written ----------------------------------------------------------------------

    def _write_step(
        self, spans: list[_Span], samples: list[tuple[float, Mapping[str, float]]]
    ) -> None:
        events = [event for span in sorted(spans, key=_by_begin) for event in self._events(span)]
        for time_s, values in samples:
            for name, value in values.items():
                shown = {"MiB": round(value / _MIB, 3)}
                events.append({"ph": "C", "name": name, "ts": self._us(time_s), "args": shown})
        self._append("".join(f",\n{self._line(event)}" for event in events))

    def _events(self, span: _Span) -> Iterator[dict[str, Any]]:
        """The span, and before the first one of a track the track's name and place."""
        lane = self._lane(span)
        thread = self._order.setdefault(span.track, 100 * (len(self._order) + 1)) + lane
        if thread not in self._named:
            self._named.add(thread)
            name = f"{span.track} ({lane + 1})" if lane else span.track
            yield {"ph": "M", "name": "thread_name", "tid": thread, "args": {"name": name}}
            place = {"sort_index": thread}
            yield {"ph": "M", "name": "thread_sort_index", "tid": thread, "args": place}
        began_us = self._us(span.began_s)
        yield {
            "ph": "X",
            "name": span.name,
            "ts": began_us,
            "dur": round(self._us(span.ended_s) - began_us, 3),
            "tid": thread,
            "args": span.details,
        }

    def _lane(self, span: _Span) -> int:
        """Spans of one track may lie within each other, as computing does, but not overlap."""
        if span.track == COMPUTE:
            return 0
        free_s = self._lanes.setdefault(span.track, [])
        for lane, lane_free_s in enumerate(free_s):
            if lane_free_s <= span.began_s:
                free_s[lane] = span.ended_s
                return lane
        free_s.append(span.ended_s)
        return len(free_s) - 1

    def _us(self, time_s: float) -> float:
        return round((time_s - self._zero_s) * 1e6, 3)

    def _line(self, event: dict[str, Any]) -> str:
        return json.dumps({"pid": self._rank, **event})

    def _append(self, text: str) -> None:
        """A disk that is full by now is no reason to end a training."""
        if self._has_ended:
            return
        try:
            with self.path.open("a") as file:
                file.write(text)
        except OSError as error:
            self._has_ended, self._num_steps = True, NUM_STEPS
            logger.warning(
                "activation offload: the trace %s cannot be written: %s; it ends here",
                self.path,
                error.strerror,
            )


def path_of_rank(path: Path, rank: int) -> Path:
    """The file of a rank, of which each has its own: rank 0 has `path` itself."""
    return path.with_name(f"{path.stem}-rank{rank}{path.suffix}") if rank else path


def _by_begin(span: _Span) -> tuple[float, float]:
    """Outer spans before those within them."""
    return span.began_s, -span.ended_s
