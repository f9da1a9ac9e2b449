"""Authority on how a validated call runs: at once, or under torch.compile as one custom operator."""

from dataclasses import fields

import torch
from torch import Tensor, library

from kda import admitted, contents, contract, registry
from kda.contract import DIFFERENTIABLE, Call, DecodeCall, GateCall
from kda.registry import AnyCall

# NOTE [Compiled calls]
# Eager calls never see these operators: their autograd functions know best what to keep. While torch.compile traces,
# a call is validated and its route chosen from metadata alone, and one operator with the route's name among its
# arguments goes into the graph; what only the data shows is checked when it runs. Its backward pass is a second
# operator that has the inputs and the gradients of the results, and nothing else: a route that keeps more in eager mode
# (states, or stages for `disable_recompute`) computes it again. Kernels, their order and their results are the same.
# `kda_decode` has no backward pass; its operator is declared to change the pool.

SCHEMA = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    bool: "bool",
    int: "int",
    float: "float",
    float | None: "float?",
    str: "str",
    torch.dtype: "ScalarType",
}
OPERATORS: dict[type[AnyCall], str] = {Call: "operator", GateCall: "gate", DecodeCall: "decode"}
IN_PLACE = "state_pool"


def serve(call: Call):
    """Validate a call and run it on the first route that takes it: NOTE [Calls like earlier ones]."""
    if torch.compiler.is_compiling() or registry.asked_to_explain():
        return dispatch(contract.validate(call))
    known = admitted.key(call)
    route = admitted.route(known)
    if route is None:
        call = contract.validate(call)
        contents.check(call)
        route = _chosen(registry.choose(call))
        admitted.keep(known, route)
    else:
        contract.check_transforms("q")
        call = contract.with_floats(call)
        contents.check(call)
    return _execute(call, route)


def dispatch(call: AnyCall):
    """Run a validated call on the first route that takes it."""
    compiling = torch.compiler.is_compiling()
    if not compiling:
        contents.check(call)
    explanation = registry.choose(call)
    if not compiling and registry.asked_to_explain():
        raise registry.Explained(explanation)
    route = _chosen(explanation)
    return _traced(call, route) if compiling else _execute(call, route)


def _chosen(explanation: registry.Explanation) -> str:
    if explanation.route is None:
        raise registry.NoRoute(f"no route takes this call\n{explanation}")
    return explanation.route


def _execute(call: AnyCall, route: str):
    with torch.cuda.device_of(call.g):  # Triton launches on the current device; no effect on CPU tensors
        return registry.route_named(route).run(call)


def _arguments(call: AnyCall) -> list:
    return [getattr(call, field.name) for field in fields(call)]


def _traced(call: AnyCall, route: str):
    """What `_execute` returns, as a node of the graph that is being traced."""
    results = getattr(torch.ops.kda, OPERATORS[type(call)])(route, *_arguments(call))
    if isinstance(call, DecodeCall):
        return results
    if isinstance(call, GateCall):
        return results[0]
    final_state = results[1] if call.output_final_state else None
    h = results[-1].detach() if call.return_intermediate_states else None  # detached, as its gradient would be lost
    return results[0], final_state, h


def _present(results: Tensor | tuple[Tensor | None, ...]) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else [x for x in results if x is not None]


def _fake_results(call: AnyCall) -> list[Tensor]:
    """Empty tensors like those that every route returns."""
    if isinstance(call, GateCall):
        return [call.g.new_empty(call.g.shape, dtype=call.output_dtype)]
    state = torch.float64 if call.q.dtype == torch.float64 else torch.float32
    made = [call.q.new_empty(call.v.shape)]
    if call.output_final_state:
        made.append(call.q.new_empty(call.state_shape, dtype=state))
    if call.return_intermediate_states:
        packed = call.cu_seqlens is not None
        chunks = library.get_ctx().new_dynamic_size() if packed else call.chunks_per_row()
        made.append(call.q.new_empty((call.q.shape[0], chunks, *call.state_shape[1:]), dtype=state))
    return made


