"""Authority on memory: how much a child process may take, what a call had asked for when there was none left, and
whether calls keep some of it.
"""

import ctypes
import gc
import math
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from harness.call import Offence, Run
from harness.workers import SHARED, share_of_gpu

REPEATS = 12  # calls that must all keep memory; caches by argument hold fewer entries than that
# Bytes that are worth a look. On the CPU Python's own objects are counted too, and a few of them always come and go.
LEAST = {"cpu": 2**8, "cuda": 1}
BLOCK = 512  # to which torch rounds allocations on a GPU
_MIB = 2**20
_ASKED = re.compile(r"(?:tried to allocate|unable to allocate) ([\d.]+ \w+)", re.IGNORECASE)
_SHORT = re.compile(r"OutOfMemoryError|MemoryError|can't allocate memory|std::bad_alloc|out of memory", re.IGNORECASE)


def readable(count: float) -> str:
    return f"{count / 2**30:.3g} GiB" if count >= 2**30 else f"{count / _MIB:.3g} MiB"


def limit(device: str, most: int | None = None) -> int:
    """Hold this process to `most` bytes beyond what it has, without it to its share of what is there; returns them.

    On a GPU the limit is on torch's allocator there. On the CPU it is on private memory (RLIMIT_DATA), not on
    addresses, of which libraries reserve far more than they use.
    """
    if device != "cpu":
        total = torch.cuda.get_device_properties(device).total_memory
        fraction = share_of_gpu() if most is None else min(1.0, most / total)
        torch.cuda.set_per_process_memory_fraction(fraction, torch.device(device).index)
        return int(fraction * total)
    import resource

    if most is None:
        workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
        most = int(SHARED * _kib("/proc/meminfo", "MemAvailable") * 1024 / workers)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = _kib("/proc/self/status", "VmData") * 1024 + most
    resource.setrlimit(resource.RLIMIT_DATA, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
    return most


def _kib(path: str, name: str) -> int:
    """A number of kiB from a file of the kernel's."""
    return int(re.search(rf"^{name}:\s+(\d+) kB", Path(path).read_text(), re.MULTILINE)[1])


def shortage(text: str, allowed: int | None = None) -> str | None:
    """What an error says of memory that there was not, in one line; None if it speaks of something else."""
    if not _SHORT.search(text):
        return None
    asked = _ASKED.search(text)
    said = f"out of memory, {f'{asked[1]} asked for' if asked else 'it is not known how much was asked for'}"
    return said if allowed is None else f"{said}, {readable(allowed)} allowed"


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def in_use(device: str) -> int:
    """Bytes that this process has allocated: by torch on a GPU, by malloc on the CPU, whole pages where that is silent.

    Python's small objects are not among malloc's.
    """
    if device != "cpu":
        return torch.cuda.memory_allocated(device)
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallinfo2"):
        libc.mallinfo2.restype = _Mallinfo
        info = libc.mallinfo2()
        return info.uordblks + info.hblkhd
    return _kib("/proc/self/status", "VmRSS") * 1024


def _held(outputs: Iterable[Tensor]) -> int:
    """What the memory of these tensors counts for."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in outputs}
    return sum(math.ceil(size / BLOCK) * BLOCK for size in storages.values())


def watched(call: Callable[[], Run], device: str) -> Run:
    """The result of a call that has been made before, with an offence if each further one keeps memory.

    Only if this one seems to keep some are others made, until one does not.
    """
    least = LEAST["cpu" if device == "cpu" else "cuda"]
    before = in_use(device)
    done = call()
    if in_use(device) - before - _held(done.outputs.values()) < least:
        return done
    for generation in (1, 2):  # looking through everything takes a tenth of a second: only where the rest says so
        first = before = _settled(device, generation)
        for _ in range(REPEATS):
            call()
            now = _settled(device, generation)
            if now - before < least:
                return done
            before = now
    said = f"each of {REPEATS} calls with the same arguments kept memory, {(before - first) // REPEATS} bytes a call"
    return replace(done, offences=(*done.offences, Offence("memory", "leak", said)))


def _settled(device: str, generation: int) -> int:
    """Bytes in use without what is only waiting to be collected, as far as that is no older than a generation."""
    gc.collect(generation)
    return in_use(device)
