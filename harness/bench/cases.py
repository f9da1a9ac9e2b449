"""Authority on what is timed: named problems in the shapes of real models, and how their tensors are made quickly."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from harness.globs import matches
from harness.problem import Case, Problem, materialise

MODES = ("forward", "forward_backward", "kept")  # kept: both passes, and nothing computed twice that need not be
USUAL = MODES[:2]
DISTINCT_HEADS = 4  # query heads with values of their own; making every one of 96 would take longer than timing them

_BOUNDED = Problem(
    entry="chunk",
    lengths=(8192,),
    heads=96,
    K=128,
    V=128,
    dtype="bf16",
    gate_dtype="bf16",
    gate="lower_bound",
    lower_bound=-5.0,
    safe_gate=True,
    l2norm=True,
    beta_sigmoid=True,
    loss="o",
    q="gauss",
    k="gauss",
    v="gauss",
    g="gauss",
    beta="gauss",
    A_log="gauss",
    dt_bias="gauss",
    do="gauss",
    seed=1,
)
_MIXED = (1300, 547, 2048, 963, 271, 3063)


def _softplus(problem: Problem) -> Problem:
    """The same shape with Kimi-Linear's gate and initialisation."""
    model = {"A_log": "kimi", "dt_bias": "kimi"}
    return replace(problem, gate="softplus", lower_bound=None, safe_gate=False, **model)


_H32 = replace(_BOUNDED, heads=32)
# Small and at the edge of what bf16 operands resolve: there the error is the point, not the time.
_DIFFICULT = replace(
    _BOUNDED,
    lengths=(200,),
    heads=4,
    K=64,
    V=64,
    gate="pregated",
    lower_bound=None,
    g="bounded",
    A_log=None,
    dt_bias=None,
)
# What serving is made of: one call, of one new token, of four, or of one with three drafts whose states are kept too.
_DECODE = replace(
    _H32,
    entry="decode",
    lengths=(1,) * 64,
    safe_gate=False,
    loss="none",
    initial_state=True,
    h0="gauss",
    offsets="int32",
)
_REPEATED = {"k": "repeated", "g": "zeros", "beta_sigmoid": False}

CASES: Mapping[str, Problem] = {
    "k3-T8192-H96": _BOUNDED,
    "k3-T8192-H64": replace(_BOUNDED, heads=64),
    "k3-T8192-H32": _H32,
    "k3-8x1024-packed-H96": replace(_BOUNDED, lengths=(1024,) * 8, packed=True),
    "k3-mixed-packed-H96": replace(_BOUNDED, lengths=_MIXED, packed=True),
    "k3-T1024-H32": replace(_H32, lengths=(1024,)),
    "k3-B8-T1024-H32": replace(_H32, lengths=(1024,) * 8),
    "k3-T65536-H32": replace(_H32, lengths=(65536,)),
    "kimi_linear-softplus-T8192-H32": _softplus(_H32),
    "softplus-T8192-H96": _softplus(_BOUNDED),
    "gva-T8192-H16-HV64": replace(_BOUNDED, heads=16, group=4),
    **{
        f"T8192-H32-K{K}-V{V}": replace(_H32, K=K, V=V)
        for K, V in ((64, 64), (256, 256), (128, 256), (128, 64), (64, 128), (256, 128))
    },
    **{f"decode-B{B}-H32": replace(_DECODE, lengths=(1,) * B) for B in (1, 8, 64, 256)},
    **{
        f"decode-B{B}-H32-{name}": replace(_DECODE, lengths=(changes.get("step", 1),) * B, **changes)
        for B in (64, 256)
        for name, changes in {
            "bf16_pool": {"state_dtype": "bf16"},
            "v_first": {"v_first": True},
            "T4": {"step": 4},
            "drafts3": {"rejected": 3},
        }.items()
    },
    "difficult-random": _DIFFICULT,
    "difficult-saturated_gate": replace(_DIFFICULT, g="bound"),
    "difficult-repeated_keys-beta1": replace(_DIFFICULT, **_REPEATED, beta="ones"),
    "difficult-repeated_keys-beta2": replace(_DIFFICULT, **_REPEATED, beta="twos"),
    "difficult-saturated_gate-unbounded": replace(_DIFFICULT, g="bound", safe_gate=False),
    "difficult-gate_spikes": replace(_DIFFICULT, g="spikes_1e6", safe_gate=False),
    "difficult-gate_resets": replace(_DIFFICULT, g="resets", safe_gate=False),
    "difficult-fp16_values_of_1e4": replace(_DIFFICULT, v="huge", dtype="fp16", gate_dtype="fp16"),
}


def select(glob: str) -> dict[str, Problem]:
    """The cases whose name matches, in order; ValueError if none does."""
    chosen = {name: problem for name, problem in CASES.items() if matches(name, glob)}
    if not chosen:
        raise ValueError(f"cases is {glob!r}; it must match one of {', '.join(CASES)}")
    return chosen


def distinct_heads(heads: int) -> int:
    """The largest divisor of the number of query heads that is at most DISTINCT_HEADS."""
    return max(n for n in range(1, DISTINCT_HEADS + 1) if heads % n == 0)


def tensors(problem: Problem, device: str) -> Case:
    """The problem with the values of its first heads repeated in all the others, each in memory of its own."""
    made = distinct_heads(problem.heads)
    few = materialise(replace(problem, heads=made), device)
    inputs = {name: _repeated(name, x, problem.heads // made) for name, x in few.inputs.items()}
    return Case(problem, inputs, few.options)


def _repeated(name: str, x: Tensor, times: int) -> Tensor:
    if name == "cu_seqlens":
        return x
    axis = {"A_log": 0, "dt_bias": 0, "initial_state": 1, "dht": 1}.get(name, 2)
    return torch.cat([x] * times, axis)


def has_gradients(mode: str) -> bool:
    return mode != "forward"


def bytes_that_must_move(case: Case, mode: str) -> int:
    """Every tensor of the call once: inputs and outputs, and with gradients those that arrive and leave.

    What a kernel saves, recomputes or reads twice is not counted. A decode case is one call, which reads one state of
    each sequence and writes those that have a slot.
    """
    if case.problem.entry == "decode":
        return _bytes_of_one_call(case)
    arriving = ("do", "dht")
    inputs = {name: x for name, x in case.inputs.items() if name not in arriving}
    moved = sum(x.nbytes for x in inputs.values()) + inputs["v"].nbytes
    if case.problem.final_state:
        N, HV = len(case.problem.lengths), case.problem.value_heads
        moved += N * HV * case.problem.K * case.problem.V * torch.float32.itemsize
    if has_gradients(mode):
        moved += sum(x.nbytes for name, x in case.inputs.items() if name != "cu_seqlens")
    return moved


def _bytes_of_one_call(case: Case) -> int:
    problem, inputs = case.problem, case.inputs
    tokens = problem.step + problem.rejected
    by_token = ("q", "k", "v", "g", "beta")
    rows = sum(inputs[name].nbytes for name in by_token) + inputs["v"].nbytes
    parameters = sum(inputs[name].nbytes for name in ("A_log", "dt_bias") if inputs.get(name) is not None)
    states = 1 + (tokens if problem.rejected else 1)
    return rows * tokens // problem.step + parameters + states * inputs["initial_state"].nbytes
