"""Authority on `kda bench`: its options, the order of its work, and its exit status."""

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console

from harness import options, results
from harness.bench import cases, compare, plot, tables
from harness.bench.contenders import Contender, contenders, subjects
from harness.bench.document import Document, Skipped
from harness.bench.measure import ContextLost, Settings, Truth, measure
from harness.bench.oracle_cost import costs
from harness.bench.timing import Clock, CudaClock
from harness.isolate import StorageError
from harness.problem import Problem
from harness.terminal import FINDING, INCOMPLETE, OK, say

COST_SECONDS = 5.0  # of repetitions to each route and width of --oracle


def modes(text: str) -> tuple[str, ...]:
    """Names of MODES, separated by commas."""
    chosen = tuple(dict.fromkeys(filter(None, (part.strip() for part in text.split(",")))))
    if not chosen or set(chosen) - set(cases.MODES):
        raise argparse.ArgumentTypeError(f"modes is {text!r}; it must be some of {','.join(cases.MODES)}")
    return chosen


def heads(text: str) -> int:
    """A number of heads from 0."""
    if not text.isdecimal() or int(text) > 4096:
        raise argparse.ArgumentTypeError(f"error-heads is {text!r}; it must be an integer in 0..4096")
    return int(text)


def add_to_parser(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    parser.add_argument("--cases", default="*", metavar="GLOB", help="only cases whose name matches")
    parser.add_argument("--modes", type=modes, default=cases.USUAL, metavar="LIST", help=",".join(cases.MODES))
    parser.add_argument("--subjects", default="kda,fla", metavar="LIST", help="as --subject of check, comma-separated")
    parser.add_argument("--rounds", type=options.count, default=5, metavar="N", help="turns that each contender has")
    parser.add_argument("--error-heads", type=heads, default=2, metavar="N", help="heads held against float64")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw the times as SVG to this file")
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--list", action="store_true", help="print the cases, and time nothing")
    other.add_argument("--oracle", action="store_true", help="time one verdict instead; needs no GPU")
    other.add_argument("--compare", nargs=2, type=Path, metavar=("A", "B"), help="two results instead; needs no GPU")
    options.add_to_parser(parser, "routes", "device", "budget", "json")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """0: everything asked for was measured. 1: a route of ours failed, or something is slower. 3: less was measured."""
    if arguments.compare:
        return _compare(*arguments.compare, console)
    if arguments.oracle:
        return _oracle(arguments.json, console)
    chosen = cases.select(arguments.cases)
    if arguments.list:
        for name, problem in chosen.items():
            say(console, f"{name}: {problem!r}")
        return OK
    device = arguments.device or options.default_device()
    if device == "cpu":
        console.print("kda bench needs a GPU: times of interpreted kernels mean nothing; nothing was measured")
        console.print("--oracle, --compare and --list work without one")
        return INCOMPLETE
    settings = Settings(rounds=arguments.rounds, error_heads=arguments.error_heads)
    with torch.cuda.device(device):
        clock = CudaClock(device)
        return Bench(device, clock, settings, arguments, console).run(chosen, clock.copy_rate())


class Bench:
    """One run: works through cases and modes, and has everything on disk after each."""

    def __init__(self, device: str, clock: Clock, settings: Settings, arguments: argparse.Namespace, console: Console):
        self.device, self.clock, self.settings = device, clock, settings
        self.arguments, self.console = arguments, console
        self.deadline = time.monotonic() + (arguments.budget or float("inf"))

    def run(self, chosen: dict[str, Problem], copy_rate: float) -> int:
        given = self.arguments
        found, missing = subjects(given.subjects)
        asked = {"subjects": given.subjects, "routes": given.routes, "modes": given.modes, **asdict(self.settings)}
        self.document = Document(results.environment(self.device), asked, copy_rate, skipped=missing)
        say(self.console, f"{self.document.env['device']}, a copy moves {copy_rate / 1e12:.2f} TB/s")
        self._skips(missing)
        self._save()  # fails now, not after the first hour
        try:
            for name, problem in chosen.items():
                if self._late():
                    self._leave(f"the budget is spent, before {name}")
                    break
                try:
                    self._case(name, problem, contenders(found, given.routes, problem.entry))
                except torch.OutOfMemoryError as error:
                    self._leave(f"{name} does not fit: {error}")
        except KeyboardInterrupt:
            self._leave("interrupted; what was measured is kept")
        except ContextLost as reason:
            for contender in reason.contenders:
                self._leave(f"the GPU is lost to this process: {reason}", "failed", contender)
        self._save()
        return exit_status(self.document)

    def _case(self, name: str, problem: Problem, entrants: list[Contender]) -> None:
        case = cases.tensors(problem, self.device)
        truth = Truth.of(case, self.settings.error_heads, any(map(cases.has_gradients, self.arguments.modes)))
        self.document.problems[name] = repr(problem)
        for mode in self.arguments.modes:
            work = (entrants, self.clock, self.settings, truth, lambda: not self._late())
            rows, skipped = measure(name, case, mode, *work)
            self.document.rows += rows
            self.document.skipped += skipped
            self._save()
            self._show(name, mode, rows, len(truth.queries))
            self._skips(skipped)

    def _late(self) -> bool:
        return time.monotonic() > self.deadline

    def _leave(self, reason: str, kind: str = "left", contender: str = "every contender") -> None:
        """Note why the run ends before its last case."""
        self.document.skipped.append(Skipped("", "", contender, reason, kind))
        self._skips(self.document.skipped[-1:])

    def _show(self, name: str, mode: str, rows: list, heads: int) -> None:
        if rows:
            self.console.print(tables.times(name, mode, rows, self.document.copy_bytes_per_second))
            if heads:
                self.console.print(tables.errors(name, mode, rows, heads))
        for row in rows:
            if row.no_graph:
                say(self.console, f"no graph: {row.contender}: {row.no_graph}", style="yellow")

    def _skips(self, skipped: list[Skipped]) -> None:
        for one in skipped:
            where = f" on {one.case}, {one.mode}" if one.case else ""
            style = "red" if one.kind == "failed" else "yellow"
            say(self.console, f"{one.kind}: {one.contender}{where}: {one.reason}", style=style)

    def _save(self) -> None:
        try:
            if self.arguments.json:
                self.document.save(self.arguments.json)
            if self.arguments.plot:
                results.write_atomically(self.arguments.plot, plot.svg(self.document))
        except OSError as error:
            raise StorageError(f"the results could not be written ({error})") from None


def exit_status(document: Document) -> int:
    """0: rows, and nothing that was asked for is missing. 1: a route of ours failed. 3: less than asked for."""
    kinds = {(one.kind, one.contender.partition(" ")[0] == "kda") for one in document.skipped}
    if ("failed", True) in kinds:
        return FINDING
    return OK if document.rows and {kind for kind, _ in kinds} <= {"refused"} else INCOMPLETE


def _compare(a: Path, b: Path, console: Console) -> int:
    found = list(compare.changes(Document.load(a), Document.load(b)))
    if not found:
        console.print("the two results have no row in common")
        return INCOMPLETE
    console.print(tables.comparison(found))
    slower = [change for change in found if change.verdict == "slower"]
    console.print(f"{len(slower)} of {len(found)} slower by more than noise")
    return FINDING if slower else OK


def _oracle(target: Path | None, console: Console) -> int:
    measured = list(costs(COST_SECONDS))
    console.print(tables.verdict_costs(measured))
    if target:
        rows = [{**asdict(cost), "ratio": cost.ratio, "full_ratio": cost.full_ratio} for cost in measured]
        document = {"schema": 1, "kind": "oracle_cost", "env": results.environment("cpu"), "rows": rows}
        results.write_atomically(target, json.dumps(document, indent=1))
    return FINDING if any(cost.ratio > cost.target for cost in measured) else OK
