"""Authority on the faults put into the backward pass of the fused routes: reverse scan, chunks, gate adjoint, host."""

from functools import partial

from harness.mutants.mutant import Mutant, Patch

SCAN, CHUNK, GATE, HOST = "kda/fused_scan_bwd.py", "kda/fused_chunk_bwd.py", "kda/fused_gate.py", "kda/fused_bwd.py"
_any = partial(Mutant, route="fused-unbounded", entry="chunk", families=("generic", "ragged"))
_safe = partial(Mutant, route="fused-safe_gate", entry="chunk", families=("gate_bound", "generic"))
_scan, _chunk, _gate, _host = (partial(Patch, file) for file in (SCAN, CHUNK, GATE, HOST))
STATE_PLACE = "o_v[:, None] * K + o_k[None, :] if V_FIRST else o_k[None, :] * V + o_v[:, None]"
THREE_PARTS = "tl.dot(b_hi, b_m, tl.dot(b_mid, b_m, tl.dot(b_lo, b_m, b_dg)))"
THROUGH_NORM = "        b_dx -= b_x * (tl.sum(b_x * b_dx, axis=0) * unscale * unscale)[None, :]\n"

MUTANTS = (
    _any(
        "fused-bwd-response-in-bf16",
        "precision",
        "dv comes from R with bf16 digits: its rest is left out",
        (_scan(" + tl.dot(b_dy.to(tl.bfloat16), b_R_rest)", ""),),
        families=("repeated_keys", "generic"),
    ),
    _any(
        "fused-bwd-dht-dropped",
        "missing_gradient",
        "what arrives for the final state does not enter the reverse scan",
        (_scan("tl.load(dht + o_S).to(tl.float32) * shift", "tl.load(dht + o_S).to(tl.float32) * 0.0"),),
    ),
    _safe(
        "fused-bwd-dht-unshifted",
        "formula",
        "what arrives for the final state is not shifted as the carried gradient is",
        (_scan("tl.load(dht + o_S).to(tl.float32) * shift", "tl.load(dht + o_S).to(tl.float32)"),),
    ),
    _any(
        "fused-bwd-states-k-first",
        "layout",
        "dht and dh0 are taken as K-first where they are V-first",
        (_scan(STATE_PLACE, "o_k[None, :] * V + o_v[:, None]"),),
    ),
    _any(
        "fused-bwd-tail-reads-on",
        "ragged",
        "the last chunk of a sequence reads do of the next one",
        (_scan("b_do = tl.load(do + i_o + o_tv, mask=m_t, other=0.0)", "b_do = tl.load(do + i_o + o_tv)"),),
        families=("ragged",),
    ),
    _safe(
        "fused-bwd-state-gradients-shifted",
        "layout",
        "dS behind whole chunks is stored with its shift, which the last kernel does not expect",
        (
            _scan(
                "o_k)\n        store_state(states, state_blocks, i_w, i_v, unshift * b_dS, V)",
                "o_k)\n        store_state(states, state_blocks, i_w, i_v, b_dS, V)",
            ),
        ),
    ),
    _any(
        "fused-bwd-rows-past-end",
        "mask",
        "rows past the end of a sequence, which repeat its last one, keep their do",
        (_chunk("tl.where(m_t[:, None], tl.load(do + i_v + o_tv), 0.0)", "tl.load(do + i_v + o_tv)"),),
        families=("ragged",),
    ),
    _any(
        "fused-bwd-gates-through-chunk",
        "formula",
        "the part of dg that goes through the whole chunk lacks its decay",
        (_chunk("(b_decay * tl.sum(b_SdS, axis=0))[:, None]", "tl.sum(b_SdS, axis=0)[:, None]"),),
    ),
    _any(
        "fused-bwd-ranges-without-own",
        "formula",
        "a token's own gate gets no gradient from its q and k",
        (
            _chunk(
                "range_adjoint(b_dg, b_q * b_dq + b_k * b_dk, o_i >= o_j)",
                "range_adjoint(b_dg, b_q * b_dq + b_k * b_dk, o_i > o_j)",
            ),
        ),
    ),
    _any(
        "fused-bwd-ranges-in-bf16",
        "precision",
        "sums over ranges of gates are of bf16 numbers",
        (_chunk(THREE_PARTS, "tl.dot(b_hi, b_m, b_dg)"),),
        families=("gate_bound", "generic"),
    ),
    _safe(
        "fused-bwd-earlier-key-added",
        "formula",
        "the earlier token of an anchored pair adds to dg what it must take away",
        (_chunk("b_e = b_e - b_dx if ANCHORED else b_e + b_dx", "b_e = b_e + b_dx"),),
    ),
    _any(
        "fused-bwd-diagonal-of-keys",
        "missing_gradient",
        "k gets nothing from its own token's o",
        (_chunk("    b_w += b_diagonal[None, :] * b_q\n", ""),),
    ),
    _any(
        "fused-bwd-keys-without-beta",
        "missing_gradient",
        "dk lacks the part that comes through beta k",
        (_chunk("    b_dk += b_beta[None, :] * b_w\n", ""),),
    ),
    _any(
        "fused-bwd-bias-of-query-head",
        "head",
        "the gate's adjoint reads dt_bias by query head",
        (_chunk("tl.load(dt_bias + i_hv * K + o_k)", "tl.load(dt_bias + i_h * K + o_k)"),),
    ),
    _any(
        "fused-bwd-norm-constant",
        "missing_gradient",
        "the gradients of q and k take their norms as constants",
        (_chunk(THROUGH_NORM, ""),),
    ),
    _any(
        "fused-bwd-divides-by-scale",
        "nan_spreads",
        "the gradient of q through its norm divides by a scale of 0",
        (
            _host(
                "return 0.0 if abs(scale) < torch.finfo(torch.float32).tiny else", "return math.inf if not scale else"
            ),
        ),
        families=("magnitudes",),
    ),
    _any(
        "fused-bwd-kept-values-unwritten",
        "stale_memory",
        "disable_recompute keeps a y that no scan has filled",
        (_host("scan(call, plan, kept.made, kept.y, kept.states)", "scan(call, plan, kept.made, None, kept.states)"),),
        tests=("tests/kda/test_chunk_fused_bwd.py::test_disable_recompute_changes_no_bit",),
    ),
    _any(
        "fused-bwd-resets-give-nan",
        "nan_spreads",
        "a gate without gradient passes its size on to dA_log, 0 * inf at infinite ones",
        (_gate("tl.where(b_dg == 0.0, 0.0, b_dA)", "b_dA"),),
        families=("gate_extremes", "spikes_resets"),
        tests=("tests/kda/test_fused_gate.py::test_no_gradient_passes_any_gate",),
    ),
    _safe(
        "fused-bwd-slope-of-sigmoid",
        "formula",
        "the slope of the bounded gate has 1 + e where it has its square",
        (_gate("    b_root *= b_root\n", ""),),
    ),
    _any(
        "fused-bwd-unused-tail",
        "stale_memory",
        "tokens behind the last sequence keep what memory held as their gradients",
        (
            _host(
                "blank = functools.partial(allocate_tokens, call, B, T, HV)",
                "blank = lambda *s, dtype=torch.float32: torch.empty(B, T, HV, *s, dtype=dtype, device=call.q.device)",
            ),
        ),
        families=("ragged",),
    ),
)
