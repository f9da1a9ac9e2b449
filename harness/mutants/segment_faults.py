"""Authority on the faults put into segment and context parallelism: where sequences are cut, the chain of states."""

from functools import partial

from harness.mutants.mutant import Mutant, Patch

SEGMENTS, ROUTES, RANKS = "kda/segments.py", "kda/fused_segments.py", "kda/context_parallel.py"
SEGMENT_TESTS, RANK_TESTS = "tests/kda/test_segments.py", "tests/kda/test_context_parallel.py"
_any = partial(Mutant, route="segment_parallel-unbounded", entry="chunk", families=("generic", "ragged"))
_ranks = partial(Mutant, kind="context_parallel", entry="chunk", tests=(f"{RANK_TESTS}::test_ranks_are_one_rank",))
_segments, _routes, _context = (partial(Patch, file) for file in (SEGMENTS, ROUTES, RANKS))

MUTANTS = (
    _any(
        "segments-state-not-passed",
        "formula",
        "a piece adds its own part to a state and forgets what came",
        (_segments("torch.baddbmm(Q[j], P[j], states[j], out=states[j + 1])", "states[j + 1] = Q[j]"),),
    ),
    _any(
        "segments-back-not-transposed",
        "formula",
        "gradients of states go back by the transition itself",
        (_segments("transitions.mT.flip(1)", "transitions.flip(1)"),),
    ),
    _any(
        "segments-arrive-before",
        "layout",
        "a piece is given the gradient of the state before it",
        (_routes("pieces.by_slot(arriving, after=True)", "pieces.by_slot(arriving)"),),
    ),
    _any(
        "segments-final-state-of-first",
        "layout",
        "the final state is that of the first piece",
        (_segments("x[self.first + (self.counts - 1).clamp(min=0)]", "x[self.first]"),),
    ),
    _any(
        "segments-beyond-the-sequence",
        "ragged",
        "pieces of a sequence go on behind its end",
        (_segments("torch.minimum(order * tokens, lengths[owner])", "order * tokens"),),
        families=("ragged",),
    ),
    _any(
        "segments-missing-pieces-reset",
        "ragged",
        "a sequence with fewer pieces than another loses the gradient of its final state",
        (_routes("self.pieces.by_sequence(P, unit)", "self.pieces.by_sequence(P, 0.0)"),),
        families=("ragged",),
    ),
    _any(
        "segments-transition-with-values",
        "formula",
        "what a piece does to the unit matrix includes the values that it writes",
        (Patch("kda/fused_fwd.py", "ht=P, blank=True)", "ht=P)"),),
    ),
    _any(
        "segments-chain-in-fp32",
        "precision",
        "the chain is in fp32, which a caller may have made tf32",
        (_segments("x.double().transpose(0, 1)", "x.transpose(0, 1)"),),
        tests=(f"{SEGMENT_TESTS}::test_chain_is_the_recurrence_and_its_back_the_adjoint",),
    ),
    _any(
        "segments-chosen-for-short-sequences",
        "dispatch",
        "many short sequences count as long ones",
        (_routes("if B * T // max(N, 1) < LEAST_TOKENS:", "if B * T < LEAST_TOKENS:"),),
        tests=(f"{SEGMENT_TESTS}::test_a_route_is_chosen_where_it_pays",),
    ),
    _ranks(
        "ranks-state-of-the-rank-before",
        fault="only the rank just before counts, not those before it",
        patches=(
            _context(
                "chain(transitions[:, :r], additions[:, :r], torch.zeros_like(additions[:, 0]))[:, r]",
                "additions[:, r - 1]",
            ),
        ),
    ),
    _ranks(
        "ranks-empty-shard-blocks",
        fault="a rank without tokens lets no state through",
        patches=(_context("(unit if context.tokens == 0 else torch.zeros_like(unit))", "torch.zeros_like(unit)"),),
    ),
    _ranks(
        "ranks-begin-lets-another-through",
        fault="a sequence that begins on a rank is given the state of the one before it",
        patches=(_context("return torch.zeros_like(unit), made[1][self._going]", "return unit, made[1][self._going]"),),
    ),
    _ranks(
        "ranks-parameters-not-summed",
        fault="gradients of A_log and dt_bias are the rank's own",
        patches=(_context("total = sum_tiles(self._gathered(found[name][None])[0])", "total = found[name]"),),
    ),
    _ranks(
        "ranks-arriving-gradient-dropped",
        fault="the gradient that arrives from later ranks is dropped",
        patches=(_context("dht[self._going] += chain_back(", "_ = chain_back("),),
    ),
    _ranks(
        "ranks-state-gradient-of-another-sequence",
        fault="the gradient that goes back is that of the last sequence of a rank, not the first",
        patches=(_context("piece = self._piece(call, 0, do, dht)", "piece = self._piece(call, -1, do, dht)"),),
    ),
    _ranks(
        "ranks-coming-state-is-an-input",
        fault="the initial state of a sequence that began elsewhere gets a gradient",
        patches=(_context("dh0[self._coming] = 0", "pass"),),
    ),
    _ranks(
        "ranks-hold-what-only-touches",
        fault="a rank holds sequences that end where it begins",
        patches=(_context("if max(a, begin) < min(b, end)", "if max(a, begin) <= min(b, end)"),),
        tests=(f"{RANK_TESTS}::test_every_token_is_on_its_rank_and_every_sequence_begins_and_ends_once",),
    ),
    _ranks(
        "ranks-goes-on-at-the-end",
        fault="a sequence that ends with a rank goes on",
        patches=(_context("spans[held[-1]][1] > end", "spans[held[-1]][1] >= end"),),
        tests=(f"{RANK_TESTS}::test_every_token_is_on_its_rank_and_every_sequence_begins_and_ends_once",),
    ),
)
