"""Every refusal: its type, the argument it names, and that nothing ran before it."""

import math

import pytest
import torch

import kda

B, T, H, HV, K, V = 1, 6, 2, 4, 8, 5
FLAGS = (
    "output_final_state",
    "use_qk_l2norm_in_kernel",
    "use_gate_in_kernel",
    "use_beta_sigmoid_in_kernel",
    "allow_neg_eigval",
    "safe_gate",
    "disable_recompute",
    "return_intermediate_states",
    "state_v_first",
)
NEXT_BELOW_BOUND = math.nextafter(-5.0, -math.inf)


def arguments(**changes: object) -> dict[str, object]:
    """A legal call, with some arguments replaced; a change that is a function gets the legal value."""
    legal = {
        "q": torch.zeros(B, T, H, K),
        "k": torch.zeros(B, T, H, K),
        "v": torch.zeros(B, T, HV, V),
        "g": torch.zeros(B, T, HV, K),
        "beta": torch.zeros(B, T, HV),
    }
    return legal | {name: change(legal[name]) if callable(change) else change for name, change in changes.items()}


def gate(**changes: object) -> dict[str, object]:
    return {"use_gate_in_kernel": True, "A_log": torch.zeros(HV), **changes}


def packed(offsets: list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(offsets, dtype=dtype)


REFUSALS = {
    "q_list": ({"q": [1.0]}, TypeError, "q is list"),
    "q_rank": ({"q": lambda x: x[0]}, ValueError, "q.shape is"),
    "q_integers": ({"q": lambda x: x.long()}, TypeError, "q.dtype is int64"),
    "q_wide": ({"q": torch.zeros(B, T, H, 257)}, ValueError, "q.shape is"),
    "q_no_channels": ({"q": torch.zeros(B, T, H, 0)}, ValueError, "q.shape is"),
    "q_no_heads": ({"q": torch.zeros(B, T, 0, K), "k": torch.zeros(B, T, 0, K)}, ValueError, "v.shape is"),
    "k_shape": ({"k": lambda x: x[:, 1:]}, ValueError, "k.shape is"),
    "k_dtype": ({"k": lambda x: x.half()}, TypeError, "k.dtype is float16"),
    "k_device": ({"k": lambda x: x.to("meta")}, ValueError, "k.device is meta"),
    "v_tokens": ({"v": lambda x: x[:, 1:]}, ValueError, "v.shape is"),
    "v_heads": ({"v": torch.zeros(B, T, 3, V)}, ValueError, "v.shape is"),
    "v_fewer_heads": ({"v": torch.zeros(B, T, 1, V)}, ValueError, "v.shape is"),
    "v_wide": ({"v": torch.zeros(B, T, HV, 257)}, ValueError, "v.shape is"),
    "v_no_columns": ({"v": torch.zeros(B, T, HV, 0)}, ValueError, "v.shape is"),
    "g_without_channels": ({"g": torch.zeros(B, T, HV)}, ValueError, "g.shape is"),
    "g_query_heads": ({"g": torch.zeros(B, T, H, K)}, ValueError, "g.shape is"),
    "g_none": ({"g": None}, TypeError, "g is NoneType"),
    "beta_query_heads": ({"beta": torch.zeros(B, T, H)}, ValueError, "beta.shape is"),
    "beta_integers": ({"beta": lambda x: x.int()}, TypeError, "beta.dtype is int32"),
    "scale_text": ({"scale": "1"}, TypeError, "scale is '1'"),
    "scale_bool": ({"scale": True}, TypeError, "scale is True"),
    "scale_nan": ({"scale": math.nan}, ValueError, "scale is nan"),
    "scale_beyond_fp32": ({"scale": 1e39}, ValueError, "scale is 1e+39"),
    **{f"{name}_not_bool": ({name: 1}, TypeError, f"{name} is 1") for name in FLAGS},
    "neg_eigval_without_sigmoid": ({"allow_neg_eigval": True}, ValueError, "allow_neg_eigval is True"),
    "chunk_size_16": ({"chunk_size": 16}, ValueError, "chunk_size is 16"),
    "chunk_size_none": ({"chunk_size": None}, ValueError, "chunk_size is None"),
    "cp_context": ({"cp_context": object()}, TypeError, "cp_context is object"),
    **{
        f"lower_bound_{bound!r}": (gate(lower_bound=bound), ValueError, f"lower_bound is {bound!r}")
        for bound in (math.nan, 0.0, -0.0, 1e-300, 3.0, math.inf, -math.inf, -1e39)
    },
    "lower_bound_text": (gate(lower_bound="-5"), TypeError, "lower_bound is '-5'"),
    "lower_bound_bool": (gate(lower_bound=True), TypeError, "lower_bound is True"),
    "lower_bound_pregated": ({"lower_bound": -5.0}, ValueError, "lower_bound is -5.0"),
    "safe_gate_below_bound": (
        gate(safe_gate=True, lower_bound=NEXT_BELOW_BOUND),
        ValueError,
        f"lower_bound is {NEXT_BELOW_BOUND!r}",
    ),
    "safe_gate_softplus": (gate(safe_gate=True), ValueError, "lower_bound is None"),
    "A_log_missing": ({"use_gate_in_kernel": True}, ValueError, "A_log is None"),
    "A_log_pregated": ({"A_log": torch.zeros(HV)}, ValueError, "A_log is given"),
    "A_log_query_heads": (gate(A_log=torch.zeros(H)), ValueError, "A_log.shape is"),
    "A_log_integers": (gate(A_log=torch.zeros(HV).int()), TypeError, "A_log.dtype is int32"),
    "dt_bias_pregated": ({"dt_bias": torch.zeros(HV * K)}, ValueError, "dt_bias is given"),
    "dt_bias_rank": (gate(dt_bias=torch.zeros(HV, K)), ValueError, "dt_bias.shape is"),
    "state_bf16": (
        {"initial_state": torch.zeros(B, HV, K, V).bfloat16()},
        TypeError,
        "initial_state.dtype is bfloat16",
    ),
    "state_v_first": ({"initial_state": torch.zeros(B, HV, V, K)}, ValueError, "initial_state.shape is"),
    "state_k_first": (
        {"initial_state": torch.zeros(B, HV, K, V), "state_v_first": True},
        ValueError,
        "initial_state.shape is",
    ),
    "state_count": (
        {"initial_state": torch.zeros(1, HV, K, V), "cu_seqlens": packed([0, 2, T])},
        ValueError,
        "initial_state.shape is",
    ),
    "offsets_list": ({"cu_seqlens": [0, T]}, TypeError, "cu_seqlens is list"),
    "offsets_int16": ({"cu_seqlens": packed([0, T], torch.int16)}, TypeError, "cu_seqlens.dtype is int16"),
    "offsets_rank": ({"cu_seqlens": packed([0, T])[None]}, ValueError, "cu_seqlens.shape is"),
    "offsets_empty": ({"cu_seqlens": packed([])}, ValueError, "cu_seqlens.shape is"),
    "offsets_device": ({"cu_seqlens": packed([0, T]).to("meta")}, ValueError, "cu_seqlens.device is meta"),
    "offsets_start": ({"cu_seqlens": packed([1, T])}, ValueError, "cu_seqlens[0] is 1"),
    "offsets_decreasing": ({"cu_seqlens": packed([0, 4, 3])}, ValueError, "cu_seqlens[2] is 3"),
    "offsets_beyond": ({"cu_seqlens": packed([0, T + 1])}, ValueError, "cu_seqlens[-1] is 7"),
    "offsets_cpu_alone": ({"cu_seqlens_cpu": packed([0, T])}, ValueError, "cu_seqlens_cpu is given"),
    "offsets_cpu_list": ({"cu_seqlens": packed([0, T]), "cu_seqlens_cpu": [0, T]}, TypeError, "cu_seqlens_cpu is list"),
    "offsets_cpu_dtype": (
        {"cu_seqlens": packed([0, T]), "cu_seqlens_cpu": torch.zeros(2)},
        TypeError,
        "cu_seqlens_cpu.dtype is float32",
    ),
    "offsets_cpu_shape": (
        {"cu_seqlens": packed([0, T]), "cu_seqlens_cpu": packed([0, 1, T])},
        ValueError,
        "cu_seqlens_cpu.shape is",
    ),
    "offsets_cpu_differ": (
        {"cu_seqlens": packed([0, 2, T]), "cu_seqlens_cpu": packed([0, 3, T])},
        ValueError,
        "cu_seqlens_cpu is [0, 3, 6]",
    ),
    "unknown_keyword": ({"head_first": False}, TypeError, "head_first"),
}


@pytest.mark.parametrize("changes, error, named", REFUSALS.values(), ids=REFUSALS.keys())
def test_chunk_kda_refuses(changes, error, named):
    with kda.record_launches() as launches, pytest.raises(error) as refusal:
        kda.chunk_kda(**arguments(**changes))
    assert named in str(refusal.value)
    assert launches == []


@pytest.mark.parametrize("case", ["q_rank", "A_log_missing", "state_v_first", "offsets_beyond", "unknown_keyword"])
def test_fused_recurrent_kda_refuses_alike(case):
    changes, error, named = REFUSALS[case]
    with pytest.raises(error) as refusal:
        kda.fused_recurrent_kda(**arguments(**changes))
    assert named in str(refusal.value)


def test_a_packed_batch_is_one_row():
    two = {name: torch.cat([x, x]) for name, x in arguments().items()}
    with pytest.raises(ValueError, match=r"q.shape is \[2, 6, 2, 8\]; it must be \[1, T, H, K\]"):
        kda.chunk_kda(**two, cu_seqlens=packed([0, T]))


GATE_REFUSALS = {
    "g_rank": ({"g": torch.zeros(B, T, HV * K)}, ValueError, "g.shape is"),
    "g_integers": ({"g": torch.zeros(B, T, HV, K).int()}, TypeError, "g.dtype is int32"),
    "A_log_missing": ({"A_log": None}, ValueError, "A_log is None"),
    "lower_bound_zero": ({"lower_bound": 0.0}, ValueError, "lower_bound is 0.0"),
    "dt_bias_shape": ({"dt_bias": torch.zeros(HV)}, ValueError, "dt_bias.shape is"),
    "output_integers": ({"output_dtype": torch.int32}, TypeError, "output_dtype is torch.int32"),
    "output_text": ({"output_dtype": "float32"}, TypeError, "output_dtype is float32"),
}


@pytest.mark.parametrize("changes, error, named", GATE_REFUSALS.values(), ids=GATE_REFUSALS.keys())
def test_fused_kda_gate_refuses(changes, error, named):
    with kda.record_launches() as launches, pytest.raises(error) as refusal:
        kda.fused_kda_gate(**{"g": torch.zeros(B, T, HV, K), "A_log": torch.zeros(HV), **changes})
    assert named in str(refusal.value)
    assert launches == []


ACCEPTED = {
    "safe_gate_at_the_bound": gate(safe_gate=True, lower_bound=-5.0),
    "safe_gate_integer_bound": gate(safe_gate=True, lower_bound=-5),
    "deep_bound_without_safe_gate": gate(lower_bound=-1000.0),
    "bound_without_A_log": {"use_gate_in_kernel": True, "lower_bound": -0.5},
    "integer_scale": {"scale": 1},
    "no_sequences": {"cu_seqlens": packed([0])},
    "unused_tail": {"cu_seqlens": packed([0, 2], torch.int32)},
    "offsets_and_their_copy": {"cu_seqlens": packed([0, 2, T]), "cu_seqlens_cpu": packed([0, 2, T], torch.int32)},
    "half_beta_and_gate": {"beta": lambda x: x.half(), "g": lambda x: x.bfloat16()},
    "chunk_size_32": {"chunk_size": 32, "return_intermediate_states": True},
    "disable_recompute": {"disable_recompute": True},
}


@pytest.mark.parametrize("changes", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_edges_of_the_contract_are_legal(changes):
    explanation = kda.explain("chunk_kda", **arguments(**changes))
    assert explanation.route is not None


def with_value(value: float, *index: int):
    """A change that plants one value."""

    def change(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[index] = value
        return x

    return change


VALUE_REFUSALS = {
    "positive_gate": ({"g": with_value(0.5, 0, 3, 1, 2)}, "g[0, 3, 1, 2] is 0.5; it must be a log decay <= 0"),
    "nan_gate": ({"g": with_value(math.nan, 0, 3, 1, 2)}, "g[0, 3, 1, 2] is nan"),
    "below_the_promise": ({"g": with_value(-5.5, 0, 3, 1, 2), "safe_gate": True}, "g[0, 3, 1, 2] is -5.5"),
    "raw_gate": (gate(g=with_value(-math.inf, 0, 3, 1, 2)), "g[0, 3, 1, 2] is -inf; it must be finite"),
    "nan_query": ({"q": with_value(math.nan, 0, 3, 1, 2)}, "q[0, 3, 1, 2] is nan"),
    "nan_factor": (gate(A_log=torch.tensor([0.0, math.nan, 0.0, 0.0])), "A_log[1] is nan"),
}


@pytest.mark.parametrize("changes, message", VALUE_REFUSALS.values(), ids=VALUE_REFUSALS.keys())
def test_values_are_checked_only_on_request(changes, message, monkeypatch):
    call = arguments(**changes)
    monkeypatch.delenv("KDA_VALIDATE", raising=False)
    assert kda.explain("chunk_kda", **call).route is not None
    monkeypatch.setenv("KDA_VALIDATE", "1")
    with pytest.raises(ValueError) as refusal:
        kda.chunk_kda(**call)
    assert message in str(refusal.value)


def test_requested_checks_pass_resets_and_do_not_read_the_unused_tail(monkeypatch):
    monkeypatch.setenv("KDA_VALIDATE", "1")
    call = arguments(g=with_value(-math.inf, 0, 1, 0, 0), q=with_value(math.nan, 0, 5, 0, 0))
    assert kda.explain("chunk_kda", **call, cu_seqlens=packed([0, 5])).route is not None


def test_requested_checks_read_the_raw_gate_of_the_gate_entry(monkeypatch):
    monkeypatch.setenv("KDA_VALIDATE", "1")
    with pytest.raises(ValueError, match=r"g\[0, 0, 0, 1\] is inf"):
        kda.fused_kda_gate(torch.tensor([0.0, math.inf]).view(1, 1, 1, 2), torch.zeros(1))
