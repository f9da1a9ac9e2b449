"""Adapters: each translation against a stand-in of its API, each wrong word found, each problem outside told."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.adapters import Adapter, adapter_route, attention_gym, flash_kda
from harness.adapters.declare import PLACES
from harness.bench import contenders
from harness.call import NotCovered, call
from harness.check import tasks_of
from harness.cli import main
from harness.families import FAMILIES
from harness.fitting import fitted
from harness.foreign import foreign_specs, taken
from harness.part import formats_of
from harness.problem import Edit, Problem, materialise
from harness.profiles import Profile
from harness.runner import Runner
from harness.subject import Subject, load_subject
from harness.verdict import judge
from oracle.operator import evaluate
from oracle.rounding import ToFormat
from oracle.stages import evaluate_chunk
from tests.harness import declared, peers

ROOT = Path(__file__).resolve().parents[2]
PLAIN = Problem(
    **{"lengths": (7, 7), "heads": 2, "K": 4, "V": 4, "initial_state": True, "loss": "none", "seed": 3},
    **{"q": "unit", "k": "unit", "v": "gauss", "g": "bounded", "beta": "uniform", "h0": "gauss"},
)
RAW = {"gate": "lower_bound", "lower_bound": -3.0, "g": "gauss", "A_log": "gauss", "dt_bias": "gauss"}
FLASH = {**RAW, "K": 128, "V": 128, "dtype": "bf16", "gate_dtype": "bf16", "l2norm": True, "beta_sigmoid": True}
FLASH |= {"beta": "gauss", "q": "gauss", "k": "gauss"}
PACKED = {"lengths": (5, 66, 1), "packed": True}
OWN = {  # what stand-ins take beside PLAIN
    "flash": FLASH,
    "decode": {"entry": "decode", "lengths": (5, 5), "step": 2},
    "in_place": {},
}
# What no problem near it has: resets where gates have a bound.
ALLOWED = {
    "takes raw gates",
    "takes gates from -5.914",
}
ADAPTERS = ("gym", "gym_by_token", "vllm_like", "sglang_like", "flash", "in_place", "decode")


def problem(name: str, **changes: object) -> Problem:
    adapter = getattr(declared, name)
    return Problem(**{**vars(PLAIN), "entry": adapter.entry, **OWN.get(name, {}), **changes})


def classes(adapter: Adapter, asked: Problem, tmp_path) -> dict[str, str]:
    """The class of every quantity; the worse one of an argument that several verdicts speak of."""
    subject = Subject("x", "", (adapter_route(adapter),))
    verdicts = Runner(subject, "cpu", tmp_path, isolated=False).check(adapter.id, asked).verdicts
    return {verdict.quantity: verdict.klass for verdict in sorted(verdicts, key=lambda v: v.klass != "OK")}


CHANGES = {
    "dense": {},
    "v_first": {"v_first": True},
    "varlen": PACKED,
    "no_state": {"initial_state": False},
    "no_final_state": {"final_state": False, **PACKED},
}
OF_DECODE = ("dense", "v_first")  # its calls are dense, and always have states
TRANSLATED = [(name, change) for name in ADAPTERS for change in (OF_DECODE if name == "decode" else CHANGES)]


@pytest.mark.parametrize("name, change", TRANSLATED)
def test_a_right_declaration_is_right(name, change, tmp_path):
    asked = problem(name, **CHANGES[change])
    assert set(classes(getattr(declared, name), asked, tmp_path).values()) == {"OK"}


@pytest.mark.parametrize(
    "name, changes",
    [
        ("gym", {"gate": "softplus", "A_log": "zeros", "g": "gauss", "dt_bias": "gauss"}),
        ("gym", {**RAW, "l2norm": True, "q": "gauss", "k": "gauss", "V": 3}),
        ("sglang_like", {**RAW, "group": 2, "V": 3, "scale": 0.3}),
        ("sglang_like", {"gate": "softplus", "A_log": "gauss", "g": "gauss", "l2norm": True, "k": "gauss"}),
        ("vllm_like", {"l2norm": True, "q": "gauss", "k": "gauss", "V": 6, "K": 3}),
    ],
    ids=["gym_softplus", "gym_lower_bound", "sglang_lower_bound_gva", "sglang_softplus", "vllm_l2norm"],
)
def test_options_are_passed_or_done_before(name, changes, tmp_path):
    adapter = getattr(declared, name)
    adapter = replace(adapter, gate=replace(adapter.gate, lowest=-float("inf")))
    assert set(classes(adapter, problem(name, **changes), tmp_path).values()) == {"OK"}


def test_gradients_go_back_through_the_translation(tmp_path):
    asked = problem("gym", loss="both", lengths=(70,), do="gauss", dht="gauss", **RAW)
    found = classes(declared.gym, asked, tmp_path)
    assert {"dq", "dk", "dv", "dg", "dbeta", "dh0", "dA_log", "ddt_bias"} <= set(found)
    assert set(found.values()) == {"OK"}


@pytest.mark.parametrize(
    "wrong, changes, quantity",
    [
        ("natural_for_log2", {}, "o"),
        ("one_token_for_cumulative", {}, "o"),
        ("sums_of_32_for_64", {"lengths": (40,)}, "o"),
        ("k_first_for_v_first", {}, "ht"),
        ("activated_for_logits", {**FLASH, "beta_sigmoid": False, "beta": "uniform"}, "o"),
        ("no_normalisation_for_always", {**FLASH, "l2norm": False}, "o"),
        ("a_doubled_beta", {**FLASH, "neg_eigval": True}, "o"),
        ("returned_for_in_place", {}, "inputs"),
        ("nothing_mutated", {}, "inputs"),
        ("o_is_kept", {}, "inputs"),
        ("int64_for_int32", {"lengths": (3, 4), "packed": True}, "o"),
        ("swallowed", {"beta_sigmoid": True, "beta": "gauss"}, "o"),
        ("natural_decode", OWN["decode"], "o"),
        ("v_first_decode", OWN["decode"], "o"),
    ],
)
def test_a_wrong_word_is_a_finding(wrong, changes, quantity, tmp_path):
    adapter = declared.WRONG[wrong]
    asked = Problem(**{**vars(PLAIN), "entry": adapter.entry, **changes})
    assert classes(adapter, asked, tmp_path)[quantity] == "BUG"


def test_a_write_outside_the_slots_of_a_pool_is_a_crash_with_the_place(tmp_path):
    subject = Subject("x", "", (adapter_route(declared.past_its_slots),))
    asked = Problem(**{**vars(PLAIN), "entry": "chunk"})
    (verdict,) = Runner(subject, "cpu", tmp_path, isolated=False).check("past_its_slots", asked).verdicts
    assert verdict.klass == "CRASH" and "memory of no sequence's state changed, in or behind slots [" in verdict.message


@pytest.mark.parametrize("v_first, told", [(True, "OK"), (False, "BUG")], ids=["declared", "transposed"])
def test_a_transposed_initial_state_shows_though_no_final_one_is_asked_for(v_first, told, tmp_path):
    adapter = replace(declared.gym_by_token, states=replace(declared.gym_by_token.states, v_first=v_first))
    assert classes(adapter, problem("gym_by_token", final_state=False), tmp_path) == {"o": told}


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"K": 64}, "takes K = 128"),
        ({"dtype": "fp16"}, "takes q, k, v and beta in bf16"),
        ({"gate_dtype": "fp32"}, "takes g in bf16"),
        ({"group": 2}, "takes one value head to a query head"),
        ({"lengths": (4, 0), "packed": True}, "takes sequences of at least 1 tokens"),
        ({"lengths": (4,), "packed": True, "tail": 2}, "takes no tokens behind the last offset"),
        ({"l2norm": False}, "takes normalisation of q and k in the kernel"),
        ({"beta_sigmoid": False, "beta": "uniform"}, "takes logits for beta"),
        ({"neg_eigval": True}, "takes no allow_neg_eigval"),
        ({"gate": "pregated", "lower_bound": None, "g": "mild"}, "takes raw gates"),
        ({"gate": "softplus", "lower_bound": None}, "takes a lower_bound for raw gates"),
        ({"lower_bound": -6.0}, "takes a lower_bound in [-5, 0)"),
        ({"dt_bias": None}, "takes dt_bias with raw gates"),
        ({"intermediates": True}, "takes no intermediate states"),
    ],
    ids=lambda value: value.removeprefix("takes ") if isinstance(value, str) else "",
)
def test_a_problem_outside_the_domain_is_not_covered_with_the_reason(changes, reason, tmp_path):
    asked = problem("flash", **changes)
    with pytest.raises(NotCovered) as refused:
        call(adapter_route(declared.flash), materialise(asked))
    assert str(refused.value) == reason
    assert classes(declared.flash, asked, tmp_path) == {"call": "NOT_COVERED"}
    assert reason in adapter_route(declared.flash).limits


@pytest.mark.parametrize(
    "changes, covered",
    [
        ({}, True),
        ({"g": "resets"}, False),
        ({"edits": (Edit("g", (0, 0, 0), -5.5),)}, True),
        ({"edits": (Edit("g", (0, 0, 0), -6.5),)}, False),
        ({**RAW, "lower_bound": -5.9}, True),
        ({**RAW, "lower_bound": -6.0}, False),
        ({"dtype": "fp16"}, True),
        ({"dtype": "fp16", "k": "gauss"}, False),
        ({"dtype": "fp16", "k": "gauss", "q": "gauss", "l2norm": True}, True),
        ({"l2norm": True, "loss": "both"}, False),
        ({"dtype": "fp16", "edits": (Edit("k", (0, 0, 0), 2.0),)}, False),
    ],
)
def test_limits_on_values_count_edits_too(changes, covered):
    assert (adapter_route(declared.gym).lacks(problem("gym", **changes)) is None) == covered


@pytest.mark.parametrize("name", ADAPTERS)
def test_every_family_is_moved_into_the_domain_or_told_why_not(name):
    route = adapter_route(getattr(declared, name))
    moved, left = set(), {}
    for family in FAMILIES:
        for example in family.examples:
            asked = fitted(example, route.id, route.entry)
            near = None if asked is None else route.nearest(asked)
            if near is None:
                continue
            reason = route.lacks(near)
            if reason is None:
                moved.add(family.name)
                assert route.nearest(near) == near
            else:
                left[family.name] = reason
    assert {"generic", "ragged", "repeated_keys"} <= moved
    assert set(left.values()) <= ALLOWED, left


def test_moved_problems_keep_what_their_family_is_for():
    route = adapter_route(declared.flash)
    repeated = Problem(entry="chunk", lengths=(40,), k="repeated", g="zeros", beta="ones", K=16, V=16)
    near = route.nearest(repeated)
    assert (near.k, near.beta, near.g, near.lengths) == ("repeated", "high", "zeros", (40,))
    assert near.lower_bound > -1e-5 and near.l2norm and near.K == 128
    assert route.lacks(route.nearest(replace(repeated, g="resets"))) == "takes raw gates"


def test_examples_that_cannot_be_had_are_tasks_all_the_same():
    """So that a result says that they are not covered, and why."""
    route = adapter_route(declared.flash)
    resets = next(family for family in FAMILIES if family.name == "spikes_resets")
    tasks = list(tasks_of(route.id, "chunk", resets, Profile("one", 1, 1.0, 1.0), 0, "cpu", route.nearest))
    assert any(route.lacks(task.problem) == "takes raw gates" for task in tasks)


@pytest.mark.parametrize("name", ["gym", "flash"])
def test_a_child_process_loads_an_adapter_by_its_name(name, tmp_path):
    subject = load_subject(f"tests.harness.declared:{name}")
    runner = Runner(subject, "cpu", tmp_path)
    try:
        verdicts = runner.check(name, problem(name)).verdicts
    finally:
        runner.close()
    assert subject.foreign and {v.quantity: v.klass for v in verdicts} == {"o": "OK", "ht": "OK"}


FLASH_CASES = {
    "generic": {"lengths": (37,)},
    "saturated_gates": {"lengths": (37,), "g": "raw_30", "lower_bound": -5.0},
    "small_sigmoids": {"lengths": (37,), "A_log": "kimi", "g": "gauss", "beta": "saturated"},
    "slow_decay": {"lengths": (150,), "lower_bound": -0.01},
    "distinct_keys_high_beta": {"lengths": (37,), "beta": "high"},
}


@pytest.mark.parametrize("changes", FLASH_CASES.values(), ids=FLASH_CASES)
def test_what_flash_kda_is_declared_to_round_is_what_its_design_rounds(changes, tmp_path):
    """The stand-in rounds where the source does. An envelope much wider than that would see nothing."""
    subject = Subject("x", "", (adapter_route(declared.flash),))
    verdicts = Runner(subject, "cpu", tmp_path, isolated=False).check("flash", problem("flash", **changes)).verdicts
    assert {v.klass for v in verdicts} == {"OK"} and all(0.2 < v.ratio < 0.8 for v in verdicts), verdicts


@pytest.mark.parametrize("h0, told", [("dyadic", {"o": "OK", "ht": "OK"}), ("gauss", {"call": "NOT_COVERED"})])
def test_states_in_bf16_are_asked_for_with_values_that_it_holds(h0, told, tmp_path):
    asked = problem("flash", h0=h0)
    assert classes(declared.flash_in_bf16, asked, tmp_path) == told
    assert adapter_route(declared.flash_in_bf16).nearest(asked).h0 == "dyadic"


def test_the_half_precision_series_is_the_design_and_loses_digits_where_keys_repeat(tmp_path):
    """What it loses there is UNSTABLE; of a kernel that declares anything else it is a BUG."""
    asked = problem("flash", lengths=(40,), k="repeated", lower_bound=-1e-6, A_log="zeros", g="zeros", beta="high")
    assert classes(declared.flash, asked, tmp_path)["o"] == "UNSTABLE"
    solved = replace(flash_kda.PRECISION, inverse="substitution")
    assert classes(replace(declared.flash, precision=solved), asked, tmp_path)["o"] == "BUG"


def test_several_adapters_are_one_subject():
    subject = load_subject("tests.harness.declared:several")
    assert {(route.id, route.entry) for route in subject.routes} == {
        ("in_place", "recurrent"),
        ("log2_decode", "decode"),
    }


def test_check_says_what_was_exercised_and_what_is_lacking(tmp_path, capsys):
    target = tmp_path / "result.json"
    asked = ["--subject", "tests.harness.declared:vllm_like", "--families", "impulse", "--json", str(target)]
    assert main(["check", "--device", "cpu", "--report", str(tmp_path), "--jobs", "1", *asked]) == 0
    coverage = json.loads(target.read_text())["coverage"]
    assert coverage["problems"]["vllm_like"] > 0 and coverage["met"]["vllm_like"]["gate pregated"] > 0
    lacking = coverage["lacking"]["vllm_like chunk"]
    assert "takes activated gates" in lacking and "has no gradients" in lacking
    assert "vllm_like (chunk): takes" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["flash_kda", "attention_gym", "vllm", "sglang"])
def test_a_peer_that_is_not_installed_says_so(name, capsys):
    with pytest.raises(ValueError, match=f"subject is '{name}', which cannot be imported"):
        load_subject(name)
    _, missing = contenders.subjects(name)
    assert missing[0].kind == "missing" and "cannot be imported" in missing[0].reason


def test_flash_kda_is_found_by_its_name(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "flash_kda", SimpleNamespace(fwd=peers.flash_kda_fwd))
    subject = load_subject("flash_kda")
    checked = Runner(subject, "cpu", tmp_path, isolated=False).check("flash_kda", problem("flash"))
    assert {v.quantity: v.klass for v in checked.verdicts} == {"o": "OK", "ht": "OK"}


@pytest.mark.parametrize("argument", ["cumulative_gate", "gate"])
def test_attention_gym_is_taken_as_it_is_installed(argument, monkeypatch):
    chunk = peers.gym_chunk_kda if argument == "cumulative_gate" else peers.gym_natural_kda
    installed = SimpleNamespace(chunk_kda=chunk, recurrent_kda=peers.gym_natural_kda)
    for module in ("attn_gym", "attn_gym.linear"):
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, "attn_gym.linear.kda", installed)
    first, *rest = attention_gym.routes()
    adapter = first.function.adapter
    assert (adapter.gate.log, adapter.gate.cumulative) == (("log2", 64) if not rest else ("natural", None))
    assert [route.id for route in rest] == ([] if argument == "cumulative_gate" else ["recurrent"])


@pytest.mark.parametrize(
    "changes, complaint",
    [
        ({"l2norm": "sometimes"}, f"l2norm is 'sometimes'; it must be one of {', '.join(PLACES)}"),
        ({"arguments": {"gates": "g"}}, "arguments has gates"),
        ({"states": replace(declared.gym.states, final="pool")}, "must say what state_indices is"),
    ],
    ids=["place", "argument", "pool"],
)
def test_a_declaration_that_contradicts_itself_is_refused(changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        replace(declared.gym, **changes)


@pytest.mark.parametrize(
    "changes, complaint",
    [
        ({"arguments": {"g": "log_decay"}}, "does not have log_decay"),
        ({"function": "tests.harness.peers:nothing"}, "cannot be imported"),
    ],
    ids=["argument", "function"],
)
def test_a_function_without_the_arguments_declared_is_refused(changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        adapter_route(replace(declared.gym, **changes))


def test_an_argument_that_would_only_be_swallowed_is_refused():
    adapter = replace(declared.vllm_like, beta="flag")
    with pytest.raises(ValueError, match="only swallows allow_neg_eigval, use_beta_sigmoid_in_kernel; name them"):
        adapter_route(adapter)


def looks_up(g, **kwargs):
    if "A_log" in kwargs:
        return kwargs["A_log"], kwargs.get("dt_bias"), kwargs.pop("chunk_size", 64)
    return g


def hands_on(g, **kwargs):
    return looks_up(g, **kwargs)


def swallows(g, **kwargs):
    return g


def wrapper(*args, **kwargs):
    return args


@pytest.mark.parametrize(
    "function, expected",
    [
        (looks_up, {"g", "A_log", "dt_bias", "chunk_size"}),
        (hands_on, None),
        (swallows, {"g"}),
        (wrapper, None),
        (lambda q, g: q, {"q", "g"}),
    ],
    ids=["looks_up", "hands_on", "swallows", "wrapper", "plain"],
)
def test_what_a_function_takes_out_of_its_kwargs(function, expected):
    assert taken(function) == expected


def test_bench_times_the_kernel_alone(monkeypatch):
    """Tensors are translated beforehand, and the call goes to the kernel with its own arguments."""
    seen = []

    def kernel(q, k, v, cumulative_gate, beta, initial_state=None, *, cu_seqlens=None, output_final_state=False):
        seen.append(cumulative_gate)
        return v, None

    route = adapter_route(replace(declared.gym, function=kernel))
    timed = contenders.timed_call(
        contenders.Contender("x", Subject("x", "", (route,)), route), materialise(problem("gym")), "forward"
    )
    assert seen == []
    timed(), timed()
    assert len(seen) == 2 and seen[0] is seen[1]


def test_the_example_of_the_page_is_a_declaration(monkeypatch):
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "adapters.md").read_text(), re.DOTALL)
    made: dict = {}
    exec(example, made)

    def forward(q, k, v, log2_decay, beta, scale, initial_state, use_qk_l2norm_in_kernel, offsets, out):
        raise NotImplementedError

    route = adapter_route(replace(made["adapter"], function=forward))
    assert "takes K = 64 or 128" in route.lacking and "takes gates from -5" in route.lacking


def test_specs_of_kernels_without_a_chunk_size_have_their_own():
    assert attention_gym.CHUNK.of_call(32, "ieee").chunk == 64
    assert foreign_specs()["chunk-unbounded"].of_call(32, "ieee").chunk == 32


ROUNDED = Problem(
    **{"entry": "chunk", "heads": 1, "dtype": "bf16", "gate_dtype": "bf16", "initial_state": True, "loss": "both"},
    **dict.fromkeys(("q", "k", "v", "h0", "do", "dht"), "gauss"),
    l2norm=True,
)
NORMALISED = replace(
    ROUNDED,
    **{"lengths": (20,), "K": 16, "V": 16, "g": "gauss", "gate": "softplus", "A_log": "gauss", "dt_bias": "gauss"},
    **{"beta": "gauss", "beta_sigmoid": True, "seed": 2},
)
ACROSS = replace(
    ROUNDED,
    **{"lengths": (17,), "K": 64, "V": 64, "q": "unit", "k": "unit", "l2norm": False, "beta": "uniform", "g": "gauss"},
    **{"gate": "lower_bound", "lower_bound": -5.0, "A_log": "gauss", "dt_bias": "gauss", "seed": 0},
)
SHORT = replace(ROUNDED, lengths=(2,), K=64, V=64, g="mild", beta="uniform", seed=1)


@pytest.mark.parametrize(
    "problem, unsaid, wrong",
    [
        pytest.param(SHORT, ("kept", "kept_product"), {"dg"}, id="states_in_memory"),
        pytest.param(NORMALISED, ("qk_norm",), {"o", "dv", "dbeta"}, id="normalised_keys"),
        pytest.param(ACROSS, ("scaled_key",), {"dg"}, id="keys_times_beta"),
    ],
)
def test_what_fla_stores_in_the_dtype_of_the_call_is_declared(problem, unsaid, wrong):
    """Its chunk kernels keep normalised q and k in that dtype, the states that gradients of gates are made of and their
    products, and beta k, from which the gradients of keys in earlier blocks come.
    """
    case = materialise(problem, "cpu")
    spec = foreign_specs()["chunk-unbounded"].of_call(64, "ieee")
    stored = formats_of(spec, case.inputs, case.options)
    exact = evaluate(case.inputs, case.options)
    made = evaluate_chunk(case.inputs, case.options, rounding=ToFormat(), formats=stored, diagonal="pair")
    returned = {name: x.reshape(exact[name].shape).float() for name, x in made.items()}
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        returned[name] = returned[name].bfloat16()
    silent = replace(spec, stages={name: fmt for name, fmt in spec.stages.items() if name not in unsaid})
    found = [judge(case.inputs, case.options, returned, entry="chunk", spec=said) for said in (spec, silent)]
    assert {v.quantity for v in found[0] if v.klass != "OK"} == set()
    assert {v.quantity for v in found[1] if v.klass == "BUG"} >= wrong


@pytest.mark.parametrize("sigmoid, made_in", [(False, "bf16"), (True, None)], ids=["beta", "logits"])
def test_keys_times_a_beta_that_the_kernel_makes_itself_are_not_rounded(sigmoid, made_in):
    case = materialise(replace(ROUNDED, beta_sigmoid=sigmoid, beta="gauss" if sigmoid else "uniform"), "cpu")
    spec = foreign_specs()["chunk-unbounded"].of_call(64, "ieee")
    assert formats_of(spec, case.inputs, case.options).get("scaled_key") == made_in
