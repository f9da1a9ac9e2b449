"""Under torch.compile(fullgraph=True): the same bits as eager calls, on every route, forward and backward."""

import itertools
from dataclasses import fields, replace

import pytest
import torch
from torch import library
from torch._dynamo.testing import CompileCounterWithBackend

import kda
from kda import contract
from kda.contract import Call, GateCall

T, H, HV = 5, 1, 2
ROUTES = ("fused-safe_gate", "fused-unbounded", "chunk-safe_gate", "chunk-unbounded", "recurrent", "torch")
NAMES = ("q", "k", "v", "g", "beta", "initial_state")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def tensors(route: str, device: str, tokens: int = T, sequences: int = 1) -> dict[str, torch.Tensor]:
    """Leaves of a legal call that the route takes: bf16 and K = V = 64 for the fused ones."""
    fused = route.startswith("fused")
    K, V, dtype = (64, 64, torch.bfloat16) if fused else (8, 4, torch.float32)
    generator = torch.Generator().manual_seed(tokens)
    rows = lambda *shape: torch.randn(1, tokens, *shape, generator=generator)  # noqa: E731
    made = {"q": rows(H, K), "k": rows(H, K), "v": rows(HV, V), "g": -rows(HV, K).abs(), "beta": rows(HV).sigmoid()}
    made = {name: x.to(dtype) for name, x in made.items()}
    made["initial_state"] = torch.randn(sequences, HV, K, V, generator=generator)
    return {name: x.to(device).requires_grad_() for name, x in made.items()}


def options(route: str) -> dict[str, object]:
    return {"output_final_state": True, "use_qk_l2norm_in_kernel": True, "safe_gate": route.endswith("safe_gate")}


def whole(entry, backend: str = "aot_eager", **kwargs: object):
    return torch.compile(entry, fullgraph=True, backend=backend, **kwargs)


def both(results) -> torch.Tensor:
    return sum(x.float().square().sum() for x in results if x is not None)


def outcome(entry, call: dict[str, torch.Tensor], loss=both, **rest: object) -> dict[str, torch.Tensor]:
    """Results and gradients by name; None where there is no gradient."""
    results = entry(**call, **rest)
    loss(results).backward()
    made = {f"result {i}": x.detach() for i, x in enumerate(results) if x is not None}
    return made | {f"d{name}": x.grad for name, x in call.items() if isinstance(x, torch.Tensor)}


def differing(a: dict[str, torch.Tensor | None], b: dict[str, torch.Tensor | None]) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name in a if not _same(a[name], b[name])]


def _same(x: torch.Tensor | None, y: torch.Tensor | None) -> bool:
    """Bit by bit; no gradient, where PyTorch finds no path to a tensor, is a gradient of zeros."""
    if x is None or y is None:
        return not any(z is not None and z.any() for z in (x, y))
    return torch.equal(x, y)


LOSSES = {"both": both, "o": lambda r: r[0].float().square().sum(), "state": lambda r: r[1].square().sum()}


@pytest.mark.parametrize(
    "route, loss",
    [(route, loss) for route in ROUTES for loss in LOSSES if loss == "both" or not route.startswith("fused")],
)
def test_compiled_and_eager_are_the_same_bits(route, loss, device):
    loss = LOSSES[loss]
    with kda.force_route(route):
        eager = outcome(kda.chunk_kda, tensors(route, device), loss, **options(route))
        with kda.record_launches() as launches:
            compiled = outcome(whole(kda.chunk_kda), tensors(route, device), loss, **options(route))
    assert differing(eager, compiled) == []
    assert {launch.route for launch in launches} == {route}


@pytest.mark.parametrize("wanted", [("q",), ("g", "initial_state"), ("v", "beta")], ids="-".join)
@pytest.mark.parametrize("route", ["chunk-unbounded", "recurrent", "torch"])
def test_gradients_of_any_subset_of_inputs(route, wanted, device):
    def call() -> dict[str, torch.Tensor]:
        return {name: x.requires_grad_(name in wanted) for name, x in tensors(route, device).items()}

    with kda.force_route(route):
        eager, compiled = (outcome(entry, call(), **options(route)) for entry in (kda.chunk_kda, whole(kda.chunk_kda)))
        full = outcome(kda.chunk_kda, tensors(route, device), **options(route))
    assert differing(eager, compiled) == []
    assert [name for name in NAMES if eager[f"d{name}"] is not None] == [name for name in NAMES if name in wanted]
    assert all(torch.equal(eager[f"d{name}"], full[f"d{name}"]) for name in wanted)


