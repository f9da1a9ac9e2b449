"""What a failure needs: every flag alone, every length one more and one less, and a sentence that says so."""

from dataclasses import replace

from harness.necessity import Trial, summary, trials
from harness.problem import FLAGS, Edit, Problem

PROBLEM = Problem(entry="chunk", lengths=(17, 4), packed=True, K=2, V=2, heads=2, initial_state=True, l2norm=True)


def tried(problem, fails):
    return {trial.change: trial.fails for trial in trials(problem, fails, seconds=20)}


def test_every_flag_and_length_is_tried_alone():
    found = tried(PROBLEM, lambda problem: True)
    assert {f"{flag}={not getattr(PROBLEM, flag)}" for flag in FLAGS} - set(found) == {"packed=False"}  # not legal
    assert {"lengths[0]=16", "lengths[0]=18", "lengths[1]=3", "lengths[1]=5", "one sequence less (the last)"} <= set(
        found
    )
    assert {"heads=1", "heads=3", "K=1", "K=3", "loss=o"} <= set(found)


def test_what_the_fault_needs_cures_it():
    found = tried(PROBLEM, lambda problem: problem.lengths[0] > 16 and problem.initial_state and problem.heads > 1)
    cured = {change for change, fails in found.items() if not fails}
    assert cured == {"lengths[0]=16", "one sequence less (the first)", "initial_state=False", "heads=1"}


def test_what_cannot_be_compared_is_no_trial():
    found = tried(PROBLEM, lambda problem: None if problem.l2norm is False else True)
    assert "l2norm=False" not in found and "initial_state=False" in found


def test_edits_move_with_their_sequence():
    """The edit of sequence 1, token 1 stays there when sequence 0 becomes shorter or longer."""
    problem = replace(PROBLEM, edits=(Edit("v", (18, 0, 0), 5.0),))
    seen = {}
    trials(problem, lambda candidate: seen.setdefault(candidate.lengths, candidate.edits) is None, seconds=20)
    assert seen[16, 4] == (Edit("v", (17, 0, 0), 5.0),)
    assert seen[18, 4] == (Edit("v", (19, 0, 0), 5.0),)
    assert seen[17, 3] == problem.edits
    assert seen[(17,)] == ()


def test_time_is_a_limit():
    assert trials(PROBLEM, lambda problem: True, seconds=0) == []


def test_one_sentence():
    found = [Trial("K=3", True), Trial("l2norm=False", False), Trial("heads=1", True)]
    assert summary(found) == "right with l2norm=False; still wrong with each of 2 other single changes"
    assert summary(found[:1]) == "none of 1 single changes makes it right"
    assert summary([]) == "no changes tried"
