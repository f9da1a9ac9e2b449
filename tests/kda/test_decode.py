"""Decoding: values of every option against the oracle; what a paged pool, padding and rollback promise bit by bit."""

import contextlib
import math
from dataclasses import replace

import pytest
import torch
import triton

import kda
from harness import interpreter, verdict
from harness.bits import differing_bytes
from harness.call import NotCovered, call, keywords
from harness.problem import DTYPES, Case, Problem, materialise
from harness.subject import own_subject
from kda import decode, fused_recurrent

INTERPRETED = triton.knobs.runtime.interpret
ROUTES = ("decode", "torch")
each_route = pytest.mark.parametrize("route", ROUTES)
each_pool = pytest.mark.parametrize("pool", ["fp32", "bf16"])
TOKENS = ("q", "k", "v", "g", "beta")
PLAIN = Problem(
    entry="decode",
    lengths=(5, 5),
    heads=2,
    group=2,
    K=8,
    V=12,
    initial_state=True,
    loss="none",
    **dict.fromkeys(("q", "k"), "unit"),
    **dict.fromkeys(("v", "h0"), "gauss"),
    g="mild",
    beta="uniform",
)
RAW = {"q": "gauss", "k": "gauss", "l2norm": True, "beta_sigmoid": True, "beta": "gauss", "g": "gauss"}
SOFTPLUS = {**RAW, "gate": "softplus", "A_log": "gauss", "dt_bias": "gauss"}
BOUNDED = {**RAW, "gate": "lower_bound", "lower_bound": -5.0, "A_log": "gauss", "dt_bias": "gauss"}
MODEL = {**SOFTPLUS, "dtype": "bf16", "gate_dtype": "bf16", "heads": 1, "group": 1, "K": 128, "V": 128}

OPTIONS = {
    "pregated-fp32": {},
    "pregated-bf16": {"dtype": "bf16", "g": "slow"},
    "pregated-fp16": {"dtype": "fp16", "gate_dtype": "fp16"},
    "pregated-resets": {"g": "resets"},
    "softplus": SOFTPLUS,
    "softplus-bf16-no_bias": {**SOFTPLUS, "dtype": "bf16", "gate_dtype": "bf16", "dt_bias": None},
    "softplus-raw_1e4": {**SOFTPLUS, "g": "raw_1e4", "A_log": "extreme_80"},
    "lower_bound": BOUNDED,
    "lower_bound-no_parameters": {**BOUNDED, "A_log": None, "dt_bias": None},
    "l2norm": {"l2norm": True, "q": "gauss", "k": "gauss"},
    "beta_sigmoid": {"beta_sigmoid": True, "beta": "gauss"},
    "neg_eigval": {"beta_sigmoid": True, "neg_eigval": True, "beta": "gauss"},
    "scale": {"scale": -3.0},
    "v_first": {**BOUNDED, "v_first": True},
    "repeated_keys-beta_2": {"k": "repeated", "l2norm": True, "beta": "twos", "g": "zeros"},
    "K1-V1": {"K": 1, "V": 1},
    "K60-V100": {"K": 60, "V": 100, "v_first": True},
    "K256-V64": {**MODEL, "K": 256, "V": 64},
    "K64-V256": {**MODEL, "K": 64, "V": 256, "v_first": True},
    "K128-V128": MODEL,
    "varlen-ragged": {"lengths": (5, 0, 1, 4), "packed": True, "tail": 3, "offsets": "int32"},
}


def case_of(device: str, pool: str = "fp32", **changes: object) -> Case:
    return materialise(replace(PLAIN, state_dtype=pool, **changes), device)


def arguments(case: Case) -> dict[str, object]:
    """Of `kda_decode` but for where states are."""
    given = {name: case.inputs[name] for name in (*TOKENS, "A_log", "dt_bias") if case.inputs.get(name) is not None}
    words = keywords(case, "decode")
    return given | {name: value for name, value in words.items() if name not in ("step", "rejected", "index_dtype")}


def served(case: Case, route: str = "decode", step: int = 1, rejected: int = 0) -> dict[str, torch.Tensor]:
    """o and the final states, decoded call by call; no slot of anybody else changes, and the route is seen to run."""
    case = replace(case, problem=replace(case.problem, edits=(), step=step, rejected=rejected))
    return call(own_subject().route(route, "decode"), case).outputs


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> dict[str, int]:
    """Bytes that differ, for the quantities that do."""
    return {name: n for name in a if (n := differing_bytes(a[name], b[name]))}


