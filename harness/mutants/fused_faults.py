"""Authority on the faults put into the fused chunk kernels: chunks as operators, the scan, its gates, and the host."""

from functools import partial

from harness.mutants.mutant import Mutant, Patch

PREP, SCAN, GATE, HOST = "kda/fused_prep.py", "kda/fused_scan.py", "kda/fused_gate.py", "kda/fused_fwd.py"
ROUTES = "kda/fused.py"
TESTS, GATE_TESTS = "tests/kda/test_chunk_fused.py", "tests/kda/test_fused_gate.py"
_any = partial(Mutant, route="fused-unbounded", entry="chunk", families=("generic", "ragged"))
_safe = partial(Mutant, route="fused-safe_gate", entry="chunk", families=("gate_bound", "generic"))
_prep, _scan, _gate, _host, _routes = (partial(Patch, file) for file in (PREP, SCAN, GATE, HOST, ROUTES))
SUFFIX = "tl.exp2(range_sums_from(0.0, o_j > o_i, b_hi, b_lo))"
DIAGONAL = "tl.where(o_i == o_j, b_diagonal[:, None], tl.where(o_i > o_j, b_qk, 0.0))"
UPDATE = "tl.dot(b_y.to(tl.bfloat16), b_rest, b_S * b_decay[None, :])"