@pytest.mark.parametrize("route", ["recurrent", "torch"])
def test_packed_with_every_result(route, device):
    """Without a copy on the host the number of chunks is known only as the graph runs."""

    def call(offsets: list[int]) -> dict[str, torch.Tensor]:
        cu_seqlens = torch.tensor(offsets, device=device)
        return {**tensors(route, device, 40, len(offsets) - 1), "cu_seqlens": cu_seqlens}

    rest = {**options(route), "return_intermediate_states": True, "chunk_size": 32}
    compiled = whole(kda.chunk_kda)
    with kda.force_route(route):
        for offsets in ([0, 35, 40], [0, 3, 38]):
            eager = outcome(kda.chunk_kda, call(offsets), **rest)
            assert differing(eager, outcome(compiled, call(offsets), **rest)) == []
            assert eager["result 2"].shape[1] == sum(-(-(b - a) // 32) for a, b in itertools.pairwise(offsets))


RAW = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}


@pytest.mark.parametrize("lower_bound", [None, -5.0], ids=["softplus", "lower_bound"])
@pytest.mark.parametrize("route", ["chunk-unbounded", "recurrent", "torch"])
def test_gate_parameters(route, lower_bound, device):
    def call() -> dict[str, torch.Tensor]:
        parameters = {"A_log": torch.linspace(-1, 1, HV), "dt_bias": torch.linspace(-1, 1, HV * 8)}
        return tensors(route, device) | {name: x.to(device).requires_grad_() for name, x in parameters.items()}

    rest = {**options(route), **RAW, "lower_bound": lower_bound, "state_v_first": False}
    with kda.force_route(route):
        eager, compiled = (outcome(entry, call(), **rest) for entry in (kda.chunk_kda, whole(kda.chunk_kda)))
    assert differing(eager, compiled) == []
    assert compiled["dA_log"].any() and compiled["ddt_bias"].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("route", ["gate", "torch"])
def test_gate_entry(route, dtype, device):
    def call() -> dict[str, torch.Tensor]:
        made = {"g": torch.linspace(-3, 3, 24).view(1, 3, HV, 4), "A_log": torch.tensor([0.5, -0.5])}
        return {name: x.to(device).requires_grad_() for name, x in made.items()}

    with kda.force_route(route):
        entry = lambda **kwargs: (kda.fused_kda_gate(**kwargs, output_dtype=dtype),)  # noqa: E731
        eager, compiled = outcome(entry, call()), outcome(whole(entry), call())
    assert differing(eager, compiled) == [] and compiled["result 0"].dtype == dtype


@pytest.mark.parametrize("route", ["chunk-unbounded", "recurrent", "torch"])
def test_one_graph_for_every_length(route, device):
    counter, counts = CompileCounterWithBackend("aot_eager"), set()
    compiled = torch.compile(kda.chunk_kda, fullgraph=True, backend=counter, dynamic=True)
    with kda.force_route(route):
        for tokens in (5, 6, 2):
            eager = outcome(kda.chunk_kda, tensors(route, device, tokens), **options(route))
            assert differing(eager, outcome(compiled, tensors(route, device, tokens), **options(route))) == []
            counts.add(counter.frame_count)
    assert len(counts) == 1, "compiled again for another length"


def test_another_forced_route_is_another_graph(device):
    compiled, ran = whole(kda.chunk_kda), []
    for route in ("torch", "recurrent", "torch"):
        with kda.force_route(route), kda.record_launches() as launches:
            compiled(**tensors(route, device))
        ran.append({launch.route for launch in launches})
    assert ran == [{"torch"}, {"recurrent"}, {"torch"}]


def test_inductor(device):
    route = "recurrent"
    with kda.force_route(route):
        entry = lambda **kwargs: [2 * x for x in kda.chunk_kda(**kwargs)]  # noqa: E731
        eager = outcome(entry, tensors(route, device), **options(route))
        compiled = outcome(whole(entry, "inductor"), tensors(route, device), **options(route))
    assert differing(eager, compiled) == []


def arguments(call: Call | GateCall) -> list[object]:
    return [getattr(call, field.name) for field in fields(call)]


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "varlen"])
@pytest.mark.parametrize("route", ["chunk-unbounded", "recurrent", "torch"])
def test_operator_passes_opcheck(route, packed, device):
    call = Call("chunk", **tensors(route, device, sequences=1 + packed), output_final_state=True)
    if packed:
        call = replace(call, cu_seqlens=torch.tensor([0, 3, T], device=device))
    outcomes = library.opcheck(torch.ops.kda.operator.default, (route, *arguments(contract.validate(call))))
    assert set(outcomes.values()) == {"SUCCESS"}


@pytest.mark.parametrize("route", ["gate", "torch"])
def test_gate_passes_opcheck(route, device):
    g, A_log = torch.randn(1, 3, HV, 4, device=device), torch.zeros(HV, device=device)
    call = contract.validate_gate(GateCall(g.requires_grad_(), A_log.requires_grad_()))
    outcomes = library.opcheck(torch.ops.kda.gate.default, (route, *arguments(call)))
    assert set(outcomes.values()) == {"SUCCESS"}


def test_refusals_reach_who_compiles(device):
    call = tensors("torch", device)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"k\.shape is"):
        whole(kda.chunk_kda)(**{**call, "k": call["k"][:, 1:]})
    with pytest.raises(ValueError, match=r"k\.shape is \[1, 4, 1, 8\]"):
        torch.compile(kda.chunk_kda, backend="aot_eager")(**{**call, "k": call["k"][:, 1:]})


def test_what_only_the_data_shows_is_refused_as_it_runs(monkeypatch, device):
    compiled, call = whole(kda.chunk_kda), tensors("torch", "cpu", sequences=2)
    compiled(**call, cu_seqlens=torch.tensor([0, 2, T]))
    with pytest.raises(ValueError, match=r"cu_seqlens\[2\] is 1; it must be at least cu_seqlens\[1\] = 2"):
        compiled(**call, cu_seqlens=torch.tensor([0, 2, 1]))
    monkeypatch.setenv("KDA_VALIDATE", "1")
    call["g"] = -call["g"]
    with pytest.raises(ValueError, match=r"g\[0, 0, 0, 0\] is .*; it must be a log decay <= 0"):
        compiled(**call, cu_seqlens=torch.tensor([0, 2, T]))


def test_second_derivatives_are_refused(device):
    call = tensors("recurrent", device)
    (dq,) = torch.autograd.grad(whole(kda.chunk_kda)(**call)[0].sum(), call["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        torch.autograd.grad(dq.sum(), call["k"])
