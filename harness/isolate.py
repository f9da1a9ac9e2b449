"""Authority on running foreign code: a warm child, a watchdog, and the problem on disk before it is launched."""

import contextlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from harness import memory
from harness.call import Offence
from harness.problem import Problem
from harness.sanitizers import Watch

FIRST_CALL_SECONDS = 600.0  # starting, compiling, autotuning: the first call, and on a GPU the first of a compile key
CALL_SECONDS = 120.0
STDERR_TAIL = 2000
SHARED_MEMORY_BYTES = 2**32  # what /dev/shm must have free to carry outputs; containers often have 64 MiB
COMPILE_KEY = ("entry", "packed", "heads", "group", "K", "V", "dtype", "gate_dtype", "gate", "safe_gate", "chunk_size")


class StorageError(Exception):
    """Something that must not be lost could not be written; it is in the message, or printed."""


@dataclass(frozen=True)
class Outcome:
    """What became of one call: outputs if it ran, a message if not; more lines of the message say where.

    `status`: ran, not_covered, unproven (another route ran than the one claimed), hang, crash, or what kind of crash:
    out_of_memory, illegal_access (the CUDA context is lost).
    """

    status: str
    outputs: dict[str, torch.Tensor] | None = None
    seconds: float = 0.0
    compile_seconds: float = 0.0
    message: str = ""
    modified: tuple[str, ...] = ()
    peak_bytes: int = 0
    faults: tuple[str, ...] = ()  # what a sanitizer reported
    offences: tuple[Offence, ...] = ()


DEATHS = ("crash", "out_of_memory", "illegal_access")


def of_error(said: str, detail: str = "", allowed: int | None = None, lost: bool = False) -> Outcome:
    """What an error that a call raised, or died of, is: `said` names it, `detail` says where it was.

    `allowed`: bytes that the process could have. `lost`: no CUDA call works any more.
    """
    short = memory.shortage(said, allowed)
    status = "illegal_access" if lost else "out_of_memory" if short else "crash"
    head = "the CUDA context is lost" if lost else short
    return Outcome(status, message="\n".join(filter(None, (f"{head}: {said}" if head else said, detail))))


