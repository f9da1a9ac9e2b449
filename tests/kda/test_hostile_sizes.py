"""Beyond 32-bit offsets: bit by bit what the call gives on a piece of it. All sizes but `small` need a GPU."""

from dataclasses import dataclass

import pytest
import torch

import kda
from harness.bits import differing_bytes

GRADIENTS = ("q", "k", "v", "g", "beta", "initial_state")
STAGED, FUSED = ("chunk-safe_gate", "chunk-unbounded"), ("fused-safe_gate", "fused-unbounded")


@dataclass(frozen=True)
class Size:
    """`lengths`: of the sequences, packed if there are several; `gib`: what the call needs of a GPU; `values`: V, if it
    is not K, which is `width`.
    """

    lengths: tuple[int, ...]
    heads: int
    width: int
    gib: int
    values: int | None = None

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


# Each goes beyond 2^31 elements in one thing alone.
SIZES = {
    "small": Size((70,), 2, 64, 0),
    "inputs": Size((2**18 + 70,), 64, 128, 60),
    "inputs_wide": Size((2**17 + 70,), 64, 256, 110, values=16),
    "states": Size((1,) * 2048, 96, 128, 80),
    "states_of_64": Size((2**17 + 70,), 96, 128, 80),
    "states_of_16": Size((2**15 + 70,), 96, 128, 40),
    "million_tokens": Size((1_000_003,), 1, 64, 30),
}
ROUTES_OF = {
    "small": (*STAGED, *FUSED, "recurrent"),
    "inputs_wide": (*STAGED, "recurrent"),
    "states": (*STAGED, *FUSED, "recurrent"),
    "states_of_64": STAGED,
    "states_of_16": FUSED,
    "million_tokens": (*STAGED, *FUSED, "recurrent"),
}
TRAINED = [(size, route) for size, routes in ROUTES_OF.items() for route in routes]
Tensors = dict[str, torch.Tensor]


def inputs(size: Size, device: str) -> Tensors:
    generator = torch.Generator(device).manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16)  # noqa: E731
    rows, V = (1, size.tokens, size.heads), size.values or size.width
    x = {name: draw(*rows, width) for name, width in (("q", size.width), ("k", size.width), ("v", V), ("do", V))}
    x["g"] = draw(*rows, size.width).abs_().mul_(-0.05)
    x["beta"] = draw(*rows)
    for name in ("initial_state", "dht"):
        x[name] = torch.randn(len(size.lengths), size.heads, size.width, V, generator=generator, device=device)
    if len(size.lengths) > 1:
        x["cu_seqlens"] = torch.tensor([0, *size.lengths], device=device).cumsum(0)
    return x


def results(route: str, x: Tensors, trained: bool) -> Tensors:
    """o, ht and, where they are wanted, every gradient."""
    leaves = {name: x[name].detach().requires_grad_(trained) for name in GRADIENTS}
    flags = dict.fromkeys(("use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "output_final_state"), True)
    entry = kda.fused_recurrent_kda if route == "recurrent" else kda.chunk_kda
    if route.endswith("safe_gate"):
        flags["safe_gate"] = True
    with kda.force_route(route):
        o, ht = entry(**leaves, **flags, cu_seqlens=x.get("cu_seqlens"))[:2]
    found = torch.autograd.grad([o, ht], list(leaves.values()), [x["do"], x["dht"]]) if trained else ()
    return {"o": o.detach(), "ht": ht.detach(), **{f"d{name}": grad for name, grad in zip(leaves, found)}}


def last_head(x: Tensors) -> Tensors:
    """That of the inputs, or of results; heads have nothing to do with one another."""
    state = lambda name: name in ("initial_state", "dinitial_state", "dht", "ht")  # noqa: E731
    axes = {name: 1 if state(name) else 2 for name in x if name != "cu_seqlens"}
    cut = {name: x[name].narrow(axis, x[name].shape[axis] - 1, 1).contiguous() for name, axis in axes.items()}
    return cut | ({"cu_seqlens": x["cu_seqlens"]} if "cu_seqlens" in x else {})


def room_for(name: str, device: str) -> Size:
    size = SIZES[name]
    if size.gib and not device.startswith("cuda"):
        pytest.skip(f"needs a GPU with {size.gib} GiB")
    if size.gib and torch.cuda.mem_get_info(device)[0] < size.gib * 2**30:
        pytest.skip(f"needs {size.gib} GiB of free memory on the GPU")
    return size


def differing(whole: Tensors, piece: Tensors) -> dict[str, int]:
    return {name: n for name in piece if (n := differing_bytes(whole[name].contiguous(), piece[name].contiguous()))}


@pytest.fixture(autouse=True)
def _memory():
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@pytest.mark.parametrize("route", [*STAGED, *FUSED, "recurrent"])
@pytest.mark.parametrize("name", ["small", "inputs"])
def test_forward_of_the_last_head(name, route, device):
    x = inputs(room_for(name, device), device)
    whole = last_head(results(route, x, trained=False))
    assert differing(whole, results(route, last_head(x), trained=False)) == {}


@pytest.mark.parametrize("name, route", TRAINED, ids=[f"{size}-{route}" for size, route in TRAINED])
def test_results_and_gradients_of_the_last_head(name, route, device):
    size = room_for(name, device)
    x = inputs(size, device)
    whole = last_head(results(route, x, trained=True))
    assert differing(whole, results(route, last_head(x), trained=True)) == {}


@pytest.mark.parametrize("route", [*STAGED, *FUSED, "recurrent"])
@pytest.mark.parametrize("name", ["small", "million_tokens"])
def test_a_sequence_goes_on_from_where_its_first_part_ended(name, route, device):
    """The last tokens alone, from the state before them: their results, and their gradients."""
    size = room_for(name, device)
    x = inputs(size, device)
    first = size.tokens // 64 * 64
    whole = results(route, x, trained=True)
    tokens = ("q", "k", "v", "g", "beta", "do")
    start = {**x, **{name: x[name][:, :first].contiguous() for name in tokens}}
    state = results(route, start, trained=False)["ht"]
    rest = {**x, **{name: x[name][:, first:].contiguous() for name in tokens}, "initial_state": state}
    piece = results(route, rest, trained=True)
    piece.pop("dinitial_state")
    whole = {name: value if name == "ht" else value[:, first:] for name, value in whole.items()}
    assert differing(whole, piece) == {}