def judged(case: Case, got: dict[str, torch.Tensor]) -> list[str]:
    verdicts = verdict.judge(
        case.inputs, case.options, got, entry="decode", spec=decode.PRECISION, quantities=case.problem.quantities()
    )
    assert {v.quantity for v in verdicts} == {"o", "ht"}
    return [str(v) for v in verdicts if v.klass not in ("OK", "UNINFORMATIVE")]


@each_route
@each_pool
@pytest.mark.parametrize("changes", OPTIONS.values(), ids=OPTIONS)
def test_values(changes, pool, route, device):
    case = case_of(device, pool, **changes)
    assert judged(case, served(case, route, step=3, rejected=1)) == []


MODES = {
    "pregated-fp32": {"lengths": (5,), "heads": 1},
    "softplus-bf16-v_first": {**SOFTPLUS, "lengths": (4,), "heads": 1, "dtype": "bf16", "v_first": True},
    "lower_bound-varlen": {**BOUNDED, "lengths": (3, 0, 1), "packed": True, "tail": 3, "heads": 1},
    "K128-V128": {**MODEL, "lengths": (3,)},
}
each_mode = pytest.mark.parametrize("changes", MODES.values(), ids=MODES)


@each_route
@each_pool
@each_mode
def test_any_number_of_tokens_a_call_and_any_rejected_drafts_have_the_same_bits(changes, pool, route, device):
    case = case_of(device, pool, **changes)
    one_by_one = served(case, route)
    for step, rejected in ((5, 0), (2, 0), (2, 3), (1, 7)):
        assert differing(one_by_one, served(case, route, step, rejected)) == {}, (step, rejected)


@pytest.mark.skipif(not INTERPRETED, reason="which products and sums of two kernels are fused is the compiler's choice")
@each_mode
def test_decoding_has_the_bits_of_the_recurrent_kernel(changes, device, monkeypatch):
    """With its tile, so that sums have the same order."""
    monkeypatch.setattr(decode, "tile", fused_recurrent.forward_tile)
    case = case_of(device, **changes)
    whole = {**arguments(case), "initial_state": case.inputs["initial_state"], "output_final_state": True}
    with kda.force_route("recurrent"):
        o, ht = kda.fused_recurrent_kda(**whole)
    assert differing({"o": o, "ht": ht}, served(case, step=5)) == {}


@pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter's sanitizer")
@each_mode
def test_kernels_are_clean_under_sanitizer_in_any_program_order(changes, device):
    case = case_of(device, **changes)
    plain = served(case, step=2, rejected=1)
    with interpreter.sanitize(), interpreter.shuffle(1):
        assert differing(plain, served(case, step=2, rejected=1)) == {}


def small_call(device: str, tokens: int = 2, pool: str = "fp32", **changes: object) -> dict[str, object]:
    """Three sequences on a pool of eight slots, `tokens` tokens each."""
    case = case_of(device, pool, **{"lengths": (tokens,) * 3, **changes})
    shape = (8, *case.inputs["initial_state"].shape[1:])
    states = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device, DTYPES[pool])
    return {**arguments(case), "state_pool": states, "slots": torch.tensor([6, 2, 3], device=device)}


def changed_slots(before: torch.Tensor, after: torch.Tensor) -> list[int]:
    return [slot for slot in range(len(before)) if differing_bytes(before[slot], after[slot])]


def decoded(given: dict[str, object], route: str = "decode") -> tuple[torch.Tensor, torch.Tensor]:
    """(o, the pool afterwards); the call's own pool stays as it is."""
    states = torch.empty_strided(
        given["state_pool"].shape, given["state_pool"].stride(), dtype=given["state_pool"].dtype
    )
    states = states.to(given["state_pool"].device).copy_(given["state_pool"])
    with kda.force_route(route):
        o = kda.kda_decode(**{**given, "state_pool": states})
    return o, states


