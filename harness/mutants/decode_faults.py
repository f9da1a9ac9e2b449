"""Authority on the faults put into decoding: slots, counts and drafts, the kernel and its host code."""

from functools import partial

from harness.mutants.mutant import Mutant, Patch

KERNEL, HOST, TORCH = "kda/decode_kernel.py", "kda/decode.py", "kda/backends/torch_backend.py"
_kernel, _host, _torch = (partial(Patch, file) for file in (KERNEL, HOST, TORCH))
_decode = partial(Mutant, route="decode", entry="decode", tests=("tests/kda/test_decode.py",))

MUTANTS: tuple[Mutant, ...] = (
    _decode(
        "decode-padding-slot-wraps",
        "slots",
        "padding reads and writes slot 0",
        (_kernel("return tl.where(i_slot < num_slots, i_slot, -1)", "return tl.maximum(i_slot, 0)"),),
    ),
    _decode(
        "decode-slot-beyond-the-pool",
        "slots",
        "a slot beyond the pool is used as an address",
        (_kernel("return tl.where(i_slot < num_slots, i_slot, -1)", "return i_slot"),),
    ),
    _decode(
        "decode-padding-stale-output",
        "stale_memory",
        "rows of padding keep what the memory held",
        (_kernel("for i_row in range(i_bos, i_eos):", "for i_row in range(i_bos, i_bos):"),),
    ),
    _decode(
        "decode-count-zero-wraps",
        "slots",
        "a count outside the table is clamped to a column",
        (
            _kernel(
                "i_column = tl.load(accepted + i_n).to(tl.int64) - 1",
                "i_column = tl.minimum(tl.maximum(tl.load(accepted + i_n).to(tl.int64) - 1, 0), columns - 1)",
            ),
        ),
    ),
    _decode(
        "decode-rollback-off-by-one",
        "slots",
        "the next call begins from the first rejected draft",
        (
            _kernel(
                "tl.load(accepted + i_n).to(tl.int64) - 1",
                "tl.minimum(tl.load(accepted + i_n).to(tl.int64), columns - 1)",
            ),
        ),
    ),
    _decode(
        "decode-only-last-state",
        "slots",
        "of several tokens only the last one's state is kept",
        (_kernel("if (i_t < columns - 1) | (i_t == tokens - 1):", "if i_t == tokens - 1:"),),
    ),
    _decode(
        "decode-dense-pool",
        "strided",
        "slots are taken to lie one behind the other",
        (_host("call.state_pool.stride(0),", "HV * K * V,"),),
    ),
    _decode(
        "decode-state-carried-in-fp32",
        "precision",
        "a bf16 pool rounds only what a call leaves, not what goes from token to token",
        (_kernel("b_S = b_stored.to(tl.float32)", "pass"),),
    ),
    _decode(
        "decode-output-of-the-rounded-state",
        "precision",
        "o is read from the rounded state",
        (
            _kernel(
                "b_o = tl.sum(b_S * b_q[:, None], axis=0)",
                "b_o = tl.sum(b_S.to(pool.dtype.element_ty).to(tl.float32) * b_q[:, None], axis=0)",
            ),
        ),
    ),
    _decode(
        "decode-offsets-trusted",
        "ragged",
        "offsets that nobody checked are used as they are",
        (
            _kernel(
                "i_bos = tl.minimum(tl.maximum(tl.load(cu_seqlens + i_n).to(tl.int64), 0), T)",
                "i_bos = tl.load(cu_seqlens + i_n).to(tl.int64)",
            ),
        ),
    ),
    _decode(
        "decode-torch-drafts-kept",
        "slots",
        "the torch route writes every state to the first column",
        (_torch("slot = table[n][min(t - begin, call.columns - 1)]", "slot = table[n][0]"),),
        route="torch",
    ),
)
