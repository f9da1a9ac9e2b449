"""Authority on `kda check`: which problems a subject is held against, in what order, and what counts as checked."""

import functools
import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import hypothesis
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from harness import coverage, results
from harness.call import Route
from harness.crew import Crew, Job, Settings, processes
from harness.diagnose import diagnose
from harness.driven import Driver, driven
from harness.families import FAMILIES, Family
from harness.fitting import drawn_for, fitted
from harness.fleet import Replay
from harness.globs import matches
from harness.isolate import StorageError
from harness.journal import Journal
from harness.minimise import minimise
from harness.options import Shape
from harness.problem import Problem
from harness.profiles import Profile, drawing
from harness.report import folder
from harness.results import FAILURES, Finding, Report, Row
from harness.runner import Checked, Runner
from harness.shrink import shrink
from harness.strategies import problems
from harness.subject import Subject
from harness.variants import in_turn

BOTH_ENTRIES = ("generic", "ragged")  # families that ask a route for both of its entries
REPEAT_EVERY = 4  # of the problems on a route, this share is run twice and compared bit by bit
DEFAULT_CHUNK = Problem.chunk_size
REPLAYED = "replayed"  # in the place of a family: problems that some runner has found
UNPROVEN_SHOWN = 100
FINDINGS_SHRUNK = 12  # distinct failures of a run that are worth shrinking


@dataclass(frozen=True)
class Task:
    route: str
    family: str
    problem: Problem
    required: bool
    large: bool = False  # needs crew.LARGE_BYTES of a GPU's memory
    form: str = ""  # of the call, that the problem has failed in before


@dataclass
class Checks:
    """What a run has done so far."""

    rows: dict[tuple[str, str, str], Row] = field(default_factory=dict)
    findings: dict[tuple[str, str, str, str], Finding] = field(default_factory=dict)
    done: int = 0
    skipped: int = 0
    planned: int = 0
    required_left: int = 0
    unproven: list[str] = field(default_factory=list)
    not_covered: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    problems: dict[str, int] = field(default_factory=dict)
    met: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    index: Path | None = None

    def record(self, task: Task, checked: Checked) -> None:
        self.done += 1
        times = {"compile": checked.compile_seconds, "kernel": checked.kernel_seconds, "oracle": checked.oracle_seconds}
        if checked.missing:
            self.not_covered[f"{task.route} gradients"] = "the route has none"
        for verdict in checked.verdicts:
            if verdict.klass == "NOT_COVERED" and verdict.quantity == "call":
                self.not_covered[f"{task.route} {task.family}"] = verdict.message
                self.skipped += 1
                if not checked.proven and len(self.unproven) < UNPROVEN_SHOWN:
                    self.unproven.append(verdict.message)
                continue
            key = (task.route, verdict.quantity, task.family)
            row = self.rows.setdefault(key, Row(*key))
            row.add(verdict)
            row.seconds = {name: row.seconds[name] + times[name] / len(checked.verdicts) for name in times}
        if not all(v.klass == "NOT_COVERED" and v.quantity == "call" for v in checked.verdicts):
            self.problems[task.route] = self.problems.get(task.route, 0) + 1
            self.met[task.route].update(coverage.met(checked.problem))
            longest = max(checked.problem.lengths, default=0)
            self.tokens[task.route] = max(self.tokens.get(task.route, 0), longest)
            self.peak_bytes[task.route] = max(self.peak_bytes.get(task.route, 0), checked.peak_bytes)
            total = self.seconds.setdefault(task.route, dict.fromkeys(times, 0.0))
            for name, spent in times.items():
                total[name] += spent

    def exit_status(self) -> int:
        """0 right, 1 a finding, 3 nothing or less than asked for."""
        if self.findings:
            return 1
        if not self.problems or self.required_left or self.unproven:
            return 3
        classes = {row.klass for row in self.rows.values()}
        return 3 if classes & {"NOT_COVERED"} else 0


