"""Authority on the faults put into the chunk kernels: what tokens of a chunk do to each other, and the inverse."""

from functools import partial

from harness.mutants.mutant import Mutant, Patch

TILES, INTRA, INTRA_BACKWARD, WY = (
    "kda/chunk_tiles.py",
    "kda/chunk_intra.py",
    "kda/chunk_intra_bwd.py",
    "kda/wy_fast.py",
)
FORWARD, INDEX = "kda/chunk_fwd.py", "kda/chunk_index.py"
_chunk = partial(Mutant, route="chunk-unbounded", entry="chunk", families=("generic", "ragged"))
_safe = partial(Mutant, route="chunk-safe_gate", entry="chunk", families=("gate_bound", "generic"))
_inverse = partial(Mutant, route="chunk-unbounded", entry="chunk", families=("repeated_keys", "generic"))
_tiles, _intra, _wy = partial(Patch, TILES), partial(Patch, INTRA), partial(Patch, WY)

DECAY, PAIRS, SOLVE, JOIN = (
    *("kda_chunk_decay_fwd_kernel", "kda_chunk_intra_fwd_kernel"),
    *("kda_solve_blocks_kernel", "kda_join_blocks_kernel"),
)
LATER = "    b_later = tl.exp2(b_G)\n    b_earlier = b_later\n    if ANCHORED:\n"
MIDDLE = """    b_shift = 0.5 * tl.min(b_G, axis=0)[None, :]
    b_later = tl.exp2(b_G)
    b_earlier = b_later
    if ANCHORED:
        b_later = tl.where(i_l < lowest, tl.exp2(b_G - b_shift), b_later) / tl.where(i_l < lowest, half_span, 1.0)
        b_G = tl.where(i_l < lowest, b_G - b_shift - tl.log2(half_span), b_G)
"""

