"""Authority on the trial of one mutant: which problems it is held against, and which layer of a check gave it away."""

import contextlib
import functools
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

from harness.check import Task, tasks_of
from harness.families import FAMILIES
from harness.fitting import drawn_for
from harness.isolate import overlaid
from harness.mutants.mutant import SOURCES, Mutant, Trial
from harness.profiles import Profile
from harness.results import FAILURES
from harness.runner import Checked, Runner
from harness.subject import Subject, own_subject
from harness.variants import VARIANTS, in_turn
from harness.verdict import Verdict

GENERATED = Profile("mutants", generated=8, budget=0.0, shrink_seconds=0.0)
TIMEOUTS = (120.0, 60.0)  # seconds for a first and for a later call
TEST_SECONDS = 300.0
LAYERS = {"modified": "inputs", "repeat": "repeat", "tail": "tail", "near_exact": "near_exact"} | {
    name: name for name in (*VARIANTS, "crash", "hang")
}

LIKELY_FORMS = {
    "mask": ("watched", "nan_head"),
    "stale_memory": ("nan_filled", "watched"),
    "strided": ("strided",),
    "race": ("watched",),
    "causality": ("causal", "causal_gradients"),
    "nan_spreads": ("nan_tail", "nan_sequence"),
}


def held_against(mutant: Mutant, seed: int, device: str) -> Iterator[Task]:
    """The problems of a trial: all of the families likeliest to show the fault, then the others, family by turns.

    Of each what `kda check` would ask of the route.
    """
    route = own_subject().route(mutant.route, mutant.entry)
    asked = functools.partial(tasks_of, route.id, route.entry, nearest=route.nearest, own_chunk=route.spec.chunk)
    able = [f for f in FAMILIES if drawn_for(mutant.entry) in f.entries and not f.gpu_only]
    likely = sorted((f for f in able if f.name in mutant.families), key=lambda f: mutant.families.index(f.name))
    for group in ([*likely], [f for f in able if f not in likely]):
        queues = [asked(family, GENERATED, seed, device) for family in group]
        for turn in zip_longest(*queues):
            yield from (task for task in turn if task is not None)


def try_mutant(mutant: Mutant, problems: int = 200, seed: int = 0, device: str = "cpu") -> Trial:
    """Hold one mutant against its problems, until the first that fails with the fault and not without it."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kda-mutant-") as name:
        folder = Path(name)
        mutant.write(folder)
        found = _in_tests(mutant, folder) if mutant.tests else _in_problems(mutant, folder, problems, seed, device)
    return replace(found, seconds=time.monotonic() - started)


def _in_problems(mutant: Mutant, folder: Path, problems: int, seed: int, device: str) -> Trial:
    with faulty_runner(folder, device) as faulty:
        count = 0
        for count, task, verdict in failures(mutant, faulty, problems, seed):
            if verdict is not None:
                return _caught(mutant, task, verdict, count)
    return Trial(mutant.id, False, problems=count)


@contextlib.contextmanager
def faulty_runner(folder: Path, device: str) -> Iterator[Runner]:
    """A runner of our kernels as the copy in `folder` has them, in a child process."""
    report = folder / "report"
    runner = Runner(own_subject(), device, report, isolated=True, timeouts=TIMEOUTS, overlay=folder)
    try:
        yield runner
    finally:
        runner.close()


def failures(mutant: Mutant, faulty: Runner, problems: int, seed: int) -> Iterator[tuple[int, Task, Verdict | None]]:
    """(count, task, what gives the fault away, or None) for each problem that the route takes, so many at most."""
    subject, count = faulty.subject, 0
    sound = Runner(subject, faulty.device, faulty.folder)
    for task in held_against(mutant, seed, faulty.device):
        if count == problems:
            break
        if subject.route(mutant.route, mutant.entry).lacks(task.problem):
            continue
        forms = _forms(subject, mutant, task, count)
        checked = faulty.check(mutant.route, task.problem, repeat=count % 4 == 0, seed=seed, forms=forms)
        count += 1
        verdict = _failure(checked)
        # What fails without the fault as well says nothing about it.
        if verdict and _failure(sound.check(mutant.route, task.problem, seed=seed, forms=forms)) is not None:
            verdict = None
        yield count, task, verdict


def _forms(subject: Subject, mutant: Mutant, task: Task, turn: int) -> tuple[str, ...]:
    """One variant to a problem, each that applies in its turn, as in `kda check`, and those likeliest to tell."""
    mine = in_turn(subject.route(mutant.route, mutant.entry), task.problem, turn)
    return (*mine, *LIKELY_FORMS.get(mutant.kind, ()))


def _failure(checked: Checked) -> Verdict | None:
    """The verdict that gives a fault away: absolute layers before statistics; a refusal of a legal call is one too."""
    failures = [v for v in checked.verdicts if v.klass in FAILURES or v.quantity == "call"]
    return min(failures, key=lambda v: (v.statistic not in LAYERS, -v.ratio), default=None)


def _caught(mutant: Mutant, task: Task, verdict: Verdict, count: int) -> Trial:
    layers = LAYERS | {"unproven": "launch record", "not_covered": "refusal"}
    return Trial(
        mutant.id,
        True,
        layers.get(verdict.statistic, "value"),
        task.family,
        verdict.quantity,
        repr(task.problem),
        count,
        ratio=verdict.ratio,
        message=str(verdict).splitlines()[0],
    )


def _in_tests(mutant: Mutant, folder: Path) -> Trial:
    """The test-suite's own files on the faulty package: what no problem can show."""
    missing = [node for node in mutant.tests if not (SOURCES / node.partition("::")[0]).is_file()]
    if missing:
        return Trial(mutant.id, False, "tests", message=f"{', '.join(missing)}: not there; tests need a checkout")
    command = [
        sys.executable,
        "-P",
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        *mutant.tests,
    ]
    try:
        done = subprocess.run(
            command, cwd=SOURCES, env=overlaid(folder), capture_output=True, text=True, timeout=TEST_SECONDS
        )
    except subprocess.TimeoutExpired:
        # A slow machine does that too: it says nothing about the fault.
        return Trial(mutant.id, False, "tests", message=f"tests did not end within {TEST_SECONDS:g} s")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return Trial(mutant.id, done.returncode == 1, "tests", message=failed[1] if failed else "", problems=1)
