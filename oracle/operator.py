"""Authority on the whole operator: what a KDA call must return, forward and gradients, from exactly the tensors it was given."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from oracle import gates, recurrence
from oracle.packing import Group, Layout
from oracle.recurrence import Rows
from oracle.rounding import EXACT, Rounding

Inputs = Mapping[str, Tensor | None]
Formats = Mapping[str, str]
BLOCK_BYTES = {"cpu": 2**30, "cuda": 2**34}  # live states of one block of heads


@dataclass(frozen=True)
class Options:
    """The arguments of a call that are not tensors; names are those of `kda.chunk_kda`."""

    scale: float | None = None
    use_qk_l2norm_in_kernel: bool = False
    use_gate_in_kernel: bool = False
    lower_bound: float | None = None
    use_beta_sigmoid_in_kernel: bool = False
    allow_neg_eigval: bool = False
    state_v_first: bool = False
    chunk_size: int = 64
    intermediates: bool = False


Core = Callable[[Rows, float, Tensor | None, Tensor | None, int | None], dict[str, Tensor]]


def evaluate(
    inputs: Inputs,
    options: Options,
    *,
    gradients: bool = True,
    rounding: Rounding = EXACT,
    formats: Formats | None = None,
    device: torch.device | str | None = None,
    core: Core | None = None,
) -> dict[str, Tensor]:
    """o, ht, h and every gradient, float64, in the layouts of the kernels' API.

    `inputs`: q, k `[B, T, H, K]`, v `[B, T, HV, V]`, g `[B, T, HV, K]`, beta `[B, T, HV]`, and optionally A_log `[HV]`, dt_bias
    `[HV * K]`, initial_state `[N, HV, K, V]`, cu_seqlens `[N + 1]`, do (like o), dht (like the state); any dtype, taken exactly. A missing do or
    dht is a zero gradient. With a rounding that has M replicas every result has a leading dimension M. `core` replaces the recurrence by
    another algorithm for the same rows (the chunkwise one, in `stages`).
    """
    device = torch.device(device) if device is not None else inputs["q"].device
    formats = dict(formats or {})
    x = {
        name: value.detach().to(device, torch.float64)
        for name, value in inputs.items()
        if value is not None and name != "cu_seqlens"
    }
    call = _Prepared(x, inputs.get("cu_seqlens"), options, rounding, formats)
    core = core or recurrent_core(rounding, formats)
    out = call.allocate(gradients)
    for group in call.layout.groups(device):
        for heads in call.head_blocks(group, device):
            call.run(group, heads, core, gradients, out)
    return call.finish(out, gradients)


def evaluate_gate(
    inputs: Inputs, options: Options, *, gradients: bool = True, rounding: Rounding = EXACT, formats: Formats | None = None
) -> dict[str, Tensor]:
    """o = the activated natural-log gate `[B, T, HV, K]` of inputs g, A_log, dt_bias, and the gradients dg, dA_log, ddt_bias for `do`."""
    x = {name: value.detach().double() for name, value in inputs.items() if value is not None and name != "cu_seqlens"}
    shape = x["g"].shape
    raw = _replicated(x["g"].flatten(0, 1), rounding)
    g, adjoint = gates.activate_gate(raw, x.get("A_log"), x.get("dt_bias"), options.lower_bound, rounding)
    out = {"o": g.unflatten(1, shape[:2])}
    if gradients and "do" in x:
        out |= adjoint(_replicated(x["do"].flatten(0, 1), rounding))
        out["dg"] = out["dg"].unflatten(1, shape[:2])
    return out if rounding.replicas else {name: value[0] for name, value in out.items()}


def recurrent_core(rounding: Rounding, formats: Formats) -> Core:
    """The plain recurrence as a core; formats: `update` (operands of the reductions, default fp32)."""
    operand = formats.get("update", "fp32")

    def core(rows: Rows, scale: float, do: Tensor | None, dstate: Tensor | None, chunk: int | None) -> dict[str, Tensor]:
        every = chunk or recurrence.segment_length(rows.length)
        o, state, kept = recurrence.forward(rows, scale, rounding, operand, every if chunk or do is not None else None)
        out = {"o": o, "state": state}
        if chunk:
            out["h"] = torch.stack(kept, 2)
        if do is not None:
            out |= recurrence.backward(rows, kept, every, do, dstate, scale, rounding, operand)
        return out

    return core


def _replicated(x: Tensor, rounding: Rounding) -> Tensor:
    return x.expand(max(rounding.replicas, 1), *x.shape)


class _Prepared:
    """A call after everything that comes before the recurrence, token-major: `[M, B * T, heads, D]`."""

    def __init__(self, x: dict[str, Tensor], cu_seqlens: Tensor | None, options: Options, rounding: Rounding, formats: dict):
        self.x, self.options, self.rounding = x, options, rounding
        self.batch, self.length, self.heads, self.K = x["q"].shape
        self.value_heads, self.V = x["v"].shape[2:]
        self.packed = cu_seqlens is not None
        self.layout = Layout.of(self.batch, self.length, cu_seqlens)
        self.sequences = len(self.layout.lengths)
        self.scale = self.K**-0.5 if options.scale is None else options.scale
        flat = lambda name: _replicated(x[name].flatten(0, 1), rounding)  # noqa: E731
        self.q, self.q_adjoint = self._normalised(flat("q"), "q")
        self.k, self.k_adjoint = self._normalised(flat("k"), "k")
        self.v = flat("v")
        self.beta, self.beta_adjoint = gates.activate_beta(
            flat("beta"), options.use_beta_sigmoid_in_kernel, options.allow_neg_eigval, rounding
        )
        self.g, self.g_adjoint = flat("g"), lambda dg: {"dg": dg}
        if options.use_gate_in_kernel:
            self.g, self.g_adjoint = gates.activate_gate(
                self.g, x.get("A_log"), x.get("dt_bias"), options.lower_bound, rounding, formats.get("gate", "fp32")
            )
        shape = (self.sequences, self.value_heads, self.K, self.V)
        self.state = self._k_first(x["initial_state"]) if "initial_state" in x else self.v.new_zeros(shape)
        self.do = x["do"].flatten(0, 1) if "do" in x else torch.zeros_like(x["v"]).flatten(0, 1)
        self.dstate = self._k_first(x["dht"]) if "dht" in x else self.v.new_zeros(shape)

    def _normalised(self, x: Tensor, name: str) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        if self.options.use_qk_l2norm_in_kernel:
            return gates.l2norm(x, f"{name}_l2norm", self.rounding)
        return x, lambda dy: dy

    def _k_first(self, state: Tensor) -> Tensor:
        return state.mT if self.options.state_v_first else state

    def allocate(self, gradients: bool) -> dict[str, Tensor]:
        M, tokens, HV, K, V = max(self.rounding.replicas, 1), self.batch * self.length, self.value_heads, self.K, self.V
        out = {"o": self.v.new_zeros(M, tokens, HV, V), "ht": self.v.new_zeros(M, self.sequences, HV, K, V)}
        if self.options.intermediates:
            self.slots = self.layout.chunk_slots(self.options.chunk_size)
            chunks = sum(-(-length // self.options.chunk_size) for length in self.layout.lengths)
            out["h"] = self.v.new_zeros(M, chunks, HV, K, V)
        if gradients:
            for name, width in (("dq", K), ("dk", K), ("dv", V), ("dg", K), ("dbeta", 1)):
                out[name] = self.v.new_zeros(M, tokens, HV, width)
            out["dh0"] = self.v.new_zeros(M, self.sequences, HV, K, V)
        return out

    def head_blocks(self, group: Group, device: torch.device) -> list[list[int]]:
        """Value heads in blocks whose live states (kept, recomputed and their gradients) fit the budget."""
        states = 8 * recurrence.segment_length(group.length)
        per_head = max(self.rounding.replicas, 1) * len(group.sequences) * self.K * self.V * 8 * states
        size = max(1, BLOCK_BYTES.get(device.type, 2**30) // max(per_head, 1))
        heads = list(range(self.value_heads))
        return [heads[first : first + size] for first in range(0, len(heads), size)]

    def run(self, group: Group, heads: list[int], core: Core, gradients: bool, out: dict[str, Tensor]) -> None:
        """Evaluate one block: gather its rows, run the core, scatter what it returns."""
        n, length, members = len(group.sequences), group.length, group.sequences
        queries = [head // (self.value_heads // self.heads) for head in heads]

        def rows(x: Tensor, which: list[int]) -> Tensor:  # [M, tokens, heads, D] -> [M, n * heads, T, D]
            return x[:, group.tokens][:, :, :, which].transpose(2, 3).flatten(1, 2)

        def scatter(name: str, value: Tensor) -> None:
            value = value.unflatten(1, (n, len(heads))).transpose(2, 3)
            block = out[name][:, :, heads[0] : heads[-1] + 1]
            block[:, group.tokens.flatten()] = value.flatten(1, 2)

        def states(value: Tensor) -> Tensor:
            return value.unflatten(1, (n, len(heads)))

        state = self.state[members][:, heads].flatten(0, 1)
        dstate = self.dstate[members][:, heads].flatten(0, 1)
        span = slice(heads[0], heads[-1] + 1)
        if length == 0:
            out["ht"][:, members, span] = states(state[None])
            if gradients:
                out["dh0"][:, members, span] = states(dstate[None])
            return
        block = Rows(
            rows(self.q, queries),
            rows(self.k, queries),
            rows(self.v, heads),
            rows(self.g, heads),
            rows(self.beta[..., None], heads).squeeze(-1),
            _replicated(state, self.rounding),
        )
        chunk = self.options.chunk_size if self.options.intermediates else None
        do = rows(self.do[None], heads) if gradients else None
        result = core(block, self.scale, do, dstate[None] if gradients else None, chunk)
        scatter("o", result["o"])
        out["ht"][:, members, span] = states(result["state"])
        if chunk:
            kept = result["h"].unflatten(1, (n, len(heads)))  # [M, n, heads, NT, K, V]
            for index, sequence in enumerate(members.tolist()):
                first = self.slots[sequence]
                out["h"][:, first : first + kept.shape[3], span] = kept[:, index].transpose(1, 2)
        if gradients:
            for name in ("dq", "dk", "dv", "dg"):
                scatter(name, result[name])
            scatter("dbeta", result["dbeta"][..., None])
            out["dh0"][:, members, span] = states(result["dstate"])

    def finish(self, out: dict[str, Tensor], gradients: bool) -> dict[str, Tensor]:
        """Adjoints of what came before the recurrence, and the caller's layouts."""
        group = self.value_heads // self.heads
        if gradients:
            for name, adjoint in (("dq", self.q_adjoint), ("dk", self.k_adjoint)):
                per_head = out[name].unflatten(2, (self.heads, group))
                summed = self.rounding.accumulate(f"{name}.group", per_head.sum(3), per_head.abs().sum(3), 24) if group > 1 else per_head.sum(3)
                out[name] = adjoint(summed)
            out["dbeta"] = self.beta_adjoint(out["dbeta"].squeeze(-1))
            out |= self.g_adjoint(out["dg"])
            if "initial_state" not in self.x:
                del out["dh0"]
        for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
            if name in out:
                out[name] = out[name].unflatten(1, (self.batch, self.length))
        if "h" in out:
            out["h"] = out["h"].unflatten(1, (self.batch, -1)) if not self.packed else out["h"].unsqueeze(1)
        for name in ("ht", "h", "dh0"):
            if name in out:
                out[name] = out[name].mT if self.options.state_v_first else out[name]
        return out if self.rounding.replicas else {name: value[0] for name, value in out.items()}