def plan(
    subject: Subject, profile: Profile, routes: str, families: str, device: str, seed: int, shape: Shape | None = None
) -> list[Task]:
    """Every task of a run, dealt out so that an early stop has seen something of every route and family.

    Large ones come last: they begin with the first and take the longest, and nobody should wait for them in between.
    """
    queues = []
    for route in subject.routes:
        if not matches(route.id, routes):
            continue
        for family in FAMILIES:
            if not matches(family.name, families) or not _asked(subject, route, family, device):
                continue
            tasks = tasks_of(route.id, route.entry, family, profile, seed, device, route.nearest, route.spec.chunk)
            queues.append(list(dict.fromkeys(_held_to(shape, task) for task in tasks)))
    rounds = max(map(len, queues), default=0)
    ordered = [queue[i] for i in range(rounds) for queue in queues if i < len(queue)]
    return sorted(ordered, key=lambda task: (task.large, not task.required))


def replayed(documents: Iterable[str], shape: Shape | None = None) -> list[Task]:
    """The tasks of what a fleet has found before, each once; large ones where they were given."""
    replays = map(Replay.of, documents)
    tasks = (Task(replay.route, REPLAYED, replay.problem, True, form=replay.form) for replay in replays)
    return list(dict.fromkeys(_held_to(shape, task) for task in tasks))


def _asked(subject: Subject, route: Route, family: Family, device: str) -> bool:
    """Whether a family has something to ask of a route there.

    Where one route serves both entries, by the same kernels, the chunk entry is asked what is its own, and in general.
    """
    if drawn_for(route.entry) not in family.entries or (route.families and family.name not in route.families):
        return False
    if family.gpu_only and (device == "cpu" or route.id == "torch"):
        return False
    twice = route.entry == "chunk" and any((r.id, r.entry) == (route.id, "recurrent") for r in subject.routes)
    return not (twice and "recurrent" in family.entries and family.name not in BOTH_ENTRIES)


def tasks_of(
    route: str,
    entry: str,
    family: Family,
    profile: Profile,
    seed: int,
    device: str,
    nearest: Callable[[Problem], Problem] = lambda problem: problem,
    own_chunk: int | None = None,
) -> Iterator[Task]:
    """What a family asks of a route: its examples, then generated problems, each as the route takes it, or `nearest` to
    that: what is not covered then is told with the reason. An example with small chunks, long so that there are many,
    is nothing new to a route whose `own_chunk` is smaller still.
    """
    for example in family.examples:
        many = example.chunk_size < DEFAULT_CHUNK and own_chunk is not None and own_chunk < example.chunk_size
        problem = None if many else fitted(example, route, entry)
        if problem is not None:
            yield Task(route, family.name, nearest(problem), True, family.gpu_only)
    if not family.gpu_only:
        for drawn in draw(family, drawn_for(entry), profile.generated * family.weight, seed, _longest(device)):
            task = _drawn(route, entry, family, nearest, drawn)
            if task is not None:
                yield task


def _drawn(
    route: str, entry: str, family: Family, nearest: Callable[[Problem], Problem], drawn: Problem
) -> Task | None:
    problem = fitted(drawn, route, entry)
    return None if problem is None else Task(route, family.name, nearest(problem), False)


def searches(
    subject: Subject, profile: Profile, routes: str, families: str, device: str, seed: int, shape: Shape | None = None
) -> dict[tuple[str, str, str], Driver[Task]]:
    """A search of each family on each route that draws problems, by (route, entry, family); none in short profiles."""
    made: dict[tuple[str, str, str], Driver[Task]] = {}
    for route in subject.routes if profile.driven else ():
        for family in FAMILIES:
            asked = matches(route.id, routes) and matches(family.name, families)
            if not asked or family.gpu_only or not _asked(subject, route, family, device):
                continue

            def task_of(drawn: Problem, route: Route = route, family: Family = family) -> Task | None:
                task = _drawn(route.id, route.entry, family, route.nearest, drawn)
                return None if task is None else _held_to(shape, task)

            strategy = problems(family, drawn_for(route.entry), _longest(device))
            made[route.id, route.entry, family.name] = Driver(strategy, task_of, profile.driven * family.weight, seed)
    return made


def _longest(device: str) -> int:
    """Tokens of a generated sequence."""
    return 66 if device != "cpu" else 34


def _held_to(shape: Shape | None, task: Task) -> Task:
    if shape is None:
        return task
    gate = task.problem.entry == "gate"
    dims = {"group": 1, "V": 1} if gate else {"group": shape.group, "V": shape.V}
    return replace(task, problem=replace(task.problem, heads=shape.heads, K=shape.K, edits=(), **dims))


