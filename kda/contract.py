"""Authority on what a legal call is: one place, one wording, and every refusal before any kernel runs."""

import math
from dataclasses import dataclass, replace
from typing import NoReturn, Self

import torch
from torch import Tensor
from torch.autograd import forward_ad

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INDEX_DTYPES = (torch.int32, torch.int64)
POOL_DTYPES = (torch.float32, torch.bfloat16)
MAX_HEAD_DIM = 256
MAX_DECODE_TOKENS = 8  # new tokens of one sequence in one call
SAFE_BOUND = -5.0
PRECISIONS = ("ieee", "tf32")  # of the products of fp32 tensors
DIFFERENTIABLE = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
FP32_MAX = torch.finfo(torch.float32).max


def refuse(name: str, got: object, must: str, error: type[Exception] = ValueError) -> NoReturn:
    """The one wording of every refusal: the argument, what it was, what it must be."""
    raise error(f"{name} is {got}; it must be {must}")


def default_scale(q: Tensor, scale: float | None) -> float:
    """K^-1/2 for None; anything else is left to validation."""
    if scale is None and isinstance(q, Tensor) and q.dim() == 4 and q.shape[-1]:
        return q.shape[-1] ** -0.5
    return 1.0 if scale is None else scale


@dataclass(frozen=True, eq=False)
class Call:
    """One validated call of the operator; every route is handed exactly this.

    q, k `[B, T, H, K]`, v `[B, T, HV, V]`, g `[B, T, HV, K]`, beta `[B, T, HV]`, states `[N, HV, K, V]` fp32
    (`[N, HV, V, K]` V-first).
    """

    entry: str
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    scale: float = 1.0
    initial_state: Tensor | None = None
    output_final_state: bool = False
    use_qk_l2norm_in_kernel: bool = False
    use_gate_in_kernel: bool = False
    use_beta_sigmoid_in_kernel: bool = False
    allow_neg_eigval: bool = False
    safe_gate: bool = False
    lower_bound: float | None = None
    disable_recompute: bool = False
    return_intermediate_states: bool = False
    state_v_first: bool = False
    cu_seqlens: Tensor | None = None
    cu_seqlens_cpu: Tensor | None = None
    chunk_size: int = 64
    precision: str = "ieee"

    @classmethod
    def of(cls, **arguments: object) -> Self:
        """The call with all of these arguments, in a fraction of the constructor's time; not for torch.compile."""
        made = object.__new__(cls)
        made.__dict__.update(arguments)
        return made

    def but(self, **changes: object) -> Self:
        """The call with other arguments, as `dataclasses.replace` has it, in a tenth of the time."""
        return self.of(**{**self.__dict__, **changes})

    @property
    def shape(self) -> tuple[int, int, int, int, int, int]:
        """(B, T, H, HV, K, V)."""
        (B, T, H, K), (_, _, HV, V) = self.q.shape, self.v.shape
        return B, T, H, HV, K, V

    @property
    def sequences(self) -> int:
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.numel() - 1

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        _, _, _, HV, K, V = self.shape
        return (self.sequences, HV, V, K) if self.state_v_first else (self.sequences, HV, K, V)

    @property
    def beta_range(self) -> float:
        """What beta's sigmoid is multiplied by."""
        return 2.0 if self.allow_neg_eigval else 1.0

    def offsets(self) -> Tensor:
        """First row of every sequence in the flattened batch, and the end: int64 `[N + 1]`, as kernels may trust it.

        Packed: cu_seqlens made nondecreasing within [0, T], whatever the device holds; no host sync.
        """
        if self.cu_seqlens is None:
            return torch.arange(self.sequences + 1, device=self.q.device) * self.q.shape[1]
        return self.cu_seqlens.long().clamp(0, self.q.shape[1]).cummax(0).values

    def chunk_offsets(self) -> Tensor:
        """Index of every sequence's first chunk, and the total: int64 `[N + 1]` on the device, without a host sync."""
        chunks = (self.offsets().diff() + self.chunk_size - 1).div(self.chunk_size, rounding_mode="floor")
        return torch.nn.functional.pad(chunks.cumsum(0), (1, 0))

    def chunk_bound(self) -> int:
        """At least the number of chunks of the whole call, known without reading the offsets."""
        if self.cu_seqlens is None:
            return self.sequences * self.chunks_per_row()
        return self.q.shape[1] // self.chunk_size + self.sequences

    def chunks_per_row(self) -> int:
        """Chunks of one row of the batch; packed on a GPU: from `cu_seqlens_cpu`, or by waiting for the device."""
        if self.cu_seqlens is None:
            return -(-self.q.shape[1] // self.chunk_size)
        offsets = self.cu_seqlens if self.cu_seqlens_cpu is None else self.cu_seqlens_cpu
        return sum(-(-length // self.chunk_size) for length in offsets.diff().tolist())


@dataclass(frozen=True, eq=False)
class GateCall:
    """One validated call of the gate: g `[B, T, HV, K]`, A_log `[HV]`, dt_bias `[HV * K]`."""

    g: Tensor
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    lower_bound: float | None = None
    output_dtype: torch.dtype = torch.float32

    entry = "gate"


@dataclass(frozen=True, eq=False, kw_only=True)
class DecodeCall(Call):
    """One validated call of `kda_decode`: state_pool `[P, HV, K, V]` (`[P, HV, V, K]` V-first), fp32 or bf16, changed
    in place; slots `[N]` or `[N, S]` and num_accepted_tokens `[N]`, int32 or int64.
    """

    state_pool: Tensor
    slots: Tensor
    num_accepted_tokens: Tensor | None = None

    @property
    def columns(self) -> int:
        """S, or 1 where each sequence has one slot."""
        return 1 if self.slots.dim() == 1 else self.slots.shape[1]

    def slot_table(self) -> Tensor:
        """int64 `[N, columns]`; what is no slot of the pool is -1."""
        table = self.slots.reshape(self.sequences, self.columns).long()
        return table.where((table >= 0) & (table < self.state_pool.shape[0]), -1)

    def first_slots(self) -> Tensor:
        """int64 `[N]`: the slot of each sequence's state as the call begins; -1 for a sequence that is padding."""
        if self.num_accepted_tokens is None:
            return self.slot_table()[:, 0]
        column = self.num_accepted_tokens.long() - 1
        inside = (column >= 0) & (column < self.columns)
        first = self.slot_table().gather(1, column.clamp(0, self.columns - 1)[:, None])[:, 0]
        return first.where(inside, -1)


def validate(call: Call) -> Call:
    """Refuse anything that is not in the contract; returns the call, its numbers as floats."""
    check_transforms("q")
    _check_tensors(call)
    _check_flags(call)
    _check_bound(call)
    _check_gate_parameters(call.use_gate_in_kernel, call.lower_bound, call.A_log, call.dt_bias, call.g)
    _check_offsets(call)
    _check_state(call)
    if isinstance(call, DecodeCall):
        _check_decode(call)
    return with_floats(call)


def with_floats(call: Call) -> Call:
    """The call with its numbers as floats, whatever numbers they were."""
    if type(call.scale) is float and type(call.lower_bound) in (float, type(None)):
        return call
    return replace(call, scale=float(call.scale), lower_bound=_as_float(call.lower_bound))


def validate_gate(call: GateCall) -> GateCall:
    """The contract of `fused_kda_gate`; returns the call, its numbers as floats."""
    check_transforms("g")
    _check_tensor("g", call.g, "[B, T, HV, K]", 4, None, FLOAT_DTYPES, call.g)
    _check_lower_bound(call.lower_bound)
    _check_gate_parameters(True, call.lower_bound, call.A_log, call.dt_bias, call.g)
    if not isinstance(call.output_dtype, torch.dtype) or call.output_dtype not in _allowed(FLOAT_DTYPES, call.g):
        refuse("output_dtype", call.output_dtype, f"one of {_names(FLOAT_DTYPES)}", TypeError)
    return replace(call, lower_bound=_as_float(call.lower_bound))


def check_transforms(name: str) -> None:
    """Batched tensors and tangents would be lost where kernels take the data, in some routes without a word."""
    if not torch.compiler.is_compiling() and (
        torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    ):
        refuse(
            name,
            "under a torch.func transform or forward-mode differentiation",
            "outside of both: there are reverse-mode gradients, and a batch axis instead of vmap",
            TypeError,
        )


def _as_float(x: float | None) -> float | None:
    return None if x is None else float(x)


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _allowed(dtypes: tuple[torch.dtype, ...], like: Tensor) -> tuple[torch.dtype, ...]:
    """float64 is legal on the CPU, where the PyTorch backend computes in it."""
    return (*dtypes, torch.float64) if like.device.type == "cpu" else dtypes


def _check_tensor(name, x, letters, rank, shape, dtypes, like) -> None:
    if not isinstance(x, Tensor):
        refuse(name, type(x).__name__, f"a tensor {letters}", TypeError)
    if x.dim() != rank:
        refuse(f"{name}.shape", list(x.shape), letters)
    if shape is not None and tuple(x.shape) != tuple(shape):
        refuse(f"{name}.shape", list(x.shape), f"{letters} = {list(shape)}")
    if x.dtype not in _allowed(dtypes, x):
        refuse(f"{name}.dtype", str(x.dtype).removeprefix("torch."), f"one of {_names(dtypes)}", TypeError)
    if x.device != like.device:
        refuse(f"{name}.device", x.device, f"{like.device}, as the other tensors")
    _check_layout(name, x)


def _check_layout(name: str, x: Tensor) -> None:
    if x.layout != torch.strided:
        refuse(f"{name}.layout", x.layout, "torch.strided: a dense tensor, of any strides")


def _check_tensors(call: Call) -> None:
    q = call.q
    _check_tensor("q", q, "[B, T, H, K]", 4, None, FLOAT_DTYPES, q)
    B, T, H, K = q.shape
    if not 1 <= K <= MAX_HEAD_DIM:
        refuse("q.shape", list(q.shape), f"[B, T, H, K] with K in 1..{MAX_HEAD_DIM}")
    _check_tensor("k", call.k, "[B, T, H, K]", 4, q.shape, (q.dtype,), q)
    _check_tensor("v", call.v, "[B, T, HV, V]", 4, None, (q.dtype,), q)
    HV, V = call.v.shape[2:]
    if call.v.shape[:2] != q.shape[:2]:
        refuse("v.shape", list(call.v.shape), f"[B, T, HV, V] with B, T = {B}, {T}")
    if not 1 <= V <= MAX_HEAD_DIM:
        refuse("v.shape", list(call.v.shape), f"[B, T, HV, V] with V in 1..{MAX_HEAD_DIM}")
    if H < 1 or HV % H or HV < H:
        refuse("v.shape", list(call.v.shape), f"[B, T, HV, V] with HV a multiple of H = {H}")
    _check_tensor("g", call.g, "[B, T, HV, K]", 4, (B, T, HV, K), FLOAT_DTYPES, q)
    _check_tensor("beta", call.beta, "[B, T, HV]", 3, (B, T, HV), FLOAT_DTYPES, q)
    if isinstance(call.scale, bool) or not isinstance(call.scale, (int, float)):
        refuse("scale", repr(call.scale), "a finite number, or None for K^-1/2", TypeError)
    if not abs(call.scale) <= FP32_MAX:
        refuse("scale", repr(call.scale), "a number that is finite in fp32, or None for K^-1/2")


def _check_flags(call: Call) -> None:
    for name in (
        "output_final_state",
        "use_qk_l2norm_in_kernel",
        "use_gate_in_kernel",
        "use_beta_sigmoid_in_kernel",
        "allow_neg_eigval",
        "safe_gate",
        "disable_recompute",
        "return_intermediate_states",
        "state_v_first",
    ):
        if not isinstance(getattr(call, name), bool):
            refuse(name, repr(getattr(call, name)), "True or False", TypeError)
    if call.allow_neg_eigval and not call.use_beta_sigmoid_in_kernel:
        refuse("allow_neg_eigval", True, "False unless use_beta_sigmoid_in_kernel is True: it doubles that sigmoid")
    if not isinstance(call.chunk_size, int) or call.chunk_size not in (32, 64):
        refuse("chunk_size", repr(call.chunk_size), "32 or 64")
    if not isinstance(call.precision, str) or call.precision not in PRECISIONS:
        refuse("precision", repr(call.precision), "'ieee' or 'tf32'")


def _check_lower_bound(bound: object) -> None:
    if bound is None:
        return
    if isinstance(bound, bool) or not isinstance(bound, (int, float)):
        refuse("lower_bound", repr(bound), "a number below 0, or None", TypeError)
    if not -FP32_MAX <= bound < 0:
        refuse("lower_bound", repr(bound), "below 0 and finite in fp32")


def _check_bound(call: Call) -> None:
    _check_lower_bound(call.lower_bound)
    if call.lower_bound is not None and not call.use_gate_in_kernel:
        refuse(
            "lower_bound",
            repr(call.lower_bound),
            "None unless use_gate_in_kernel is True: it belongs to that activation",
        )
    if call.safe_gate and call.use_gate_in_kernel and (call.lower_bound is None or call.lower_bound < SAFE_BOUND):
        refuse(
            "lower_bound",
            repr(call.lower_bound),
            f"in [{SAFE_BOUND:g}, 0) when safe_gate and use_gate_in_kernel are True",
        )


def _check_gate_parameters(in_kernel: bool, lower_bound, A_log, dt_bias, g: Tensor) -> None:
    HV, K = g.shape[2:]
    if not in_kernel:
        for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
            if x is not None:
                refuse(name, "given", "None unless use_gate_in_kernel is True")
        return
    if A_log is None and lower_bound is None:
        refuse("A_log", None, "a tensor [HV] for the softplus gate (only a lower_bound gate can do without)")
    if A_log is not None:
        _check_tensor("A_log", A_log, "[HV]", 1, (HV,), FLOAT_DTYPES, g)
    if dt_bias is not None:
        _check_tensor("dt_bias", dt_bias, "[HV * K]", 1, (HV * K,), FLOAT_DTYPES, g)


def _check_offsets(call: Call) -> None:
    cu, cpu = call.cu_seqlens, call.cu_seqlens_cpu
    if cu is None:
        if cpu is not None:
            refuse("cu_seqlens_cpu", "given", "None unless cu_seqlens is given")
        return
    _check_indices("cu_seqlens", cu, "[N + 1]", call.q)
    if cu.dim() != 1 or cu.numel() < 1:
        refuse("cu_seqlens.shape", list(cu.shape), "[N + 1]")
    if call.q.shape[0] != 1:
        refuse("q.shape", list(call.q.shape), "[1, T, H, K] when cu_seqlens packs the batch")
    if cpu is not None:
        _check_offsets_copy(cpu, cu)


def _check_indices(name: str, x: object, letters: str, like: Tensor) -> None:
    if not isinstance(x, Tensor):
        refuse(name, type(x).__name__, f"a tensor {letters}", TypeError)
    if x.dtype not in INDEX_DTYPES:
        refuse(f"{name}.dtype", _names((x.dtype,)), "int32 or int64", TypeError)
    if x.device != like.device:
        refuse(f"{name}.device", x.device, f"{like.device}, as the other tensors")
    _check_layout(name, x)


def _check_offsets_copy(cpu: object, cu: Tensor) -> None:
    if not isinstance(cpu, Tensor):
        refuse("cu_seqlens_cpu", type(cpu).__name__, "a tensor [N + 1]", TypeError)
    if cpu.dtype not in INDEX_DTYPES:
        refuse("cu_seqlens_cpu.dtype", _names((cpu.dtype,)), "int32 or int64", TypeError)
    if cpu.device.type != "cpu":
        refuse("cu_seqlens_cpu.device", cpu.device, "cpu")
    _check_layout("cu_seqlens_cpu", cpu)
    if cpu.shape != cu.shape:
        refuse("cu_seqlens_cpu.shape", list(cpu.shape), f"that of cu_seqlens, {list(cu.shape)}")


def _check_state(call: Call) -> None:
    if call.initial_state is not None:
        letters = "[N, HV, V, K]" if call.state_v_first else "[N, HV, K, V]"
        _check_tensor("initial_state", call.initial_state, letters, 4, call.state_shape, (torch.float32,), call.q)


def _check_decode(call: DecodeCall) -> None:
    for name in (*DIFFERENTIABLE, "state_pool"):
        x = getattr(call, name)
        if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
            must = "one without, or the call under torch.no_grad(): states that change in place have no gradients"
            refuse(name, "a tensor that requires a gradient", must)
    _check_pool(call)
    N, T = call.sequences, call.q.shape[1]
    if call.cu_seqlens is None and not 1 <= T <= MAX_DECODE_TOKENS:
        refuse("q.shape", list(call.q.shape), f"[B, T, H, K] with T in 1..{MAX_DECODE_TOKENS} new tokens a sequence")
    slots, accepted = call.slots, call.num_accepted_tokens
    _check_indices("slots", slots, "[N] or [N, S]", call.q)
    if slots.dim() not in (1, 2) or slots.shape[0] != N:
        refuse("slots.shape", list(slots.shape), f"[N] or [N, S] with N = {N}, the number of sequences")
    least = 1 if call.cu_seqlens is not None else T
    if slots.dim() == 2 and not least <= slots.shape[1] <= MAX_DECODE_TOKENS:
        refuse(
            "slots.shape", list(slots.shape), f"[N, S] with S in {least}..{MAX_DECODE_TOKENS}, a slot for each token"
        )
    if accepted is None:
        return
    _check_indices("num_accepted_tokens", accepted, "[N]", call.q)
    if tuple(accepted.shape) != (N,):
        refuse("num_accepted_tokens.shape", list(accepted.shape), f"[N] = {[N]}")
    if slots.dim() != 2:
        refuse("num_accepted_tokens", "given", "None unless slots is [N, S]: a slot for the state after each token")


def _check_pool(call: DecodeCall) -> None:
    pool, letters = call.state_pool, "[P, HV, V, K]" if call.state_v_first else "[P, HV, K, V]"
    _check_tensor("state_pool", pool, letters, 4, None, POOL_DTYPES, call.q)
    state = call.state_shape[1:]
    if tuple(pool.shape[1:]) != state:
        refuse("state_pool.shape", list(pool.shape), f"{letters} = [P, {', '.join(map(str, state))}]")
    dense, size = (state[1] * state[2], state[2], 1), math.prod(state)
    is_dense = all(n == 1 or stride == own for n, stride, own in zip(state, pool.stride()[1:], dense))
    if not is_dense or (pool.shape[0] > 1 and pool.stride(0) < size):
        must = f"[s, {', '.join(map(str, dense))}] with s at least {size}: it is changed in place, slot by slot"
        refuse("state_pool.stride()", list(pool.stride()), must)
