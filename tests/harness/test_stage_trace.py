"""Stage traces: right kernels stay inside on every stage, and the stage that is broken is the one that is named."""

import math
from dataclasses import replace

import pytest

from harness import stage_line
from harness.call import DIFFERENTIABLE, Route, keywords
from harness.problem import Problem, materialise
from harness.results import Finding
from harness.runner import Runner
from harness.stage_line import Traced
from harness.stage_trace import StageRatio, first_outside, hold
from harness.subject import own_subject
from harness.verdict import Verdict
from kda import chunk_bwd, chunk_fwd, contract, fused_bwd, fused_fwd
from kda.chunk_bwd import PRECISION
from kda.chunk_stages import chunk_stages

PROBLEM = Problem(
    entry="chunk",
    lengths=(40,),
    K=4,
    V=4,
    chunk_size=32,
    initial_state=True,
    **dict.fromkeys(("v", "h0", "do", "dht"), "gauss"),
    q="unit",
    g="mild",
    beta="uniform",
)
# Stage -> the kernel that makes it, and the place of the stage among its arguments.
MADE_BY = {
    "q_decayed": ("kda_chunk_decay_fwd_kernel", 5),
    "k_rest": ("kda_chunk_decay_fwd_kernel", 7),
    "decay": ("kda_chunk_decay_fwd_kernel", 8),
    "A_qk": ("kda_chunk_intra_fwd_kernel", 5),
    "A_kk": ("kda_chunk_intra_fwd_kernel", 6),
    "inverse": ("kda_join_blocks_kernel", 2),
    "w": ("kda_wy_fwd_kernel", 4),
    "u": ("kda_wy_fwd_kernel", 5),
    "states": ("kda_chunk_state_fwd_kernel", 5),
    "v_new": ("kda_chunk_state_fwd_kernel", 6),
    "dA_qk": ("kda_chunk_output_bwd_kernel", 3),
    "dh": ("kda_chunk_state_bwd_kernel", 7),
    "dv_new": ("kda_chunk_state_bwd_kernel", 8),
    "z": ("kda_wy_bwd_kernel", 6),
    "dA_kk": ("kda_wy_bwd_kernel", 8),
}


def traced(problem: Problem, route: str) -> list[StageRatio]:
    case = materialise(problem)
    tensors = {name: case.inputs.get(name) for name in DIFFERENTIABLE}
    words = keywords(case, "chunk") | {"scale": contract.default_scale(tensors["q"], problem.scale)}
    call = contract.validate(contract.Call("chunk", **tensors, **words))
    stages = chunk_stages(call, route, do=case.inputs["do"], dht=case.inputs["dht"])
    return hold(stages, case, Route(route, "chunk", None, PRECISION[route]).judged_by(problem))


@pytest.mark.parametrize("route", PRECISION)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_right_kernels_are_inside_on_every_stage(route, dtype):
    held = traced(Problem(**{**PROBLEM.__dict__, "dtype": dtype, "lengths": (5, 33), "packed": True}), route)
    assert [stage.stage for stage in held if not stage.ratio <= 1] == []
    assert first_outside(held) is None
    assert len(held) == 22


@pytest.mark.parametrize("stage", MADE_BY)
def test_the_broken_stage_is_named(stage, monkeypatch):
    kernel_name, argument = MADE_BY[stage]

    def broken(plan, kernel, programs, *arguments, **constants):
        launch(plan, kernel, programs, *arguments, **constants)
        if kernel.__name__ == kernel_name:
            arguments[argument].mul_(1.5)

    launch = chunk_fwd.launch
    for module in (chunk_fwd, chunk_bwd):
        monkeypatch.setattr(module, "launch", broken)
    assert first_outside(traced(PROBLEM, "chunk-unbounded")).stage == stage


@pytest.mark.parametrize(
    "slots, named",
    [({"states": (1, 2), "v_new": (0, 1, 2)}, "v_new"), ({"states": (0, 1), "v_new": (0, 1)}, "states")],
    ids=["values_first", "states_first"],
)
def test_stages_that_take_turns_are_told_apart_by_chunk(slots, named):
    held = [StageRatio("u", 0.1, ()), *(StageRatio(name, 9.0, where) for name, where in slots.items())]
    assert first_outside(held).stage == named


