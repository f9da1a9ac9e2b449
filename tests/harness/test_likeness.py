"""Likeness: what a wrong answer looks like, how alike two signatures are, and that a fault is like itself."""

import json
import math
from dataclasses import replace

import pytest
import torch

from harness.field import Field
from harness.fitting import fitted
from harness.likeness import book, probes
from harness.likeness.book import Entry, likest
from harness.likeness.cell import PLACES, Cell, cell_of
from harness.likeness.looking import said
from harness.likeness.signature import SIGNING, Signature, similarity
from harness.mutants import MUTANTS
from harness.mutants.signing import signable, signature_of
from harness.problem import Problem
from harness.results import Finding
from harness.subject import own_subject
from harness.terminal import finding_lines

PACKED = Problem(entry="chunk", lengths=(20, 0, 40), packed=True, tail=4, heads=2, group=2, K=3, V=4, chunk_size=32)
SHAPE = (1, 64, 4, 4)  # of o
BY_ID = {mutant.id: mutant for mutant in MUTANTS}


def field(change, shape=SHAPE, quantity="o") -> Field:
    expected = 1 + torch.arange(math.prod(shape), dtype=torch.float64).view(shape)
    got = expected.clone()
    change(got)
    return Field(quantity, got, expected, torch.full(shape, 1e-3, dtype=torch.float64))


def places(cell: Cell) -> dict[str, str]:
    return dict(zip(PLACES, cell.places))


def cell(**changes) -> Cell:
    return replace(Cell(3.0, -0.5, 1.0, 0, "-9099--90909090909"), **changes)


def test_a_lost_head_of_the_second_chunk():
    def change(got):
        got[0, 20 + 32 : 60, 3] = 0

    made = cell_of(field(change), 100.0, PACKED)
    where = places(made)
    assert (made.far, made.size, made.gain, made.lost) == (2.0, 0.0, 0.0, 0)
    wanted = {"later chunks": "2", "first chunk": "0", "chunk start": "2", "first token": "0", "last token": "1"}
    wanted |= {"first head": "0", "first of group": "0", "rest of group": "1", "outside": "0", "diagonal": "-"}
    assert {name: where[name] for name in wanted} == wanted


def test_states_that_are_not_finite():
    def change(got):
        got[0] = math.nan

    made = cell_of(field(change, (3, 4, 3, 4), "ht"), math.inf, PACKED)
    where = places(made)
    assert (made.far, made.lost) == (9.0, 9)
    assert (where["first sequence"], where["later sequences"], where["first token"]) == ("9", "0", "-")


def test_errors_that_only_count_together_are_where_they_are_largest():
    def change(got):
        got[0, 0] += 1e-4

    assert places(cell_of(field(change), 1.5, PACKED))["first token"] == "4"  # of two sequences


@pytest.mark.parametrize("text", ["", "1 2 3 4", "nan 0 1 0 " + "-" * len(PLACES), "0 0 1 0 123"])
def test_what_is_no_cell_is_refused(text):
    with pytest.raises(ValueError):
        Cell.parsed(text)


ONE = Signature({"plain": {"o": cell(), "dk": cell(far=1.0)}, "packed": {"nan_tail o": None}, "resets": {}})
NEAR = Signature({"plain": {"o": cell(far=3.5), "dk": cell(far=1.0)}, "packed": {"nan_tail o": None}})
FAR = Signature({"plain": {"o": cell(gain=-1.0, places="-0900--00909090909")}, "resets": {"dv": cell()}})
RIGHT = Signature({"plain": {}, "packed": {}})


def test_a_signature_is_like_itself_and_more_than_any_other():
    assert similarity(ONE, ONE) == similarity(FAR, FAR) == 1.0
    assert 1.0 > similarity(ONE, NEAR) > similarity(ONE, FAR) > 0.0
    assert similarity(RIGHT, RIGHT) == similarity(ONE, RIGHT) == 0.0


@pytest.mark.parametrize("one, other", [(ONE, NEAR), (ONE, FAR), (NEAR, FAR), (ONE, RIGHT)])
def test_likeness_is_symmetric(one, other):
    assert similarity(one, other) == similarity(other, one)


def test_probes_that_were_not_asked_do_not_count():
    assert similarity(ONE, Signature({"plain": ONE.answers["plain"]})) == 1.0


