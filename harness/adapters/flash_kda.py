"""Authority on FlashKDA as a subject: what its CUDA forward is documented to take, and where its design rounds.

Source: https://github.com/MoonshotAI/FlashKDA, read at 1ce47ea. `pip install -v --no-build-isolation .` in a clone with
its submodule builds it; so does torch's extension loader, in about 100 s, from csrc/flash_kda.cpp and
csrc/smxx/fwd_launch.cu with CUTLASS' include folder: name `flash_kda_C`, for a Hopper GPU with `-gencode
arch=compute_90a,code=sm_90a --expt-relaxed-constexpr --expt-extended-lambda --use_fast_math` and the `-U__CUDA_NO_*`
flags of its setup.py, its flash_kda folder on the path.
"""

from dataclasses import replace

from harness.adapters.declare import Adapter, Domain, Gate, States
from harness.adapters.routes import adapter_route
from harness.call import Route
from kda.precision import PrecisionSpec

# NOTE [What FlashKDA rounds]
# Chunks of 16 tokens. q and k are normalised to bf16. Sigmoids, of the gate and of beta, go by tanh.approx. 2^G, 2^-G,
# every product with them, the scale, k.k (fp16), q.k, residuals and values are stored in bf16 before they are used
# again, and both parts of o too; so is the state, fp32 ones on their way in. The inverse is a doubling series in fp16,
# with sums in fp16, stored in bf16. All of that is its documented design: what it costs is UNSTABLE, not BUG.
PRECISION = PrecisionSpec(
    "chunk",
    {
        **{"o": "io", "ht": "fp32", "qk_norm": "bf16", "sigmoid": "tanh_approx"},
        **{"operand": "bf16", "merge": "fp16", "stored_inverse": "bf16", "state": "bf16"},
    },
    chunk=16,
    inverse="neumann",
    form="stored",
)

ADAPTER = Adapter(
    "flash_kda",
    "flash_kda:fwd",
    PRECISION,
    arguments={"out": "out", "final_state": "final_state"},
    without=("safe_gate", "chunk_size", "return_intermediate_states"),
    gate=Gate(activation="always", softplus=False, bounds=(-5.0, 0.0), needs=("A_log", "dt_bias")),
    l2norm="always",
    beta="always",
    neg_eigval=False,
    states=States(v_first=True, final="written"),
    scale_required=True,
    offsets="int64",
    by_head=True,
    results=(),
    contiguous=True,
    differentiable=False,
    domain=Domain(("bf16",), ("bf16",), (128,), (128,), grouped=False, shortest=1, tokens=1, tail=False),
)
# Its other mode: states that are handed over in bf16. `--subject harness.adapters.flash_kda:IN_BF16`
IN_BF16 = replace(
    ADAPTER,
    route="flash_kda-bf16",
    precision=replace(PRECISION, stages={**PRECISION.stages, "ht": "bf16"}),
    states=replace(ADAPTER.states, dtype="bf16"),
)


def routes() -> tuple[Route, ...]:
    """Its one route. ValueError where it is not installed."""
    return (adapter_route(ADAPTER, f"{__name__}:ADAPTER"),)
