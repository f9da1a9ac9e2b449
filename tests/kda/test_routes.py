"""The registry: which route serves a call and why, forcing and forbidding, and the record of what ran."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import kda
from kda import registry
from kda.contract import Call, GateCall
from kda.fused import PRECISION
from kda.fused_segments import PRECISION as SEGMENTS
from kda.registry import needs_kernels

NO_KERNELS = "need GPU tensors"


def arguments(dtype: torch.dtype = torch.float32, **changes: object) -> dict[str, object]:
    rows = lambda *shape: torch.zeros(1, 4, *shape, dtype=dtype)  # noqa: E731
    return {"q": rows(1, 4), "k": rows(1, 4), "v": rows(2, 3), "g": rows(2, 4), "beta": rows(2), **changes}


@pytest.fixture
def kernels(monkeypatch):
    """As in a process with TRITON_INTERPRET=1, whatever this one is."""
    monkeypatch.setattr(registry, "INTERPRETED", True)


@pytest.fixture
def no_kernels(monkeypatch):
    """As in a process without TRITON_INTERPRET, on a machine without a GPU."""
    monkeypatch.setattr(registry, "INTERPRETED", False)


ENTRIES = {
    "chunk_kda": (*SEGMENTS, *PRECISION, "chunk-safe_gate", "chunk-unbounded", "recurrent"),
    "fused_recurrent_kda": ("recurrent",),
    "fused_kda_gate": ("gate",),
    "kda_decode": ("decode",),
}  # the kernels that are asked, in order
UNKNOWN_BOUND = "needs gates known to be in [-5, 0]: safe_gate or such a lower_bound"


def explained(entry: str, dtype: torch.dtype = torch.float32) -> kda.Explanation:
    if entry == "fused_kda_gate":
        return kda.explain(entry, torch.zeros(1, 4, 2, 4, dtype=dtype), torch.zeros(2))
    if entry == "kda_decode":
        return kda.explain(entry, **arguments(dtype, state_pool=torch.zeros(2, 2, 4, 3), slots=torch.zeros(1).int()))
    return kda.explain(getattr(kda, entry), **arguments(dtype))


EACH_ENTRY = pytest.mark.parametrize("entry, asked", ENTRIES.items(), ids=ENTRIES)


@EACH_ENTRY
def test_kernels_come_first(entry, asked, kernels):
    explanation = explained(entry)
    needs_bf16 = "its operands are bf16, and q, k, v are float32"
    refused = (*((route, needs_bf16) for route in (*SEGMENTS, *PRECISION)), ("chunk-safe_gate", UNKNOWN_BOUND))
    refused = refused if entry == "chunk_kda" else ()
    assert (explanation.route, explanation.reasons) == (asked[len(refused)], refused)


RAW = {"use_gate_in_kernel": True, "A_log": torch.zeros(2)}


@pytest.mark.parametrize(
    "changes, route",
    [
        ({"safe_gate": True}, "chunk-safe_gate"),
        ({**RAW, "lower_bound": -5.0}, "chunk-safe_gate"),
        ({**RAW, "lower_bound": -0.1, "safe_gate": True}, "chunk-safe_gate"),
        ({**RAW, "lower_bound": -5.000001}, "chunk-unbounded"),
        (RAW, "chunk-unbounded"),
        ({}, "chunk-unbounded"),
    ],
    ids=["promised", "lower_bound-5", "lower_bound-0.1", "lower_bound-below", "softplus", "pregated"],
)
def test_the_chunk_path_goes_by_what_is_known_of_the_gates(changes, route, kernels):
    assert kda.explain("chunk_kda", **arguments(**changes)).route == route


@EACH_ENTRY
def test_torch_serves_what_kernels_cannot_run(entry, asked, no_kernels):
    explanation = explained(entry)
    assert explanation.route == "torch"
    assert tuple(name for name, _ in explanation.reasons) == asked
    assert f"{asked[-1]}: refused, Triton kernels {NO_KERNELS}" in str(explanation)


@EACH_ENTRY
def test_torch_serves_float64(entry, asked, kernels):
    explanation = explained(entry, torch.float64)
    assert explanation.route == "torch"
    assert tuple(name for name, _ in explanation.reasons) == asked
    assert explanation.reasons[-1] == (asked[-1], "computes in fp32, not float64")


@pytest.mark.parametrize("name", ["g", "beta", "A_log", "initial_state"])
def test_kernels_refuse_any_float64_tensor(name, kernels):
    call = arguments(A_log=torch.zeros(2), use_gate_in_kernel=True, initial_state=torch.zeros(1, 2, 4, 3))
    call[name] = call[name].double()
    assert kda.explain("chunk_kda", **call).route == "torch"


def test_the_gate_kernel_refuses_float64_output_and_parameters(kernels):
    g, A_log = torch.zeros(1, 4, 2, 4), torch.zeros(2)
    assert kda.explain("fused_kda_gate", g, A_log, output_dtype=torch.float64).route == "torch"
    assert kda.explain("fused_kda_gate", g, A_log.double()).route == "torch"


def test_kernels_run_on_gpus_and_nowhere_else(no_kernels):
    class OnGpu:
        device, dtype = torch.device("cuda"), torch.float32

    assert needs_kernels(OnGpu()) is None
    assert NO_KERNELS in needs_kernels(torch.zeros(1, device="meta"))


def test_torch_serves_other_devices_only_when_forced(kernels):
    call = GateCall(torch.zeros(1, 1, 1, 1, device="meta"), torch.zeros(1, device="meta"))
    explanation = registry.choose(call)
    assert explanation.route is None and "only when it is forced" in dict(explanation.reasons)["torch"]
    with kda.force_route("torch"):
        assert registry.choose(call).route == "torch"


MACHINES = {
    "ampere": (80, None, None),
    "turing": (75, None, "needs bf16 tensor cores: sm_80 or newer, not sm_75"),
    "amd": (0, "6.4", "exchanges numbers within a warp in a way only proven on NVIDIA GPUs"),
}


@pytest.mark.parametrize("arch, hip, reason", MACHINES.values(), ids=MACHINES)
@pytest.mark.parametrize("route", PRECISION)
def test_fused_routes_know_their_machines(route, arch, hip, reason, monkeypatch, no_kernels):
    monkeypatch.setattr("kda.fused_fwd.arch", lambda device: arch)
    monkeypatch.setattr(torch.version, "hip", hip)
    with FakeTensorMode():
        rows = lambda *shape: torch.empty(1, 4, *shape, dtype=torch.bfloat16, device="cuda")  # noqa: E731
        call = Call("chunk", rows(1, 64), rows(1, 64), rows(2, 64), rows(2, 64), rows(2), safe_gate=True)
        assert registry.route_named(route).verify(call) == reason
        assert registry.choose(call).route == ("fused-safe_gate" if reason is None else "chunk-safe_gate")


def test_force_route(kernels):
    with kda.force_route("torch"):
        explanation = explained("chunk_kda")
        assert explanation.route == "torch"
        assert explanation.reasons == tuple((name, "torch is forced") for name in ENTRIES["chunk_kda"])
        with kda.force_route("recurrent"):
            assert explained("chunk_kda").route == "recurrent"
            assert explained("fused_kda_gate").route == "gate", "a route is forced only where it has the entry"
    assert explained("chunk_kda").route == "chunk-unbounded"


def test_a_forced_route_that_refuses_is_an_error(kernels):
    with kda.force_route("recurrent"), pytest.raises(ValueError, match=r"no route takes this call") as refusal:
        kda.chunk_kda(**arguments(torch.float64))
    assert "recurrent: refused, computes in fp32" in str(refusal.value)
    assert "torch: refused, recurrent is forced" in str(refusal.value)


def test_forbid_routes(kernels):
    with kda.forbid_routes("recurrent"):
        assert explained("fused_recurrent_kda").reasons == (("recurrent", "forbidden"),)
        with kda.forbid_routes("torch", "gate"):
            assert explained("fused_recurrent_kda").route is None
        assert explained("fused_kda_gate").route == "gate"
    with kda.forbid_routes():
        assert explained("fused_recurrent_kda").route == "recurrent"


def test_environment_variables(kernels, monkeypatch):
    monkeypatch.setenv("KDA_FORCE_ROUTE", "torch")
    assert explained("fused_recurrent_kda").route == "torch"
    with kda.force_route("recurrent"):
        assert explained("fused_recurrent_kda").route == "recurrent", "a block comes before the environment"
    monkeypatch.setenv("KDA_FORCE_ROUTE", "")
    monkeypatch.setenv("KDA_FORBID_ROUTES", "gate, recurrent")
    assert explained("fused_recurrent_kda").route == "torch"


@pytest.mark.parametrize(
    "block", [lambda: kda.force_route("fused"), lambda: kda.forbid_routes("torch", "fused")], ids=["force", "forbid"]
)
def test_unknown_routes_are_named(block):
    with pytest.raises(ValueError, match=f"is 'fused'; it must be one of {', '.join(registry.ORDER)}"), block():
        pass
    assert explained("fused_kda_gate").route is not None


@pytest.mark.parametrize("variable", ["KDA_FORCE_ROUTE", "KDA_FORBID_ROUTES"])
def test_unknown_routes_in_the_environment_are_named(variable, monkeypatch):
    monkeypatch.setenv(variable, "fused")
    with pytest.raises(ValueError, match=f"{variable} is 'fused'"):
        explained("fused_kda_gate")


def test_explain_launches_nothing_and_raises_as_the_call_would():
    with kda.record_launches() as launches:
        explained("chunk_kda")
    assert launches == []
    with pytest.raises(ValueError, match=r"k.shape is"):
        kda.explain("chunk_kda", **arguments(k=torch.zeros(1, 3, 1, 4)))
    with pytest.raises(ValueError, match="entry is 'decode'; it must be one of chunk_kda"):
        kda.explain("decode")


def test_every_route_declares_itself():
    assert [route.id for route in kda.routes()] == list(registry.ORDER)
    for route in kda.routes():
        assert route.entries and route.summary and route.precision.excuses == ()
    with pytest.raises(ValueError, match=r"route\.id is 'fused'"):
        registry.register(registry.Route("fused", frozenset(), "", None, None, None, kda.PrecisionSpec("chunk")))


def test_the_record_holds_forward_and_backward_while_it_is_open(device):
    call = {name: x.to(device).requires_grad_() for name, x in arguments().items()}
    with kda.force_route("recurrent"):
        with kda.record_launches() as outer, kda.record_launches() as inner:
            o, _ = kda.chunk_kda(**call)
        with kda.record_launches() as backward:
            o.sum().backward()
        kda.chunk_kda(**call)
    assert [(launch.route, launch.kernel) for launch in inner] == [("recurrent", "kda_recurrent_fwd_kernel")]
    assert outer == inner and inner[0].configuration["BK"] == 8
    assert [launch.kernel for launch in backward] == ["kda_recurrent_bwd_kernel", *["kda_sum_heads_kernel"] * 3]


def test_the_record_names_the_torch_route():
    with kda.force_route("torch"), kda.record_launches() as launches:
        kda.chunk_kda(**arguments())
        kda.fused_kda_gate(torch.zeros(1, 1, 1, 1), torch.zeros(1))
    assert [(launch.route, launch.kernel) for launch in launches] == [("torch", "recurrence"), ("torch", "gate")]
