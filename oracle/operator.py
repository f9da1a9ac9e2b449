"""Authority on the whole operator: what a KDA call must return, forward and gradients, for exactly its tensors."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from oracle import gates, recurrence
from oracle.packing import Group, Layout
from oracle.recurrence import LIVE_STATES, Room, Rows, Stages
from oracle.rounding import EXACT, Rounding

Inputs = Mapping[str, Tensor | None]
Formats = Mapping[str, str]
BLOCK_BYTES = {"cpu": 2**30, "cuda": 2**34}  # live states of one block of heads
CACHE_BYTES = 2**17  # of one state, of those replicas that a CPU works off together
BY_TOKEN = ("o", "dq", "dk", "dv", "dg", "dbeta")


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

    `inputs`: q, k `[B, T, H, K]`, v `[B, T, HV, V]`, g `[B, T, HV, K]`, beta `[B, T, HV]`, and optionally A_log `[HV]`,
    dt_bias `[HV * K]`, initial_state `[N, HV, K, V]`, cu_seqlens `[N + 1]`, do (like o), dht (like the state); any
    dtype, taken exactly. A missing do or dht is a zero gradient. With a rounding that has M replicas every result has a
    leading dimension M. `formats`: stage -> format of the rounding points (`recurrence.Stages`, and gate, qk_norm,
    beta, sigmoid), fp32 where not named. `core` replaces the recurrence by another algorithm for the same rows (the
    chunkwise one, in `stages`). ValueError for options, offsets or heads that contradict each other.
    """
    device = torch.device(device) if device is not None else inputs["q"].device
    formats = dict(formats or {})
    x = _doubled(inputs, device)
    call = _Prepared(x, inputs.get("cu_seqlens"), options, rounding, formats)
    core = core or recurrent_core(rounding, formats)
    out = call.allocate(gradients)
    for group in call.layout.groups(device):
        for part, heads in call.blocks(group):
            call.run(part, heads, core, gradients, out)
    return call.finish(out, gradients)


def evaluate_gate(
    inputs: Inputs,
    options: Options,
    *,
    gradients: bool = True,
    rounding: Rounding = EXACT,
    formats: Formats | None = None,
) -> dict[str, Tensor]:
    """The activated natural-log gate o `[B, T, HV, K]` of g, A_log and dt_bias; with `do` also dg, dA_log, ddt_bias."""
    x = _doubled(inputs, inputs["g"].device)
    _check_gate(x, options)
    shape, storage = x["g"].shape, (formats or {}).get("gate", "fp32")
    raw, sigmoid = _replicated(x["g"].flatten(0, 1), rounding), (formats or {}).get("sigmoid", "fp32")
    parameters = (x.get("A_log"), x.get("dt_bias"), options.lower_bound)
    g, adjoint = gates.activate_gate(raw, *parameters, rounding, storage, sigmoid)
    out = {"o": g.unflatten(1, shape[:2])}
    if gradients and "do" in x:
        out |= adjoint(_replicated(x["do"].flatten(0, 1), rounding))
        out["dg"] = out["dg"].unflatten(1, shape[:2])
    return _without_replicas(out, rounding)


