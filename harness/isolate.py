"""Authority on running foreign code: a warm child process, a watchdog, and the problem on disk before anything is
launched.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from harness.problem import Problem

FIRST_CALL_SECONDS = 600.0  # compiling and autotuning
CALL_SECONDS = 120.0
STDERR_TAIL = 2000


@dataclass(frozen=True)
class Outcome:
    """What became of one call: status ran | not_covered | crash | hang, outputs if it ran, a message if not."""

    status: str
    outputs: dict[str, torch.Tensor] | None = None
    seconds: float = 0.0
    compile_seconds: float = 0.0
    message: str = ""
    modified: tuple[str, ...] = ()
    peak_bytes: int = 0


class Child:
    """A process that has loaded one subject. Started on demand, reused, replaced after a crash, a hang or a lost CUDA
    context.
    """

    def __init__(
        self,
        subject: str,
        device: str,
        inflight: Path,
        first_call: float = FIRST_CALL_SECONDS,
        later_calls: float = CALL_SECONDS,
        pin_autotune: bool = False,
    ):
        self.pin_autotune = pin_autotune
        self.subject, self.device, self.inflight = subject, device, inflight
        self.first_call, self.later_calls = first_call, later_calls
        self.process: subprocess.Popen | None = None
        self.calls = 0
        shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.scratch = tempfile.TemporaryDirectory(prefix="kda-", dir=shared)

    def run(self, route: str, problem: Problem) -> Outcome:
        """One call; the problem stays in `inflight` if the child does not come back."""
        note = write_ahead(self.inflight, route, problem)
        outcome = self._ask(route, problem)
        if outcome.status in ("ran", "not_covered"):
            note.unlink(missing_ok=True)
        return outcome

    def close(self) -> None:
        if self.process is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
            self._kill()
        self.scratch.cleanup()

    def _start(self) -> Outcome | None:
        self.errors = open(Path(self.scratch.name, "stderr"), "w+b")  # noqa: SIM115  lives as long as the process
        command = [
            sys.executable,
            "-m",
            "harness.child",
            self.subject,
            self.device,
            json.dumps(sys.path),
            str(int(self.pin_autotune)),
        ]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, start_new_session=True
        )
        self.calls = 0
        ready = self._read(self.first_call)
        return ready if isinstance(ready, Outcome) else None

    def _ask(self, route: str, problem: Problem) -> Outcome:
        if self.process is None or self.process.poll() is not None:
            failed = self._start()
            if failed:
                return failed
        outputs = Path(self.scratch.name, "outputs.safetensors")
        outputs.unlink(missing_ok=True)
        request = {"route": route, "problem": problem.to_json(), "outputs": str(outputs)}
        try:
            self.process.stdin.write((json.dumps(request) + "\n").encode())
            self.process.stdin.flush()
        except OSError:
            return self._died()
        reply = self._read(self.later_calls if self.calls else self.first_call)
        self.calls += 1
        if isinstance(reply, Outcome):
            return reply
        if reply["status"] == "raised":
            if reply.get("sticky"):
                self._kill()
            return Outcome("crash", message=reply["message"])
        if reply["status"] == "not_covered":
            return Outcome("not_covered", message=reply["message"])
        return Outcome(
            "ran",
            load_file(outputs),
            reply["seconds"],
            reply["compile_seconds"],
            modified=tuple(reply["modified"]),
            peak_bytes=reply["peak_bytes"],
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
        self.errors.seek(0)
        tail = self.errors.read()[-STDERR_TAIL:].decode(errors="replace").strip()
        self.process = None
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
        return Outcome("crash", message=f"{how}{': ' + tail.splitlines()[-1] if tail else ''}")

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process = None


def write_ahead(folder: Path, route: str, problem: Problem) -> Path:
    """The problem on disk, flushed to the device, before it is launched."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{os.getpid()}-{time.monotonic_ns()}.json"
    with open(path, "w") as file:
        file.write(problem.to_json({"route": route, "status": "in flight"}))
        file.flush()
        os.fsync(file.fileno())
    return path
