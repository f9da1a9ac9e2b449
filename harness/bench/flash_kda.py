"""Authority on FlashKDA as a subject: how its in-place CUDA forward is called with the arguments of `kda.chunk_kda`.

`kda bench --subjects kda,harness.bench.flash_kda:subject`, with the package flash_kda installed.
"""

import importlib

import torch
from torch import Tensor

from harness.call import Route
from harness.problem import Problem
from harness.subject import Subject
from kda.precision import PrecisionSpec

WIDTH, CHUNK = 128, 16
STAGES = {"o": "io", "ht": "fp32", "operand": "bf16", "stored_inverse": "bf16", "state": "bf16"}


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **settled: object,
) -> tuple[Tensor, Tensor | None]:
    """(o, final state or None), as `kda.chunk_kda`; `settled` are flags that `lacks` has found to be what it does."""
    flash_kda = importlib.import_module("flash_kda")
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    o, state = torch.empty_like(v), None
    if output_final_state:
        state = torch.empty(sequences, v.shape[2], WIDTH, WIDTH, dtype=torch.float32, device=v.device)
    if initial_state is not None and not state_v_first:
        initial_state = initial_state.mT.contiguous()
    scale = WIDTH**-0.5 if scale is None else scale
    bias = dt_bias.view(-1, WIDTH)
    states = {"initial_state": initial_state, "final_state": state, "cu_seqlens": cu_seqlens}
    flash_kda.fwd(q, k, v, g, beta, scale, o, A_log, bias, lower_bound, **states)
    return o, state if state is None or state_v_first else state.mT


def lacks(problem: Problem) -> str | None:
    """Why it cannot take a problem, or None."""
    needs = {
        "bf16 tensors": {problem.dtype, problem.gate_dtype} == {"bf16"},
        f"K = V = {WIDTH}": (problem.K, problem.V) == (WIDTH, WIDTH),
        "one value head to a query head": problem.group == 1,
        "a lower_bound with A_log and dt_bias": problem.gate == "lower_bound" and problem.A_log and problem.dt_bias,
        "l2norm and beta_sigmoid in the kernel": problem.l2norm and problem.beta_sigmoid and not problem.neg_eigval,
        "int64 offsets": not problem.packed or problem.offsets == "int64",
        "no intermediate states": not problem.intermediates,
    }
    return next((f"needs {need}" for need, given in needs.items() if not given), None)


def subject() -> Subject:
    """FlashKDA's forward as a subject; ValueError where it is not installed."""
    try:
        module = importlib.import_module("flash_kda")
    except ImportError as error:
        raise ValueError(f"subject is 'flash_kda', which cannot be imported: {error}") from None
    spec = PrecisionSpec("chunk", STAGES, chunk=CHUNK, diagonal="anchor", inverse="substitution")
    route = Route("flash_kda", "chunk", chunk_kda, spec, lacks, differentiable=False)
    return Subject("flash_kda", str(getattr(module, "__version__", "")), (route,))
