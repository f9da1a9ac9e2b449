"""Decoding as an engine does it: what a call gets, and that memory of no sequence is watched."""

from dataclasses import replace

import pytest
import torch

from harness.fitting import LONG, SCHEDULES, SPARING, fitted, for_decoding
from harness.problem import Problem, materialise
from harness.runner import Runner
from harness.serving import Served, SlotsTouched, serve
from harness.subject import load_subject, own_subject, signature_subject

PROBLEM = Problem(
    entry="decode",
    lengths=(3, 0, 1),
    packed=True,
    tail=1,
    K=2,
    V=3,
    initial_state=True,
    loss="none",
    g="mild",
    h0="ramp",
)
DENSE = replace(PROBLEM, lengths=(5, 5), packed=False, tail=0)


def calls_of(problem: Problem) -> list[dict[str, object]]:
    """The arguments of every call that serves a problem."""
    made = []

    def decode(**call):
        made.append({name: x.clone() if torch.is_tensor(x) else x for name, x in call.items()})
        return torch.zeros_like(call["v"])

    case = materialise(problem)
    tensors = {name: x for name, x in case.inputs.items() if x is not None}
    serve(decode, **tensors, step=problem.step, rejected=problem.rejected)
    return made


def test_a_dense_batch_goes_by_steps_behind_a_padding_row_of_nan():
    calls = calls_of(replace(DENSE, step=2))
    assert [list(call["q"].shape) for call in calls] == [[3, 2, 1, 2], [3, 2, 1, 2], [3, 1, 1, 2]]
    q = materialise(DENSE).inputs["q"]
    for call, first in zip(calls, (0, 2, 4)):
        assert bool(call["q"][0].isnan().all()) and int(call["slots"][0]) == -1
        assert torch.equal(call["q"][1:], q[:, first : first + 2])
        assert "num_accepted_tokens" not in call and call["slots"].dim() == 1


def test_a_packed_batch_has_sequences_that_end_before_others():
    calls = calls_of(replace(PROBLEM, step=2))
    assert [call["cu_seqlens"].tolist() for call in calls] == [[0, 2, 4, 4, 5], [0, 2, 3, 3, 3]]


def test_drafts_are_taken_back_by_counts():
    calls = calls_of(replace(PROBLEM, step=2, rejected=1))
    assert [call["num_accepted_tokens"].tolist() for call in calls] == [[0, 1, 1, 1], [0, 2, 1, 1]]
    assert [call["cu_seqlens"].tolist() for call in calls] == [[0, 2, 5, 5, 7], [0, 2, 4, 4, 4]]
    assert all(call["slots"].shape == (4, 3) for call in calls)


def test_states_lie_in_slots_of_their_own_far_from_each_other():
    (call,) = calls_of(replace(DENSE, step=5))
    pool, slots = call["state_pool"], call["slots"][1:]
    assert len(set(slots.tolist())) == len(slots) and not torch.equal(slots, torch.arange(len(slots)))
    assert torch.equal(pool[slots], materialise(DENSE).inputs["initial_state"])
    assert bool(pool[[slot for slot in range(len(pool)) if slot not in slots.tolist()]].isnan().all())


def touches(where: str):
    """A kernel that writes what is not its own."""

    def decode(state_pool, slots, v, **rest):
        if where == "spare":
            spare = next(slot for slot in range(len(state_pool)) if slot not in slots.tolist())
            state_pool[spare, 0, 0, 0] = 1.0
        else:
            pages = state_pool.as_strided((len(state_pool), state_pool.stride(0)), (state_pool.stride(0), 1))
            pages[0, -1] = 1.0
        return torch.zeros_like(v)

    return decode


@pytest.mark.parametrize("where", ["spare", "behind"])
def test_memory_of_no_sequence_is_watched(where, tmp_path):
    case = materialise(DENSE)
    with pytest.raises(SlotsTouched, match=r"memory of no sequence's state changed, in or behind slots \[\d+\]"):
        serve(touches(where), **case.inputs, step=1)
    subject = signature_subject("wrong", {"decode": touches(where)})
    runner = Runner(replace(subject, foreign=False), "cpu", tmp_path)
    (verdict,) = runner.check("decode", DENSE).verdicts
    assert verdict.klass == "CRASH" and "SlotsTouched" in verdict.message


@pytest.mark.parametrize("entry", ["recurrent", "chunk", "gate"])
def test_whole_sequences_of_the_recurrent_entry_are_decoded(entry):
    gate = {"gate": "softplus", "A_log": "zeros"} if entry == "gate" else {}
    problem = Problem(entry=entry, lengths=(7,), K=2, V=2, **gate)
    made = fitted(problem, "decode", "decode")
    if entry != "recurrent":
        assert made is None
        return
    assert (made.entry, made.loss, made.h0, made.quantities()) == ("decode", "none", "zeros", {"o", "ht"})
    long = for_decoding(replace(problem, lengths=(LONG + 1,)))
    assert (long.step, long.rejected) == SPARING


def test_every_schedule_and_every_pool_comes_up():
    made = [for_decoding(Problem(lengths=(length,), seed=seed)) for length in range(5) for seed in range(20)]
    assert {(p.step, p.rejected) for p in made} == set(SCHEDULES)
    assert {(p.step, p.rejected, p.state_dtype) for p in made} == {
        (*schedule, states) for schedule in SCHEDULES for states in ("fp32", "bf16")
    }


def test_decode_routes_are_ours_and_those_of_others():
    ours = {route.id: route for route in own_subject().routes if route.entry == "decode"}
    assert set(ours) == {"decode", "torch"}
    assert all(isinstance(route.function, Served) and not route.differentiable for route in ours.values())
    (theirs,) = (route for route in load_subject("kda:kda_decode").routes)
    assert (theirs.id, theirs.entry, theirs.spec.stages["carried"]) == ("decode", "decode", "pool")
    assert theirs.lacks(replace(PROBLEM, rejected=1)) is None

    def no_counts(q, k, v, g, beta, state_pool, slots, use_qk_l2norm_in_kernel=False): ...

    (narrow,) = signature_subject("narrow", {"decode": no_counts}).routes
    assert narrow.lacks(replace(DENSE, rejected=1)) == "has no argument num_accepted_tokens"
    assert narrow.lacks(PROBLEM) == "has no argument cu_seqlens" and narrow.lacks(DENSE) is None
