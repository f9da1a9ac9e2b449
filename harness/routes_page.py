"""Authority on docs/routes.md: which route takes which option. `python -m harness.routes_page` writes it anew."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import kda
from kda import contract, registry

PAGE = Path(__file__).resolve().parents[1] / "docs" / "routes.md"
WORKS = "works"
NOT_AN_ENTRY = "does not have this entry"
FORCED = "when forced"
ENTRIES: Mapping[str, Callable] = {
    "chunk": kda.chunk_kda,
    "recurrent": kda.fused_recurrent_kda,
    "gate": kda.fused_kda_gate,
    "decode": kda.kda_decode,
}
HEADER = """# Which route takes which option

Written by `python -m harness.routes_page`; a test keeps it current, runs every call that works on a CPU, and sees the
others refused. Each row is one change to a call that all routes of its entry take: bf16, K = V = 64, dense, gates
promised to be in [-5, 0], states in fp32. A cell is the answer of the route's verifier; the first route from the left
that works serves the call, and one that says `when forced` can take it, but is passed over unless it is forced.
Arguments outside the contract (`kda/contract.py`) are refused before any route is asked. `cp_context` is no matter of
routes: each rank's tokens are a call of their own (`kda/context_parallel.py`).
"""


@dataclass(frozen=True)
class Option:
    """One row: `sizes` and keywords that differ from the plain call's; `entries` that have it.

    `runs` is False where this process may not have what it takes: another device.
    """

    name: str
    keywords: Mapping[str, object] = field(default_factory=dict)
    entries: tuple[str, ...] = ("chunk", "recurrent", "decode")
    K: int = 64
    V: int = 64
    group: int = 1
    tokens: int = 3
    dtype: torch.dtype = torch.bfloat16
    gate_dtype: torch.dtype | None = None
    sequences: int = 1
    state: bool = False
    pool_dtype: torch.dtype = torch.float32
    requires_grad: bool = False
    strided: bool = False
    interpreted: bool = True
    device: str = "cpu"

    @property
    def runs(self) -> bool:
        return self.interpreted and self.device == "cpu"


RAW = {"use_gate_in_kernel": True, "safe_gate": False}
ONLY_CHUNK = ("chunk",)
WHOLE = ("chunk", "recurrent")  # sequences, with states that are arguments and results
ONLY_DECODE = ("decode",)
OPTIONS = (
    Option("plain"),
    Option("gates without a promise", {"safe_gate": False}, ONLY_CHUNK),
    Option("softplus gate in the kernel", RAW),
    Option("`lower_bound=-5`", {**RAW, "lower_bound": -5.0}),
    Option("`lower_bound=-8`", {**RAW, "lower_bound": -8.0}),
    Option("`use_qk_l2norm_in_kernel`", {"use_qk_l2norm_in_kernel": True}),
    Option("`use_beta_sigmoid_in_kernel`", {"use_beta_sigmoid_in_kernel": True}),
    Option("`allow_neg_eigval`", {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}),
    Option("`scale`", {"scale": 0.3}),
    Option("`initial_state`", entries=WHOLE, state=True),
    Option("`output_final_state`", {"output_final_state": True}, WHOLE),
    Option("`state_v_first`", {"output_final_state": True, "state_v_first": True}, WHOLE, state=True),
    Option("`state_v_first`", {"state_v_first": True}, ONLY_DECODE),
    Option("a bf16 pool", entries=ONLY_DECODE, pool_dtype=torch.bfloat16),
    Option("`slots` in int32, -1 among them", {"slots": torch.tensor([-1], dtype=torch.int32)}, ONLY_DECODE),
    Option(
        "`slots` `[N, S]`, `num_accepted_tokens`",
        {"slots": torch.tensor([[0, 2, 1, 3]]), "num_accepted_tokens": torch.tensor([4])},
        ONLY_DECODE,
    ),
    Option("`return_intermediate_states`", {"return_intermediate_states": True}, ONLY_CHUNK),
    Option("`chunk_size=32`", {"chunk_size": 32}, ONLY_CHUNK),
    Option("`disable_recompute`", {"disable_recompute": True}, ONLY_CHUNK),
    Option("GVA (HV = 2 H)", group=2),
    Option("K != V", V=128),
    Option("K = V = 256", K=256, V=256),
    Option("K = 60, V = 100", K=60, V=100),
    Option("`cu_seqlens` int64", {"cu_seqlens": torch.tensor([0, 1, 3])}, sequences=2),
    Option(
        "`cu_seqlens` int32, an empty sequence, an unused tail",
        {"cu_seqlens": torch.tensor([0, 0, 2], dtype=torch.int32)},
        sequences=2,
    ),
    Option(
        "`cu_seqlens_cpu`",
        {"cu_seqlens": torch.tensor([0, 1, 3]), "cu_seqlens_cpu": torch.tensor([0, 1, 3])},
        ONLY_CHUNK,
        sequences=2,
    ),
    Option("no tokens", entries=WHOLE, tokens=0),
    Option("no sequences", {"cu_seqlens": torch.tensor([0])}, sequences=0),
    Option("gradients", entries=WHOLE, requires_grad=True),
    Option("strided tensors", strided=True),
    Option("gate in fp32", gate_dtype=torch.float32),
    Option("fp16", dtype=torch.float16),
    Option("fp32", dtype=torch.float32),
    Option("fp32, `precision='tf32'`", {"precision": "tf32"}, ONLY_CHUNK, dtype=torch.float32),
    Option("float64 (CPU)", dtype=torch.float64),
    Option("CPU tensors, no interpreter", interpreted=False),
    Option("GPU tensors (sm_90)", device="cuda"),
    Option("GPU tensors (sm_90), 65536 tokens", entries=ONLY_CHUNK, tokens=2**16, device="cuda"),
)
GATE = ("gate",)
GATE_OPTIONS = (
    Option("softplus", entries=GATE),
    Option("`lower_bound=-5`", {"lower_bound": -5.0}, GATE),
    Option("`A_log=None`", {"lower_bound": -5.0, "A_log": None}, GATE),
    Option("`output_dtype` bf16", {"output_dtype": torch.bfloat16}, GATE),
    Option("K = 60", entries=GATE, K=60),
    Option("gradients", entries=GATE, requires_grad=True),
    Option("strided tensors", entries=GATE, strided=True),
    Option("no tokens", entries=GATE, tokens=0),
    Option("fp32", entries=GATE, dtype=torch.float32),
    Option("float64 (CPU)", {"output_dtype": torch.float64}, GATE, dtype=torch.float64),
    Option("CPU tensors, no interpreter", entries=GATE, interpreted=False),
    Option("GPU tensors (sm_90)", entries=GATE, device="cuda"),
)


def arguments(option: Option, entry: str) -> dict[str, object]:
    """The call of a row."""
    shape, dtype, HV = (1, option.tokens), option.dtype, option.group
    generator = torch.Generator().manual_seed(0)

    def rows(*sizes: int, dtype: torch.dtype = dtype) -> Tensor:
        x = torch.rand(*shape, *sizes, generator=generator).to(dtype)
        x = torch.stack([x, x], -1)[..., 0] if option.strided else x
        return x.requires_grad_(option.requires_grad)

    gate = rows(HV, option.K, dtype=option.gate_dtype or dtype)
    made: dict[str, object] = {"g": gate if entry == "gate" else (-gate.detach()).requires_grad_(option.requires_grad)}
    if entry == "gate" or option.keywords.get("use_gate_in_kernel"):
        made["A_log"] = torch.zeros(HV)
    if entry != "gate":
        made |= {"q": rows(1, option.K), "k": rows(1, option.K), "v": rows(HV, option.V), "beta": rows(HV)}
        made["safe_gate"] = True
    if option.state:
        made["initial_state"] = torch.rand(option.sequences, HV, option.K, option.V, generator=generator)
    if entry == "decode":
        pool = torch.rand(option.sequences + 3, HV, option.K, option.V, generator=generator)
        made |= {"state_pool": pool.to(option.pool_dtype), "slots": torch.arange(option.sequences)}
    made |= option.keywords
    if entry in ("recurrent", "decode"):
        made.pop("safe_gate")
    if option.device == "cpu":
        return made
    there = lambda x: torch.empty_like(x, device=option.device) if isinstance(x, Tensor) else x  # noqa: E731
    return {name: there(x) for name, x in made.items()}


@contextlib.contextmanager
def _machine(option: Option) -> Iterator[None]:
    """As on the machine that a row is about, whatever this one is."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(registry, "INTERPRETED", option.interpreted and option.device == "cpu"))
        if option.device == "cuda":
            stack.enter_context(mock.patch("kda.fused_fwd.arch", return_value=90))
            stack.enter_context(mock.patch("kda.fused_segments.multiprocessors", return_value=132))
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield


def cell(option: Option, entry: str, route: kda.Route) -> str:
    """`works`, or why the route refuses; why it would rather not, behind `when forced: `."""
    if entry not in route.entries:
        return NOT_AN_ENTRY
    with _machine(option):
        call = _validated(entry, arguments(option, entry))
        reason = route.verify(call)
        if reason is None:
            return WORKS
        with registry.force_route(route.id):
            return reason if route.verify(call) else f"{FORCED}: {reason}"


def _validated(entry: str, keywords: dict[str, object]) -> contract.Call | contract.GateCall:
    if entry == "gate":
        return contract.validate_gate(contract.GateCall(**keywords))
    scale = contract.default_scale(keywords["q"], keywords.pop("scale", None))
    kind = contract.DecodeCall if entry == "decode" else contract.Call
    return contract.validate(kind(entry=entry, scale=scale, **keywords))


def table(entry: str, options: tuple[Option, ...]) -> str:
    """One row an option, one column a route that has the entry; reasons as footnotes."""
    routes = [route for route in kda.routes() if entry in route.entries]
    notes: dict[str, int] = {}

    def shown(option: Option, route: kda.Route) -> str:
        answer = cell(option, entry, route)
        if answer == WORKS:
            return answer
        kind = FORCED if answer.startswith(FORCED) else "refused"
        return f"{kind} ({notes.setdefault(answer.removeprefix(f'{FORCED}: '), len(notes) + 1)})"

    lines = [f"| option | {' | '.join(route.id for route in routes)} |", "|" + "---|" * (len(routes) + 1)]
    for option in options:
        lines.append(f"| {option.name} | {' | '.join(shown(option, route) for route in routes)} |")
    return "\n".join([*lines, "", *(f"{number}. {reason}" for reason, number in notes.items())])


def of_entry(entry: str) -> tuple[Option, ...]:
    return tuple(option for option in OPTIONS + GATE_OPTIONS if entry in option.entries)


def text() -> str:
    """The page."""
    parts = [f"## `{function.__name__}`\n\n{table(entry, of_entry(entry))}" for entry, function in ENTRIES.items()]
    return "\n".join([HEADER, "\n\n".join(parts), ""])


if __name__ == "__main__":
    PAGE.write_text(text())
