"""Authority on the signatures of mutants: each is asked the probes on the route that reaches it, and answers wrong."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from harness.likeness.book import Entry
from harness.likeness.signature import SIGNING, Signature, sign
from harness.mutants.mutant import Mutant
from harness.mutants.trial import faulty_runner


def signature_of(mutant: Mutant, device: str = "cpu", seed: int = SIGNING) -> Signature:
    """What a copy of our sources with the fault in it answers to every probe."""
    with tempfile.TemporaryDirectory(prefix="kda-mutant-") as name:
        mutant.write(Path(name))
        with faulty_runner(Path(name), device) as runner:
            return sign(runner, runner.subject.route(mutant.route, mutant.entry), seed)


def signed(mutant: Mutant, device: str = "cpu") -> Entry:
    """The mutant's entry of the book."""
    signature = signature_of(mutant, device)
    return Entry(mutant.id, mutant.kind, mutant.place, mutant.fault, mutant.route, mutant.entry, signature)


def signable(mutants: Sequence[Mutant]) -> list[Mutant]:
    """Those that problems can show."""
    return [mutant for mutant in mutants if mutant.must_be_caught and not mutant.tests]
