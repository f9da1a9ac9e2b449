"""Adapters of the stand-ins in `peers`: by what is declared of the real kernels, and by declarations of their own."""

from dataclasses import replace

import torch

from harness.adapters import Adapter, Domain, Gate, States, attention_gym, flash_kda, sglang, vllm
from harness.foreign import foreign_specs
from tests.harness import peers

STEPS = foreign_specs()["recurrent"]
OF_A_STEP = ("chunk_size", "safe_gate", "return_intermediate_states")
RAW = ("A_log", "dt_bias", "lower_bound", "use_gate_in_kernel")
FLAGS = ("use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval")


def in_place_kda(q, k, v, g, beta, state, offsets=None):
    """(o, the state that came in, moved on); int32 offsets, read as such whatever they are."""
    if offsets is not None:
        offsets = offsets.view(torch.int32)[: state.shape[0] + 1]
    with torch.no_grad():
        o, moved = peers.recurrence(q, k, v, g, beta, None, state, offsets)
        state.copy_(moved)
    return o, state


def one_slot_too_many(q, k, v, g, beta, initial_state=None, initial_state_indices=None, **given):
    spare = min(set(range(len(initial_state))) - set(initial_state_indices.tolist()))
    initial_state[spare, 0, 0, 0] = 1.0
    return peers.sglang_chunk_kda(q, k, v, g, beta, None, initial_state, initial_state_indices)


gym = replace(attention_gym.CUMULATIVE, name="gym", function=peers.gym_chunk_kda)
gym_by_token = replace(attention_gym.NATURAL, name="gym_by_token", function=peers.gym_natural_kda)
vllm_like = replace(vllm.ADAPTER, name="vllm_like", function=peers.vllm_chunk_kda)
sglang_like = replace(sglang.ADAPTER, name="sglang_like", function=peers.sglang_chunk_kda)
flash = replace(flash_kda.ADAPTER, name="flash", function=peers.flash_kda_fwd)
flash_in_bf16 = replace(flash_kda.IN_BF16, name="flash_in_bf16", function=peers.flash_kda_fwd)
in_place = Adapter(
    "in_place",
    in_place_kda,
    STEPS,
    entry="recurrent",
    arguments={"initial_state": "state", "cu_seqlens": "offsets"},
    without=(*RAW, *FLAGS, "scale"),
    gate=Gate(activation="never"),
    l2norm="never",
    beta="never",
    neg_eigval=False,
    states=States(final="in_place", required=True),
    offsets="int32",
    differentiable=False,
    domain=Domain(grouped=False),
)
decode = Adapter(
    "log2_decode",
    peers.log2_decode,
    foreign_specs()["decode"],
    entry="decode",
    arguments={"g": "log2_gate", "state_pool": "cache", "slots": "where"},
    without=(*RAW, *FLAGS, "cu_seqlens", "num_accepted_tokens"),
    gate=Gate(log="log2", activation="never"),
    l2norm="never",
    beta="never",
    neg_eigval=False,
    domain=Domain(),
)
several = (in_place, decode)

past_its_slots = replace(
    sglang_like,
    name="past_its_slots",
    function=one_slot_too_many,
    l2norm="never",
    without=(*sglang_like.without, *RAW[:3], "scale", "cu_seqlens"),
    gate=Gate(activation="never"),
)

# One wrong word each, and what it does.
WRONG = {
    "natural_for_log2": replace(gym, gate=replace(gym.gate, log="natural")),
    "one_token_for_cumulative": replace(gym, gate=replace(gym.gate, cumulative=None)),
    "sums_of_32_for_64": replace(gym, gate=replace(gym.gate, cumulative=32)),
    "k_first_for_v_first": replace(vllm_like, states=replace(vllm_like.states, v_first=False)),
    "activated_for_logits": replace(flash, beta="never"),
    "no_normalisation_for_always": replace(flash, l2norm="never"),
    "a_doubled_beta": replace(flash, neg_eigval=True, without=(*flash.without, "allow_neg_eigval")),
    "returned_for_in_place": replace(
        in_place, states=States(required=True), without=(*in_place.without, "output_final_state")
    ),
    "nothing_mutated": replace(sglang_like, mutates=()),
    "o_is_kept": replace(vllm_like, mutates=()),
    "int64_for_int32": replace(in_place, offsets="int64"),
    "swallowed": replace(vllm_like, beta="flag", keywords=("use_beta_sigmoid_in_kernel", "allow_neg_eigval")),
    "natural_decode": replace(decode, gate=Gate(activation="never")),
    "v_first_decode": replace(decode, states=States(v_first=True)),
}
wrong = WRONG["natural_for_log2"]