@each_route
@each_pool
def test_padding_is_left_alone_and_gives_zeros(pool, route, device):
    given = small_call(device, pool=pool)
    o, after = decoded(given, route)
    assert changed_slots(given["state_pool"], after) == [2, 3, 6]
    padded = {**given, "slots": torch.tensor([6, -1, 3], device=device)}
    for name in TOKENS:
        padded[name] = given[name].clone()
        padded[name][1] = math.nan
    o_padded, after_padded = decoded(padded, route)
    assert changed_slots(given["state_pool"], after_padded) == [3, 6]
    assert not o_padded[1].any()
    assert differing_bytes(o_padded[::2], o[::2]) == 0
    assert differing_bytes(after_padded[[3, 6]], after[[3, 6]]) == 0


@each_route
def test_padding_only_and_no_sequences(route, device):
    given = small_call(device)
    o, after = decoded({**given, "slots": torch.full((3,), -1, device=device)}, route)
    assert not o.any() and changed_slots(given["state_pool"], after) == []
    empty = {**given, **{name: given[name][:0] for name in TOKENS}, "slots": given["slots"][:0]}
    o, after = decoded(empty, route)
    assert o.shape == (0, *given["v"].shape[1:]) and changed_slots(given["state_pool"], after) == []


@each_route
def test_states_that_have_no_slot_are_not_kept(route, device):
    given = small_call(device, tokens=3)
    whole = {**given, "slots": torch.tensor([[6, 1, 0], [2, 7, 4], [3, 5, -1]], device=device)}
    holes = {**given, "slots": torch.tensor([[6, -1, 0], [2, -1, -1], [3, 5, -1]], device=device)}
    (o, after), (o_holes, after_holes) = decoded(whole, route), decoded(holes, route)
    assert differing_bytes(o, o_holes) == 0
    assert changed_slots(given["state_pool"], after_holes) == [0, 2, 3, 5, 6]
    assert differing_bytes(after[[0, 2, 3, 5, 6]], after_holes[[0, 2, 3, 5, 6]]) == 0


@each_route
def test_one_slot_a_sequence_keeps_the_last_state(route, device):
    given = small_call(device)
    each = {**given, "slots": torch.tensor([[6, 0], [2, 1], [3, 7]], device=device)}
    (o, after), (o_each, after_each) = decoded(given, route), decoded(each, route)
    assert differing_bytes(o, o_each) == 0
    assert differing_bytes(after[[6, 2, 3]], after_each[[0, 1, 7]]) == 0


def watched() -> contextlib.AbstractContextManager:
    """Where kernels are interpreted, an access outside their tensors is an error."""
    return interpreter.sanitize() if INTERPRETED else contextlib.nullcontext()


def foreign_indices(given: dict[str, object]) -> dict[str, dict[str, object]]:
    """Calls whose sequence 1 begins in no slot of the pool: what a GPU meets that nobody has checked."""
    device = given["slots"].device
    table = torch.tensor([[6, 0], [2, 1], [3, 7]], device=device)
    counts = lambda n: {"slots": table, "num_accepted_tokens": torch.tensor([1, n, 1], device=device)}  # noqa: E731
    slots = lambda n: {"slots": torch.tensor([6, n, 3], device=device)}  # noqa: E731
    return {
        **{f"slot {n}": slots(n) for n in (8, 2**40, -2, -(2**40))},
        **{f"count {n}": counts(n) for n in (0, 3, -5, 2**40)},
    }


@pytest.mark.parametrize("name", foreign_indices({"slots": torch.zeros(1)}))
def test_an_index_that_nobody_checked_is_no_slot(name, device, monkeypatch):
    monkeypatch.setattr("kda.contents._readable", lambda indices: False)
    given = small_call(device)
    foreign = {**given, **foreign_indices(given)[name]}
    with watched():
        o, after = decoded(foreign)
    expected = {**foreign, "slots": foreign["slots"].clone()}
    expected["slots"][1] = -1
    o_expected, after_expected = decoded(expected)
    assert differing_bytes(o, o_expected) == 0 and not o[1].any()
    assert differing_bytes(after, after_expected) == 0


def test_offsets_that_nobody_checked_stay_inside_the_tokens(device, monkeypatch):
    monkeypatch.setattr("kda.contents._readable", lambda indices: False)
    given = small_call(device, lengths=(2, 2, 2), packed=True)
    with watched():
        o, after = decoded({**given, "cu_seqlens": torch.tensor([-3, 2, 2**40, 1], device=device)})
    o_legal, after_legal = decoded({**given, "cu_seqlens": torch.tensor([0, 2, 6, 6], device=device)})
    assert differing_bytes(o, o_legal) == 0 and differing_bytes(after, after_legal) == 0


