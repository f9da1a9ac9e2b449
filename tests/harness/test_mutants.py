"""The catalogue fits the sources, and a sample of it is caught; `kda mutants` tries it all."""

import json

import pytest

from harness.check import plan
from harness.cli import main
from harness.mutants import MUTANTS, campaign, command
from harness.mutants.mutant import KINDS, SOURCES, Mutant, Patch, Trial
from harness.mutants.trial import GENERATED, held_against
from harness.subject import own_subject

SAMPLE = (
    "gate-bound-by-clamping",
    "gate-strided",
    "gate-token-mask",
    "rec-norm-eps-outside",
    "rec-query-head-by-remainder",
    "rec-final-state-of-empty",
    "chunk-suffix-by-difference",
    "anchor-middle-of-tile",
    "inverse-stored-bf16",
    "contract-half-state",
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_patches_fit_exactly_one_place_and_stay_python(mutant):
    texts: dict[str, str] = {}
    for patch in mutant.patches:
        before = texts.get(patch.file) or (SOURCES / patch.file).read_text()
        texts[patch.file] = patch.apply(before)
        assert texts[patch.file] != before
    for file, text in texts.items():
        compile(text, file, "exec")


def test_catalogue_has_every_kind_and_no_id_twice():
    assert {mutant.kind for mutant in MUTANTS} == set(KINDS)
    assert len({mutant.id for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize(
    "before, within, message",
    [("a = 2", "", "has 0 of"), ("a = 1", "", "has 2 of"), ("a = 1", "h", "has 0 functions"), ("x", "f", "has 0 of")],
    ids=["absent", "twice", "no_function", "outside_function"],
)
def test_patch_refuses_anything_but_one_place(before, within, message):
    text = "def f():\n    a = 1\n\n\ndef g():\n    a = 1\n\n\nx = 0\n"
    with pytest.raises(ValueError, match=message):
        Patch("file.py", before, "a = 3", within).apply(text)


def test_patch_within_a_function_leaves_the_others():
    text = "def f():\n    a = 1\n\n\ndef g():\n    a = 1\n"
    assert Patch("file.py", "a = 1", "a = 3", "g").apply(text) == "def f():\n    a = 1\n\n\ndef g():\n    a = 3\n"


@pytest.mark.parametrize(
    "route, longest",
    [("fused-safe_gate", 1024), ("segment_parallel-unbounded", 1024), ("chunk-unbounded", 2053)],
)
def test_a_trial_asks_what_a_check_asks_and_no_longer_example(route, longest):
    mutant = next(mutant for mutant in MUTANTS if mutant.route == route)
    asked = {task.problem for task in held_against(mutant, seed=0, device="cpu")}
    assert asked >= {task.problem for task in plan(own_subject(), GENERATED, route, "*", "cpu", seed=0)}
    assert max(sum(problem.lengths) for problem in asked) == longest


def test_sample_is_caught():
    chosen = [mutant for mutant in MUTANTS if mutant.id in SAMPLE]
    assert len(chosen) == len(SAMPLE)
    trials = campaign(chosen, jobs=2, problems=12)
    assert {trial.mutant: trial.caught for trial in trials} == dict.fromkeys(SAMPLE, True)


def test_what_is_no_fault_survives():
    same = Mutant(
        "same",
        "formula",
        "nothing",
        (Patch("kda/gate.py", "b_z = b_g + b_bias", "b_z = b_bias + b_g"),),
        "gate",
        "gate",
    )
    (trial,) = campaign([same], jobs=1, problems=6)
    assert (trial.caught, trial.problems) == (False, 6)


@pytest.mark.parametrize(
    "caught, tried, status", [(True, 10, 0), (False, 10, 1), (True, 3, 3)], ids=["all", "survivor", "interrupted"]
)
def test_status_of_the_command(caught, tried, status, monkeypatch, tmp_path, capsys):
    def instead(mutants, *, done, **_):
        trials = [Trial(mutant.id, caught, "value", "generic", "o", problems=1) for mutant in mutants[:tried]]
        for trial in trials:
            done(trial)
        return trials

    monkeypatch.setattr(command, "campaign", instead)
    target = tmp_path / "mutants.json"
    assert main(["mutants", "--mutants", "validation", "--json", str(target)]) == status
    rows = json.loads(target.read_text())["mutants"]
    assert sum(row["caught"] for row in rows) == (tried if caught else 0)
    assert len(rows) == sum(mutant.kind == "validation" for mutant in MUTANTS)
    assert f"{tried if caught else 0} of {tried} caught" in capsys.readouterr().out


def test_known_limits_are_listed_and_not_tried(monkeypatch, capsys):
    monkeypatch.setattr(command, "campaign", lambda mutants, **_: [] if not mutants else pytest.fail("tried"))
    assert main(["mutants", "--mutants", "offsets_32"]) == 0
    assert "2^31 elements" in capsys.readouterr().out


def test_a_glob_without_mutants_is_wrong_use(capsys):
    assert main(["mutants", "--mutants", "nowhere"]) == 2
    assert "mutants is 'nowhere'" in capsys.readouterr().err
