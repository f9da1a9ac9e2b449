"""Authority on the chunk entry: `chunk_kda`, which picks a route for training and prefill."""

import torch
from torch import Tensor

from kda import contract, ops
from kda.context_parallel import ContextParallel, chunk_kda_cp
from kda.contract import Call


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: ContextParallel | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    precision: str = "ieee",
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """KDA over whole sequences: (o `[B, T, HV, V]`, final state or None), and the intermediate states if asked for.

    Tensors and gates as in `fused_recurrent_kda`. `safe_gate` promises natural-log gates in [-5, 0] (with the in-kernel
    gate it needs a `lower_bound` in [-5, 0)); it chooses an implementation, never a result.
    `return_intermediate_states` adds the state at the start of every `chunk_size`-token (32 or 64) chunk, `[B, NT, HV,
    K, V]` fp32 without gradient (`[B, NT, HV, V, K]` with `state_v_first`), chunks of packed sequences one sequence
    after the other; on a GPU that needs the number of chunks, read from `cu_seqlens_cpu` or, without it, from the
    device. `disable_recompute` trades memory for time where a route can; results are the same. `precision` says how
    fp32 tensors may be multiplied: 'ieee' to fp32's own digits, 'tf32' with operands rounded to 11 bits where a route
    gains by it. `cp_context`, from `build_cp_context`: the tensors are this rank's share of a call whose tokens several
    ranks hold, states `[n, HV, K, V]` those of the sequences that it holds a part of. Rows of initial_state are read,
    and get gradients, where a sequence begins on this rank; the final state is the one behind the last token that the
    rank holds. Gradients are those of the sum of all ranks' losses, those of A_log and dt_bias the same on each. Raises
    ValueError or TypeError naming the argument, before any kernel runs.
    """
    call = (Call if torch.compiler.is_compiling() else Call.of)(
        entry="chunk",
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        A_log=A_log,
        dt_bias=dt_bias,
        scale=contract.default_scale(q, scale),
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        safe_gate=safe_gate,
        lower_bound=lower_bound,
        disable_recompute=disable_recompute,
        return_intermediate_states=return_intermediate_states,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        chunk_size=chunk_size,
        precision=precision,
    )
    if cp_context is not None:
        return chunk_kda_cp(call, cp_context)[:2]
    o, final_state, states = ops.serve(call)
    return (o, final_state, states) if return_intermediate_states else (o, final_state)
