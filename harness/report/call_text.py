"""Authority on how a problem's call is written down: the lines that a user of the kernel would write."""

import torch

from harness.call import DIFFERENTIABLE, Route, keywords
from harness.problem import Case, Problem
from harness.results import Finding
from harness.variants import VARIANTS

TENSORS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens")
STREAM_OF = {"initial_state": "h0"}
DEFAULTS = {
    "chunk_size": 64,
    "step": 1,
    "rejected": 0,
    "index_dtype": torch.int64,
}  # and False or None for every other keyword


def target(route: Route) -> tuple[str, str]:
    """(module, expression in it) of the function that a user calls; ("", its name) where the subject does not say."""
    module, _, attribute = route.origin.partition(":")
    return module, attribute or getattr(route.function, "__name__", "kernel")


def given_keywords(case: Case, route: Route) -> dict[str, object]:
    """The keywords of the call that say something, tensors apart."""
    words = {name: value for name, value in keywords(case, route.entry).items() if name != "cu_seqlens"}
    defaults = lambda name: (DEFAULTS[name],) if name in DEFAULTS else (False, None)  # noqa: E731
    return {name: value for name, value in words.items() if not any(value is x for x in defaults(name))}


def call_lines(case: Case, route: Route) -> list[str]:
    """The call and its backward pass, with tensors by name."""
    names = [name for name in TENSORS if case.inputs.get(name) is not None]
    arguments = [f"{name}={name}" for name in names]
    arguments += [f"{name}={value!r}" for name, value in given_keywords(case, route).items()]
    results, function = {"gate": "g_out", "decode": "o, ht"}.get(route.entry, "o, ht, *rest"), target(route)[1]
    if route.entry == "decode":
        function, arguments = "harness.serving.serve", [function, *arguments]
    lines = [f"{results} = {function}(", *(f"    {argument}," for argument in arguments), ")"]
    if case.problem.gradients and route.differentiable:
        first = "g_out" if route.entry == "gate" else "o"
        roots = [(x, d) for x, d in ((first, "do"), ("ht", "dht")) if case.inputs.get(d) is not None]
        leaves = [name for name in DIFFERENTIABLE if case.inputs.get(name) is not None]
        outputs, arriving = (", ".join(pair) for pair in zip(*roots))
        lines.append(f"torch.autograd.grad([{outputs}], [{', '.join(leaves)}], [{arriving}])")
    return lines


def shape_lines(case: Case) -> list[str]:
    """Every tensor with its shape, dtype and pattern."""
    lines = []
    for name in (*TENSORS, "do", "dht"):
        x = case.inputs.get(name)
        if x is not None:
            stream = STREAM_OF.get(name, name)
            kind = f"  {x.tolist()}" if name == "cu_seqlens" else f"  {_described(case.problem, stream)}"
            lines.append(f"{name:13} {str(x.dtype).removeprefix('torch.'):8} {list(x.shape)}{kind}")
    return lines


def _described(problem: Problem, stream: str) -> str:
    """What a tensor is filled with."""
    edits = sum(edit.tensor == stream for edit in problem.edits)
    return f"{getattr(problem, stream)}{f', then {edits} set by hand' if edits else ''}"


def form_lines(finding: Finding) -> list[str]:
    """What another form of the call is and how to run it, for a finding about one."""
    if not finding.variant:
        return []
    variant = VARIANTS[finding.variant]
    return [
        f"The call alone does not show this: it fails in another form, {variant.name}, of which is promised that "
        f"{variant.promise}.",
        "`kda replay problem.json` runs the call and every other form of it; what is said to be expected here is what "
        "follows from the result of the call itself.",
    ]
