"""Context parallelism: two, three and four ranks are one rank, within what rounding may change."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import kda
from harness import verdict
from harness.problem import Case, Problem, materialise
from kda import context_parallel, fused, registry
from kda.context_parallel import ContextParallel
from tests.kda.ranks import Ranks, Task, joined, started
from tests.kda.test_chunk_fused import BOUNDED, INTERPRETED, PLAIN, RAW, SOFTPLUS

MOST = 4
SMALL = replace(PLAIN, K=8, V=6, loss="both", dtype="fp32")
TRAINED = {**RAW, **SOFTPLUS, "heads": 2, "group": 2}
PACKED = {"packed": True, "lengths": (5, 23, 0, 9, 1)}  # 38 tokens

TORCH = {
    "dense-2": ({"lengths": (21,)}, (10, 11)),
    "dense-batch-3-gate": ({"lengths": (17, 17), **TRAINED}, (9, 5, 3)),
    "dense-4-a_rank_without_tokens-v_first": ({"lengths": (13,), "v_first": True, "V": 5}, (6, 0, 4, 3)),
    "dense-4-no_tokens_first_and_last": ({"lengths": (7,)}, (0, 3, 4, 0)),
    "packed-2-straddling": (PACKED, (12, 26)),
    "packed-3-a_sequence_over_all": ({**PACKED, "lengths": (3, 30, 4), **TRAINED}, (10, 12, 15)),
    "packed-3-one_ends_where_another_begins": ({**PACKED, "lengths": (13, 20)}, (10, 10, 13)),
    "packed-4-cut_between_sequences": ({**PACKED, "lengths": (8, 0, 4, 12)}, (8, 4, 0, 12)),
    "packed-4-tail-v_first": ({**PACKED, "tail": 7, "v_first": True}, (20, 3, 17, 5)),
    "packed-4-an_empty_shard_inside": ({**PACKED, "lengths": (2, 20)}, (9, 0, 3, 10)),
    "packed-3-resets": ({**PACKED, "g": "resets"}, (7, 20, 11)),
    "no_initial_state": ({**PACKED, "initial_state": False}, (11, 13, 14)),
    "loss_of_o": ({**PACKED, "loss": "o", "final_state": False}, (11, 13, 14)),
    "bf16": ({**PACKED, "dtype": "bf16"}, (11, 13, 14)),
}
KERNELS = {
    "fused-safe_gate": ({**PACKED, **RAW, **BOUNDED, "lengths": (20, 37)}, (25, 3, 29)),
    "segment_parallel-unbounded": ({"lengths": (71,)}, (20, 33, 18)),
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    with started(MOST, tmp_path_factory.mktemp("ranks")) as ranks:
        yield ranks


def judged(case: Case, got: dict[str, torch.Tensor], spec: kda.PrecisionSpec) -> list[str]:
    wanted = case.problem.quantities()
    verdicts = verdict.judge(case.inputs, case.options, got, entry="chunk", spec=spec, quantities=wanted)
    assert {v.quantity for v in verdicts} == wanted
    return [str(v) for v in verdicts if v.klass not in ("OK", "UNINFORMATIVE")]


def held(ranks: Ranks, problem: Problem, route: str, shards: tuple[int, ...], spec: kda.PrecisionSpec) -> None:
    shares = ranks.run(Task(problem, route, shards))
    assert all(share.launched <= {route} for share in shares) and any(share.launched for share in shares)
    case = materialise(problem)
    assert judged(case, joined(case, shares), spec) == []


@pytest.mark.parametrize("changes, shards", TORCH.values(), ids=TORCH)
def test_ranks_are_one_rank(changes, shards, ranks):
    """Every result and gradient, on plain PyTorch; the envelope is that of one rank."""
    held(ranks, replace(SMALL, **changes), "torch", shards, registry.route_named("torch").precision)


@pytest.mark.skipif(not INTERPRETED, reason="tensors of gloo ranks are on the CPU")
@pytest.mark.parametrize("route, changes, shards", [(r, *x) for r, x in KERNELS.items()], ids=KERNELS)
def test_ranks_run_kernels(route, changes, shards, ranks):
    gates = fused.SAFE_GATE if route.endswith("safe_gate") else fused.UNBOUNDED
    spec = fused.PRECISION[gates].of_call(64, "ieee")
    spec = replace(spec, segment=16, gradients=replace(spec.gradients, segment=16))
    held(ranks, replace(PLAIN, loss="both", **changes), route, shards, spec)


def context_of(offsets: list[int], shards: list[int], rank: int) -> ContextParallel:
    return ContextParallel(None, rank, len(shards), **context_parallel._share(offsets, shards, rank))


LAYOUTS = {
    "even": ([0, 12], [4, 4, 4]),
    "empty_sequences_at_every_cut": ([0, 0, 4, 4, 4, 9, 9], [4, 0, 5]),
    "empty_shards": ([0, 3, 7], [0, 3, 0, 4, 0]),
    "tail": ([0, 3], [2, 2, 3]),
    "no_tokens": ([0, 0, 0], [0, 0]),
    "no_sequences": ([0], [0, 2]),
    "empty_sequence_at_the_end": ([0, 5, 5], [5, 0]),
    "one_token_each": ([0, 2, 2, 3], [1, 1, 1]),
}


@pytest.mark.parametrize("offsets, shards", LAYOUTS.values(), ids=LAYOUTS)
def test_every_token_is_on_its_rank_and_every_sequence_begins_and_ends_once(offsets, shards):
    tokens, begun, ended = [], [], []
    for rank, first in enumerate(itertools.accumulate([0, *shards[:-1]])):
        one = context_of(offsets, shards, rank)
        assert one.tokens == shards[rank] and len(one.offsets) == len(one.sequences) + 1
        for n, (a, b) in zip(one.sequences, itertools.pairwise(one.offsets)):
            tokens += [(n, first + i) for i in range(a, b)]
        begun += one.sequences[1:] if one.comes else one.sequences
        ended += one.sequences[:-1] if one.goes_on else one.sequences
    spans = list(itertools.pairwise(offsets))
    assert tokens == [(n, i) for n, (a, b) in enumerate(spans) for i in range(a, b)]
    assert begun == ended == list(range(len(spans)))


def local(context: ContextParallel, tokens: int, **changes: object) -> dict[str, object]:
    rows = lambda *shape: torch.randn(1, tokens, 1, *shape, generator=torch.Generator().manual_seed(0))  # noqa: E731
    call = {"q": rows(8), "k": rows(8), "v": rows(4), "g": -rows(8).abs(), "beta": rows().sigmoid()}
    return {**call, "cp_context": context, **changes}


def test_one_rank_has_the_bits_of_a_call_without_a_context():
    call = local(context_of([0, 3, 9], [9], 0), 9, output_final_state=True)
    got = kda.chunk_kda(**call)
    expected = kda.chunk_kda(**{**call, "cp_context": None, "cu_seqlens": torch.tensor([0, 3, 9])})
    assert all(torch.equal(x, y) for x, y in zip(got, expected))


def test_explain_says_the_route_of_the_local_call():
    context = context_of([0, 30], [10, 10, 10], 1)
    with kda.force_route("torch"), kda.record_launches() as launches:
        assert kda.explain("chunk_kda", **local(context, 10)).route == "torch"
    assert launches == []


REFUSED = {
    "tokens": (9, {}, ValueError, r"q.shape is \[1, 9, 1, 8\]; it must be .* T = 10, the tokens of rank 1"),
    "cu_seqlens": (10, {"cu_seqlens": torch.tensor([0, 10])}, ValueError, "cu_seqlens is given; it must be None"),
    "cu_seqlens_cpu": (10, {"cu_seqlens_cpu": torch.tensor([0, 10])}, ValueError, "cu_seqlens_cpu is given"),
    "intermediates": (10, {"return_intermediate_states": True}, ValueError, "return_intermediate_states is True"),
    "states": (10, {"initial_state": torch.zeros(2, 1, 8, 4)}, ValueError, r"initial_state.shape is \[2, 1, 8, 4\]"),
    "context": (10, {"cp_context": "ranks"}, TypeError, "cp_context is str; it must be None, or what build_cp_context"),
    "not_a_tensor": (10, {"q": None}, TypeError, "q is NoneType"),
}


@pytest.mark.parametrize("tokens, changes, error, message", REFUSED.values(), ids=REFUSED)
def test_calls_are_refused_by_name(tokens, changes, error, message):
    call = local(context_of([0, 30], [10, 10, 10], 1), tokens)
    with pytest.raises(error, match=message), kda.record_launches() as launches:
        kda.chunk_kda(**{**call, **changes})
    assert launches == []


@pytest.fixture
def group(monkeypatch):
    """As on the second of three ranks."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda group: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 3)


