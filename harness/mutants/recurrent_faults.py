"""Authority on the faults put into the recurrent route, its kernels and its host code."""

from functools import partial

from harness.mutants.mutant import Mutant, Patch

KERNELS, HOST, SHARED = "kda/recurrent_kernels.py", "kda/fused_recurrent.py", "kda/adjoints.py"
FORWARD, BACKWARD, SUM = "kda_recurrent_fwd_kernel", "kda_recurrent_bwd_kernel", "kda_sum_heads_kernel"
_kernel = partial(Patch, KERNELS)
_forward = lambda before, after: (Patch(KERNELS, before, after, FORWARD),)  # noqa: E731
_backward = lambda before, after: (Patch(KERNELS, before, after, BACKWARD),)  # noqa: E731

NORM = "b_x / tl.sqrt(tl.sum(b_x * b_x, axis=0) + L2NORM_EPS)"
UPDATE = """    b_S = decay_state(b_S, b_a)
    b_u = b_beta * (b_v - tl.sum(b_S * b_k[:, None], axis=0))
"""
LATE_DECAY = """    b_u = b_beta * (b_v - tl.sum(b_S * b_k[:, None], axis=0))
    b_S = decay_state(b_S, b_a)
"""
FINAL = """    if ht is not None:
        tl.store("""
FINAL_IF_ANY = """    if (ht is not None) and length > 0:
        tl.store("""