MUTANTS = (
    _chunk(
        "chunk-reset-floor",
        "formula",
        "log2 gates are clamped at -16: a reset leaks",
        (_tiles("GATE_FLOOR = tl.constexpr(-1e4)", "GATE_FLOOR = tl.constexpr(-16.0)"),),
        families=("spikes_resets",),
    ),
    _chunk(
        "chunk-reset-unclamped",
        "mask",
        "-inf is split into parts, inf - inf",
        (_tiles("return tl.where(b_g < GATE_FLOOR, GATE_FLOOR, b_g)", "return b_g"),),
        families=("spikes_resets",),
    ),
    _chunk(
        "chunk-gate-base",
        "formula",
        "natural-log gates are taken for log2 ones",
        (_tiles(".to(tl.float32) * LOG2E", ".to(tl.float32)", "load_gate"),),
    ),
    _chunk(
        "chunk-gates-two-parts",
        "precision",
        "gates are split in two bf16 parts instead of three",
        (_tiles("b_mid, b_rest.to(tl.bfloat16)", "b_mid, tl.zeros_like(b_mid)"),),
    ),
    _chunk(
        "chunk-gates-one-part",
        "precision",
        "gates are summed in bf16",
        (_tiles("tl.dot(b_m, b_hi, tl.dot(b_m, b_mid, tl.dot(b_m, b_lo)))", "tl.dot(b_m, b_hi)"),),
    ),
    _chunk(
        "chunk-operand-truncated",
        "precision",
        "tf32 operands are truncated, not rounded",
        (_tiles("(b_bits + 0x1000) & -0x2000", "b_bits & -0x2000"),),
    ),
    _chunk(
        "chunk-split-rest-lost",
        "precision",
        "the inverse enters products as one operand, without the rest of its rounding",
        (_tiles('if DOT != "fp32":', "if False:", "split_product"),),
        families=("repeated_keys", "dyadic", "generic"),
    ),
    _chunk(
        "chunk-norm-unused",
        "ignored_argument",
        "rows are not divided by their norm",
        (_tiles("b_x = b_x * tl.load(rstd + o_rstd, mask=m_t, other=0.0)[:, None]", "b_x = b_x * 1.0"),),
    ),
    _chunk(
        "chunk-beta-range",
        "ignored_argument",
        "beta's sigmoid is not doubled",
        (_tiles("tl.where(m, beta_range * sigmoid(b_beta), 0.0)", "tl.where(m, sigmoid(b_beta), 0.0)"),),
        families=("saturated_beta", "generic"),
    ),
    _chunk(
        "chunk-suffix-by-difference",
        "precision",
        "k 2^(G_C - G) takes the decay behind a token as the total minus the prefix",
        (
            _intra(
                "b_x = tl.exp2(range_sums(o_j > o_i, b_hi, b_mid, b_lo))",
                "b_x = tl.exp2(tl.sum(b_g, axis=0)[None, :] - range_sums(o_j <= o_i, b_hi, b_mid, b_lo))",
                DECAY,
            ),
        ),
        families=("spikes_resets",),
    ),
    _chunk(
        "chunk-prefix-by-difference",
        "causality",
        "q 2^G takes the decay before a token as the total minus the suffix",
        (
            _intra(
                "b_x = tl.exp2(range_sums(o_j <= o_i, b_hi, b_mid, b_lo))",
                "b_x = tl.exp2(tl.sum(b_g, axis=0)[None, :] - range_sums(o_j > o_i, b_hi, b_mid, b_lo))",
                DECAY,
            ),
        ),
    ),
    _chunk(
        "chunk-padding-gates",
        "ragged",
        "gates behind a sequence's end decay its last chunk",
        (_intra("b_g = load_gate(g + i_gk + o_gk, m)", "b_g = load_gate(g + i_gk + o_gk, (o_k < K)[None, :])", DECAY),),
        families=("ragged",),
    ),
    _chunk(
        "chunk-decay-norm-of-q",
        "formula",
        "decayed keys are divided by the norms of q",
        (_intra("load_normalised(k + i_qk + o_qk, k_rstd,", "load_normalised(k + i_qk + o_qk, q_rstd,", DECAY),),
    ),
    _chunk(
        "chunk-pairs-gate-of-query-head",
        "head",
        "A_qk and A_kk read the gate by query head",
        (_intra("g += i_rv * K", "g += (i_row * HV + i_h) * K", PAIRS),),
    ),
    _chunk(
        "chunk-pairs-head-by-remainder",
        "head",
        "A_qk and A_kk take the query head by remainder",
        (_intra("i_h = i_hv // (HV // H)", "i_h = i_hv % H", PAIRS),),
    ),
    _chunk(
        "chunk-range-without-row",
        "formula",
        "the range of a row leaves out its own gate",
        (_intra("((b_odd == 1) == (o_j <= o_i))", "((b_odd == 1) == (o_j < o_i))"),),
    ),
    _chunk(
        "chunk-neighbours-lost",
        "stale_memory",
        "pairs of neighbours belong to no level",
        (_intra("((o_i ^ o_j) >= least)", "((o_i ^ o_j) > least)"),),
    ),
    _chunk(
        "chunk-last-level-lost",
        "ragged",
        "pairs across the middle of the chunk belong to no level",
        (_intra("range(lowest - ANCHORED, LEVELS)", "range(lowest - ANCHORED, LEVELS - 1)"),),
        families=("ragged",),
    ),
    _chunk(
        "chunk-diagonal-unscaled",
        "formula",
        "the diagonal of A_qk lacks the scale",
        (_intra("operand(b_diagonal * scale, DOT)", "operand(b_diagonal, DOT)"),),
    ),
    _chunk(
        "chunk-channels-of-last-tile",
        "mask",
        "channels past K are loaded",
        (_intra("m = m_t[:, None] & (o_k < K)\n", "m = m_t[:, None] & (o_k < BK * tl.cdiv(K, BK))\n", PAIRS),),
        families=("shapes",),
    ),
    _safe(
        "anchor-span-lost",
        "overflow",
        "column factors of an anchored block lack 2^-c",
        (_intra("tl.exp2(-b_G) * (1.0 / half_span)", "tl.exp2(-b_G)"),),
    ),
    _safe(
        "anchor-first-row",
        "precision",
        "the anchor's own gate is in the ranges of its block: the span is wider, and its gradient has to cancel",
        (_intra(" & ((o_j & (size - 1)) != first)", " & ((o_j & (size - 1)) != first - 1)"),),
        limit="both factors contain that gate, which cancels: seen where a factor wider by 2^7 overflows, for "
        "keys beyond 2^60",
    ),
    _safe(
        "anchor-middle-of-tile",
        "causality",
        "the anchor is halfway to the tile's last row",
        (_intra(LATER, MIDDLE),),
    ),
    _safe(
        "anchor-span-115",
        "overflow",
        "half the span is 115, which leaves nothing for the values",
        (
            Patch(
                FORWARD,
                "return 2.0 ** round((BLOCK - 1) / 2 * abs(bound) * math.log2(math.e))",
                "return 2.0**115 + 0.0 * bound",
            ),
        ),
        families=("magnitudes",),
    ),
    _safe(
        "anchor-step-lost",
        "stale_memory",
        "pairs inside the anchored blocks are not computed",
        (_intra("range(lowest - ANCHORED, LEVELS)", "range(lowest, LEVELS)"),),
    ),
    _safe(
        "anchor-gradient-sign",
        "formula",
        "gates of an anchored block get the gradient of the earlier token with the wrong sign",
        (
            Patch(
                INTRA_BACKWARD,
                "sign = tl.where(i_s == lowest - 2, -1.0, 1.0)",
                "sign = tl.where(i_s == lowest - 2, 1.0, 1.0)",
            ),
        ),
    ),
    _chunk(
        "pairs-backward-dk-of-q",
        "missing_gradient",
        "dk lacks what comes through A_qk",
        (
            Patch(
                INTRA_BACKWARD,
                "b_dkx += product(b_dP, operand(b_y * b_q, INTRA), INTRA)",
                "b_dkx += 0.0 * product(b_dP, operand(b_y * b_q, INTRA), INTRA)",
            ),
        ),
    ),
    _chunk(
        "pairs-backward-dg-of-q",
        "missing_gradient",
        "dg lacks the rows of q",
        (Patch(INTRA_BACKWARD, "b_e = operand(b_x * b_q, INTRA).to(tl.float32) * b_dqx + ", "b_e = "),),
    ),
    _chunk(
        "pairs-backward-diagonal",
        "missing_gradient",
        "dk lacks the diagonal of A_qk",
        (Patch(INTRA_BACKWARD, "b_dk += b_diagonal *", "b_dk += 0.0 * b_diagonal *"),),
    ),
    _inverse(
        "inverse-without-beta",
        "formula",
        "the system is solved without beta",
        (
            _wy(
                "b_L = b_L * load_betas(beta + o_t * HV, m_t, beta_range, BETA_SIGMOID)[:, None]",
                "b_L = b_L * 1.0",
                SOLVE,
            ),
        ),
    ),
    _inverse(
        "inverse-first-term",
        "inverse",
        "the blocks' inverse is I - L, the series' first two terms",
        (
            _wy(
                "b_row = tl.sum(b_L.to(tl.float64)[:, :, None] * b_R, axis=1)",
                "b_row = b_L.to(tl.float64)",
                SOLVE,
            ),
        ),
    ),
    _inverse(
        "inverse-half-substitution",
        "inverse",
        "rows of the substitution are rounded to fp16",
        (
            _wy(
                "b_R = tl.where((o_i == i)[None, :, None], b_R - b_row[:, None, :], b_R)",
                "b_R = tl.where((o_i == i)[None, :, None], (b_R - b_row[:, None, :]).to(tl.float16) * 1.0, b_R)",
                SOLVE,
            ),
        ),
    ),
    _inverse(
        "inverse-bf16-merge",
        "inverse",
        "blocks are joined from operands in bf16",
        (_wy("b_LR += b_L.to(tl.float64)[:, None]", "b_LR += b_L.to(tl.bfloat16).to(tl.float64)[:, None]", JOIN),),
    ),
    _inverse(
        "inverse-stored-bf16",
        "inverse",
        "the inverse's blocks are stored in bf16",
        (_wy("b_R.to(tl.float32), mask=(o_t", "b_R.to(tl.bfloat16).to(tl.float32), mask=(o_t", SOLVE),),
    ),
    _inverse(
        "inverse-diagonal-included",
        "stale_memory",
        "the substitution reads the diagonal of A_kk, which nobody wrote",
        (_wy("(o_i < i)[None, :]", "(o_i <= i)[None, :]", SOLVE),),
    ),
    _inverse(
        "inverse-join-forgotten",
        "stale_memory",
        "the two halves of a chunk are not joined",
        (Patch(FORWARD, "while size < C:", "while size < C // 2:"),),
        families=("ragged",),
    ),
    _inverse(
        "inverse-join-sign",
        "formula",
        "the joined block has the wrong sign",
        (_wy("b_R -= b_1", "b_R += b_1", JOIN),),
    ),
    _chunk(
        "wy-beta-of-row",
        "formula",
        "w and u take beta of the row instead of the column",
        (
            _wy(
                "b_R = b_R * load_betas(beta + i_rv + o_t * HV, m_t, beta_range, BETA_SIGMOID)[None, :]",
                "b_R = b_R * load_betas(beta + i_rv + o_t * HV, m_t, beta_range, BETA_SIGMOID)[:, None]",
            ),
        ),
    ),
    _chunk(
        "wy-backward-mirror",
        "stale_memory",
        "the gradient of A_kk is not mirrored above the diagonal",
        (_wy("tl.store(dA_kk + i_rv * C + o_j * (HV * C) + o_i, b_dA, mask=m_A)", "pass"),),
    ),
    _chunk(
        "wy-backward-dbeta",
        "missing_gradient",
        "dbeta lacks what comes through A_kk",
        (_wy("b_dbeta -= tl.sum(tl.where(m_A, b_A * b_zv, 0.0), axis=1)", "b_dbeta += 0.0"),),
    ),
    _chunk(
        "wy-backward-beta",
        "formula",
        "the gradient of A_kk lacks beta",
        (_wy("b_dA = -b_beta[:, None] * b_zv", "b_dA = -b_zv"),),
    ),
    _chunk(
        "chunk-norm-eps",
        "precision",
        "eps is added to the norm, not under the root",
        (
            Patch(
                FORWARD,
                "1.0 / tl.sqrt(tl.sum(b_x * b_x, axis=1) + L2NORM_EPS)",
                "1.0 / (tl.sqrt(tl.sum(b_x * b_x, axis=1)) + L2NORM_EPS)",
            ),
        ),
        families=("magnitudes",),
    ),
    _chunk(
        "chunk-fp16-as-bf16",
        "precision",
        "products of fp16 calls round to bf16",
        (Patch(FORWARD, 'torch.float16: "tf32"', 'torch.float16: "bf16"'),),
    ),
    _chunk(
        "chunk-fp32-as-tf32",
        "precision",
        "products of fp32 calls round to tf32",
        (Patch(FORWARD, 'full = "fp32" if call.precision == "ieee" else "tf32"', 'full = "tf32"'),),
        families=("dyadic", "generic"),
    ),
    _chunk(
        "index-full-chunks",
        "ragged",
        "the last chunk of a sequence is taken for a full one",
        (
            Patch(
                INDEX,
                "counts = (offsets[sequence + 1] - rows).clamp(0, call.chunk_size)",
                "counts = torch.where(offsets[sequence + 1] > rows, call.chunk_size, 0)",
            ),
        ),
        families=("ragged",),
    ),
    _chunk(
        "index-empty-sequences",
        "ragged",
        "a chunk's sequence is searched from the left: empty sequences shift it",
        (Patch(INDEX, "right=True", "right=False"),),
        families=("ragged",),
    ),
)