def recurrent_core(rounding: Rounding, formats: Formats) -> Core:
    """The plain recurrence as a core; `formats` as in `recurrence.Stages`."""
    stages = Stages.of(formats)

    def core(
        rows: Rows, scale: float, do: Tensor | None, dstate: Tensor | None, chunk: int | None
    ) -> dict[str, Tensor]:
        room = Room(reused=True)
        parts = [
            run(rows.some(first, last), scale, do, dstate, chunk, rounding.some(first, last), room)
            for first, last in _spans(max(rounding.replicas, 1), rows.state[0])
        ]
        return parts[0] if len(parts) == 1 else {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def run(
        rows: Rows,
        scale: float,
        do: Tensor | None,
        dstate: Tensor | None,
        chunk: int | None,
        rounding: Rounding,
        room: Room,
    ) -> dict[str, Tensor]:
        every, gradients = chunk or recurrence.segment_length(rows.length), {}
        if do is not None and rounding.replicas and recurrence.keeps_all(rows):
            o, state, kept, gradients = recurrence.both(
                rows, scale, do, dstate, rounding, stages, every, bool(chunk), room
            )
        else:
            keep = every if chunk or do is not None else None
            o, state, kept = recurrence.forward(rows, scale, rounding, stages, keep)
            if do is not None:
                gradients = recurrence.backward(rows, kept, every, do, dstate, scale, rounding, stages)
        out = {"o": o, "state": state}
        if chunk:
            out["h"] = torch.stack(kept, 2)
        return out | gradients

    return core


def _spans(replicas: int, state: Tensor) -> list[tuple[int, int]]:
    """The replicas in spans whose states stay in a CPU's cache, where the recurrence does little with each number."""
    count = replicas if state.is_cuda else max(1, CACHE_BYTES // max(1, 8 * state.numel()))
    return [(first, min(first + count, replicas)) for first in range(0, replicas, count)]


def _doubled(inputs: Inputs, device: torch.device) -> dict[str, Tensor]:
    """The tensors that are there, without their offsets, in float64: exact for every narrower dtype."""
    present = {name: x for name, x in inputs.items() if x is not None and name != "cu_seqlens"}
    return {name: x.detach().to(device, torch.float64) for name, x in present.items()}


def _replicated(x: Tensor, rounding: Rounding) -> Tensor:
    return x.expand(max(rounding.replicas, 1), *x.shape)


def _without_replicas(out: dict[str, Tensor], rounding: Rounding) -> dict[str, Tensor]:
    return out if rounding.replicas else {name: value[0] for name, value in out.items()}


def _check_gate(x: Mapping[str, Tensor], options: Options) -> None:
    if options.lower_bound is None and "A_log" not in x:
        raise ValueError("A_log is None, must be [HV] unless there is a lower_bound")


def _check(x: Mapping[str, Tensor], options: Options) -> None:
    """ValueError where options and tensors contradict each other."""
    heads, value_heads = x["q"].shape[2], x["v"].shape[2]
    if value_heads % heads:
        raise ValueError(f"v has {value_heads} heads, must be a multiple of the {heads} heads of q")
    if options.allow_neg_eigval and not options.use_beta_sigmoid_in_kernel:
        raise ValueError("allow_neg_eigval is True, must be False without use_beta_sigmoid_in_kernel")
    if options.intermediates and options.chunk_size < 1:
        raise ValueError(f"chunk_size is {options.chunk_size}, must be positive")
    if options.use_gate_in_kernel:
        _check_gate(x, options)


class _Prepared:
    """A call after everything that comes before the recurrence, token-major: `[M, B * T, heads, D]`."""

    def __init__(
        self,
        x: dict[str, Tensor],
        cu_seqlens: Tensor | None,
        options: Options,
        rounding: Rounding,
        formats: Formats,
    ):
        _check(x, options)
        self.x, self.options, self.rounding, self.packed = x, options, rounding, cu_seqlens is not None
        self.batch, self.length, self.heads, self.K = x["q"].shape
        self.value_heads, self.V = x["v"].shape[2:]
        self.layout = Layout.of(self.batch, self.length, cu_seqlens)
        self.slots = self.layout.chunk_slots(options.chunk_size) if options.intermediates else None
        self.scale = self.K**-0.5 if options.scale is None else options.scale
        self._activate(formats)
        state = (len(self.layout.lengths), self.value_heads, self.K, self.V)
        self.state = self._k_first(x["initial_state"]) if "initial_state" in x else self.v.new_zeros(state)
        self.dstate = self._k_first(x["dht"]) if "dht" in x else self.v.new_zeros(state)
        self.do = (x["do"] if "do" in x else torch.zeros_like(x["v"])).flatten(0, 1)

    def _activate(self, formats: Formats) -> None:
        """q, k, v, g and beta as the recurrence takes them, and the adjoints of what made them so."""
        x, options, rounding = self.x, self.options, self.rounding
        q, k, v, g, beta = (_replicated(x[name].flatten(0, 1), rounding) for name in ("q", "k", "v", "g", "beta"))
        stored = lambda stage: formats.get(stage, "fp32")  # noqa: E731
        self.q, self.q_adjoint = q, lambda dq: dq
        self.k, self.k_adjoint = k, lambda dk: dk
        if options.use_qk_l2norm_in_kernel:
            self.q, self.q_adjoint = gates.l2norm(q, "q_l2norm", rounding, stored("qk_norm"))
            self.k, self.k_adjoint = gates.l2norm(k, "k_l2norm", rounding, stored("qk_norm"))
        self.v = v
        self.g, self.g_adjoint = g, lambda dg: {"dg": dg}
        if options.use_gate_in_kernel:
            self.g, self.g_adjoint = gates.activate_gate(
                g, x.get("A_log"), x.get("dt_bias"), options.lower_bound, rounding, stored("gate"), stored("sigmoid")
            )
        use_sigmoid, doubled = options.use_beta_sigmoid_in_kernel, options.allow_neg_eigval
        self.beta, self.beta_adjoint = gates.activate_beta(
            beta, use_sigmoid, doubled, rounding, stored("beta"), stored("sigmoid")
        )

    def _k_first(self, state: Tensor) -> Tensor:
        return state.mT if self.options.state_v_first else state

    def allocate(self, gradients: bool) -> dict[str, Tensor]:
        """Zeros for every result of the recurrence; what no sequence writes stays 0."""
        replicas, tokens = max(self.rounding.replicas, 1), self.batch * self.length
        by_token = lambda width: self.v.new_zeros(replicas, tokens, self.value_heads, width)  # noqa: E731
        states = lambda count: self.v.new_zeros(replicas, count, self.value_heads, self.K, self.V)  # noqa: E731
        out = {"o": by_token(self.V), "ht": states(len(self.layout.lengths))}
        if self.slots:
            out["h"] = states(self.slots[-1])
        if gradients:
            widths = {"dq": self.K, "dk": self.K, "dv": self.V, "dg": self.K, "dbeta": 1}
            out |= {name: by_token(width) for name, width in widths.items()}
            out["dh0"] = states(len(self.layout.lengths))
        return out

    def blocks(self, group: Group) -> Iterator[tuple[Group, range]]:
        """The group in parts, some sequences and value heads each, whose live states fit the budget."""
        live = LIVE_STATES * recurrence.segment_length(group.length)
        row = max(self.rounding.replicas, 1) * max(self.K * self.V, 1) * 8 * live
        rows = max(1, BLOCK_BYTES.get(self.v.device.type, BLOCK_BYTES["cpu"]) // row)
        heads = min(rows, self.value_heads)
        for first in range(0, len(group.sequences), rows // heads):
            some = slice(first, first + rows // heads)
            part = Group(group.length, group.sequences[some], group.tokens[some])
            for head in range(0, self.value_heads, heads):
                yield part, range(head, min(head + heads, self.value_heads))

    def run(self, part: Group, heads: range, core: Core, gradients: bool, out: dict[str, Tensor]) -> None:
        """Evaluate one block: gather its rows, run the core, scatter what it returns."""
        span = slice(heads.start, heads.stop)
        state = self.state[part.sequences][:, span].flatten(0, 1)
        dstate = self.dstate[part.sequences][:, span].flatten(0, 1)
        if part.length == 0:
            result = {"state": state[None], "dstate": dstate[None]}
        else:
            queries = [head // (self.value_heads // self.heads) for head in heads]
            rows = lambda x, which: x[:, part.tokens][:, :, :, which].transpose(2, 3).flatten(1, 2)  # noqa: E731
            block = Rows(
                rows(self.q, queries),
                rows(self.k, queries),
                rows(self.v, span),
                rows(self.g, span),
                rows(self.beta[..., None], span).squeeze(-1),
                _replicated(state, self.rounding),
            )
            arriving = (rows(self.do[None], span), dstate[None]) if gradients else (None, None)
            result = core(block, self.scale, *arriving, self.options.chunk_size if self.slots else None)
        self._scatter(result, part, span, out)

    def _scatter(self, result: dict[str, Tensor], part: Group, span: slice, out: dict[str, Tensor]) -> None:
        """Write a core's result, `[M, sequences * heads, ...]`, to its place in `out`."""
        apart = {name: value.unflatten(1, (len(part.sequences), -1)) for name, value in result.items()}
        for name, target in {"state": "ht", "dstate": "dh0"}.items():
            if name in apart and target in out:
                out[target][:, part.sequences, span] = apart[name]
        for name in BY_TOKEN:
            if name in apart:
                value = apart[name][..., None] if name == "dbeta" else apart[name]
                out[name][:, :, span][:, part.tokens.flatten()] = value.transpose(2, 3).flatten(1, 2)
        if "h" in apart:
            for index, sequence in enumerate(part.sequences.tolist()):
                slots = slice(self.slots[sequence], self.slots[sequence + 1])
                out["h"][:, slots, span] = apart["h"][:, index].transpose(1, 2)

    def finish(self, out: dict[str, Tensor], gradients: bool) -> dict[str, Tensor]:
        """Adjoints of what came before the recurrence, and the caller's layouts."""
        if gradients:
            out["dq"] = self.q_adjoint(self._group_sum("dq", out["dq"]))
            out["dk"] = self.k_adjoint(self._group_sum("dk", out["dk"]))
            out["dbeta"] = self.beta_adjoint(out["dbeta"].squeeze(-1))
            out |= self.g_adjoint(out["dg"])
            if "initial_state" not in self.x:
                del out["dh0"]
        for name in BY_TOKEN:
            if name in out:
                out[name][:, self.layout.used :] = 0  # whatever the tail holds, NaN included
                out[name] = out[name].unflatten(1, (self.batch, self.length))
        if "h" in out:
            sequences = 1 if self.packed else self.batch
            out["h"] = out["h"].unflatten(1, (sequences, self.slots[-1] // max(sequences, 1)))
        for name in ("ht", "h", "dh0"):
            if name in out and self.options.state_v_first:
                out[name] = out[name].mT
        return _without_replicas(out, self.rounding)

    def _group_sum(self, name: str, x: Tensor) -> Tensor:
        """The gradient of a query head: that of its value heads, summed in fp32."""
        members = self.value_heads // self.heads
        if members == 1:
            return x
        x = x.unflatten(2, (self.heads, members))
        return self.rounding.accumulate(f"{name}.group", x.sum(3), x.abs().sum(3), 24)