class Child:
    """A process that has loaded one subject: started on demand, reused, replaced once it dies, hangs or is poisoned."""

    def __init__(
        self,
        subject: str,
        device: str,
        inflight: Path,
        first_call: float = FIRST_CALL_SECONDS,
        later_calls: float = CALL_SECONDS,
        pin_autotune: bool = False,
        overlay: Path | None = None,
        sanitizer: str | None = None,
        memory_bytes: int | None = None,
    ):
        """`overlay`: a folder whose packages the process imports instead of the installed ones; it runs under the tool
        `sanitizer` of compute-sanitizer. `memory_bytes`: what calls may take, if not the process's share.
        """
        self.overlay = overlay
        self.subject, self.device, self.inflight = subject, device, inflight
        self.first_call, self.later_calls = first_call, later_calls
        self.pin_autotune, self.memory_bytes = pin_autotune, memory_bytes
        self.allowed: int | None = None  # bytes, as the process said
        self.process: subprocess.Popen | None = None
        self.compiled: set[tuple] = set()  # compile keys that the process has answered for
        self.scratch = tempfile.TemporaryDirectory(prefix="kda-", dir=_shared_memory())
        self.errors = Path(self.scratch.name, "stderr")
        self.watch = Watch(sanitizer, Path(self.scratch.name)) if sanitizer else None

    def run(
        self, route: str, problem: Problem, variant: str = "", stages: bool = False, again: bool = False
    ) -> Outcome:
        """One call, in the form of that variant, or its intermediates; the problem stays in `inflight` if the child
        does not come back. `again`: the same call was the last one, so that this one should not need more memory.
        """
        note = write_ahead(self.inflight, route, problem)
        outcome = self._watched(self._ask(route, problem, variant=variant, stages=stages, again=again))
        if outcome.status in ("ran", "not_covered"):
            note.unlink(missing_ok=True)
        return outcome

    def _watched(self, outcome: Outcome) -> Outcome:
        faults = self.watch.faults() if self.watch else ()
        if faults and outcome.status in DEATHS:
            return replace(outcome, message="\n".join((*faults, outcome.message)))
        return replace(outcome, faults=faults)

    def close(self) -> None:
        if self.process is not None:
            self._kill()
        self.scratch.cleanup()

    def _start(self) -> Outcome | None:
        limit = str(self.memory_bytes or "")
        arguments = [self.subject, self.device, json.dumps(sys.path), str(int(self.pin_autotune)), limit]
        command = [sys.executable, "-m", "harness.child", *arguments]
        pipe, environment = subprocess.PIPE, None
        if self.overlay is not None:
            command.insert(1, "-P")  # else the working directory comes first
            environment = overlaid(self.overlay)
        if self.watch is not None:
            command, environment = self.watch.command(command), self.watch.environment(environment)
        with open(self.errors, "wb") as errors:
            self.process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=errors, start_new_session=True, env=environment
            )
        self.compiled.clear()
        ready = self._read(self.first_call)
        if isinstance(ready, Outcome):
            return ready
        self.allowed = ready["allowed"]
        return None

    def _ask(self, route: str, problem: Problem, **how: object) -> Outcome:
        if self.process is None or self.process.poll() is not None:
            failed = self._start()
            if failed:
                return failed
        outputs = Path(self.scratch.name, "outputs.safetensors")
        outputs.unlink(missing_ok=True)
        request = {"route": route, "problem": problem.to_json(), "outputs": str(outputs), **how}
        try:
            self.process.stdin.write((json.dumps(request) + "\n").encode())
            self.process.stdin.flush()
        except OSError:
            return self._died()
        key = (route, *(getattr(problem, name) for name in COMPILE_KEY)) if self.device != "cpu" else ()
        reply = self._read(self.later_calls if key in self.compiled else self.first_call)
        if isinstance(reply, Outcome):
            return reply
        self.compiled.add(key)
        if reply["status"] == "raised":
            if reply["sticky"]:
                self._kill()
            return of_error(reply["message"], reply["trace"][-STDERR_TAIL:], self.allowed, reply["sticky"])
        if reply["status"] != "ran":
            return Outcome(reply["status"], message=reply["message"])
        return Outcome(
            "ran",
            load_file(outputs),
            reply["seconds"],
            reply["compile_seconds"],
            modified=tuple(reply["modified"]),
            peak_bytes=reply["peak_bytes"],
            offences=tuple(Offence(*one) for one in reply["offences"]),
        )

    def _read(self, timeout: float) -> dict | Outcome:
        """The next answer, or what happened instead."""
        deadline, text = time.monotonic() + timeout, b""
        pipe = self.process.stdout
        while not text.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                self._kill()
                return Outcome("hang", message=f"no answer within {timeout:g} s")
            block = os.read(pipe.fileno(), 65536)
            if not block:
                return self._died()
            text += block
        return json.loads(text)

    def _died(self) -> Outcome:
        code = self.process.wait()
        said = self.errors.read_bytes().decode(errors="replace")
        tail = re.sub(r"^Extension modules: .*\n?", "", said, flags=re.MULTILINE)[-STDERR_TAIL:].strip()
        self._kill()  # what it started, if anything
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
        # What takes the machine's last memory is killed with this signal; nothing else here sends it.
        how = f"{how}, as by a system that is out of memory" if code == -signal.SIGKILL else how
        short = memory.shortage(f"{how}\n{tail}", self.allowed)
        said = "\n".join(filter(None, (f"{short}: {how}" if short else how, tail)))
        return Outcome("out_of_memory" if short else "crash", message=said)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()
        self.process = None


def overlaid(folder: Path) -> dict[str, str]:
    """The environment of a Python that finds packages in `folder` first, then wherever this one does."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}


def context_is_lost() -> bool:
    """After an illegal access every later CUDA call fails: this process has nothing more to say."""
    try:
        torch.cuda.synchronize()
        return float(torch.ones(1, device="cuda").sum()) != 1.0
    except RuntimeError:
        return True


def _shared_memory() -> str | None:
    """A folder in memory for the outputs, if there is room in it."""
    shared = "/dev/shm"
    if os.access(shared, os.W_OK) and shutil.disk_usage(shared).free >= SHARED_MEMORY_BYTES:
        return shared
    return None


def write_ahead(folder: Path, route: str, problem: Problem) -> Path:
    """The problem on disk, flushed to the device, before it is launched."""
    path = folder / f"{os.getpid()}-{time.monotonic_ns()}.json"
    text = problem.to_json({"route": route, "status": "in flight"})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(path, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise StorageError(f"{path} could not be written ({error}), so nothing is launched:\n{text}") from None
    return path
