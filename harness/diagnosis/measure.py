"""Authority on measuring a diagnosis: one mutant from the first problem that shows it to what is said of it."""

import functools
import math
import re
import resource
import tempfile
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path

from harness.counterexample import MINIMISE_SECONDS, SHARE_OF_DIAGNOSIS
from harness.diagnose import diagnose
from harness.diagnosis.chosen import made_by
from harness.likeness.book import Like, likest
from harness.likeness.looking import asked
from harness.likeness.signature import Signature
from harness.minimise import minimise
from harness.mutants.mutant import Mutant
from harness.mutants.trial import failures, faulty_runner
from harness.problem import FLAGS, Problem
from harness.results import Finding
from harness.runner import Runner
from harness.shrink import Attempts, shrink

SEED = 0  # that of stored signatures is another one, and so are the sizes and values of their problems
PROBLEMS = 100
ATTEMPTS = 40  # of each of the two searches: what a machine is fast enough for does not matter
SECONDS = 600.0  # of a search, which its attempts end before
DIAGNOSIS_SECONDS = MINIMISE_SECONDS * SHARE_OF_DIAGNOSIS
MODES = ("gate", "dtype", "gate_dtype", "scale", "offsets", "chunk_size", "precision", "loss")


@dataclass(frozen=True)
class Row:
    """One mutant. `found`: class, quantity and form; `problem`: the smallest, as JSON, "" if none was found; `seconds`:
    of the CPU, to make it smaller and to diagnose it; `stage`: the line of the diagnosis; `answers`: the signature, as
    stored.
    """

    mutant: str
    kind: str
    route: str
    entry: str
    place: str
    found: tuple[str, str, str] = ("", "", "")
    problem: str = ""
    seconds: float = 0.0
    stage: str = ""
    answers: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def stage_word(self) -> str:
        """The stage, the result or the kernel that the stage line names; what it says where it names none."""
        line = self.stage
        forms = (r"^(\w+) is (?:the first|what is wrong)", r"what makes (\w+) of them", r"^kernel (\w+)")
        said = next(filter(None, (re.search(form, line) for form in forms)), None)
        return said[1] if said else line.rpartition("; ")[2]

    @property
    def names_stage(self) -> bool:
        """Whether the stage line names what the patched function makes."""
        function = self.place.rpartition(":")[2]
        return self.stage_word in (function, *made_by(self.place))

    @property
    def likes(self) -> list[Like]:
        """The known faults that it is likest to, by the book as it is now."""
        return likest(Signature.from_dict(self.answers), self.route, self.entry, self.found[1])

    @property
    def sizes(self) -> dict[str, int]:
        """Value heads; ends of sequences before others or a tail, and of chunks inside of sequences; flags and modes
        that are not the default; tokens.
        """
        problem = Problem.from_json(self.problem)
        packed = (len(problem.lengths) - 1 + (problem.tail > 0)) if problem.packed else 0
        chunks = sum((length - 1) // problem.chunk_size for length in problem.lengths if length)
        plain = {one.name: one.default for one in fields(Problem) if one.default is not MISSING}
        flags = sum(getattr(problem, name) != plain[name] for name in (*FLAGS, *MODES))
        tokens = sum(problem.lengths) + problem.tail
        return {"heads": problem.value_heads, "boundaries": packed + chunks, "flags": flags, "tokens": tokens}


def measured(mutant: Mutant, seed: int = SEED, device: str = "cpu") -> Row:
    """Find the mutant as `kda mutants` does, make the problem smaller and diagnose it as `kda minimise` does."""
    row = Row(mutant.id, mutant.kind, mutant.route, mutant.entry, mutant.place)
    with tempfile.TemporaryDirectory(prefix="kda-mutant-") as name:
        mutant.write(Path(name))
        with faulty_runner(Path(name), device) as runner:
            finding = first_failure(mutant, runner, seed)
            if finding is None:
                answers = asked(runner, runner.subject.route(mutant.route, mutant.entry), seed, math.inf)
                return replace(row, answers=answers.as_dict())
        before = _cpu_seconds()
        with faulty_runner(Path(name), device) as runner:
            smaller = smallest(runner, finding, seed)
            answers = asked(runner, runner.subject.route(mutant.route, mutant.entry), seed, math.inf)
            made = diagnose(runner, replace(finding, problem=smaller), seed, DIAGNOSIS_SECONDS)
        seconds = round(_cpu_seconds() - before, 1)
    found, said = (made.finding.klass, made.finding.quantity, made.finding.variant), answers.as_dict()
    return replace(
        row, found=found, problem=smaller.to_json(), seconds=seconds, stage=dict(made.lines)["stage"], answers=said
    )


def first_failure(mutant: Mutant, runner: Runner, seed: int) -> Finding | None:
    """What gives the mutant away first; None if nothing does."""
    for _, task, verdict in failures(mutant, runner, PROBLEMS, seed):
        if verdict is not None:
            return runner.steadier(Finding.of(mutant.route, verdict, task.problem))
    return None


def smallest(runner: Runner, finding: Finding, seed: int) -> Problem:
    """The smallest problem after a number of attempts: the same for the same seed."""
    fails = functools.partial(runner.fails_like, finding, seed=seed)
    smaller = shrink(finding.problem, Attempts(fails, ATTEMPTS), SECONDS)
    return minimise(smaller, Attempts(fails, ATTEMPTS), SECONDS)


def _cpu_seconds() -> float:
    """Of this process and of those that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)