def _by_result(call: AnyCall, grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Incoming gradients as `Route.gradients` takes them: (do, dht) of the operator, (dy,) of the gate."""
    if isinstance(call, GateCall):
        return (grads[0],)
    return grads[0], grads[1] if call.output_final_state else None


def _signature(kind: type[AnyCall]) -> str:
    formats = {field.name: SCHEMA[field.type] for field in fields(kind)}
    formats |= {IN_PLACE: "Tensor(a!)"} if IN_PLACE in formats else {}
    return "str route, " + ", ".join(f"{form} {name}" for name, form in formats.items())


def _call(kind: type[AnyCall], arguments: tuple) -> AnyCall:
    return kind(**dict(zip((field.name for field in fields(kind)), arguments)))


def _define(kind: type[AnyCall]) -> library.CustomOpDef:
    """Register the operator of one kind of call, whose fields are the arguments.

    It returns a list; one that changes an argument a tensor, as PyTorch demands of those.
    """
    changed = [field.name for field in fields(kind) if field.name == IN_PLACE]
    returned = (lambda results: results[0]) if changed else (lambda results: results)

    def forward(route: str, *arguments: object) -> list[Tensor] | Tensor:
        call = _call(kind, arguments)
        contents.check(call)
        with torch.no_grad():
            return returned(_present(_execute(call, route)))

    schema = f"({_signature(kind)}) -> Tensor{'' if changed else '[]'}"
    operator = library.custom_op(f"kda::{OPERATORS[kind]}", forward, mutates_args=changed, schema=schema)
    operator.register_fake(lambda route, *arguments: returned(_fake_results(_call(kind, arguments))))
    return operator


def _define_backward(kind: type[AnyCall], operator: library.CustomOpDef) -> None:
    """Register `kda::<name>_backward`, and the formula that calls it."""
    name, names = OPERATORS[kind], [field.name for field in fields(kind)]
    tensors = [name for name in names if name in (*DIFFERENTIABLE, "cu_seqlens", "cu_seqlens_cpu")]

    def backward(grads: list[Tensor | None], wanted: list[str], route: str, *arguments: object) -> list[Tensor]:
        call = _call(kind, arguments)
        with torch.no_grad(), torch.cuda.device_of(call.g):
            made = registry.route_named(route).gradients(call, *_by_result(call, grads))
        return [made[name].contiguous() for name in wanted]

    def fake_backward(grads: list[Tensor | None], wanted: list[str], route: str, *arguments: object) -> list[Tensor]:
        call = _call(kind, arguments)
        return [torch.empty_like(getattr(call, name), memory_format=torch.contiguous_format) for name in wanted]

    def keep(ctx, inputs: tuple, output: list[Tensor]) -> None:
        ctx.set_materialize_grads(False)
        ctx.route, arguments = inputs[0], dict(zip(names, inputs[1:]))
        ctx.save_for_backward(*(arguments.pop(name) for name in tensors))
        ctx.rest = arguments

    def formula(ctx, grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
        arguments = {**ctx.rest, **dict(zip(tensors, ctx.saved_tensors))}
        wanted = [name for name, needed in zip(names, ctx.needs_input_grad[1:]) if needed]
        given = (arguments[name] for name in names)
        made = getattr(torch.ops.kda, f"{name}_backward")(list(grads), wanted, ctx.route, *given)
        made = dict(zip(wanted, made))
        return None, *(made.get(name) for name in names)

    operator.register_autograd(formula, setup_context=keep)
    schema = f"(Tensor?[] grads, str[] wanted, {_signature(kind)}) -> Tensor[]"
    adjoint = library.custom_op(f"kda::{name}_backward", backward, mutates_args=(), schema=schema)
    adjoint.register_fake(fake_backward)


_define_backward(Call, _define(Call))
_define_backward(GateCall, _define(GateCall))
_define(DecodeCall)
