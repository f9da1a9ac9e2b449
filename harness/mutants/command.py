"""Authority on `kda mutants`: what it tries, what it prints, and when it is content."""

import argparse
import json
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from harness import options, results
from harness.globs import matches
from harness.likeness import book
from harness.mutants.campaign import campaign
from harness.mutants.catalogue import MUTANTS
from harness.mutants.mutant import Mutant, Trial
from harness.mutants.signing import signable, signed

RIGHT, SURVIVOR, INCOMPLETE = 0, 1, 3


def run(arguments: argparse.Namespace, console: Console) -> int:
    """0: every selected mutant is caught, or is a known limit. 1: one survived. 3: not all were tried."""
    glob = arguments.mutants
    chosen = [m for m in MUTANTS if matches(m.id, glob) or matches(m.kind, glob)]
    if not chosen:
        raise ValueError(f"mutants is {glob!r}; it must match an id or a kind")
    if arguments.signatures:
        return _sign(chosen, arguments, console)
    if arguments.json:
        results.probe(arguments.json, "json")
    device = arguments.device or options.default_device()
    by_id = {mutant.id: mutant for mutant in chosen}

    def show(trial: Trial) -> None:
        console.print(_line(by_id[trial.mutant], trial), markup=False, highlight=False, soft_wrap=True)

    tried = [mutant for mutant in chosen if mutant.must_be_caught]
    settings = {"jobs": arguments.jobs, "problems": arguments.problems, "seed": arguments.seed, "device": device}
    trials = campaign(tried, **settings, done=show)
    _print(chosen, trials, console)
    if arguments.json:
        document = {"schema": 1, "env": results.environment(device), **settings, "mutants": _rows(chosen, trials)}
        results.write_atomically(arguments.json, json.dumps(document, indent=1))
    if any(not trial.caught for trial in trials):
        return SURVIVOR
    return RIGHT if len(trials) == len(tried) else INCOMPLETE


def _sign(chosen: list[Mutant], arguments: argparse.Namespace, console: Console) -> int:
    """Add the signatures of those that problems can show to a book, or begin one; each is written as it is made."""
    results.probe(arguments.signatures, "signatures")
    entries = {one.id: one for one in book.read(arguments.signatures)} if arguments.signatures.exists() else {}
    for mutant in signable(chosen):
        entries[mutant.id] = signed(mutant, arguments.device or options.default_device())
        results.write_atomically(arguments.signatures, book.written(entries.values()))
        wrong = sum(map(bool, entries[mutant.id].signature.answers.values()))
        console.print(f"signed   {mutant.id}: {wrong} probes answered wrong", markup=False, highlight=False)
    return RIGHT


def _line(mutant: Mutant, trial: Trial) -> str:
    if not trial.caught:
        return f"SURVIVED {mutant.id}: {mutant.fault}; {trial.problems} problems, {trial.seconds:.0f} s {trial.message}"
    where = f"{trial.family} {trial.quantity}".strip() or trial.message
    return f"caught   {mutant.id}: {trial.layer}, {where}, problem {trial.problems}, {trial.seconds:.0f} s"


def _rows(chosen: list[Mutant], trials: list[Trial]) -> list[dict[str, object]]:
    known = {trial.mutant: trial for trial in trials}
    rows = []
    for mutant in chosen:
        about = {"kind": mutant.kind, "fault": mutant.fault, "route": mutant.route, "limit": mutant.limit}
        about["equivalent"] = mutant.equivalent
        rows.append({**about, **asdict(known.get(mutant.id, Trial(mutant.id, False)))})
        rows[-1]["ratio"] = str(rows[-1]["ratio"])
    return rows


def _print(chosen: list[Mutant], trials: list[Trial], console: Console) -> None:
    """Kinds with their layers, then what nobody caught and what nothing here can."""
    table = Table(title="mutants", title_justify="left")
    for column in ("kind", "mutants", "caught", "by", "problems", "seconds"):
        table.add_column(column, justify="left" if column in ("kind", "by") else "right")
    known = {trial.mutant: trial for trial in trials}
    for kind in sorted({mutant.kind for mutant in chosen}):
        mine = [mutant for mutant in chosen if mutant.kind == kind]
        found = [known[mutant.id] for mutant in mine if mutant.id in known and known[mutant.id].caught]
        layers = sorted({trial.layer for trial in found}, key=lambda name: -sum(t.layer == name for t in found))
        said = ", ".join(f"{name} {sum(t.layer == name for t in found)}" for name in layers)
        problems, seconds = sum(t.problems for t in found), sum(t.seconds for t in found)
        table.add_row(kind, str(len(mine)), str(len(found)), said, str(problems), f"{seconds:.0f}")
    console.print(table)
    caught = sum(trial.caught for trial in trials)
    known_limits = [mutant for mutant in chosen if not mutant.must_be_caught]
    for mutant in known_limits:
        why = f"limit: {mutant.limit}" if mutant.limit else f"equivalent: {mutant.equivalent}"
        console.print(f"not tried {mutant.id}: {why}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"{caught} of {len(trials)} caught, {len(known_limits)} known limits, {len(chosen)} selected")
