"""Authority on times: cold-cache samples on a GPU, the order in which contenders take turns, and their statistics."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

Call = Callable[[], object]
FLUSH_BYTES = 2**28  # several times any L2 cache
COPY_BYTES = 2**30
SAMPLES_AT_MOST = 50  # of one contender in one round: what is in flight stays far from the launch queue's end


@dataclass(frozen=True)
class Summary:
    """What a set of times comes to, in milliseconds: the median, and its spread."""

    median: float
    minimum: float
    lower: float  # quartile
    upper: float  # quartile
    samples: int

    @classmethod
    def of(cls, times: Sequence[float]) -> "Summary":
        """ValueError without a time."""
        if not times:
            raise ValueError("times is empty; it must have at least one")
        ordered = sorted(times)
        lower, median, upper = (
            statistics.quantiles(ordered, n=4, method="inclusive") if len(ordered) > 1 else ordered * 3
        )
        return cls(median, ordered[0], lower, upper, len(ordered))


class Clock(Protocol):
    """Takes `count` times of a call in milliseconds."""

    def cold(self, call: Call, count: int) -> list[float]:
        """On the device, each from a cache that holds nothing of the call."""

    def host(self, call: Call, count: int) -> list[float]:
        """Until the call returns, each on an idle device."""

    def capture(self, call: Call, needed_bytes: int) -> Call:
        """The call as a graph that replays it; RuntimeError where it cannot be captured."""


class CudaClock:
    """Times by events around each call, with a buffer larger than L2 written in between.

    Calls are queued one after another, so a time holds what the host adds only where the device has to wait for it, as
    `triton.testing.do_bench` has it; that one's estimates and warm-up would be repeated in every round.
    """

    def __init__(self, device: str):
        self.flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device=device)

    def cold(self, call: Call, count: int) -> list[float]:
        call()  # whoever ran before has left its clocks, caches and allocations
        events = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(count)]
        for start, end in events:
            self.flush.zero_()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in events]

    def host(self, call: Call, count: int) -> list[float]:
        times = []
        for _ in range(count):
            torch.cuda.synchronize()
            started = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - started))
        torch.cuda.synchronize()
        return times

    def capture(self, call: Call, needed_bytes: int) -> Call:
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self.flush.device)
        if free < 2 * needed_bytes:  # a graph keeps what its call needs, and so would the next contender's
            raise RuntimeError(f"a graph would hold {needed_bytes / 2**30:.1f} of {free / 2**30:.1f} GiB")
        current, side = torch.cuda.current_stream(), torch.cuda.Stream(self.flush.device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            call()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(current), torch.cuda.graph(graph):  # a failed capture does not leave its own stream
            call()
        return graph.replay

    def copy_rate(self) -> float:
        """Bytes per second that a copy reads and writes, the two added."""
        source, target = (torch.empty(COPY_BYTES, dtype=torch.uint8, device=self.flush.device) for _ in range(2))
        median = Summary.of(self.cold(lambda: target.copy_(source), SAMPLES_AT_MOST)).median
        return 2 * COPY_BYTES / (median / 1e3)


def take_turns(samplers: Mapping[str, Callable[[], list[float]]], rounds: int) -> dict[str, Summary]:
    """`rounds` times of every sampler, one after the other in each round, and another one first in each."""
    names = list(samplers)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds if names else 0):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            times[name] += samplers[name]()
    return {name: Summary.of(taken) for name, taken in times.items()}


def samples_in(milliseconds: float, seconds_per_call: float) -> int:
    """How many calls of that length fill a round; at least one."""
    return max(1, min(SAMPLES_AT_MOST, int(milliseconds / 1e3 / max(seconds_per_call, 1e-6))))
