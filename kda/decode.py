"""Authority on decoding: `kda_decode`, a few new tokens of every sequence on states that stay in a paged pool."""

import triton
from torch import Tensor

from kda import contract, ops, record, registry
from kda.adjoints import allocate_tokens
from kda.contract import DIFFERENTIABLE, DecodeCall
from kda.decode_kernel import kda_decode_kernel
from kda.fused_recurrent import Tile, constants, replace_tensors
from kda.gate import dense
from kda.precision import PrecisionSpec

ROUTE = "decode"
INDICES = ("slots", "num_accepted_tokens", "cu_seqlens")

# The state is rounded to the pool's format after every token, also between the tokens of one call; o is read before.
PRECISION = PrecisionSpec(
    algorithm="recurrent",
    stages={
        "o": "io",
        "ht": "pool",
        "carried": "pool",
        **dict.fromkeys(("gate", "decay", "qk_norm", "beta", "state", "update"), "fp32"),
    },
)

# NOTE [Rollback]
# A speculative step decodes T drafted tokens of which the model then accepts the first n; n is unknown until all are
# decoded. Each token's state goes to a slot of its own, [b, 0] to [b, T - 1], and the next step begins from [b, n - 1]:
# nothing is undone or computed again, and what was rejected is overwritten. A state has the same bits whether its token
# came in a call of its own or in one of many: one binary serves every T, and rounds to the pool's format after each.
# Reading [b, n - 1] before [b, 0] is written needs no order between programs: each owns its columns of one sequence's
# states, and no two sequences share a slot.


def tile(K: int, V: int) -> Tile:
    """One warp and 64 values of state a thread, the fastest of four on an H200: sums over K need no barrier."""
    BK = max(8, triton.next_power_of_2(K))
    return Tile(BK, min(max(8, 2048 // BK), 64, max(8, triton.next_power_of_2(V))), 1)


def run(call: DecodeCall) -> Tensor:
    """o of a validated call; the pool is changed in place."""
    call = replace_tensors(call, {name: dense(getattr(call, name)) for name in (*DIFFERENTIABLE, *INDICES)})
    _, T, H, HV, K, V = call.shape
    o = allocate_tokens(call, *call.v.shape, dtype=call.q.dtype)
    cut = tile(K, V)
    grid = (call.sequences * HV * triton.cdiv(V, cut.BV),)
    if grid[0]:
        record.note(ROUTE, "kda_decode_kernel", **vars(cut))
        kda_decode_kernel[grid](
            call.q,
            call.k,
            call.v,
            call.g,
            call.beta,
            call.A_log,
            call.dt_bias,
            call.state_pool,
            call.slots,
            call.num_accepted_tokens,
            o,
            call.cu_seqlens,
            call.scale,
            call.lower_bound or 0.0,
            call.beta_range,
            call.state_pool.stride(0),
            call.state_pool.shape[0],
            call.columns,
            T,
            H,
            HV,
            K,
            V,
            **constants(call, cut),
        )
    return o


def kda_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state_pool: Tensor,
    slots: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    num_accepted_tokens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """One to eight new tokens of every sequence: o `[B, T, HV, V]` in q's dtype; the states in `state_pool` move on.

    q, k, v, g, beta and the options as in `fused_recurrent_kda`, with T in 1..8; with cu_seqlens `[N + 1]` sequences of
    0 to 8 tokens in a batch of one (without, N = B). state_pool `[P, HV, K, V]` (`[P, HV, V, K]` with `state_v_first`)
    holds one state a slot, fp32 or bf16, and is changed in place; slots may lie any distance apart, each one dense. No
    other argument may lie in its memory.

    slots, int32 or int64, says where states are. `[N]`: sequence b begins as the state in slot slots[b] and leaves its
    last one there. `[N, S]` with S in T..8: the state after token t goes to slot slots[b, t], and the sequence begins
    from slots[b, num_accepted_tokens[b] - 1] (`[N]`, int32 or int64, each in 1..S; None for all ones). So the next call
    may go on from any of this call's tokens: with n of them accepted it has, bit for bit, the state that n calls of one
    token would have left.

    -1 is no slot. A sequence that would begin there is padding: no slot of it is read or written, its tokens may hold
    anything, and its rows of o are zeros; a state that would be written there is not kept. Slots other than -1 must
    differ: what two sequences leave in a slot they share is undefined. On a GPU slots and counts are not read by the
    host, and a slot outside the pool or a count outside 1..S means -1; on CPU tensors and with KDA_VALIDATE=1 they are
    refused, as shared slots are.

    A bf16 pool rounds each state to nearest after every token, T in one call or not; o is computed before that
    rounding, in fp32. No gradients: tensors that require them are refused outside torch.no_grad(). Capture in a CUDA
    graph needs nothing special: the host never waits, and no shape depends on data. Raises ValueError or TypeError
    naming the argument, before any kernel runs.
    """
    call = DecodeCall(
        entry="decode",
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        A_log=A_log,
        dt_bias=dt_bias,
        scale=contract.default_scale(q, scale),
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        lower_bound=lower_bound,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        state_pool=state_pool,
        slots=slots,
        num_accepted_tokens=num_accepted_tokens,
    )
    return ops.dispatch(contract.validate(call))


registry.register(
    registry.Route(
        id=ROUTE,
        entries=frozenset({"decode"}),
        summary="new tokens on a paged pool of states in Triton, every option",
        verify=lambda call: registry.needs_kernels(call.state_pool, *(getattr(call, name) for name in DIFFERENTIABLE)),
        run=run,
        gradients=None,
        precision=PRECISION,
    )
)
