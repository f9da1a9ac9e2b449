"""Authority on probes: a few small problems, each of which other faults get wrong in other ways."""

from dataclasses import dataclass, replace

from harness.families import ORDINARY
from harness.fitting import fitted
from harness.problem import Problem

DRAWINGS = 3  # sizes of a probe, by its seed


@dataclass(frozen=True)
class Probe:
    """One question: a problem, and other forms of the call that are asked with it. `judged`: by every statistic of a
    verdict, which takes longer, and not element by element only.
    """

    name: str
    problem: Problem
    forms: tuple[str, ...] = ()
    judged: bool = False

    def drawn(self, seed: int) -> Problem:
        """The question in other numbers: another seed, and with it other widths and another length.

        The lengths of `PROBES` are such that none moves across a block, and no number of heads or sequences changes.
        """
        problem, more = self.problem, seed % DRAWINGS
        V = {} if problem.entry == "gate" else {"V": problem.V + more}
        longest = max(problem.lengths)
        lengths = tuple(length + (more if length == longest else 0) for length in problem.lengths)
        return replace(problem, seed=seed, K=problem.K + more, lengths=lengths, **V)

    def fit(self, route: str, entry: str, seed: int) -> Problem | None:
        """The drawn problem as that route takes it; None where it takes nothing like it."""
        return fitted(self.drawn(seed), route, entry)


_PLAIN = Problem(lengths=(20,), heads=2, group=2, K=8, V=5, initial_state=True, **ORDINARY)
_MODES = {"l2norm": True, "q": "gauss", "k": "gauss", "beta_sigmoid": True, "beta": "gauss"}
_SOFTPLUS = {"gate": "softplus", "A_log": "gauss", "dt_bias": "gauss", "g": "gauss"}
_BOUNDED = {"gate": "lower_bound", "lower_bound": -5.0, "safe_gate": True, "A_log": "gauss", "dt_bias": "gauss"}
_EXACT = {"q": "dyadic", "k": "onehot", "v": "dyadic", "g": "dyadic", "beta": "dyadic", "scale": 0.125}
_EXACT |= {"h0": "dyadic", "do": "dyadic", "dht": "dyadic"}
_GATE = Problem(entry="gate", lengths=(36,), heads=2, K=5, g="gauss", gate="softplus", A_log="zeros", do="gauss")


def _but(**changes: object) -> Problem:
    return replace(_PLAIN, **changes)


def _one(**changes: object) -> Problem:
    """One head: the questions that heads have nothing to do with."""
    return _but(heads=1, group=1, **changes)


def _gate(**changes: object) -> Problem:
    return replace(_GATE, **changes)


# The most telling first: a look that runs out of time has asked these.
PROBES: tuple[Probe, ...] = (
    Probe("modes", _but(lengths=(9,), **_SOFTPLUS, **_MODES, neg_eigval=True, scale=0.3), ("nan_head",)),
    Probe("packed", _one(lengths=(5, 0, 18), packed=True, tail=3, v_first=True, K=4), ("watched", "nan_tail")),
    Probe("bounded", _one(lengths=(20,), g="gauss", dtype="bf16", **_BOUNDED, **_MODES), ("causal",)),
    Probe("two_chunks", _one(lengths=(36, 65), packed=True, K=3, V=3)),
    Probe("loss_of_state", _one(lengths=(5,), dtype="fp16", loss="state", v_first=True, K=36), ("nan_filled",)),
    Probe("loss_of_o", _one(lengths=(5,), loss="o", final_state=False, K=100), ("strided",)),
    Probe("nearly_exact", _one(lengths=(18,), K=16, dtype="bf16", **_EXACT), judged=True),
    Probe("resets", _one(lengths=(9,), g="resets")),
    Probe("repeated_keys", _one(lengths=(40,), dtype="bf16", k="repeated", beta="twos", g="zeros")),
    Probe("spikes", _one(lengths=(18,), g="spikes_1e6")),
    Probe("raw_gates", _one(lengths=(5,), **{**_SOFTPLUS, "g": "raw_30", "A_log": "kimi"})),
    Probe("tiny_keys", _one(lengths=(5,), q="tiny", k="tiny", l2norm=True, beta_sigmoid=True, beta="saturated")),
    Probe("starts", _one(entry="chunk", lengths=(33, 0, 2), packed=True, K=3, V=3, intermediates=True, chunk_size=32)),
    Probe("ordinary", _one(entry="chunk", lengths=(46,), K=16, V=16, precision="tf32"), judged=True),
    Probe("gate", _gate(A_log="gauss", dt_bias="gauss"), ("watched", "strided", "nan_head")),
    Probe("gate_bounded", _gate(A_log="gauss", dt_bias="gauss", gate="lower_bound", lower_bound=-5.0)),
    Probe("gate_half", _gate(lengths=(65,), K=20, A_log="kimi", dt_bias="kimi", gate_dtype="bf16")),
    Probe("gate_raw_30", _gate(g="raw_30", A_log="kimi", dt_bias="gauss")),
    Probe("gate_bounded_30", _gate(g="raw_30", A_log="kimi", gate="lower_bound", lower_bound=-5.0)),
    Probe("gate_steep", _gate(g="raw_100", A_log="extreme_80")),
    Probe("gate_flat", _gate(g="raw_1e4", A_log="extreme_minus_80", gate="lower_bound", lower_bound=-5.0)),
    Probe("gate_bounded_steep", _gate(g="raw_100", A_log="extreme_80", gate="lower_bound", lower_bound=-5.0)),
)


def probes_of(route: str, entry: str) -> tuple[Probe, ...]:
    """The probes that a route is asked, in order."""
    return tuple(probe for probe in PROBES if probe.fit(route, entry, 0) is not None)