@each_route
@each_pool
def test_slots_may_lie_apart(pool, route, device):
    """As in a pool whose pages hold something else too."""
    given = small_call(device, pool=pool, v_first=True)
    o, after = decoded(given, route)
    size = given["state_pool"][0].numel()
    for gap in (1, 16):
        pages = torch.full((8, size + gap), 7.0, dtype=after.dtype, device=device)
        apart = pages[:, :size].unflatten(1, after.shape[1:]).copy_(given["state_pool"])
        with kda.force_route(route):
            o_apart = kda.kda_decode(**{**given, "state_pool": apart})
        assert differing_bytes(o, o_apart) == 0 and differing_bytes(after, apart) == 0
        assert bool((pages[:, size:] == 7).all())


@pytest.mark.parametrize("name", [*TOKENS, "slots", "A_log", "dt_bias"])
def test_strided_arguments_are_read_as_they_are(name, device):
    given = small_call(device, **SOFTPLUS)
    strided = {**given, name: torch.stack([given[name], torch.full_like(given[name], 7)], -1)[..., 0]}
    (o, after), (o_strided, after_strided) = decoded(given), decoded(strided)
    assert differing_bytes(o, o_strided) == 0 and differing_bytes(after, after_strided) == 0


@each_route
@pytest.mark.parametrize("name", [*TOKENS, "A_log", "dt_bias"])
def test_negated_views_are_read_as_their_values(name, route, device):
    given = small_call(device, **SOFTPLUS)
    negated = {**given, name: torch._neg_view(-given[name])}
    (o, after), (o_negated, after_negated) = decoded(given, route), decoded(negated, route)
    assert differing_bytes(o, o_negated) == 0 and differing_bytes(after, after_negated) == 0


@each_route
def test_a_pool_made_in_inference_mode_serves_outside_of_it(route, device):
    given = small_call(device)
    o, after = decoded(given, route)
    with torch.inference_mode():
        pool = given["state_pool"].clone()
    with kda.force_route(route):
        o_outside = kda.kda_decode(**{**given, "state_pool": pool})
    assert pool.is_inference() and not o_outside.is_inference()
    assert differing_bytes(o, o_outside) == 0 and differing_bytes(after, pool) == 0


@pytest.mark.parametrize("name", [*TOKENS, "A_log", "dt_bias", "slots"])
def test_an_argument_in_the_memory_of_the_pool_is_refused(name, device):
    given = small_call(device, **SOFTPLUS)
    size, before = given[name].numel(), given["state_pool"].clone()
    memory = given["state_pool"].view(-1) if name != "slots" else given["state_pool"].view(-1).view(torch.int64)
    inside = {**given, name: memory[5 : 5 + size].view(given[name].shape)}
    with pytest.raises(ValueError, match=f"^{name} is in the memory of state_pool; it must be in memory of its own"):
        kda.kda_decode(**inside)
    assert differing_bytes(given["state_pool"], before) == 0


def test_arguments_beside_the_pool_in_one_buffer_are_legal(device):
    """As in an engine that cuts all of its memory from one piece: before the pool, behind it, and with gaps."""
    given = small_call(device)
    o, after = decoded(given)
    pool, q, v = given["state_pool"], given["q"], given["v"]
    buffer = torch.full((2 * q.numel() + pool.numel() + v.numel(),), math.nan, device=device)
    before, inside, behind = buffer.split([2 * q.numel(), pool.numel(), v.numel()])
    cut = {"q": before[::2], "state_pool": inside, "v": behind}
    cut = {name: x.view(given[name].shape).copy_(given[name]) for name, x in cut.items()}
    o_cut = kda.kda_decode(**{**given, **cut})
    assert differing_bytes(o, o_cut) == 0 and differing_bytes(after, cut["state_pool"]) == 0


