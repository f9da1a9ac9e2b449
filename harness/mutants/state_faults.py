"""Authority on the faults put into what carries the chunk route: states, outputs, coordination, and the way back."""

from functools import partial

from harness.mutants.mutant import Mutant, Patch

STATE, OUTPUT, BACKWARD, FORWARD = "kda/chunk_state.py", "kda/chunk_output.py", "kda/chunk_bwd.py", "kda/chunk_fwd.py"
SCAN, SCAN_BACK = "kda_chunk_state_fwd_kernel", "kda_chunk_state_bwd_kernel"
READ, READ_BACK, INTER = "kda_chunk_output_fwd_kernel", "kda_chunk_output_bwd_kernel", "kda_chunk_inter_bwd_kernel"
_chunk = partial(Mutant, route="chunk-unbounded", entry="chunk", families=("generic", "ragged"))
_state, _output = partial(Patch, STATE), partial(Patch, OUTPUT)
NEXT, EARLIER = "next_state", "earlier_state"
DECAYED = "decay_state(b_S, tl.load(p_a + o_k, mask=m_k, other=0.0))"
UPDATE = f"{DECAYED} + product(b_k, b_v, DOT)"
OF_CHUNK = "tl.load(decay + i_sv * K + o_k, mask=m_k, other=0.0)"
V_FIRST = "o_S = o_v[None, :] * K + o_k[:, None] if V_FIRST else o_k[:, None] * V + o_v[None, :]"
K_FIRST = "o_S = o_k[:, None] * V + o_v[None, :]"
HALVES = "tests/kda/test_chunk_invariants.py::test_states_in_two_halves_are_right"