MUTANTS = (
    Mutant(
        "rec-norm-eps-outside",
        "precision",
        "eps is added to the norm, not under the root",
        (_kernel(NORM, "b_x / (tl.sqrt(tl.sum(b_x * b_x, axis=0)) + L2NORM_EPS)", "load_qk"),),
        families=("magnitudes",),
    ),
    Mutant(
        "rec-decay-exp2",
        "formula",
        "2^g of a natural-log gate",
        (_kernel("return exp(b_g)", "return tl.exp2(b_g)", "load_decay"),),
        families=("generic",),
    ),
    Mutant(
        "rec-decay-after-prediction",
        "formula",
        "the update is predicted from the state before its decay",
        (_kernel(UPDATE, LATE_DECAY, "advance_state"),),
        families=("generic",),
    ),
    Mutant(
        "rec-reset-by-product",
        "mask",
        "a reset multiplies the state by 0 instead of replacing it",
        (
            _kernel(
                "return tl.where(b_a[:, None] == 0.0, 0.0, b_a[:, None] * b_S)",
                "return b_a[:, None] * b_S",
                "decay_state",
            ),
        ),
        families=("spikes_resets",),
        limit="states of legal calls are finite: seen once a state has overflowed (values near 1e38) before a reset",
    ),
    Mutant(
        "rec-channel-mask-k",
        "mask",
        "lanes past K of q and k are loaded",
        (_kernel("tl.load(p_x, mask=m_k, other=0.0)", "tl.load(p_x)", "load_qk"),),
        families=("shapes",),
    ),
    Mutant(
        "rec-channel-mask-gate",
        "mask",
        "lanes past K of the gate are loaded and go into exp",
        (_kernel("tl.load(p_g, mask=m_k, other=0.0)", "tl.load(p_g)", "load_decay"),),
        families=("shapes",),
    ),
    Mutant(
        "rec-state-of-query-head",
        "head",
        "the initial state is that of the query head",
        _forward("tl.load(h0 + (i_n * HV + i_hv) * K * V", "tl.load(h0 + (i_n * HV + i_h) * K * V"),
        families=("generic",),
    ),
    Mutant(
        "rec-gate-of-query-head",
        "head",
        "the gate is read by query head",
        _forward("p_g = g + (i_bos * HV + i_hv) * K", "p_g = g + (i_bos * HV + i_h) * K"),
        families=("generic",),
    ),
    Mutant(
        "rec-beta-of-head-0",
        "head",
        "every head gets beta of head 0",
        _forward("p_beta = beta + i_bos * HV + i_hv", "p_beta = beta + i_bos * HV"),
        families=("generic",),
    ),
    Mutant(
        "rec-beta-stride",
        "head",
        "beta advances by query heads",
        _forward("p_beta += HV", "p_beta += H"),
        families=("generic",),
    ),
    Mutant(
        "rec-query-head-by-remainder",
        "head",
        "a value head's query head is its remainder by H",
        _forward("i_h = i_hv // (HV // H)", "i_h = i_hv % H"),
        families=("generic",),
    ),
    Mutant(
        "rec-state-layout-forward",
        "layout",
        "the forward pass reads and writes V-first states K-first",
        _forward("state_offsets(o_k, o_v, K, V, V_FIRST)", "state_offsets(o_k, o_v, K, V, False)"),
        families=("generic",),
    ),
    Mutant(
        "rec-state-layout-backward",
        "layout",
        "the backward pass reads V-first states K-first",
        _backward("state_offsets(o_k, o_v, K, V, V_FIRST)", "state_offsets(o_k, o_v, K, V, False)"),
        families=("generic",),
    ),
    Mutant(
        "rec-kept-state-late",
        "formula",
        "states are kept one token after the start of a segment",
        _forward("if i_t % interval == 0:", "if i_t % interval == 1:"),
        families=("generic",),
    ),
    Mutant(
        "rec-final-state-of-empty",
        "stale_memory",
        "the final state of an empty sequence is not written",
        _forward(FINAL, FINAL_IF_ANY),
        families=("ragged",),
    ),
    Mutant(
        "rec-unused-tail",
        "stale_memory",
        "rows of no sequence are not cleared",
        (Patch(SHARED, "make = torch.empty if call.cu_seqlens is None else torch.zeros", "make = torch.empty"),),
        families=("ragged",),
    ),
    Mutant(
        "rec-no-loss-of-o",
        "stale_memory",
        "without a gradient of o the backward pass reads memory nobody wrote",
        (
            Patch(
                HOST,
                "torch.zeros_like(call.v) if do is None else do",
                "torch.empty_like(call.v) if do is None else do",
            ),
        ),
        families=("generic",),
    ),
    Mutant(
        "rec-state-bf16",
        "precision",
        "the carried state is rounded to bf16",
        _forward(
            "b_S = advance_state(b_S, b_k, b_v, b_beta, b_a)",
            "b_S = advance_state(b_S, b_k, b_v, b_beta, b_a).to(tl.bfloat16).to(tl.float32)",
        ),
        families=("dyadic", "generic"),
    ),
    Mutant(
        "rec-dq-scale",
        "formula",
        "dq lacks the scale",
        _backward("b_dq = scale * (", "b_dq = ("),
        families=("generic",),
    ),
    Mutant(
        "rec-dk-prediction",
        "missing_gradient",
        "dk lacks the path through the prediction",
        _backward(" - tl.sum(b_S * b_dv[None, :], axis=1)", ""),
        families=("generic",),
    ),
    Mutant(
        "rec-dg-after-decay",
        "formula",
        "dg is taken from the gradient of the state before the gate",
        _backward("tl.sum(b_dS * b_S, axis=1)", "tl.sum(decay_state(b_dS, b_a) * b_S, axis=1)"),
        families=("generic",),
    ),
    Mutant(
        "rec-loss-of-state",
        "missing_gradient",
        "the incoming gradient of the final state is dropped",
        _backward("b_dS = tl.load(dht", "b_dS = 0.0 * tl.load(dht"),
        families=("generic",),
    ),
    Mutant(
        "rec-dh0-first-decay",
        "formula",
        "dh0 lacks the decay of the first token",
        _backward("b_dS = decay_state(b_dS, b_a)", "b_dS = tl.where(i_r == i_bos, b_dS, decay_state(b_dS, b_a))"),
        families=("generic",),
    ),
    Mutant(
        "rec-dbeta-prediction",
        "missing_gradient",
        "dbeta is taken from v, without the prediction",
        _backward("tl.sum(b_w * b_r, axis=0)", "tl.sum(b_w * b_v, axis=0)"),
        families=("generic",),
    ),
    Mutant(
        "rec-segment-end",
        "ragged",
        "the last segment is recomputed beyond the end of the sequence",
        _backward("tokens = tl.minimum(interval, length - i_first)", "tokens = interval"),
        families=("ragged",),
    ),
    Mutant(
        "rec-workspace-barrier",
        "race",
        "no barrier between the states' stores and their loads by other warps",
        (
            _kernel(
                "            tl.debug_barrier()\n            for i_b in range(0, tokens):",
                "            for i_b in range(0, tokens):",
                BACKWARD,
            ),
        ),
        limit="the interpreter runs all lanes of a program in step; seen, if at all, by repeats on a GPU with two "
        "warps or more to a program (K above 64)",
    ),
    Mutant(
        "rec-offset-of-state-32",
        "offsets_32",
        "the backward pass numbers tiles in 32 bits, and so addresses states",
        _backward("i_p = tl.cast(i_tile, tl.int64)", "i_p = tl.cast(i_tile, tl.int32)"),
        limit="states must have more than 2^31 elements (8 GiB); a GPU's memory, not the interpreter's time",
    ),
    Mutant(
        "rec-second-grid-axis",
        "grid_limit",
        "sequences x heads lie on the second grid axis",
        (
            _kernel("i_p = tl.program_id(0).to(tl.int64)", "i_p = tl.program_id(1).to(tl.int64)", FORWARD),
            Patch(
                HOST,
                "grid = (call.sequences * HV * triton.cdiv(V, tile.BV),)",
                "grid = (1, call.sequences * HV * triton.cdiv(V, tile.BV))",
            ),
            Patch(HOST, "    if grid[0]:", "    if grid[1]:"),
        ),
        limit="the interpreter has no launch limit; on a GPU from 65536 programs on (2048 sequences of 32 heads)",
    ),
    Mutant(
        "rec-heads-not-summed",
        "missing_gradient",
        "dq and dk are those of the first value head of a group",
        (_kernel("for i_g in range(0, G):", "for i_g in range(0, 1):", SUM),),
        families=("generic",),
    ),
    Mutant(
        "rec-heads-summed-bf16",
        "precision",
        "gradients of value heads are rounded to bf16 before they are summed",
        (
            _kernel(
                "tl.load(partial + o_p, mask=m, other=0.0)",
                "tl.load(partial + o_p, mask=m, other=0.0).to(tl.bfloat16).to(tl.float32)",
                SUM,
            ),
        ),
        families=("dyadic", "generic"),
    ),
    Mutant(
        "rec-norm-projection",
        "missing_gradient",
        "the gradient through the norm lacks its radial part",
        (_kernel("(b_dy - b_y * tl.sum(b_y * b_dy, axis=1)[:, None]) / b_n", "b_dy / b_n", SUM),),
        families=("generic",),
    ),
    Mutant(
        "rec-norm-nan-rows",
        "nan_spreads",
        "rows of no sequence are normalised, NaN or not",
        (_kernel("b_dy = tl.where(m_live, (", "b_dy = tl.where(m_live | True, (", SUM),),
        families=("ragged",),
    ),
    Mutant(
        "rec-beta-slope-cancels",
        "precision",
        "the slope of beta's sigmoid is p (1 - p), which cancels",
        (
            Patch(
                SHARED,
                "slope = (e.mul_(call.beta_range) if call.allow_neg_eigval else e).div_(below)",
                "slope = call.beta_range * torch.sigmoid(call.beta.float()) * (1 - torch.sigmoid(call.beta.float()))",
            ),
        ),
        families=("saturated_beta",),
    ),
    Mutant(
        "rec-beta-slope-range",
        "formula",
        "the slope of a doubled sigmoid is not doubled",
        (Patch(SHARED, "(e.mul_(call.beta_range) if call.allow_neg_eigval else e)", "e"),),
        families=("saturated_beta", "generic"),
    ),
    Mutant(
        "rec-beta-nan-rows",
        "nan_spreads",
        "dbeta of rows of no sequence is 0 times a slope that may be NaN",
        (Patch(SHARED, ".masked_fill_(dbeta == 0, 0)", ""),),
        families=("ragged",),
    ),
    Mutant(
        "rec-scale-ignored",
        "ignored_argument",
        "scale is always K^-1/2",
        (Patch(HOST, "scale=contract.default_scale(q, scale)", "scale=contract.default_scale(q, None)"),),
        families=("generic",),
    ),
    Mutant(
        "rec-layout-ignored",
        "ignored_argument",
        "state_v_first is ignored by both kernels",
        (Patch(HOST, '"V_FIRST": call.state_v_first', '"V_FIRST": False'),),
        families=("generic",),
    ),
    Mutant(
        "rec-strided-gradient",
        "strided",
        "the incoming gradients are addressed as if they were dense",
        (Patch(HOST, "_recurrent_backward(call, h, dense(do), dense(dht))", "_recurrent_backward(call, h, do, dht)"),),
        families=("generic",),
    ),
    Mutant(
        "rec-strided-inputs",
        "strided",
        "inputs are addressed as if they were dense",
        (
            Patch(
                HOST,
                "[dense(getattr(call, name)) for name in DIFFERENTIABLE]",
                "[getattr(call, name) for name in DIFFERENTIABLE]",
            ),
        ),
        families=("generic",),
    ),
    Mutant(
        "rec-dh0-not-returned",
        "missing_gradient",
        "the gradient of the initial state is not returned",
        (Patch(HOST, '"initial_state": dh0,', '"initial_state": None,'),),
        families=("generic",),
    ),
    Mutant(
        "rec-unknown-keyword",
        "ignored_argument",
        "unknown keywords are swallowed",
        (
            Patch(
                HOST,
                "    cu_seqlens: Tensor | None = None,\n) -> tuple[Tensor, Tensor | None]:",
                "    cu_seqlens: Tensor | None = None,\n    **_: object,\n) -> tuple[Tensor, Tensor | None]:",
            ),
        ),
        tests=("tests/kda/test_contract.py",),
    ),
)
