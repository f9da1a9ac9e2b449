"""Stage traces: right kernels stay inside on every stage, and the stage that is broken is the one that is named."""

import pytest

from harness.call import DIFFERENTIABLE, Route, keywords
from harness.problem import Problem, materialise
from harness.stage_trace import StageRatio, first_outside, hold
from kda import chunk_bwd, chunk_fwd, contract
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
    assert len(held) == 20


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
