"""Authority on functions with fla's signatures: which arguments they take, what they may round, and their routes."""

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping

from harness.call import Route
from harness.problem import Problem
from harness.serving import Served
from kda.precision import PrecisionSpec

ENTRY_OF_NAME = {
    **{"chunk_kda": "chunk", "fused_recurrent_kda": "recurrent", "fused_kda_gate": "gate"},
    "kda_decode": "decode",
}

_CHUNK_STAGES = {
    **{"o": "io", "dq": "io", "dk": "io", "dv": "io", "ht": "fp32", "dh0": "fp32"},
    **{"operand": "dot", "stored_inverse": "dot", "kept": "io", "kept_product": "io", "qk_norm": "io"},
    "scaled_key": "beta",
}


def foreign_specs() -> dict[str, PrecisionSpec]:
    """What kernels with fla's signatures are taken to round, unless a subject declares better.

    Their chunk_size is the chunk of the algorithm, and so where it rounds.
    """
    chunk = _CHUNK_STAGES
    return {
        "chunk-safe_gate": PrecisionSpec("chunk", chunk, diagonal="anchor", inverse="substitution"),
        "chunk-unbounded": PrecisionSpec("chunk", chunk, diagonal="pair", inverse="substitution"),
        "recurrent": PrecisionSpec("recurrent", {"o": "io", "ht": "fp32"}),
        "gate": PrecisionSpec("gate", {}),
        "decode": PrecisionSpec("recurrent", {"o": "io", "ht": "pool", "carried": "pool"}),
    }


def taken(function: Callable) -> frozenset[str] | None:
    """The keywords that a function takes: its parameters, and those that it looks up in its `**kwargs`; what it would
    only swallow it does not take. None where that is not known: it names no tensor (it is a wrapper), hands its
    `**kwargs` on, or its source is not to be had.
    """
    if hasattr(function, "taken"):
        return function.taken
    parameters = inspect.signature(function).parameters
    swallowing = [name for name, p in parameters.items() if p.kind is p.VAR_KEYWORD]
    if not swallowing:
        return frozenset(parameters)
    looked_up = _looked_up(function, swallowing[0]) if "g" in parameters else None
    return None if looked_up is None else frozenset({*parameters, *looked_up} - {swallowing[0]})


def _looked_up(function: Callable, kwargs: str) -> set[str] | None:
    """Strings that a function takes out of its `**kwargs`; None where these are used as a whole."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None
    found, uses = set(), sum(isinstance(node, ast.Name) and node.id == kwargs for node in ast.walk(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript):
            owner, key = node.value, node.slice
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            owner, key = node.func.value, node.args[0]
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
            owner, key = node.comparators[0], node.left
        else:
            continue
        if isinstance(owner, ast.Name) and owner.id == kwargs and isinstance(key, ast.Constant):
            found.add(key.value)
            uses -= 1
    return None if uses else found


def _accepts(function: Callable) -> Callable[[Problem], str | None]:
    """Refuses a problem that needs an argument the function does not have."""
    names = taken(function)

    def lacks(problem: Problem) -> str | None:
        needed = _needed(problem)
        missing = [name for name, wanted in needed.items() if wanted and names is not None and name not in names]
        return f"has no argument {', '.join(missing)}" if missing else None

    return lacks


def _needed(problem: Problem) -> dict[str, bool]:
    """The arguments that say something beside the tensors of every call, and whether the problem needs each."""
    needed = {
        "A_log": problem.A_log is not None,
        "dt_bias": problem.dt_bias is not None,
        "lower_bound": problem.lower_bound is not None,
    }
    if problem.entry != "gate":
        needed |= {
            "scale": problem.scale is not None,
            "use_qk_l2norm_in_kernel": problem.l2norm,
            "use_gate_in_kernel": problem.gate != "pregated",
            "use_beta_sigmoid_in_kernel": problem.beta_sigmoid,
            "allow_neg_eigval": problem.neg_eigval,
            "state_v_first": problem.v_first,
            "cu_seqlens": problem.packed,
        }
    if problem.entry in ("chunk", "recurrent"):
        needed |= {"initial_state": problem.initial_state}
    if problem.entry == "decode":
        needed |= {"num_accepted_tokens": problem.rejected > 0}
    if problem.entry == "chunk":
        needed |= {
            "safe_gate": problem.safe_gate,
            "return_intermediate_states": problem.intermediates,
            "chunk_size": problem.intermediates and problem.chunk_size != 64,
            "precision": problem.precision != "ieee",
        }
    return needed


def _limits(function: Callable, entry: str) -> tuple[str, ...]:
    """The options of fla's that a function does not have, in words."""
    names, plain = taken(function), {"initial_state": True, "loss": "none"} if entry == "decode" else {}
    every = _needed(Problem(entry=entry, **plain)) if entry != "gate" else ("A_log", "dt_bias", "lower_bound")
    return (
        () if names is None else tuple(f"has no argument {name}" for name in every if name not in {*names, "precision"})
    )


def _only_known(function: Callable) -> Callable:
    """Drop keywords that the function does not take; `lacks` has seen to it that none of them matters."""
    names = taken(function)
    if names is None:
        return function
    return lambda **kwargs: function(**{name: value for name, value in kwargs.items() if name in names})


def both(*checks: Callable[[Problem], str | None]) -> Callable[[Problem], str | None]:
    return lambda problem: next((reason for check in checks if (reason := check(problem))), None)


def _wants_safe_gate(problem: Problem) -> str | None:
    return None if problem.safe_gate else "the safe_gate path takes safe_gate problems"


def _wants_no_safe_gate(problem: Problem) -> str | None:
    return "the unbounded path takes problems without safe_gate" if problem.safe_gate else None


def signature_routes(functions: Mapping[str, Callable], origins: Mapping[str, str] | None = None) -> tuple[Route, ...]:
    """The routes of callables with fla's signatures, by entry.

    On a function `precision` overrides the assumed PrecisionSpec, `differentiable = False` drops the gradients, and
    `stages` exposes intermediates (see `Route`). `origins`: entry -> `module:attribute` of the function.
    """
    specs, routes = foreign_specs(), []
    for entry, function in functions.items():
        lacks, known = _accepts(function), _only_known(function)
        declared = getattr(function, "precision", None)
        shown = {"origin": (origins or {}).get(entry, ""), "stages": getattr(function, "stages", None)}
        shown["limits"] = _limits(function, entry)
        if entry == "chunk":
            safe, free = both(lacks, _wants_safe_gate), both(lacks, _wants_no_safe_gate)
            routes.append(Route("chunk-safe_gate", entry, known, declared or specs["chunk-safe_gate"], safe, **shown))
            routes.append(Route("chunk-unbounded", entry, known, declared or specs["chunk-unbounded"], free, **shown))
        else:
            differentiable = entry != "decode" and getattr(function, "differentiable", True)
            if entry == "decode":
                known = Served(known)
            routes.append(Route(entry, entry, known, declared or specs[entry], lacks, differentiable, **shown))
    return tuple(routes)


def entry_of(function: Callable) -> str | None:
    """The entry that a function serves, by its `entry`, its name or its arguments; None for anything else."""
    parameters = set(inspect.signature(function).parameters)
    named = getattr(function, "entry", None) or ENTRY_OF_NAME.get(getattr(function, "__name__", ""))
    if named:
        return named
    if {"q", "k", "v", "g", "beta"} <= parameters:
        if {"state_pool", "slots"} <= parameters:
            return "decode"
        return "chunk" if parameters & {"chunk_size", "safe_gate"} else "recurrent"
    return "gate" if {"g", "A_log"} <= parameters else None