MUTANTS = (
    _chunk(
        "state-bf16",
        "precision",
        "the carried state is rounded to bf16",
        (_state(UPDATE, f"({UPDATE}).to(tl.bfloat16).to(tl.float32)", NEXT),),
        families=("slow_decay", "dyadic", "reported"),
    ),
    _chunk(
        "state-kept-decayed",
        "formula",
        "states are kept after their chunk's decay",
        (_state("h + i_sv * K * V + o_S, b_S,", f"h + i_sv * K * V + o_S, decay_state(b_S, {OF_CHUNK}),", SCAN),),
    ),
    _chunk(
        "state-not-decayed",
        "formula",
        "a chunk's decay is left out where states are carried",
        (_state(DECAYED, "b_S", NEXT),),
    ),
    _chunk(
        "state-reset-by-product",
        "mask",
        "a chunk that resets multiplies the state by 0 instead of replacing it",
        (_state(DECAYED, "tl.load(p_a + o_k, mask=m_k, other=0.0)[:, None] * b_S", NEXT),),
        limit="states of legal calls are finite: seen once a state has overflowed (values near 1e38) before a reset",
    ),
    _chunk(
        "state-layout",
        "layout",
        "the scan writes V-first states K-first, which the others read V-first",
        (_state(V_FIRST, K_FIRST, SCAN),),
    ),
    _chunk(
        "state-initial-of-head-0",
        "head",
        "every head starts from the state of head 0",
        (_state("load_state(h0 + i_S, o_S,", "load_state(h0 + i_n * HV * K * V, o_S,", SCAN),),
    ),
    _chunk(
        "state-last-chunk-unmasked",
        "ragged",
        "the last chunk of a sequence takes in rows of the next one",
        (_state("m_t = o_t < length - i_c * C", "m_t = o_t < C", SCAN),),
        families=("ragged",),
    ),
    _chunk(
        "state-slot-of-sequence",
        "ragged",
        "states are kept from the slot of the sequence's number on",
        (_state("i_slot = tl.load(slots_of + i_n)", "i_slot = i_n", SCAN),),
        families=("ragged", "intermediates"),
    ),
    _chunk(
        "state-slot-32",
        "offsets_32",
        "kept states are addressed in 32 bits",
        (_state("i_sv = (i_slot + i_c) * HV + i_hv", "i_sv = ((i_slot + i_c) * HV + i_hv).to(tl.int32)", SCAN),),
        limit="the states of all chunks must have more than 2^31 elements: at K = V = 128 and 64 heads 131072 tokens, "
        "8 GiB, more than a test's share of memory",
    ),
    _chunk(
        "state-halves-alike",
        "layout",
        "of more than 128 rows the second half starts where the first one does",
        (_state("o_S + (BK if V_FIRST else BK * V)", "o_S + (BK if V_FIRST else 0)"),),
        tests=(HALVES,),
    ),
    _chunk(
        "state-backward-half-lost",
        "missing_gradient",
        "of more than 128 rows dv lacks what the second half gives",
        (
            _state(
                "b_kdS += times_state(p_k + BK, o_tk, m_t[:, None] & m_k1[None, :], b_dS1, DOT)",
                "b_kdS += 0.0 * times_state(p_k + BK, o_tk, m_t[:, None] & m_k1[None, :], b_dS1, DOT)",
            ),
        ),
        tests=(HALVES,),
    ),
    _chunk(
        "state-backward-loss",
        "missing_gradient",
        "the incoming gradient of the final state is dropped",
        (_state("b_dS += load_state(dht", "b_dS += 0.0 * load_state(dht", SCAN_BACK),),
    ),
    _chunk(
        "state-backward-w",
        "missing_gradient",
        "the gradient of the state lacks the path through w",
        (_state(" - product(b_w, b_dv, DOT)", "", EARLIER),),
    ),
    _chunk(
        "state-backward-scale",
        "formula",
        "the gradient of the state lacks the scale",
        (_state("+ scale * product(b_q, b_do, DOT)", "+ product(b_q, b_do, DOT)", EARLIER),),
    ),
    _chunk(
        "state-backward-kept-late",
        "formula",
        "the gradient of the state is kept after its chunk's decay",
        (
            _state(
                "dh + i_sv * K * V + o_S, b_dS,", f"dh + i_sv * K * V + o_S, decay_state(b_dS, {OF_CHUNK}),", SCAN_BACK
            ),
        ),
    ),
    _chunk(
        "output-unscaled",
        "formula",
        "what o reads from the state lacks the scale",
        (_output("b_o = b_o * scale + product(", "b_o = b_o + product("),),
    ),
    _chunk(
        "output-upper-triangle",
        "stale_memory",
        "the output reads A_qk above the diagonal, which nobody wrote",
        (_output("m_A = m_t[:, None] & (o_t[:, None] >= o_t[None, :])", "m_A = m_t[:, None] & m_t[None, :]"),),
    ),
    _chunk(
        "output-rows-of-next",
        "nan_spreads",
        "the output multiplies by 0 the values of the next sequence's rows",
        (
            _output(
                "b_v = tl.load(v_new + i_rv * V + o_tv, mask=m_v, other=0.0)",
                "b_v = tl.load(v_new + i_rv * V + o_tv, mask=(o_v < V)[None, :], other=0.0)",
                READ,
            ),
        ),
        families=("ragged",),
    ),
    _chunk(
        "output-layout",
        "layout",
        "the output reads V-first states K-first",
        (_output(V_FIRST, K_FIRST, READ),),
    ),
    _chunk(
        "output-bf16-state",
        "precision",
        "the output rounds states to bf16, whatever the operands",
        (
            _output(
                "b_S = operand(tl.load(h + o_S, mask=m_S, other=0.0), DOT)",
                'b_S = operand(operand(tl.load(h + o_S, mask=m_S, other=0.0), "bf16"), DOT)',
                READ,
            ),
        ),
        families=("generic", "dyadic"),
    ),
    _chunk(
        "output-backward-mirror",
        "stale_memory",
        "the gradient of A_qk is not mirrored above the diagonal",
        (_output("b_dA, mask=m_A & (o_i > o_j))", "b_dA, mask=m_A & (o_i > o_j) & (o_i < 0))", READ_BACK),),
    ),
    _chunk(
        "output-backward-transposed",
        "formula",
        "dv takes A_qk instead of its transpose",
        (_output("product(b_AT, b_do, DOT), mask=m_tv", "product(tl.trans(b_AT), b_do, DOT), mask=m_tv", READ_BACK),),
    ),
    _chunk(
        "inter-backward-decay",
        "formula",
        "the gradient of a chunk's decay lacks the decay",
        (_output("tl.load(decay + i_s + o_k, mask=o_k < K, other=0.0) * b_S_dS", "b_S_dS"),),
    ),
    _chunk(
        "inter-backward-suffix",
        "precision",
        "sums of dg over later tokens are the total minus the prefix",
        (
            _output(
                "b_dgs = range_sums(o_i <= o_j, b_hi, b_mid, b_lo) + b_dg[None, :]",
                "b_e = b_q * b_dq + b_k * b_dk\n"
                "    b_dgs = tl.sum(b_e, axis=0)[None, :] - range_sums(o_i > o_j, b_hi, b_mid, b_lo) + b_dg[None, :]",
            ),
        ),
        families=("spikes_resets", "magnitudes", "generic"),
    ),
    _chunk(
        "inter-backward-k-rest",
        "missing_gradient",
        "dg lacks what comes through k 2^(G_C - G)",
        (_output("b_dgs += range_sums(o_i > o_j, b_hi, b_mid, b_lo)", "b_dgs += 0.0 * b_x", INTER),),
    ),
    _chunk(
        "inter-backward-dk",
        "missing_gradient",
        "dk lacks what comes through k 2^(G_C - G)",
        (_output("b_dk + b_x, mask=m", "b_dk, mask=m"),),
    ),
    _chunk(
        "inter-backward-dbeta-share",
        "race",
        "shares of dbeta of different columns of K go to one place",
        (_output("store_column(dbeta + i_k * total", "store_column(dbeta + 0 * total"),),
        families=("shapes", "generic"),
    ),
    _chunk(
        "inter-backward-bf16-gate",
        "precision",
        "the products of dg are summed in one bf16 part",
        (
            _output(
                "b_dgs += range_sums(o_i > o_j, b_hi, b_mid, b_lo)",
                "b_dgs += range_sums(o_i > o_j, b_hi, 0.0 * b_mid, 0.0 * b_lo)",
                INTER,
            ),
        ),
        families=("generic", "dyadic"),
    ),
    _chunk(
        "backward-strided",
        "strided",
        "the incoming gradients are addressed as if they were dense",
        (
            Patch(
                BACKWARD,
                "backward(call, plan, index, made, dense(do), dense(dht))",
                "backward(call, plan, index, made, do, dht)",
            ),
        ),
    ),
    _chunk(
        "backward-no-loss-of-o",
        "stale_memory",
        "without a gradient of o the backward pass reads memory nobody wrote",
        (Patch(BACKWARD, "torch.zeros_like(call.v) if do is None", "torch.empty_like(call.v) if do is None"),),
    ),
    _chunk(
        "backward-gate-adjoint",
        "missing_gradient",
        "dt_bias gets no gradient",
        (Patch(BACKWARD, '"dt_bias": ddt_bias,', '"dt_bias": None,'),),
    ),
    _chunk(
        "backward-tail",
        "stale_memory",
        "gradients of tokens of no sequence are not cleared",
        (
            Patch(
                BACKWARD,
                "blank = functools.partial(allocate_tokens, call)",
                "blank = lambda *shape, **kind: empty(*shape, **{**fp32, **kind})",
            ),
            Patch(BACKWARD, '    fp32 = {"dtype": torch.float32}\n    where', "    where"),
            Patch(
                BACKWARD,
                "    # Tokens of no sequence get no gradient:",
                '    fp32 = {"dtype": torch.float32}\n    # Tokens of no sequence get no gradient:',
            ),
        ),
        families=("ragged",),
    ),
    _chunk(
        "backward-kept-stages",
        "ignored_argument",
        "disable_recompute keeps one stage too few",
        (
            Patch(
                BACKWARD,
                "replace(made, u=None).tensors() if call.disable_recompute",
                "replace(made, u=None, w=made.k_rest).tensors() if call.disable_recompute",
            ),
        ),
        tests=("tests/kda/test_chunk_invariants.py::test_disable_recompute_changes_no_bit",),
    ),
    _chunk(
        "route-parameter-ignored",
        "dispatch",
        "the route asked for is ignored: bounded gates go the unbounded way",
        (
            Patch(
                BACKWARD,
                "_ChunkFunction.apply(call, Plan.of(call, route), training, *tensors)",
                "_ChunkFunction.apply(call, Plan.of(call, UNBOUNDED), training, *tensors)",
            ),
        ),
        route="chunk-safe_gate",
    ),
    _chunk(
        "route-takes-any-gate",
        "dispatch",
        "the bounded route takes gates that nobody bounded",
        (Patch(BACKWARD, "if anchored(route) and not bounded:", "if anchored(route) and bounded is None:"),),
        tests=("tests/kda/test_routes.py",),
    ),
    _chunk(
        "plan-chunk-of-64",
        "compiler",
        "the number of halving levels is that of 64-token chunks",
        (Patch(FORWARD, '"LEVELS": int(math.log2(chunk))', '"LEVELS": 6'),),
        equivalent="in chunks of 32 the sixth level has no pair: its region is empty, and it writes nothing",
    ),
    _chunk(
        "plan-levels-of-32",
        "compiler",
        "the number of halving levels is that of 32-token chunks",
        (Patch(FORWARD, '"LEVELS": int(math.log2(chunk))', '"LEVELS": 5'),),
        families=("ragged",),
    ),
)