def test_nan_stays_in_its_sequence_and_its_head(device):
    given = small_call(device)
    (o, after), dirty = decoded(given), {**given, "state_pool": given["state_pool"].clone()}
    for name in TOKENS:
        dirty[name] = given[name].clone()
        dirty[name][1] = math.nan
        dirty[name][:, :, given[name].shape[2] // 2 :] = math.nan
    dirty["state_pool"][2] = math.nan
    o_dirty, after_dirty = decoded(dirty)
    assert differing_bytes(o[::2, :, :2], o_dirty[::2, :, :2]) == 0
    assert differing_bytes(after[[6, 3], :2], after_dirty[[6, 3], :2]) == 0


def test_inputs_but_the_pool_are_not_modified(device):
    given = small_call(device, **SOFTPLUS)
    before = {name: x.clone() for name, x in given.items() if isinstance(x, torch.Tensor)}
    decoded(given)
    assert differing(before, given) == {}


def test_slots_edited_in_place_are_read_again(device):
    given = small_call(device)
    decoded(given)
    given["slots"].copy_(torch.tensor([0, 1, -1], device=device))
    assert changed_slots(given["state_pool"], decoded(given)[1]) == [0, 1]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_indices_of_either_width(dtype, device):
    given = small_call(device)
    table = torch.tensor([[6, 0], [2, 1], [3, 7]], device=device)
    counts = torch.tensor([2, 1, 2], device=device)
    wide = {**given, "slots": table, "num_accepted_tokens": counts}
    mixed = {**given, "slots": table.to(dtype), "num_accepted_tokens": counts.int()}
    (o, after), (o_mixed, after_mixed) = decoded(wide), decoded(mixed)
    assert differing_bytes(o, o_mixed) == 0 and differing_bytes(after, after_mixed) == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@each_pool
def test_a_captured_call_reads_new_data_and_new_slots(pool, device):
    given = small_call(device, tokens=2, pool=pool, **SOFTPLUS)
    given["slots"] = torch.tensor([[6, 0], [2, 1], [3, 7]], device=device)
    given["num_accepted_tokens"] = torch.ones(3, dtype=torch.int64, device=device)
    fresh = given["state_pool"].clone()
    kda.kda_decode(**given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = kda.kda_decode(**given)
    for seed, slots in enumerate(([[6, 0], [2, 1], [3, 7]], [[5, 4], [-1, -1], [0, 6]])):
        generator = torch.Generator(device).manual_seed(seed)
        for name in ("q", "k", "v", "g"):
            given[name].copy_(torch.randn(given[name].shape, generator=generator, device=device))
        given["slots"].copy_(torch.tensor(slots, device=device))
        given["num_accepted_tokens"].fill_(1 + seed)
        given["state_pool"].copy_(fresh)
        o_eager, after = decoded(given)
        graph.replay()
        assert differing_bytes(o, o_eager) == 0 and differing_bytes(given["state_pool"], after) == 0


@pytest.mark.parametrize("route", ["decode", "torch"])
@each_pool
def test_compiled_and_eager_are_the_same_bits(pool, route, device):
    torch._dynamo.reset()
    given = small_call(device, pool=pool, **BOUNDED)
    o, after = decoded(given, route)
    with kda.force_route(route), kda.record_launches() as launches:
        o_compiled = torch.compile(kda.kda_decode, fullgraph=True, backend="aot_eager")(**given)
    assert {launch.route for launch in launches} == {route}
    assert differing_bytes(o, o_compiled) == 0 and differing_bytes(given["state_pool"], after) == 0


def test_float64_on_the_torch_route(device):
    case = case_of("cpu")
    case = replace(case, inputs={name: x if x is None else x.double() for name, x in case.inputs.items()})
    got = served(case, "torch", step=2)
    assert judged(case, got) == []
    assert all(x.dtype == torch.float64 and not torch.equal(x, x.float().double()) for x in got.values())
    with pytest.raises(NotCovered, match="decode: refused, computes in fp32, not float64"):
        served(case, "decode")


REFUSALS = {
    "pool_list": ({"state_pool": [0.0]}, TypeError, "state_pool is list; it must be a tensor [P, HV, K, V]"),
    "pool_rank": (
        {"state_pool": lambda x: x[0]},
        ValueError,
        "state_pool.shape is [4, 8, 12]; it must be [P, HV, K, V]",
    ),
    "pool_fp16": (
        {"state_pool": lambda x: x.half()},
        TypeError,
        "state_pool.dtype is float16; it must be one of float32, bfloat16",
    ),
    "pool_v_first": (
        {"state_v_first": True},
        ValueError,
        "state_pool.shape is [8, 4, 8, 12]; it must be [P, HV, V, K] = [P, 4, 12, 8]",
    ),
    "pool_heads": ({"state_pool": lambda x: x[:, :2]}, ValueError, "state_pool.shape is [8, 2, 8, 12]"),
    "pool_device": ({"state_pool": lambda x: x.to("meta")}, ValueError, "state_pool.device is meta"),
    "pool_transposed": (
        {"state_pool": lambda x: x.mT.contiguous().mT},
        ValueError,
        "state_pool.stride() is [384, 96, 1, 8]",
    ),
    "pool_one_slot_many_times": (
        {"state_pool": lambda x: x[:1].expand_as(x)},
        ValueError,
        "state_pool.stride() is [0, 96, 12, 1]; it must be [s, 96, 12, 1] with s at least 384",
    ),
    "pool_negated": (
        {"state_pool": lambda x: torch._neg_view(-x)},
        ValueError,
        "state_pool is a view that negates its memory; it must be the memory itself",
    ),
    "pool_sparse": ({"state_pool": lambda x: x.to_sparse()}, ValueError, "state_pool.layout is torch.sparse_coo"),
    "slots_list": ({"slots": [0, 1, 2]}, TypeError, "slots is list"),
    "slots_none": ({"slots": None}, TypeError, "slots is NoneType"),
    "slots_float": ({"slots": lambda x: x.float()}, TypeError, "slots.dtype is float32; it must be int32 or int64"),
    "slots_int16": ({"slots": lambda x: x.short()}, TypeError, "slots.dtype is int16"),
    "slots_device": ({"slots": lambda x: x.to("meta")}, ValueError, "slots.device is meta"),
    "slots_count": ({"slots": lambda x: x[:2]}, ValueError, "slots.shape is [2]; it must be [N] or [N, S] with N = 3"),
    "slots_rank": ({"slots": lambda x: x[:, None, None]}, ValueError, "slots.shape is [3, 1, 1]"),
    "slots_narrow": (
        {"slots": lambda x: x[:, None]},
        ValueError,
        "slots.shape is [3, 1]; it must be [N, S] with S in 2..8",
    ),
    "slots_wide": (
        {"slots": torch.arange(27).view(3, 9)},
        ValueError,
        "slots.shape is [3, 9]; it must be [N, S] with S in 2..8",
    ),
    "slots_beyond": (
        {"slots": torch.tensor([6, 2, 8])},
        ValueError,
        "slots[2] is 8; it must be -1 or a slot of state_pool, below 8",
    ),
    "slots_below": ({"slots": torch.tensor([6, -2, 3])}, ValueError, "slots[1] is -2"),
    "slots_shared": (
        {"slots": torch.tensor([6, 2, 6])},
        ValueError,
        "slots[2] is 6; it must be another slot than slots[0], or -1",
    ),
    "slots_shared_in_a_row": (
        {"slots": torch.tensor([[6, 2], [1, 1], [3, 4]])},
        ValueError,
        "slots[1, 1] is 1; it must be another slot than slots[1, 0]",
    ),
    "accepted_alone": (
        {"num_accepted_tokens": torch.ones(3).long()},
        ValueError,
        "num_accepted_tokens is given; it must be None unless slots is [N, S]",
    ),
    **{
        f"accepted_{name}": (
            {"slots": torch.tensor([[6, 2], [0, 1], [3, 4]]), "num_accepted_tokens": counts},
            error,
            message,
        )
        for name, counts, error, message in (
            ("list", [1, 1, 1], TypeError, "num_accepted_tokens is list"),
            ("float", torch.ones(3), TypeError, "num_accepted_tokens.dtype is float32"),
            ("shape", torch.ones(2).long(), ValueError, "num_accepted_tokens.shape is [2]; it must be [N] = [3]"),
            ("zero", torch.tensor([1, 0, 1]), ValueError, "num_accepted_tokens[1] is 0; it must be in 1..2"),
            ("beyond", torch.tensor([1, 1, 3]), ValueError, "num_accepted_tokens[2] is 3; it must be in 1..2"),
        )
    },
    "no_tokens": (
        {name: lambda x: x[:, :0] for name in TOKENS},
        ValueError,
        "q.shape is [3, 0, 2, 8]; it must be [B, T, H, K] with T in 1..8",
    ),
    "nine_tokens": (
        {name: lambda x: torch.cat([x] * 5, 1)[:, :9] for name in TOKENS},
        ValueError,
        "q.shape is [3, 9, 2, 8]",
    ),
    "nine_tokens_packed": (
        {
            **{name: lambda x: torch.cat([x] * 5)[:, :1].transpose(0, 1) for name in TOKENS},
            "cu_seqlens": torch.tensor([0, 9, 9, 10]),
        },
        ValueError,
        "cu_seqlens[1] - cu_seqlens[0] is 9; it must be at most 8 new tokens of a sequence",
    ),
    "gradients": (
        {"q": lambda x: x.requires_grad_()},
        ValueError,
        "q is a tensor that requires a gradient; it must be one without",
    ),
    "gradients_of_the_pool": (
        {"state_pool": lambda x: x.requires_grad_()},
        ValueError,
        "state_pool is a tensor that requires a gradient",
    ),
    "gate_parameters": ({"use_gate_in_kernel": True}, ValueError, "A_log is None"),
    "neg_eigval_alone": ({"allow_neg_eigval": True}, ValueError, "allow_neg_eigval is True"),
    "initial_state": ({"initial_state": None}, TypeError, "initial_state"),
}


@pytest.mark.parametrize("changes, error, message", REFUSALS.values(), ids=REFUSALS)
def test_refusals(changes, error, message):
    given = small_call("cpu")
    given |= {name: change(given[name]) if callable(change) else change for name, change in changes.items()}
    pool = given["state_pool"].detach().clone() if torch.is_tensor(given["state_pool"]) else None
    with kda.record_launches() as launches, pytest.raises(error) as refusal:
        kda.kda_decode(**given)
    assert message in str(refusal.value)
    assert launches == []
    if pool is not None and pool.layout == torch.strided and pool.device.type == "cpu":
        assert torch.equal(given["state_pool"], pool)


def test_gradients_are_refused_only_where_they_are_wanted(device):
    given = small_call(device)
    expected = decoded(given)[0]
    with torch.no_grad():
        assert torch.equal(decoded({**given, "q": given["q"].clone().requires_grad_()})[0], expected)


VALUES = {
    "query": ({"q": math.nan}, "q[0, 1, 0, 0] is nan; it must be finite"),
    "gate": ({"g": 0.5}, "g[0, 1, 0, 0] is 0.5; it must be a log decay <= 0"),
    "state": ({"state_pool": math.inf}, "state_pool[6, 1, 0, 0] is inf; it must be finite"),
}


@pytest.mark.parametrize("planted, message", VALUES.values(), ids=VALUES)
def test_values_are_checked_on_request_but_for_padding(planted, message, device, monkeypatch):
    given = small_call(device)
    for name, value in planted.items():
        given[name] = given[name].clone()
        given[name][(6, 1) if name == "state_pool" else (0, 1)] = value
    monkeypatch.delenv("KDA_VALIDATE", raising=False)
    decoded(given)
    monkeypatch.setenv("KDA_VALIDATE", "1")
    with pytest.raises(ValueError) as refusal:
        kda.kda_decode(**given)
    assert message in str(refusal.value)
    decoded({**given, "slots": torch.tensor([-1, 2, 3], device=device)})


def test_requested_checks_read_indices_on_any_device(device, monkeypatch):
    monkeypatch.setenv("KDA_VALIDATE", "1")
    given = small_call(device)
    with pytest.raises(ValueError, match=r"slots\[2\] is 6; it must be another slot"):
        kda.kda_decode(**{**given, "slots": torch.tensor([6, 2, 6], device=device)})


def test_an_old_count_of_a_padding_sequence_is_legal(device):
    given = small_call(device)
    given["slots"] = torch.tensor([[6, 2], [-1, -1], [3, 4]], device=device)
    given["num_accepted_tokens"] = torch.tensor([1, 0, 2], device=device)
    o, after = decoded(given)
    assert changed_slots(given["state_pool"], after) == [2, 3, 4, 6] and not o[1].any()