MUTANTS = (
    _any(
        "fused-rows-past-end",
        "ragged",
        "rows past the end of a sequence, which repeat its last one, keep their beta and gate",
        (_prep("m_t = o_t < count", "m_t = o_t < C"),),
        families=("ragged",),
    ),
    _any(
        "fused-beta-of-row",
        "formula",
        "the system takes beta of the row instead of the column",
        (_prep("b_kk * b_beta[None, :]", "b_kk * b_beta[:, None]"),),
    ),
    _any(
        "fused-response-without-beta",
        "formula",
        "the response of o lacks beta",
        (_prep(f"{DIAGONAL} * b_beta[None, :]", DIAGONAL),),
    ),
    _safe(
        "fused-diagonal-in-tile",
        "precision",
        "the diagonal of A_qk comes from the shifted tile instead of apart",
        (_prep(DIAGONAL, "tl.where(o_i >= o_j, b_qk, 0.0)"),),
    ),
    _any(
        "fused-diagonal-norm-unused",
        "ignored_argument",
        "the diagonal of A_qk is not divided by the norms",
        (_prep("b_diagonal *= b_q_rstd * b_k_rstd", "b_diagonal *= 1.0"),),
    ),
    _any(
        "fused-last-gates-unread",
        "mask",
        "the last 32 channels get no gates: the read ahead stops a step early",
        (_prep("mask=i_k + 1 < K // BK", "mask=i_k + 2 < K // BK"),),
    ),
    _any(
        "fused-bias-of-query-head",
        "head",
        "dt_bias is read by query head",
        (_prep("tl.load(dt_bias + i_hv * K + o_k)", "tl.load(dt_bias + i_h * K + o_k)"),),
    ),
    _any(
        "fused-rest-with-own-gate",
        "formula",
        "k 2^(G_C - G) decays by the token's own gate too",
        (_prep(SUFFIX, SUFFIX.replace(">", ">=")),),
    ),
    _any(
        "fused-rest-by-difference",
        "precision",
        "k 2^(G_C - G) takes the decay behind a token as the total minus the prefix",
        (_prep(SUFFIX, "tl.exp2(tl.sum(b_g, axis=0)[None, :] - range_sums_from(0.0, o_j <= o_i, b_hi, b_lo))"),),
        families=("spikes_resets",),
    ),
    _any(
        "fused-inverse-first-term",
        "inverse",
        "the inverse is I - L, the series' first two terms",
        (
            _prep(
                "b_row -= tl.load(p_L + (i * C + j)) * columns[j]", "b_row -= tl.load(p_L + (i * C + j)) * (o_i == j)"
            ),
        ),
        families=("repeated_keys", "generic"),
    ),
    _any(
        "fused-inverse-barrier",
        "race",
        "rows of L are read without a barrier after they are written",
        (_prep("    tl.store(p_L + o_L, b_L)\n    tl.debug_barrier()\n", "    tl.store(p_L + o_L, b_L)\n"),),
        limit="the interpreter runs all lanes of a program in step; on a GPU the program is one warp, whose lanes "
        "mostly do",
    ),
    _safe(
        "fused-shift-lost",
        "overflow",
        "rows are not shifted: columns reach 2^115",
        (_host("shift=round(BLOCK / 2 * abs(bound) * math.log2(math.e)) if anchored(route) else 0", "shift=0"),),
        tests=(f"{TESTS}::test_keys_of_any_size_fit_beside_the_shift",),
    ),
    _safe(
        "fused-unshift-off-by-one",
        "formula",
        "what the state gives is half of what it should be",
        (_host("2.0**-plan.shift", "2.0 ** -(plan.shift + 1)"),),
    ),
    _any(
        "fused-solved-in-fp16",
        "overflow",
        "A_qk and R are taken to fit into fp16, whatever the keys are",
        (_host('solved="fp16" if small else "tf32"', 'solved="fp16"'),),
        families=("magnitudes", "repeated_keys"),
    ),
    _any(
        "fused-takes-intermediates",
        "dispatch",
        "a call that asks for intermediate states is taken, and gets none",
        (_routes("if call.return_intermediate_states:", "if False:"),),
        tests=(f"{TESTS}::test_what_fused_routes_refuse_another_serves",),
    ),
    _any(
        "fused-descriptor-alignment",
        "strided",
        "v is described to TMA wherever it starts",
        (_host("return plan.tma and not any(x.data_ptr() % 16 for x in tensors)", "return plan.tma"),),
        limit="TMA is not used where kernels are interpreted; on sm_90 the driver refuses a v that starts 2 bytes off",
    ),
    _any(
        "fused-slot-rounded-up",
        "layout",
        "the scan rounds a sequence's first slot up, the index of slots down",
        (_scan("i_slot = i_row // C + i_n", "i_slot = tl.cdiv(i_row, C) + i_n"),),
        families=("ragged",),
    ),
    _any(
        "fused-index-strictly-before",
        "ragged",
        "the first slot of a sequence is looked up in the sequence before it",
        (_scan("// C + b_mid <= o_s", "// C + b_mid < o_s"),),
        families=("ragged",),
    ),
    _any(
        "fused-values-past-end",
        "nan_spreads",
        "values past the end are multiplied by 0 instead of selected away",
        (_scan("b_v = tl.load(v + i_o + o_tv, mask=m_t, other=0.0)", "b_v = tl.load(v + i_o + o_tv)"),),
        families=("ragged",),
    ),
    _any(
        "fused-tail-unwritten",
        "stale_memory",
        "rows of no sequence are left as they were allocated",
        (_scan("and cu_seqlens is not None and i_n == N - 1:", "and cu_seqlens is not None and i_n == N:"),),
        families=("ragged",),
    ),
    _any(
        "fused-state-read-k-first",
        "layout",
        "a V-first initial state is read K-first",
        (
            _scan(
                "tl.load(initial_state + o_S)",
                "tl.load(initial_state + (i_n * HV + i_hv) * (K * V) + o_k[None, :] * V + o_v[:, None])",
            ),
        ),
    ),
    _any(
        "fused-state-bf16",
        "precision",
        "the carried state is rounded to bf16",
        (_scan(UPDATE, f"{UPDATE}.to(tl.bfloat16).to(tl.float32)"),),
        families=("slow_decay", "dyadic"),
    ),
    _any(
        "fused-state-part-bf16",
        "precision",
        "what the state gives to v is rounded to bf16 before it is taken off",
        (_scan("unshift * b_Sk)", "(unshift * b_Sk).to(tl.bfloat16).to(tl.float32))"),),
        families=("dyadic", "repeated_keys"),
        limit="no larger than the rounding of x that follows: sigma grows by 1.41 at most, unseen in 142 problems",
    ),
    _any(
        "fused-output-rounded-twice",
        "precision",
        "what the state gives to o is rounded to bf16 before what the chunk gives is added",
        (_scan("unshift * b_Sq)", "(unshift * b_Sq).to(tl.bfloat16).to(tl.float32))"),),
        limit="no larger than the rounding of o that follows: sigma grows by 1.41 at most, unseen in 142 problems",
    ),
    _any(
        "fused-gates-one-half",
        "precision",
        "gates are summed in fp16",
        (_gate("return b_hi, (b_g - b_hi.to(tl.float32)).to(tl.float16)", "return b_hi, b_hi * 0.0"),),
    ),
    _any(
        "fused-reset-unclamped",
        "mask",
        "-inf is split into halves, inf - inf",
        (_gate("    b_g = tl.where(b_g < GATE_FLOOR, GATE_FLOOR, b_g)\n", ""),),
        families=("spikes_resets",),
    ),
    _any(
        "fused-softplus-short-series",
        "precision",
        "log(1 + u) lacks the series' last term",
        (_gate("b_p = -0.008539230562746525 * b_u + 0.04408971592783928", "b_p = 0.0 * b_u + 0.04408971592783928"),),
        tests=(GATE_TESTS,),
    ),
    _safe(
        "fused-bounded-steep",
        "overflow",
        "exp(A_log) may be inf, which meets a raw gate of 0",
        (_gate("tl.minimum(exp(b_A) * LOG2E, FP32_MAX)", "exp(b_A) * LOG2E"),),
        tests=(GATE_TESTS,),
    ),
)