def draw(family: Family, entry: str, count: int, seed: int, longest: int) -> list[Problem]:
    """`count` problems of a family, the same ones for the same seed."""
    drawn: list[Problem] = []

    @hypothesis.seed(seed)
    @drawing(count)
    @hypothesis.given(problems(family, entry, longest))
    def collect(problem: Problem) -> None:
        drawn.append(problem)

    if count:
        collect()
    return drawn[:count]


def run(
    subject: Subject,
    tasks: list[Task],
    report: Report,
    *,
    device: str,
    budget: float,
    seed: int,
    shrink_seconds: float,
    console: Console,
    timeouts: tuple[float, float] | None = None,
    pin_autotune: bool = False,
    sanitizer: str | None = None,
    shape: Shape | None = None,
    jobs: int | None = 1,
    journal: Journal | None = None,
    drivers: Mapping[tuple[str, str, str], Driver[Task]] | None = None,
) -> Checks:
    """Work through the tasks until the budget is spent, `jobs` at a time, then through what the `drivers` make, by
    (route, entry, family); an interrupt keeps what was found.

    What the journal has done already counts, and is not done again.
    """
    checks = Checks(planned=len(tasks))
    deadline = time.monotonic() + budget
    runner = Runner(subject, device, report.folder, timeouts=timeouts, pin_autotune=pin_autotune, sanitizer=sanitizer)
    settings = Settings(subject.name, device, report.folder, seed, pin_autotune, sanitizer)
    crew = Crew(settings, processes(jobs, len(tasks), device, subject.foreign), runner)
    left = lambda: time.monotonic() <= deadline and not runner.poisoned  # noqa: E731
    past = journal.past if journal else []
    fresh = crew.check(_jobs(subject, tasks)[len(past) :], left)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())

    def settle(task: Task, checked: Checked) -> None:
        progress.update(bar, description=f"{task.route} {task.family}", total=max(len(tasks), checks.done + 1))
        checks.record(task, checked)
        for finding in _findings(task, checked):
            key = (finding.route, finding.quantity, finding.klass, task.family)
            if key not in checks.findings:
                checks.findings[key] = report.save(finding)
        progress.advance(bar)

    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            bar = progress.add_task("checking", total=len(tasks))
            for task, checked in zip(tasks, itertools.chain(past, fresh)):
                new = checks.done >= len(past)
                settle(task, checked)
                if journal and new:
                    journal.add(checked)
            if checks.done == len(tasks):
                for task, checked in _driven(subject, crew, checks, drivers or {}, left, journal):
                    checks.planned += 1
                    settle(task, checked)
                    if journal and journal.known(task) is None:
                        journal.add(checked, task.family)
        checks.required_left = sum(task.required for task in tasks[checks.done :])
        crew.close()
        if runner.poisoned:
            console.print("the GPU is lost to this process after an illegal access: stopping", style="red")
        _explain_all(checks, runner, report, shrink_seconds, seed, device, keep_shape=shape is not None)
    except (KeyboardInterrupt, StorageError) as reason:
        checks.required_left = max(1, sum(task.required for task in tasks[checks.done :]))
        console.print(str(reason) or "interrupted; what was found is kept", markup=False, soft_wrap=True)
    finally:
        crew.close()
        runner.close()
    return checks


def _driven(
    subject: Subject,
    crew: Crew,
    checks: Checks,
    drivers: Mapping[tuple[str, str, str], Driver[Task]],
    left: Callable[[], bool],
    journal: Journal | None,
) -> Iterator[tuple[Task, Checked]]:
    """What the drivers make, those first whose family came closest to a limit; what the journal knows is not run."""
    ratios: dict[tuple[str, str], float] = defaultdict(float)
    for row in checks.rows.values():
        if row.klass == "OK":
            ratios[row.route, row.family] = max(ratios[row.route, row.family], row.worst_ratio)
    turns: Counter[str] = Counter()

    def check(tasks: list[Task]) -> Iterator[Checked]:
        known = [journal.known(task) if journal else None for task in tasks]
        new = [task for task, before in zip(tasks, known) if before is None]
        fresh = crew.check(_jobs(subject, new, turns), left)
        for before in known:
            checked = before or next(fresh, None)
            if checked is None:
                return
            yield checked

    closest = sorted(drivers, key=lambda key: -ratios[key[0], key[2]])
    yield from driven((drivers[key] for key in closest), 2 * crew.count, check)


