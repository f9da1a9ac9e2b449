"""Authority on compute-sanitizer: how a child process runs under it, and what its reports say about a call."""

import os
import re
import shutil
from pathlib import Path

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
NAME = "compute-sanitizer"

# NOTE [Writes of the same value]
# Triton lets every thread that holds a copy of a number write it to shared memory, all of them to one place. That is a
# hazard of two writes to racecheck, which prints both values; where they are equal, no order of the writes matters.

# NOTE [Writes by TMA]
# What a kernel writes through a tensor descriptor no thread writes, and initcheck takes it for never written: on an
# H200 it reported the states of the fused backward pass. With KDA_TMA=0 our kernels use no descriptors, and compute the
# same.
_HAZARD = re.compile(r"Current Value : (\S+), Incoming Value : (\S+)")
_KERNEL = re.compile(r"\bat ([\w:<>~]+)\+0x")
_ACCESS = re.compile(r"Access to \S+ is (.+)")
_NOISE = re.compile(rf"^({NAME.upper()}|.*SUMMARY|Target application|Process didn't terminate|$)")


def must_be_usable(tool: str, device: str) -> None:
    """ValueError where a tool cannot watch kernels on this device."""
    if device == "cpu":
        raise ValueError(f"sanitizer is {tool!r} on the CPU; it must be left out: the interpreter watches every access")
    if shutil.which(NAME) is None:
        raise ValueError(f"sanitizer is {tool!r}; {NAME}, which comes with CUDA, must be on the PATH")


class Watch:
    """One process under a tool, and how much of its log has been read."""

    def __init__(self, tool: str, folder: Path):
        self.tool, self.log = tool, folder / f"{tool}.log"
        self._read = 0

    def command(self, command: list[str]) -> list[str]:
        """That command under the tool; its log starts anew."""
        self.log.unlink(missing_ok=True)
        self._read = 0
        report = ["--racecheck-report", "hazard"] if self.tool == "racecheck" else []
        return [NAME, "--tool", self.tool, "--log-file", str(self.log), *report, *command]

    def environment(self, base: dict[str, str] | None) -> dict[str, str]:
        """Every tensor an allocation of its own: in a block that torch divides, nobody sees where one of them ends."""
        seen = {"KDA_TMA": "0"} if self.tool == "initcheck" else {}  # NOTE [Writes by TMA]
        return {**(os.environ if base is None else base), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", **seen}

    def faults(self) -> tuple[str, ...]:
        """What was reported since the last time, each kind once for each kernel."""
        if not self.log.exists():
            return ()
        with open(self.log, errors="replace") as file:
            file.seek(self._read)
            text = file.read()
            self._read = file.tell()
        return tuple(dict.fromkeys(filter(None, map(_described, _reports(text)))))


def _reports(text: str) -> list[list[str]]:
    """The lines of each report, without the tool's margin; what follows a headline is indented."""
    reports: list[list[str]] = []
    for line in text.splitlines():
        said = re.sub(r"^=+ ?", "", line)
        if said[:1].strip() and not _NOISE.match(said):
            reports.append([said.strip()])
        elif said.startswith("    ") and reports:
            reports[-1].append(said.strip())
    return reports


def _described(report: list[str]) -> str | None:
    """One line for a report, None for a NOTE [Writes of the same value]."""
    text = "\n".join(report)
    values = _HAZARD.search(text)
    if values and values[1] == values[2]:
        return None
    kernel = _KERNEL.search(text)
    place = re.sub(r" at __shared__ 0x\w+ in block \(.*?\)| in block \(.*?\)", "", report[0]).rstrip(" :")
    access = _ACCESS.search(text)
    return "; ".join(filter(None, (place, kernel and f"in {kernel[1]}", access and access[1])))
