"""Authority on calls: how a problem becomes a call of an implementation, and what that returned."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from harness import bands, process_state
from harness.problem import OFFSETS, Case, Problem
from kda.precision import PrecisionSpec
from kda.registry import NoRoute

DIFFERENTIABLE = {
    **{"q": "dq", "k": "dk", "v": "dv", "g": "dg", "beta": "dbeta"},
    **{"A_log": "dA_log", "dt_bias": "ddt_bias", "initial_state": "dh0"},
}


class NotCovered(Exception):
    """The subject lacks what the problem asks for; counted, and never a pass."""


class RouteDidNotRun(Exception):
    """The launch record lacks the route that a check claims."""


@dataclass(frozen=True)
class Route:
    """One implementation of an entry point by a subject.

    `lacks` says why it cannot take a problem, or None. `origin` is `module:attribute` of the function that a user
    calls. `stages`, where a subject exposes them, returns a call's intermediates by the names of `oracle.trace`.
    `invariant`: it is declared that no bit depends on batch, packing, other heads or later tokens. `nearest`: the
    problem that it takes, or nearly takes, in the place of one that it does not. `limits`: what it does not take or
    have, in words. `segment`: tokens of the pieces in which it computes a problem, if it does. `families`: those that
    ask what its kernels are not asked on other routes; () for all.
    """

    id: str
    entry: str
    function: Callable
    spec: PrecisionSpec
    lacks: Callable[[Problem], str | None] = lambda problem: None
    differentiable: bool = True
    context: Callable[[], AbstractContextManager] = contextlib.nullcontext
    invariant: bool = False
    origin: str = ""
    stages: Callable[[Case], dict[str, Tensor]] | None = None
    nearest: Callable[[Problem], Problem] = lambda problem: problem
    limits: tuple[str, ...] = ()
    families: tuple[str, ...] = ()
    segment: Callable[[Problem], int] | None = None

    @property
    def lacking(self) -> tuple[str, ...]:
        """What the route does not take or have, in words."""
        gradients = self.differentiable or self.entry == "decode"
        return self.limits if gradients else (*self.limits, "has no gradients")

    def judged_by(self, problem: Problem) -> PrecisionSpec:
        """The rounding points that are declared for this problem."""
        segment = None if self.segment is None else self.segment(problem)
        return self.spec.of_call(problem.chunk_size, problem.precision, segment)

    def quantities(self, problem: Problem) -> frozenset[str]:
        wanted = problem.quantities()
        return wanted if self.differentiable else frozenset(name for name in wanted if not name.startswith("d"))


@dataclass(frozen=True)
class Offence:
    """What a call did beside returning results: to what ("bands", "process", "memory"), the name of it, in words."""

    quantity: str
    statistic: str
    message: str


@dataclass
class Run:
    """What a call returned: outputs by quantity.

    `compile_seconds` are those of `seconds` that Triton's compiler took; `modified` names inputs that were changed;
    `peak_bytes` counts memory on a GPU beyond what was allocated before.
    """

    outputs: dict[str, Tensor]
    seconds: float
    compile_seconds: float = 0.0
    modified: tuple[str, ...] = ()
    peak_bytes: int = 0
    offences: tuple[Offence, ...] = ()


def keywords(case: Case, entry: str) -> dict[str, object]:
    """The arguments of a call other than differentiable tensors, by the names that kda and fla share."""
    problem, inputs, options = case.problem, case.inputs, case.options
    if entry == "gate":
        return {"lower_bound": options.lower_bound}
    words: dict[str, object] = {
        "scale": options.scale,
        "output_final_state": problem.final_state,
        "use_qk_l2norm_in_kernel": options.use_qk_l2norm_in_kernel,
        "use_gate_in_kernel": options.use_gate_in_kernel,
        "use_beta_sigmoid_in_kernel": options.use_beta_sigmoid_in_kernel,
        "allow_neg_eigval": options.allow_neg_eigval,
        "lower_bound": options.lower_bound,
        "state_v_first": options.state_v_first,
        "cu_seqlens": inputs.get("cu_seqlens"),
    }
    if entry == "decode":
        words.pop("output_final_state")
        words |= {"step": problem.step, "rejected": problem.rejected, "index_dtype": OFFSETS[problem.offsets]}
    if entry == "chunk":
        words |= {"safe_gate": problem.safe_gate, "chunk_size": problem.chunk_size}
        words |= {"return_intermediate_states": True} if problem.intermediates else {}
        words |= {"precision": problem.precision} if problem.precision != "ieee" else {}
    return words


@dataclass
class CompileClock:
    """Seconds that Triton's compiler took."""

    seconds: float = 0.0