WRONG = {
    "offsets_floats": ({"cu_seqlens": [0, 2.0]}, TypeError, "cu_seqlens is list; it must be offsets"),
    "offsets_number": ({"cu_seqlens": 4}, TypeError, "cu_seqlens is int; it must be offsets"),
    "offsets_none": ({"cu_seqlens": []}, ValueError, "cu_seqlens is empty"),
    "offsets_first": ({"cu_seqlens": [1, 2]}, ValueError, r"cu_seqlens\[0\] is 1; it must be 0"),
    "offsets_decrease": ({"cu_seqlens": torch.tensor([0, 5, 4])}, ValueError, r"cu_seqlens\[2\] is 4"),
    "shards_short": (
        {"cu_seqlens": [0, 9], "shards": [3, 3, 2]},
        ValueError,
        r"cu_seqlens\[-1\] is 9; .* at most T = 8",
    ),
    "shards_count": ({"cu_seqlens": [0, 9], "shards": [9]}, ValueError, r"shards is \[9\]; .* each of 3 ranks"),
    "shards_negative": ({"cu_seqlens": [0, 9], "shards": [9, -1, 1]}, ValueError, r"shards is \[9, -1, 1\]"),
    "shards_number": ({"cu_seqlens": [0, 9], "shards": 3}, TypeError, "shards is int; it must be tokens of each rank"),
    "shards_alone": ({"shards": [3, 3, 3]}, ValueError, "shards is given; it must be None unless cu_seqlens"),
}


@pytest.mark.parametrize("arguments, error, message", WRONG.values(), ids=WRONG)
def test_contexts_are_refused_by_name(arguments, error, message, group):
    with pytest.raises(error, match=message):
        kda.build_cp_context(**arguments)


def test_contexts_know_their_share(group):
    even = kda.build_cp_context([0, 4, 10])
    assert (even.tokens, even.offsets, even.sequences) == (3, (0, 1, 3), (0, 1))
    assert (even.comes, even.goes_on, even.passes) == (True, True, False)
    dense = kda.build_cp_context()
    assert (dense.offsets, dense.passes) == (None, True)


def test_without_a_group_there_is_no_context():
    with pytest.raises(ValueError, match=r"group is None; it must be a group of torch\.distributed"):
        kda.build_cp_context([0, 4])


def test_compiled_calls_are_refused_by_name(group, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(ValueError, match=r"cp_context is given under torch\.compile"):
        kda.chunk_kda(**local(kda.build_cp_context(), 3))
