"""Authority on calling a declared kernel: our arguments in its conventions, and its results in ours."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.adapters.declare import FLAGS, PARAMETERS, TENSORS, Adapter
from harness.problem import DTYPES, OFFSETS
from harness.serving import Pool
from oracle.packing import Layout

LOG2E = math.log2(math.e)
EPS = 1e-6  # of the normalisation, inside the root

Given = Mapping[str, object]


@dataclass
class Handed:
    """Arguments in a kernel's conventions, and where it leaves what it does not return."""

    arguments: dict[str, object]
    out: Tensor | None = None
    final: Tensor | Pool | None = None


@dataclass(frozen=True)
class Adapted:
    """A declared kernel as a function with the arguments of `kda.chunk_kda` and its neighbours."""

    adapter: Adapter

    def __call__(self, **given: object) -> object:
        handed = self._handed(given)
        returned = self.adapter.implementation(**handed.arguments)
        if self.adapter.entry == "decode":
            return self._decoded(given, handed, returned)
        if self.adapter.entry == "gate":
            return returned / LOG2E if self.adapter.gate.log == "log2" else returned
        return self._results(given, handed, returned)

    def prepared(self, **given: object) -> Callable[[], object]:
        """The kernel's call alone, everything before it done: to be timed. Its buffers are the same at every call."""
        function, arguments = self.adapter.implementation, self._handed(given).arguments
        return lambda: function(**arguments)

    def _handed(self, given: Given) -> Handed:
        adapter, handed = self.adapter, Handed({})
        ours = {name: given.get(name) for name in TENSORS if name in given}
        if adapter.entry != "gate":
            ours |= self._operands(given)
            ours["cu_seqlens"] = self._offsets(given)
            ours["scale"] = self._scale(given)
            ours |= self._flags(given)
        if adapter.entry == "gate" or (adapter.gate.activation in ("always", "flag") and _raw(given)):
            ours |= {name: given.get(name) for name in PARAMETERS}
        if ours.get("dt_bias") is not None and adapter.by_head:
            ours["dt_bias"] = ours["dt_bias"].view(given["g"].shape[-2:])
        ours |= {name: given.get(name) for name in ("chunk_size", "safe_gate", "return_intermediate_states")}
        if adapter.entry == "decode":
            ours |= self._pooled(given, handed)
        elif adapter.entry != "gate":
            ours |= self._states(given, handed)
        if adapter.theirs("out"):
            ours["out"] = handed.out = torch.full_like(ours["v"], math.nan, memory_format=torch.contiguous_format)
        for name, value in ours.items():
            theirs = adapter.theirs(name)
            if theirs and (value is not None or name in ("scale", "out")):
                handed.arguments[theirs] = self._as_declared(name, value)
        handed.arguments |= adapter.constants
        return handed

    def _as_declared(self, name: str, value: object) -> object:
        if not isinstance(value, Tensor):
            return value
        made = value.to(DTYPES[self.adapter.formats[name]]) if name in self.adapter.formats else value
        made = made.contiguous() if self.adapter.contiguous and name not in ("state_pool",) else made
        return made.clone() if name in self.adapter.mutates and made.data_ptr() == value.data_ptr() else made

    def _operands(self, given: Given) -> dict[str, Tensor]:
        """q, k, g and beta, with what its callers are to do before."""
        adapter, made = self.adapter, {}
        if adapter.l2norm == "before" and given.get("use_qk_l2norm_in_kernel"):
            made |= {name: _normalised(given[name]) for name in ("q", "k")}
        if adapter.beta == "before" and given.get("use_beta_sigmoid_in_kernel"):
            beta = given["beta"].float().sigmoid()
            made["beta"] = beta * 2 if given.get("allow_neg_eigval") else beta
        raw = _raw(given)
        g = _activated(given) if raw and adapter.gate.activation == "before" else given["g"]
        if not raw or adapter.gate.activation == "before":
            g = g.float() * LOG2E if adapter.gate.log == "log2" else g
            g = _cumulative(g.float(), given, adapter.gate.cumulative) if adapter.gate.cumulative else g
        return {**made, "g": g}

    def _offsets(self, given: Given) -> Tensor | None:
        offsets = given.get("cu_seqlens")
        return offsets if offsets is None or self.adapter.offsets is None else offsets.to(OFFSETS[self.adapter.offsets])

    def _scale(self, given: Given) -> float | None:
        scale = given.get("scale")
        return given["q"].shape[-1] ** -0.5 if scale is None and self.adapter.scale_required else scale

    def _flags(self, given: Given) -> dict[str, object]:
        adapter = self.adapter
        places = zip(FLAGS, (adapter.l2norm, adapter.gate.activation, adapter.beta))
        flags = {flag: given.get(flag, False) for flag, place in places if place == "flag"}
        if adapter.neg_eigval and adapter.beta in ("always", "flag"):
            flags["allow_neg_eigval"] = given.get("allow_neg_eigval", False)
        if adapter.states.v_first is None:
            flags["state_v_first"] = given.get("state_v_first", False)
        return flags

    def _turned(self, given: Given) -> bool:
        """Whether its states are laid out the other way round than ours."""
        own = self.adapter.states.v_first
        return own is not None and own != bool(given.get("state_v_first"))

    def _states(self, given: Given, handed: Handed) -> dict[str, object]:
        """The initial state and where the final one goes."""
        states, wanted = self.adapter.states, bool(given.get("output_final_state"))
        dtype, initial = DTYPES[states.dtype], given.get("initial_state")
        if initial is not None:
            initial = (initial.mT if self._turned(given) else initial).to(dtype)
            initial = initial.contiguous() if self._turned(given) else initial
        if initial is None and states.required:
            initial = self._no_states(given, dtype)
        if states.final == "returned":
            return {"initial_state": initial, "output_final_state": wanted}
        if states.final == "written":
            handed.final = self._no_states(given, dtype).fill_(math.nan) if wanted else None
            return {"initial_state": initial, "final_state": handed.final}
        initial = self._no_states(given, dtype) if initial is None else initial
        if states.final == "in_place":
            handed.final = initial.clone(memory_format=torch.contiguous_format)
            return {"initial_state": handed.final}
        handed.final = pool = Pool(initial, 1, OFFSETS[states.indices], gap=0)
        return {"initial_state": pool.states, "state_indices": pool.table[:, 0].contiguous()}

    def _no_states(self, given: Given, dtype: torch.dtype) -> Tensor:
        """Zeros in its layout, one state to a sequence."""
        q, v, offsets = given["q"], given["v"], given.get("cu_seqlens")
        N = q.shape[0] if offsets is None else offsets.numel() - 1
        v_first = given.get("state_v_first") if self.adapter.states.v_first is None else self.adapter.states.v_first
        shape = (v.shape[-1], q.shape[-1]) if v_first else (q.shape[-1], v.shape[-1])
        return v.new_zeros(N, v.shape[2], *shape, dtype=dtype)

    def _pooled(self, given: Given, handed: Handed) -> dict[str, object]:
        """The pool of a decode call, in its layout, and the slots."""
        pool, slots = given["state_pool"], given["slots"].to(OFFSETS[self.adapter.states.indices])
        handed.final = pool.mT.contiguous() if self._turned(given) else pool
        return {"state_pool": handed.final, "slots": slots, "num_accepted_tokens": given.get("num_accepted_tokens")}

    def _decoded(self, given: Given, handed: Handed, returned: object) -> Tensor:
        if handed.final is not given["state_pool"]:
            given["state_pool"].copy_(handed.final.mT)
        first = returned[0] if isinstance(returned, tuple) else returned
        return first if handed.out is None else handed.out

    def _results(self, given: Given, handed: Handed, returned: object) -> tuple[Tensor | None, ...]:
        values = returned if isinstance(returned, tuple | list) else (returned,)
        named = dict(zip(self.adapter.results, values))
        if handed.out is not None:
            named["o"] = handed.out
        final = handed.final
        if isinstance(final, Pool):
            final.check_outside()
            final = final.held([0] * len(final.initial))
        if final is not None:
            named["ht"] = final
        for name in ("ht", "h"):
            if named.get(name) is not None and self._turned(given):
                named[name] = named[name].mT
        state = named.get("ht") if given.get("output_final_state") else None
        more = (named["h"],) if named.get("h") is not None else ()
        return (named.get("o"), state, *more)


def _raw(given: Given) -> bool:
    return bool(given.get("use_gate_in_kernel"))


def _normalised(x: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + EPS)).to(x.dtype)


def _activated(given: Given) -> Tensor:
    """The natural-log gate of a raw one, fp32."""
    g, A_log, bias, bound = (given.get(name) for name in ("g", "A_log", "dt_bias", "lower_bound"))
    z = g.float() if bias is None else g.float() + bias.view(g.shape[-2:])
    rate = 1.0 if A_log is None else A_log.exp()[:, None]
    return -rate * F.softplus(z) if bound is None else bound * torch.sigmoid(rate * z)


def _cumulative(g: Tensor, given: Given, chunk: int) -> Tensor:
    """Inclusive sums over the tokens of each chunk of each sequence; tokens of no sequence stay as they are."""
    layout, rows = Layout.of(*g.shape[:2], given.get("cu_seqlens")), g.flatten(0, 1)
    parts = []
    for start, length in zip(layout.starts, layout.lengths):
        parts += [part.cumsum(0) for part in rows[start : start + length].split(chunk)]
    return torch.cat([*parts, rows[layout.used :]]).view(g.shape)