def entry(name: str, signature: Signature, route: str = "recurrent", of: str = "recurrent") -> Entry:
    return Entry(name, "formula", "kda/x.py:f", "a fault", route, of, signature)


def test_the_list_is_sorted_and_of_the_same_route():
    others = [entry("far", FAR), entry("near", NEAR), entry("none", RIGHT), entry("same", ONE, "gate", "gate")]
    found = likest(ONE, "recurrent", "recurrent", among=others)
    assert [one.known.id for one in found] == ["near", "far"]
    assert found[0].score > found[1].score
    assert said(found[:1], foreign=False).startswith("near 0.9")


def test_what_never_shows_the_failing_quantity_counts_for_less():
    first, second = (likest(ONE, "recurrent", "recurrent", name, [entry("near", NEAR)])[0] for name in ("dk", "dbeta"))
    assert second.score == pytest.approx(book.UNSHOWN * first.score)


def test_a_foreign_route_is_like_a_kind_of_fault():
    found = likest(ONE, "theirs", "chunk", among=[entry("near", NEAR), entry("gate", ONE, "gate", "gate")])
    assert [one.known.id for one in found] == ["near"]
    words = said(found, foreign=True)
    assert words.startswith("kind formula 0.9") and words.endswith("as where a fault")


def test_every_probe_is_a_legal_problem_in_each_of_its_sizes():
    drawn = [probe.drawn(seed) for probe in probes.PROBES for seed in range(probes.DRAWINGS)]
    assert len(set(drawn)) == len(drawn)
    assert len({probe.name for probe in probes.PROBES}) == len(probes.PROBES)
    blocks = [[-(-length // 16) for length in problem.lengths] for problem in drawn]
    assert all(blocks[i : i + 3] == blocks[i : i + 1] * 3 for i in range(0, len(blocks), 3))


@pytest.mark.parametrize("route, of", sorted({(m.route, m.entry) for m in signable(MUTANTS)}), ids=" ".join)
def test_every_route_with_mutants_takes_its_probes(route, of):
    taken = own_subject().route(route, of)
    asked = [probe.fit(route, of, SIGNING) for probe in probes.probes_of(route, of)]
    assert len(asked) >= 8
    assert [taken.lacks(problem) for problem in asked] == [None] * len(asked)
    assert [fitted(problem, route, of) for problem in asked] == asked


def test_the_book_is_of_mutants_and_their_places():
    known = book.known()
    assert len(known) >= 80
    for one in known:
        mutant = BY_ID[one.id]
        about = (mutant.kind, mutant.place, mutant.fault, mutant.route, mutant.entry)
        assert (one.kind, one.place, one.fault, one.route, one.entry) == about
        asked = {probe.name for probe in probes.probes_of(one.route, one.entry)}
        assert set(one.signature.answers) <= asked
    assert book.written(known) == book.BOOK.read_text()


@pytest.mark.parametrize(
    "text, message",
    [
        ('{"schema": 2, "mutants": {}}', "schema must be 1"),
        ('{"schema": 1, "mutants": {"a": {}}}', "signature of a is not readable"),
        ("[]", "schema must be 1"),
    ],
    ids=["schema", "entry", "list"],
)
def test_what_is_no_book_is_refused(text, message, tmp_path):
    path = tmp_path / "book.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        book.read(path)


@pytest.mark.parametrize("name", ["gate-A-of-head-0", "gate-backward-no-bias", "torch-heads-tiled"])
def test_a_fault_with_other_problems_is_likest_to_itself(name):
    mutant = BY_ID[name]
    signature = signature_of(mutant, seed=0)
    found = likest(signature, mutant.route, mutant.entry)
    assert found[0].known.id == name
    assert found[0].score > found[1].score


def test_the_terminal_has_five_lines_and_the_report_one_more():
    lines = tuple((label, "said") for label in ("what", "where", "how", "needs", "stage"))
    problem = Problem()
    finding = Finding("id", "recurrent", "o", "BUG", 2.0, "m", problem, problem, lines=lines, like="near 0.9")
    assert len(finding_lines(finding)) == 5
    assert json.loads(json.dumps(finding.diagnosis)) == {**dict(lines), "like": "near 0.9"}