@contextlib.contextmanager
def compile_clock() -> Iterator[CompileClock]:
    """Counts compilation inside the block; what came from the cache costs nothing and counts nothing."""
    clock, before = CompileClock(), triton.knobs.compilation.listener

    def listen(*, times, **_) -> None:
        clock.seconds += times.total / 1e6

    triton.knobs.compilation.listener = listen
    try:
        yield clock
    finally:
        triton.knobs.compilation.listener = before


def call(route: Route, case: Case) -> Run:
    """Run a problem on a route, forward and, if the problem has a loss, backward.

    The tensors of the case are not what the route gets, but copies between guard bands.
    """
    reason = route.lacks(case.problem)
    if reason:
        raise NotCovered(reason)
    gradients = case.problem.gradients and route.differentiable
    banded = [bands.embed(name, x) for name, x in case.inputs.items() if x is not None]
    case = replace(case, inputs={**case.inputs, **{one.name: one.tensor for one in banded}})
    leaves = {
        name: case.inputs[name].detach().requires_grad_(gradients)
        for name in DIFFERENTIABLE
        if case.inputs.get(name) is not None
    }
    device = case.inputs["g"].device
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        resting = torch.cuda.memory_allocated()
    with process_state.watched(device) as state:
        started = time.perf_counter()
        with route.context() as launches, compile_clock() as compiling:
            outputs = _forward_backward(route, case, leaves, gradients)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    if launches is not None and case.inputs["g"].numel() and {launch.route for launch in launches} != {route.id}:
        ran = ", ".join(sorted({launch.route for launch in launches})) or "nothing"
        raise RouteDidNotRun(f"route {route.id} was forced, and the launch record shows {ran}")
    peak = torch.cuda.max_memory_allocated() - resting if device.type == "cuda" else 0
    touched = bands.touched(banded)
    modified = tuple(one.name for one in touched if one.modified())
    offences = [Offence("bands", "guard_band", said) for said in (one.overrun() for one in touched) if said]
    offences += [Offence("process", "device_state", "; ".join(state.changes))] if state.changes else []
    return Run(outputs, seconds, compiling.seconds, modified, peak, tuple(offences))


def stages_of(route: Route, case: Case) -> Run:
    """What a problem's stages left, forward and, if the problem has a loss, backward."""
    if route.stages is None:
        raise NotCovered("exposes no intermediates")
    reason = route.lacks(case.problem)
    if reason:
        raise NotCovered(reason)
    started = time.perf_counter()
    made = {name: x for name, x in route.stages(case).items() if x is not None}
    return Run(made, time.perf_counter() - started)


def _forward_backward(route: Route, case: Case, leaves: Mapping[str, Tensor], gradients: bool) -> dict[str, Tensor]:
    try:
        returned = route.function(**leaves, **keywords(case, route.entry))
    except NoRoute as refusal:
        raise NotCovered(f"refused: {refusal}") from None
    results = returned if isinstance(returned, tuple) else (returned,)
    named = dict(zip(("o", "ht", "h"), results))
    outputs = {name: x.detach() for name, x in named.items() if x is not None}
    if gradients:
        roots = [(named[n], case.inputs[d]) for n, d in (("o", "do"), ("ht", "dht")) if case.inputs.get(d) is not None]
        roots = [(root, grad) for root, grad in roots if root is not None and root.requires_grad]
        if not roots:
            raise NotCovered("its outputs carry no gradient")
        grads = torch.autograd.grad(
            [r for r, _ in roots], list(leaves.values()), [g for _, g in roots], allow_unused=True
        )
        # An input that did not take part has gradient zero, as autograd itself says with materialize_grads.
        outputs |= {
            DIFFERENTIABLE[n]: torch.zeros_like(leaf) if g is None else g for (n, leaf), g in zip(leaves.items(), grads)
        }
    return outputs
