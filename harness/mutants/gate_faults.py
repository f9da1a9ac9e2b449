"""Authority on the faults put into the gate and into the elementary functions under it."""

from functools import partial

from harness.mutants.mutant import Mutant, Patch

GATE, MATH = "kda/gate.py", "kda/fp32_math.py"
_gate = partial(Mutant, route="gate", entry="gate", families=("gate_entry",))

MUTANTS = (
    _gate(
        "gate-bound-by-clamping",
        "formula",
        "the bounded gate is the softplus gate, clamped",
        (
            Patch(
                GATE,
                "return lower_bound * sigmoid(exp(b_A) * b_z)",
                "return tl.maximum(softplus_gate(b_z, b_A), lower_bound)",
            ),
        ),
    ),
    _gate(
        "gate-softplus-of-log",
        "precision",
        "softplus is log(1 + e^z), which loses small values, up to 20",
        (
            Patch(
                GATE,
                "return tl.where(b_z > 0.0, b_z, 0.0) + log1p_exp_neg(b_z)",
                "return tl.where(b_z > 20.0, b_z, tl.log(1.0 + tl.exp(b_z)))",
            ),
        ),
    ),
    _gate(
        "gate-softplus-factors-apart",
        "overflow",
        "exp(A_log) and softplus are multiplied where one of them leaves the normal range",
        (
            Patch(
                GATE,
                "return -tl.where(b_z < -80.0, exp(b_A + b_z), exp(b_A) * softplus(b_z))",
                "return -exp(b_A) * softplus(b_z)",
            ),
        ),
    ),
    _gate(
        "gate-no-bias",
        "ignored_argument",
        "the forward pass does not add dt_bias",
        (Patch(GATE, "b_z = b_g + b_bias", "b_z = b_g + 0.0 * b_bias"),),
    ),
    _gate(
        "gate-bias-of-head-0",
        "head",
        "every head gets dt_bias of head 0",
        (Patch(GATE, "tl.load(dt_bias + i_hv * K + o_k,", "tl.load(dt_bias + o_k,", "kda_gate_fwd_kernel"),),
    ),
    _gate(
        "gate-A-of-head-0",
        "head",
        "every head gets A_log of head 0",
        (Patch(GATE, "tl.load(A_log + i_hv)", "tl.load(A_log)", "kda_gate_fwd_kernel"),),
    ),
    _gate(
        "gate-backward-A-of-head-0",
        "head",
        "the backward pass reads A_log of head 0 for every head",
        (Patch(GATE, "tl.load(A_log + i_hv)", "tl.load(A_log)", "kda_gate_bwd_kernel"),),
    ),
    _gate(
        "gate-backward-no-bias",
        "formula",
        "the backward pass takes the slope at the raw gate, without dt_bias",
        (Patch(GATE, ".to(tl.float32) + b_bias[None, :]", ".to(tl.float32)", "kda_gate_bwd_kernel"),),
    ),
    _gate(
        "gate-token-mask",
        "mask",
        "rows past the last token are written",
        (Patch(GATE, "m = (o_t < num_tokens)", "m = (o_t < num_tokens + BT)", "kda_gate_fwd_kernel"),),
    ),
    _gate(
        "gate-channel-mask",
        "mask",
        "lanes past K are read and summed into dA_log",
        (Patch(GATE, "& (o_k < K)[None, :]", "& (o_k < BK)[None, :]", "kda_gate_bwd_kernel"),),
    ),
    _gate(
        "gate-slope-far-left",
        "overflow",
        "the softplus slope's factors are multiplied where one leaves the normal range",
        (
            Patch(
                GATE,
                "b_dz = -b_dg * tl.where(m_far, b_far, exp(b_A) * sigmoid(b_z))",
                "b_dz = -b_dg * exp(b_A) * sigmoid(b_z)",
            ),
        ),
    ),
    _gate(
        "gate-slope-cancels",
        "precision",
        "the sigmoid's slope is p (1 - p), which cancels at both ends",
        (
            Patch(
                GATE,
                "b_slope = b_e / ((1.0 + b_e) * (1.0 + b_e))",
                "b_slope = sigmoid(b_x) * (1.0 - sigmoid(b_x))",
            ),
        ),
        limit="the envelope grants every gate 2^-21 of p in p (1 - p) (oracle/gates.py): seen below a slope of 2^-21, "
        "once that is not granted",
    ),
    _gate(
        "gate-steep-factors-apart",
        "overflow",
        "the bounded gate's slope and exp(A_log) are multiplied where one leaves the normal range",
        (
            Patch(
                GATE,
                "b_steep = tl.where(tl.abs(b_x) > 80.0, exp(b_A - tl.abs(b_x)), b_slope * b_ea)",
                "b_steep = b_slope * b_ea",
            ),
        ),
    ),
    _gate(
        "gate-bias-from-rounded",
        "precision",
        "ddt_bias is summed from dg as it was rounded for the output",
        (
            Patch(
                GATE,
                "tl.sum(b_dz, axis=0), mask=o_k < K",
                "tl.sum(b_dz.to(dg.dtype.element_ty).to(tl.float32), axis=0), mask=o_k < K",
            ),
        ),
    ),
    _gate(
        "gate-A-sum-bf16",
        "precision",
        "sums of dA_log over blocks of tokens are rounded to bf16",
        (Patch(GATE, "sum_slots(route, dA)", "sum_slots(route, dA.bfloat16().float())"),),
    ),
    _gate(
        "gate-A-last-block",
        "ragged",
        "dA_log leaves out a last block of fewer than 32 tokens",
        (Patch(GATE, "sum_slots(route, dA)", "sum_slots(route, dA[: max(1, B * T // BLOCK_TOKENS)])"),),
    ),
    _gate(
        "gate-A-plain-term",
        "missing_gradient",
        "dA_log leaves out what comes from the far left of softplus",
        (Patch(GATE, "(A_log.float().exp() * scaled + plain)", "(A_log.float().exp() * scaled)"),),
    ),
    _gate(
        "gate-partial-stride",
        "race",
        "partial sums of different blocks of tokens share an address",
        (Patch(GATE, "p_dA = dA_partial + (i_b * HV + i_hv) * 2", "p_dA = dA_partial + (i_b + i_hv) * 2"),),
    ),
    _gate(
        "gate-strided",
        "strided",
        "the gate is addressed as if it were dense",
        (
            Patch(
                GATE,
                "g, A_log, dt_bias = (dense(x) for x in (g, A_log, dt_bias))",
                "A_log, dt_bias = (dense(x) for x in (A_log, dt_bias))",
            ),
        ),
    ),
    _gate(
        "gate-strided-gradient",
        "strided",
        "the incoming gradient is addressed as if it were dense",
        (
            Patch(
                GATE,
                "g, A_log, dt_bias, dy = (dense(x) for x in (g, A_log, dt_bias, dy))",
                "g, A_log, dt_bias = (dense(x) for x in (g, A_log, dt_bias))",
            ),
        ),
    ),
    _gate(
        "gate-output-dtype",
        "ignored_argument",
        "output_dtype is ignored",
        (Patch(GATE, "y = torch.empty(g.shape, dtype=output_dtype,", "y = torch.empty(g.shape, dtype=torch.float32,"),),
        tests=("tests/kda/test_gate.py",),
    ),
    Mutant(
        "gate-nan-times-zero",
        "nan_spreads",
        "tokens without a gradient still multiply by their gate, which may be NaN",
        (
            Patch(
                GATE,
                "return tl.where(b_dg == 0.0, 0.0, b_dz), b_scaled, tl.where(b_dg == 0.0, 0.0, b_plain)",
                "return b_dz, b_scaled, b_plain",
            ),
        ),
        families=("ragged",),
    ),
    _gate(
        "exp-one-part",
        "precision",
        "exp(x) is 2^(x log2 e) with the product rounded, wrong by |x| ulp",
        (Patch(MATH, "return tl.exp2(b_h) * (1.0 + b_l * LN2)", "return tl.exp2(b_h)"),),
        limit="the declared exp is exp2 of a rounded product: |x| 2^-24 is what it may lose",
        families=("gate_entry", "gate_extremes"),
    ),
    _gate(
        "exp-of-minus-infinity",
        "mask",
        "exp does not clamp: inf - inf at -inf",
        (
            Patch(
                MATH,
                "b_x = tl.where(b_x < -200.0, -200.0, tl.where(b_x > 200.0, 200.0, b_x))",
                "b_x = tl.where(b_x > 200.0, 200.0, b_x)",
            ),
        ),
        route="recurrent",
        entry="recurrent",
        families=("spikes_resets",),
    ),
    _gate(
        "log1p-short-series",
        "precision",
        "the series of softplus stops three terms early",
        (Patch(MATH, "b_p = 1.0 / 9.0 + b_t * b_p", "b_p = 1.0 / 9.0 + 0.0 * b_p"),),
    ),
    _gate(
        "sigmoid-by-complement",
        "precision",
        "sigmoid of a negative x is 1 - sigmoid(-x), which cancels",
        (
            Patch(
                MATH,
                "return tl.where(b_x >= 0.0, 1.0, b_e) / (1.0 + b_e)",
                "return tl.where(b_x >= 0.0, 1.0 / (1.0 + b_e), 1.0 - 1.0 / (1.0 + b_e))",
            ),
        ),
    ),
)