def test_a_backward_scan_begins_at_the_last_chunk():
    held = [StageRatio("dh", 9.0, (0, 1)), StageRatio("dv_new", 9.0, (0, 1, 2))]
    assert first_outside(held).stage == "dv_new"


FUSED = replace(PROBLEM, lengths=(5, 0, 40), packed=True, tail=3, K=64, V=64, dtype="bf16", v_first=True)
# By kernels that leave several tiles in one tensor: which rows, and the stages that are then outside.
TILES = {
    "k_decayed": ("kda_fused_prep_kernel", 6, slice(0, 16)),
    "q_decayed": ("kda_fused_prep_kernel", 6, slice(16, 32)),
    "k_update": ("kda_fused_prep_kernel", 7, slice(None)),
    "inverse": ("kda_fused_prep_kernel", 8, slice(0, 16)),
    "response": ("kda_fused_prep_kernel", 8, slice(32, 48)),
    "states": ("kda_fused_scan_kernel", 9, slice(None)),
    "dh": ("kda_fused_scan_bwd_kernel", 8, slice(None)),
}


def of_call(problem: Problem, route: str) -> list[StageRatio]:
    """Every stage of a call of one of our routes, by the harness's own way."""
    made, case = own_subject().route(route, "chunk"), materialise(problem)
    return hold(made.stages(case), case, made.judged_by(problem))


@pytest.mark.parametrize(
    "route, changes, pieces",
    [
        ("fused-unbounded", {}, False),
        ("fused-safe_gate", {"safe_gate": True}, False),
        ("fused-unbounded", {"lengths": (33, 33), "packed": False, "tail": 0}, False),
        ("segment_parallel-unbounded", {}, True),
        ("segment_parallel-safe_gate", {"safe_gate": True, "lengths": (70,)}, True),
    ],
    ids=["fused", "fused-safe", "fused-dense", "segments", "segments-safe"],
)
def test_right_fused_kernels_are_inside_on_every_stage(route, changes, pieces):
    held = {stage.stage: stage.ratio for stage in of_call(replace(FUSED, **changes), route)}
    assert {name: ratio for name, ratio in held.items() if not ratio <= 1} == {}
    wanted = {"q_decayed", "k_decayed", "k_update", "decay", "inverse", "response", "A_qk_beta", "states", "dh"}
    assert wanted | ({"piece_states", "piece_gradients"} if pieces else set()) <= held.keys()


@pytest.mark.parametrize("stage", TILES)
def test_the_broken_tile_of_a_fused_kernel_is_named(stage, monkeypatch):
    kernel_name, argument, rows = TILES[stage]

    def broken(plan, kernel, programs, *arguments, **constants):
        launch(plan, kernel, programs, *arguments, **constants)
        if kernel.__name__ == kernel_name and arguments[argument] is not None:
            arguments[argument][:, :, rows].mul_(1.5)

    launch = fused_fwd.launch
    for module in (fused_fwd, fused_bwd):
        monkeypatch.setattr(module, "launch", broken)
    held = of_call(FUSED, "fused-unbounded")
    assert {one.stage for one in held if not one.ratio <= 1} >= {stage}
    assert first_outside(held).stage == stage


@pytest.mark.parametrize("stage", ["dA_qk", "dA_kk"])
def test_what_is_missing_above_the_diagonal_is_seen(stage, monkeypatch):
    """There it is kept for the product with the transposed."""
    kernel_name, argument = MADE_BY[stage]

    def broken(plan, kernel, programs, *arguments, **constants):
        launch(plan, kernel, programs, *arguments, **constants)
        if kernel.__name__ == kernel_name:
            for i in range(40):
                arguments[argument][0, i, 0, i % 32 + 1 :] = math.nan

    launch = chunk_fwd.launch
    monkeypatch.setattr(chunk_bwd, "launch", broken)
    assert first_outside(traced(PROBLEM, "chunk-unbounded")).stage == f"{stage}_above"


def test_offsets_that_are_not_the_calls_are_named_first():
    made, case = own_subject().route("recurrent", "chunk"), materialise(replace(PROBLEM, lengths=(5, 35), packed=True))
    stages = made.stages(case)
    stages["offsets"] = stages["offsets"] + 1
    held = hold(stages, case, made.judged_by(case.problem))
    assert [(one.stage, one.ratio) for one in held] == [("offsets", math.inf), ("chunk_offsets", 0.0)]