def _jobs(subject: Subject, tasks: list[Task], turns: Counter[str] | None = None) -> list[Job]:
    """Each problem is run in one other form too: of the variants that apply, on each route the next in turn.

    `turns` counts the jobs of each route so far.
    """
    turns = Counter() if turns is None else turns
    jobs = []
    for task in tasks:
        again = turns.total() % REPEAT_EVERY == 0 or task.family == REPLAYED
        forms = in_turn(subject.route(task.route, task.problem.entry), task.problem, turns[task.route])
        turns[task.route] += 1
        forms += (task.form,) if task.form and task.form not in forms else ()
        jobs.append(Job(task.route, task.problem, again, task.large, forms))
    return jobs


def _findings(task: Task, checked: Checked) -> Iterator[Finding]:
    for verdict in checked.verdicts:
        if verdict.klass in FAILURES:
            yield Finding.of(task.route, verdict, task.problem)


class _Shares:
    """Divides what is left of a time among what is left to do: what one does not need, the next ones have."""

    def __init__(self, seconds: float, count: int):
        self.deadline, self.left = time.monotonic() + seconds, count

    def next(self) -> float:
        share = max(0.0, self.deadline - time.monotonic()) / max(1, self.left)
        self.left -= 1
        return share


def _explain_all(
    checks: Checks, runner: Runner, report: Report, seconds: float, seed: int, device: str, keep_shape: bool
) -> None:
    """Make the problems of the first findings smaller and diagnose them; the others get a folder without that.

    Each problem stays on disk until a smaller one has replaced it.
    """
    try:
        _shrink_all(checks, runner, report, seconds, seed, keep_shape)
        _diagnose_all(checks, runner, report, seconds, seed, results.environment(device))
    finally:
        if checks.findings:
            checks.index = folder.write_index(checks.findings.values(), report, runner.subject.title, seed)


def _shrink_all(checks: Checks, runner: Runner, report: Report, seconds: float, seed: int, keep_shape: bool) -> None:
    shares = _Shares(seconds, min(len(checks.findings), FINDINGS_SHRUNK))
    for key, finding in list(checks.findings.items())[:FINDINGS_SHRUNK]:
        each = shares.next() / 2
        if finding.klass == "HANG" or runner.poisoned:
            continue
        still_fails = functools.partial(runner.fails_like, finding, seed=seed)
        smaller = shrink(finding.problem, still_fails, each, keep_shape)
        if not keep_shape:
            smaller = minimise(smaller, still_fails, each)
        checks.findings[key] = report.save(replace(finding, problem=smaller))
    checks.findings = _distinct(checks.findings)


def _diagnose_all(
    checks: Checks, runner: Runner, report: Report, seconds: float, seed: int, env: dict[str, object]
) -> None:
    shares = _Shares(seconds, min(len(checks.findings), FINDINGS_SHRUNK))
    for place, (key, finding) in enumerate(list(checks.findings.items())):
        made = diagnose(runner, finding, seed, shares.next() if place < FINDINGS_SHRUNK else 0.0)
        checks.findings[key] = folder.write(made, report, env)


def _distinct(findings: dict[tuple, Finding]) -> dict[tuple, Finding]:
    """One finding for every smallest problem; the others stay on disk."""
    seen: dict[tuple, tuple] = {}
    for key, finding in findings.items():
        seen.setdefault((finding.route, finding.quantity, finding.klass, finding.problem), key)
    return {key: findings[key] for key in seen.values()}


def summary(checks: Checks, subject: Subject, device: str, seed: int) -> dict:
    """The result document of a run."""
    coverage = {
        "planned": checks.planned,
        "checked": checks.done - checks.skipped,
        "required_left": checks.required_left,
        "not_covered": checks.not_covered,
        "unproven": checks.unproven,
        "longest": checks.tokens,
        "peak_bytes": checks.peak_bytes,
        "problems": checks.problems,
        "met": {route: dict(sorted(counts.items())) for route, counts in sorted(checks.met.items())},
        "lacking": {f"{route.id} {route.entry}": list(route.lacking) for route in subject.routes if route.lacking},
    }
    env = results.environment(device)
    return results.document(env, subject.title, seed, checks.rows.values(), checks.findings.values(), coverage)
