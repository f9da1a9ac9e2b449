"""Authority on verdicts: right results pass, planted faults are bugs, and every rule of the criterion has a case."""

import dataclasses
import math

import pytest
import torch

from harness import verdict as verdict_module
from harness.part import Call, RowErrors
from harness.verdict import declared_format, judge, worst
from kda.precision import PrecisionSpec
from oracle.envelope import LIMITS
from oracle.operator import Options, evaluate, evaluate_gate

STORED = dict(o="io", dq="io", dk="io", dv="io", dbeta="beta", dg="g")
STORED |= dict.fromkeys(("ht", "h", "dh0", "dA_log", "ddt_bias"), "fp32")
RECURRENT = PrecisionSpec("recurrent", STORED)
GATE = PrecisionSpec("gate", {"dg": "g", "dA_log": "fp32", "ddt_bias": "fp32"})
CHUNK = PrecisionSpec(
    "chunk", STORED | dict(operand="bf16", intra="tf32", merge="tf32", stored_inverse="bf16", state="fp32"), chunk=16
)
PLAIN = Options()
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def problem(T=20, H=2, HV=2, K=8, V=8, B=1, cu_seqlens=None, io=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    randn = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    unit = lambda x: x / x.norm(dim=-1, keepdim=True)  # noqa: E731
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    return {
        "q": unit(randn(B, T, H, K)).to(io),
        "k": unit(randn(B, T, H, K)).to(io),
        "v": randn(B, T, HV, V).to(io),
        "g": -0.3 * randn(B, T, HV, K).abs(),
        "beta": torch.sigmoid(randn(B, T, HV)),
        "initial_state": randn(N, HV, K, V),
        "do": randn(B, T, HV, V).to(io),
        "dht": randn(N, HV, K, V),
        "cu_seqlens": None if cu_seqlens is None else torch.tensor(cu_seqlens),
    }


def perfect(x, options=PLAIN, spec=RECURRENT):
    """What a kernel without a rounding error would return, in the declared dtypes."""
    return {name: value.to(DTYPES[declared_format(name, x, spec)]) for name, value in evaluate(x, options).items()}


def classes(x, outputs, options=PLAIN, spec=RECURRENT, **given):
    found = judge(x, options, outputs, entry="recurrent", spec=spec, **given)
    assert len({verdict.quantity for verdict in found}) == len(found)
    return {verdict.quantity: verdict for verdict in found}


def bugs(x, outputs, **given) -> set[str]:
    return {name for name, verdict in classes(x, outputs, **given).items() if verdict.klass == "BUG"}


def planted(outputs, name, change):
    out = dict(outputs) | {name: outputs[name].clone()}
    change(out[name])
    return out


@pytest.mark.parametrize("io", ["fp32", "bf16", "fp16", "fp64"])
def test_a_perfect_kernel_is_right_in_every_dtype(io):
    x = problem(io=DTYPES[io])
    found = classes(x, perfect(x))
    assert {v.klass for v in found.values()} == {"OK"} and all(v.ratio <= 1 for v in found.values())
    assert found["o"].census.elements == 20 * 2 * 8 and found["o"].census.over == 0


FAULTS = {
    "element": ("o", lambda y: y[0, 7, 1].__setitem__(3, y[0, 7, 1, 3] + 0.01)),
    "sign": ("dv", lambda y: y[0, 7, 1].neg_()),
    "swapped_rows": ("o", lambda y: y.__setitem__((0, [3, 4]), y[0, [4, 3]])),
    "swapped_heads": ("ht", lambda y: y.__setitem__((0, [0, 1]), y[0, [1, 0]])),
    "gain": ("dq", lambda y: y.mul_(1 + 1e-4)),
    "small_gain": ("ht", lambda y: y.mul_(1 + 2e-6)),
    "stale_row": ("dk", lambda y: y[:, 19].copy_(y[:, 18])),
    "lost_row": ("dv", lambda y: y[0, 5].zero_()),
    "transposed_state": ("dh0", lambda y: y.copy_(y.mT.clone())),
    "one_beta": ("dbeta", lambda y: y[0, 4, 1].mul_(1.001)),
    "nan": ("o", lambda y: y[0, 0, 0].__setitem__(0, math.nan)),
    "inf": ("dg", lambda y: y[0, 0, 0].__setitem__(0, math.inf)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_a_bug_of_its_quantity_alone(fault):
    x, (name, change) = problem(), FAULTS[fault]
    found = classes(x, planted(perfect(x), name, change))
    assert {n for n, v in found.items() if v.klass == "BUG"} == {name}
    assert not found[name].ratio <= 1 and found[name].statistic
    assert all(v.klass == "OK" for n, v in found.items() if n != name)


def test_a_missing_decay_is_a_bug():
    x = problem()
    y = planted(perfect(x), "dh0", lambda y: y.div_(torch.exp(x["g"][0, 0])[..., None]))
    assert bugs(x, y) == {"dh0"}


@pytest.mark.parametrize("replacement", [math.nan, math.inf, -math.inf])
def test_nothing_is_excused_to_a_route_that_excuses_nothing(replacement):
    """-inf gates are where chunk routes may declare inf - inf; one that does not declare it has a bug."""
    x = problem()
    x["g"][0, 9, 0, 2] = -math.inf
    y = planted(perfect(x), "o", lambda y: y[0, 12].fill_(replacement))
    assert classes(x, y)["o"].klass == "BUG"
    assert classes(x, y, spec=CHUNK)["o"].klass == "BUG"
    excusing = dataclasses.replace(CHUNK, excuses=("inf_gate",))
    assert classes(x, y, spec=excusing)["o"].klass == "UNSTABLE"
    assert classes(x, y, spec=excusing)["o"].census.nonfinite == 16


@pytest.mark.parametrize("excuse, gate", [("inf_gate", -math.inf), ("anchor_span", -6.0)], ids=["inf", "span"])
def test_an_excuse_holds_only_where_the_input_is_of_its_domain(excuse, gate):
    spec = dataclasses.replace(CHUNK, excuses=(excuse,))
    tame, wild = problem(), problem()
    wild["g"][0, :, 0, 2] = gate
    for x, klass in ((tame, "BUG"), (wild, "UNSTABLE")):
        y = planted(perfect(x, spec=spec), "o", lambda y: y[0, 12].fill_(math.nan))
        assert classes(x, y, spec=spec)["o"].klass == klass


def test_a_cumulative_gate_beyond_fp32_excuses_digits_but_no_nan():
    spec = dataclasses.replace(CHUNK, excuses=("large_cumulative_gate",))
    for gate, klass in ((-1.0, "BUG"), (-2e4, "UNSTABLE")):
        x = problem()
        x["g"][0, :, 0, 2] = gate
        y = perfect(x, spec=spec)
        assert classes(x, planted(y, "o", lambda y: y[0, 12].mul_(2)), spec=spec)["o"].klass == klass
        assert classes(x, planted(y, "o", lambda y: y[0, 12].fill_(math.nan)), spec=spec)["o"].klass == "BUG"


def test_an_activated_gate_counts_not_the_raw_one():
    """Raw gates of 1 to 4 with exp(A_log) = 148: a softplus gate whose span no fp32 factor expresses."""
    x = problem() | {"A_log": torch.full((2,), 5.0), "dt_bias": None}
    x["g"] = x["g"].abs() + 1
    options, spec = Options(use_gate_in_kernel=True), dataclasses.replace(CHUNK, excuses=("anchor_span",))
    y = planted(perfect(x, options, spec), "o", lambda y: y[0, 12].fill_(math.nan))
    assert classes(x, y, options, spec)["o"].klass == "UNSTABLE"


def test_an_overflow_of_the_output_is_right_with_the_right_sign_only():
    x = problem(io=torch.float16)
    x["v"] *= 6e4 / float(x["v"].abs().max())
    exact = evaluate(x, Options(scale=8.0))["o"]
    assert bool((exact.abs() > 70000).any())
    y = perfect(x, Options(scale=8.0))
    assert classes(x, y, Options(scale=8.0))["o"].klass == "OK"
    assert classes(x, y | {"o": y["o"].nan_to_num()}, Options(scale=8.0))["o"].klass == "BUG"
    turned = torch.where(y["o"].isinf(), -y["o"], y["o"])
    assert classes(x, y | {"o": turned}, Options(scale=8.0))["o"].klass == "BUG"


def test_an_input_on_which_float64_overflows_is_uninformative_not_right():
    x = problem(T=3, io=torch.float64)
    x["v"] *= math.inf
    assert classes(x, perfect(x))["o"].klass == "UNINFORMATIVE"


class TestForm:
    def test_a_missing_quantity_is_not_covered(self):
        x = problem()
        y = perfect(x)
        del y["dk"]
        assert classes(x, y)["dk"].klass == "NOT_COVERED"

    def test_only_what_is_asked_for_is_judged(self):
        x = problem()
        found = classes(x, {"o": perfect(x)["o"]}, quantities=frozenset({"o", "ht"}))
        assert {name: v.klass for name, v in found.items()} == {"o": "OK", "ht": "NOT_COVERED"}

    def test_a_quantity_that_the_oracle_does_not_know_is_not_passed_over(self):
        x = problem()
        assert classes(x, perfect(x), quantities=frozenset({"o", "dA_log"}))["dA_log"].klass == "NOT_COVERED"

    @pytest.mark.parametrize("name", ["ht", "dg", "dbeta", "dh0"])
    def test_another_dtype_is_a_bug_that_says_so(self, name):
        x = problem(io=torch.bfloat16)
        y = perfect(x)
        found = classes(x, y | {name: y[name].bfloat16()})[name]
        assert (found.klass, found.statistic) == ("BUG", "dtype") and "must be fp32" in found.message

    def test_integers_are_a_bug(self):
        x = problem()
        y = perfect(x)
        assert classes(x, y | {"o": y["o"].long()})["o"].statistic == "dtype"

    def test_another_shape_is_a_bug_that_says_so(self):
        x = problem(K=8, V=4)
        y = perfect(x)
        found = classes(x, y | {"ht": y["ht"].mT})["ht"]
        assert (found.klass, found.statistic) == ("BUG", "shape") and "[1, 2, 8, 4]" in found.message


class TestPacking:
    OFFSETS = (0, 5, 5, 12, 17)  # an empty sequence, two of one length, and a tail of 3 tokens

    def test_every_sequence_is_judged_and_right(self):
        x = problem(cu_seqlens=self.OFFSETS)
        assert {v.klass for v in classes(x, perfect(x)).values()} == {"OK"}

    @pytest.mark.parametrize("name", ["o", "dq", "dv", "dg", "dbeta"])
    @pytest.mark.parametrize("left", [1e-30, math.nan], ids=["tiny", "nan"])
    def test_a_touched_tail_is_a_bug(self, name, left):
        x = problem(cu_seqlens=self.OFFSETS)
        found = classes(x, planted(perfect(x), name, lambda y: y[0, 18].fill_(left)))[name]
        assert (found.klass, found.statistic) == ("BUG", "tail")

    def test_a_state_that_leaks_into_an_empty_sequence_is_a_bug(self):
        x = problem(cu_seqlens=self.OFFSETS)
        assert bugs(x, planted(perfect(x), "ht", lambda y: y[1].copy_(y[0]))) == {"ht"}

    def test_no_tokens_at_all(self):
        x = problem(T=4, cu_seqlens=(0, 0, 0))
        assert {v.klass for v in classes(x, perfect(x)).values()} == {"OK"}


@pytest.mark.parametrize(
    "case, name, index",
    [
        (dict(B=3), "o", (2, 11, 1, 5)),
        (dict(H=2, HV=6), "dv", (0, 11, 4, 5)),
        (dict(H=2, HV=6), "dk", (0, 11, 1, 5)),
        (dict(H=2, HV=6), "dbeta", (0, 11, 4)),
        (dict(cu_seqlens=(0, 5, 5, 12, 17)), "dg", (0, 8, 1, 5)),
        (dict(cu_seqlens=(0, 5, 5, 12, 17)), "ht", (2, 1, 3, 5)),
        (dict(cu_seqlens=(0, 5, 5, 12, 20)), "h", (0, 1, 1, 3, 5)),
        (dict(B=2, T=40), "h", (1, 2, 1, 3, 5)),
    ],
    ids=["batch", "gva-value", "gva-query", "gva-beta", "varlen", "varlen-state", "varlen-chunks", "batch-chunks"],
)
def test_the_census_names_the_element_in_the_callers_layout(case, name, index):
    x, options = problem(**case), Options(intermediates=name == "h", chunk_size=16)
    y = planted(perfect(x, options), name, lambda y: y.__setitem__(index, y[index] + 0.5))
    found = classes(x, y, options)[name]
    assert found.klass == "BUG" and found.census.over == 1
    wrong = found.census.worst[0]
    assert wrong.index == index
    assert wrong.got == pytest.approx(float(y[name][index])) and wrong.got - wrong.expected == pytest.approx(
        0.5, abs=1e-5
    )


class TestBudgets:
    """Large calls: heads in parts, and beyond the budget a sample with a coarse look at the others."""

    def limit(self, monkeypatch, T, heads=None, per_part=None):
        if heads:
            monkeypatch.setattr(verdict_module, "STATE_STEPS", {"cpu": heads * 8 * T * 64})
        if per_part:
            monkeypatch.setattr(verdict_module, "PART_ELEMENTS", {"cpu": per_part * 8 * T * 8})

    @pytest.mark.parametrize("heads, per_part", [(None, 1), (4, None), (4, 3), (1, 1)])
    @pytest.mark.parametrize("io", ["fp32", "bf16"])
    def test_a_right_result_is_right_under_any_budget(self, monkeypatch, heads, per_part, io):
        self.limit(monkeypatch, 20, heads, per_part)
        x = problem(H=6, HV=12, io=DTYPES[io])
        assert {v.klass for v in classes(x, perfect(x)).values()} == {"OK"}

    @pytest.mark.parametrize("head", range(6))
    @pytest.mark.parametrize("name", ["o", "dk", "ht", "dbeta"])
    def test_a_fault_is_found_whichever_head_it_is_in(self, monkeypatch, head, name):
        """Also when screening covers more heads than the replicas of a confirmation would fit."""
        self.limit(monkeypatch, 20, heads=4, per_part=2)
        x = problem(H=6, HV=6)
        place = (0, head) if name == "ht" else (0, slice(None), head)
        y = planted(perfect(x), name, lambda y: y[place].mul_(1.001))
        found = classes(x, y)
        assert {n for n, v in found.items() if v.klass == "BUG"} == {name}
        assert (found[name].census.worst[0].index[1 if name == "ht" else 2]) == head
        assert "of 6 heads judged in full" in found[name].message

    def test_all_heads_are_counted_when_the_budget_allows(self, monkeypatch):
        self.limit(monkeypatch, 20, per_part=1)
        x = problem(H=6, HV=6)
        found = classes(x, perfect(x))["o"]
        assert found.census.elements == 20 * 6 * 8 and not found.message

    def test_replicas_go_in_runs_that_memory_allows(self, monkeypatch):
        """A confirmation has five times the replicas of a screen: at once they took 94 GiB of a GPU."""
        x = problem(H=1, HV=1)
        y = planted(perfect(x), "o", lambda y: y[0, 3].mul_(1.2))
        found, counts = replicas_of_runs(monkeypatch, x, y)
        self.limit(monkeypatch, 20, per_part=1)
        in_runs, fewer = replicas_of_runs(monkeypatch, x, y)
        assert max(counts) == LIMITS.confirm and max(fewer) == LIMITS.screen and sum(fewer) == sum(counts)
        assert {n: v.klass for n, v in in_runs.items()} == {n: v.klass for n, v in found.items()}
        assert {n: v.ratio for n, v in in_runs.items()} == pytest.approx({n: v.ratio for n, v in found.items()})


def replicas_of_runs(monkeypatch, x, y, **given):
    """(classes, replicas of every run of the oracle with any)."""
    counts, run = [], Call.evaluator

    def counting(call, inputs):
        evaluate = run(call, inputs)
        return lambda rounding, *rest: (counts.append(rounding.replicas), evaluate(rounding, *rest))[1]

    with monkeypatch.context() as patch:
        patch.setattr(Call, "evaluator", counting)
        return classes(x, y, **given), [count for count in counts if count]


class TestFirstLook:
    """Large problems are first looked at with some of the replicas."""

    def runs(self, monkeypatch, x, y, large=1, **given):
        monkeypatch.setattr(verdict_module, "FIRST_LOOK", {"cpu": large})
        return replicas_of_runs(monkeypatch, x, y, **given)

    @pytest.mark.parametrize("spec", [RECURRENT, CHUNK], ids=["recurrent", "chunk"])
    def test_a_right_result_is_cleared_by_it(self, monkeypatch, spec):
        x = problem(T=24, K=16, V=16)
        found, counts = self.runs(monkeypatch, x, perfect(x, spec=spec), spec=spec)
        assert {v.klass for v in found.values()} == {"OK"} and counts == [LIMITS.first]

    def test_small_problems_have_none(self, monkeypatch):
        x = problem()
        small = verdict_module.FIRST_LOOK["cpu"]
        assert self.runs(monkeypatch, x, perfect(x), small)[1] == [LIMITS.screen]

    @pytest.mark.parametrize("spec", [RECURRENT, CHUNK], ids=["recurrent", "chunk"])
    @pytest.mark.parametrize("fault", FAULTS)
    def test_a_fault_has_the_verdict_of_all_replicas(self, monkeypatch, fault, spec):
        x, (name, change) = problem(T=24, K=16, V=16), FAULTS[fault]
        y = planted(perfect(x, spec=spec), name, change)
        found, counts = self.runs(monkeypatch, x, y, spec=spec)
        full = classes(x, y, spec=spec, limits=dataclasses.replace(LIMITS, first=LIMITS.screen))
        assert {n: v.klass for n, v in found.items()} == {n: v.klass for n, v in full.items()}
        if full[name].klass == "BUG":  # bf16 products hide the small ones
            assert counts[:2] == [LIMITS.first, LIMITS.screen - LIMITS.first]
            assert found[name].ratio == pytest.approx(full[name].ratio)


@pytest.mark.parametrize(
    "lost, vague, expected",
    [(0, 0, False), (0, 2, False), (0, 3, True), (1, 0, True)],
    ids=["clear", "few-vague-rows", "many-vague-rows", "a-lost-row"],
)
def test_the_plain_recurrence_is_asked_only_where_it_can_tell(lost, vague, expected):
    """It costs several times the rest of a verdict; a few rows of which nothing is known are no reason."""
    scale = torch.ones(1, 20)
    error, sigma = torch.full((1, 20), 0.01), torch.full((1, 20), 0.01)
    error[0, :lost], sigma[0, 20 - vague :] = 0.2, 0.3
    assert RowErrors(error, sigma, scale > 0, LIMITS).doubtful(scale) is expected


class TestGate:
    OPTIONS = (Options(use_gate_in_kernel=True), Options(use_gate_in_kernel=True, lower_bound=-5.0))

    def inputs(self):
        randn = lambda *shape, seed: torch.randn(*shape, generator=torch.Generator().manual_seed(seed))  # noqa: E731
        return {
            "g": randn(2, 20, 3, 8, seed=1),
            "A_log": 0.5 * randn(3, seed=2),
            "dt_bias": randn(24, seed=3),
            "do": randn(2, 20, 3, 8, seed=4),
        }

    @pytest.mark.parametrize("options", OPTIONS, ids=["softplus", "lower_bound"])
    def test_the_gate_alone(self, options):
        x = self.inputs()
        y = {name: value.float() for name, value in evaluate_gate(x, options).items()}
        found = {v.quantity: v for v in judge(x, options, y, entry="gate", spec=GATE)}
        assert {name: v.klass for name, v in found.items()} == dict.fromkeys(("o", "dg", "dA_log", "ddt_bias"), "OK")

    @pytest.mark.parametrize("options", OPTIONS, ids=["softplus", "lower_bound"])
    @pytest.mark.parametrize("name", ["o", "dg", "dA_log", "ddt_bias"])
    def test_a_fault_in_one_head_of_the_gate(self, options, name):
        x = self.inputs()
        y = {n: value.float() for n, value in evaluate_gate(x, options).items()}
        index = {"o": (1, 3, 2, 5), "dg": (1, 3, 2, 5), "dA_log": (2,), "ddt_bias": (21,)}[name]
        wrong = planted(y, name, lambda y: y.__setitem__(index, y[index] * 1.001))
        found = {v.quantity: v for v in judge(x, options, wrong, entry="gate", spec=GATE)}
        assert {n for n, v in found.items() if v.klass == "BUG"} == {name}
        assert found[name].census.worst[0].index == index

    @pytest.mark.parametrize("name", ["dA_log", "ddt_bias"])
    def test_a_reduction_in_bf16_is_a_bug_in_the_whole_operator_too(self, name):
        x = problem(HV=2) | {"A_log": torch.tensor([0.2, -0.4]), "dt_bias": torch.linspace(-1, 1, 16)}
        y = perfect(x, self.OPTIONS[0])
        wrong = y | {name: y[name].bfloat16().float()}
        assert {n for n, v in classes(x, y, self.OPTIONS[0]).items() if v.klass != "OK"} == set()
        assert {n for n, v in classes(x, wrong, self.OPTIONS[0]).items() if v.klass == "BUG"} == {name}


def test_an_undeclared_format_is_a_bug_and_a_declared_one_is_not():
    """The same bf16 state: inside the envelope of a route that declares it, outside that of one that does not."""
    x = problem(T=32, K=16, V=16, io=torch.bfloat16)
    y = perfect(x, spec=CHUNK) | {"ht": perfect(x, spec=CHUNK)["ht"].bfloat16().float()}
    assert classes(x, y)["ht"].klass == "BUG"
    assert (
        classes(x, y, spec=dataclasses.replace(CHUNK, stages=dict(CHUNK.stages) | {"state": "bf16"}))["ht"].klass
        == "OK"
    )


def test_the_worst_verdict_is_the_most_severe():
    x = problem()
    y = perfect(x)
    del y["o"]
    found = judge(x, Options(), planted(y, "dq", lambda t: t.mul_(2)), entry="recurrent", spec=RECURRENT)
    assert worst(found).quantity == "dq"
    assert "dq: BUG" in str(worst(found))
