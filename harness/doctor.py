"""Authority on whether this machine can do the work: versions, devices, interpreter, and places to write to."""

import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
import triton

PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "hypothesis",
    "mpmath",
    "gmpy2",
    "rich",
    "safetensors",
    "pytest",
    "pytest-xdist",
)


@dataclass(frozen=True)
class Fact:
    """One thing looked at; `ok` is False only where something that is needed is missing."""

    name: str
    value: str
    ok: bool = True


def examine(report: Path) -> list[Fact]:
    """Everything worth knowing before a run, cheap and without side effects that stay."""
    return list(_facts(report))


def _facts(report: Path) -> Iterator[Fact]:
    yield Fact("python", platform.python_version(), sys.version_info >= (3, 11))
    for package in PACKAGES:
        try:
            yield Fact(package, metadata.version(package))
        except metadata.PackageNotFoundError:
            yield Fact(package, "not installed", package == "gmpy2")
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    yield Fact("GPUs", ", ".join(devices) or "none")
    interpreted = bool(triton.knobs.runtime.interpret)
    yield Fact("kernels", "interpreted on the CPU" if interpreted else "compiled", interpreted or bool(devices))
    cache = os.environ.get("TRITON_CACHE_DIR") or str(Path.home() / ".triton" / "cache")
    yield _writable("compile cache", Path(cache))
    yield _writable("report folder", report)
    yield from _smoke()


def _writable(name: str, folder: Path) -> Fact:
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            return Fact(name, str(folder))
    except OSError as error:
        return Fact(name, f"{folder} cannot be written to ({error})", False)


def _smoke() -> Iterator[Fact]:
    """One token through the oracle and through a kernel."""
    from harness import interpreter
    from harness.problem import Problem
    from harness.runner import Runner
    from harness.subject import own_subject
    from harness.verdict import worst

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        interpreter.install()
    with tempfile.TemporaryDirectory() as folder:
        verdicts = Runner(own_subject(), device, Path(folder)).check("recurrent", Problem(K=4, V=4)).verdicts
    verdict = worst(verdicts)
    yield Fact(
        "one token, kernel against oracle",
        verdict.klass if verdict.klass == "OK" else str(verdict),
        verdict.klass == "OK",
    )