def test_what_is_nan_in_truth_is_not_measured():
    problem = replace(PROBLEM, lengths=(5, 35), packed=True)
    case = materialise(problem)
    case.inputs["v"][:, :5] = math.nan
    made = own_subject().route("chunk-unbounded", "chunk")
    assert [one.stage for one in hold(made.stages(case), case, made.judged_by(problem)) if not one.ratio <= 1] == []


def found_in(form: str, quantity: str, tmp_path) -> tuple[Runner, Route, Finding]:
    runner = Runner(own_subject(), "cpu", tmp_path)
    finding = Finding.of("chunk-unbounded", Verdict(quantity, "BUG", math.inf, form, "differs"), PROBLEM)
    return runner, runner.subject.route("chunk-unbounded", "chunk"), finding


def test_the_stage_that_differs_between_two_forms_is_named_where_both_are_inside(tmp_path, monkeypatch):
    """Every row of q 2^G gets a little of the whole chunk's decay: far below any tolerance, but of the future."""

    def looks_ahead(plan, kernel, programs, *arguments, **constants):
        launch(plan, kernel, programs, *arguments, **constants)
        if kernel.__name__ == "kda_chunk_decay_fwd_kernel":
            arguments[5].mul_(1 + 1e-6 * arguments[8].mean())

    launch = chunk_fwd.launch
    runner, route, finding = found_in("causal", "o", tmp_path)
    assert stage_line.traced(runner, route, finding, 0).parted == ""
    monkeypatch.setattr(chunk_fwd, "launch", looks_ahead)
    made = stage_line.traced(runner, route, finding, 0)
    assert (made.form, made.parted, first_outside(list(made.stages))) == ("causal", "q_decayed", None)
    assert stage_line.line(finding, made, (), "").startswith("q_decayed is the first that is not as the call itself")


def test_a_stage_that_is_wrong_in_the_failing_form_only_is_named_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr(chunk_bwd, "dense", lambda x: x)
    runner, route, finding = found_in("strided", "dq", tmp_path)
    made = stage_line.traced(runner, route, finding, 0)
    assert made.form == "strided"
    said = stage_line.line(finding, made, (), "")
    assert said.startswith("dA_qk is the first outside its envelope (") and "in that form of the call (strided)" in said


READ = "; out-of-bounds load: kernel one, program (0,): 1 of 4 lanes"
UNWRITTEN = "; uninitialised read: kernel one, program (0,): 4 of 4 bytes were never written"
OUTSIDE = Traced((StageRatio("offsets", 0.0, ()), StageRatio("w", 3.0, (0,))))
INSIDE = Traced((StageRatio("offsets", 0.0, ()), StageRatio("w", 0.5, ())))


@pytest.mark.parametrize(
    "made, message, words",
    [
        (OUTSIDE, "", "w is the first outside its envelope (3 x its limit); offsets before it are inside"),
        (OUTSIDE, READ, "kernel one, as the sanitizer says"),
        (
            OUTSIDE,
            UNWRITTEN,
            "w is the first outside its envelope (3 x its limit); offsets before it are inside; kernel",
        ),
        (INSIDE, UNWRITTEN, "kernel one, as the sanitizer says"),
        (INSIDE, "", "every stage is inside its envelope: what makes o of them is at fault"),
        (
            Traced(untraced="none"),
            "route a was forced, and the launch record shows b",
            "route is what is wrong, not a stage: the launch record shows b",
        ),
        (
            Traced(untraced="exposes no intermediates"),
            "",
            "not known: exposes no intermediates; the forward pass is wr",
        ),
        (
            Traced(INSIDE.stages[:1]),
            "",
            "not known: offsets are right, and it shows no more; the forward pass is wrong",
        ),
        (
            Traced((StageRatio("offsets", math.inf, ()),)),
            "",
            "offsets is the first outside its envelope (where no error is allowed), the first of all",
        ),
    ],
    ids=["stage", "kernel", "unwritten", "unseen", "result", "route", "none", "places", "offsets"],
)
def test_what_is_said_of_the_place(made, message, words):
    finding = Finding.of("chunk-unbounded", Verdict("o", "BUG", 9.0, "element", message), PROBLEM)
    verdicts = [Verdict("o", "BUG", 9.0), Verdict("dq", "BUG", 9.0)]
    assert stage_line.line(finding, made, verdicts, "").startswith(words)
