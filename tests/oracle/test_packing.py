"""Which tokens belong to which sequence: every token once, no padding, empty sequences and tails in their place."""

import pytest
import torch

from oracle import Options, evaluate
from oracle.packing import Layout

CPU = torch.device("cpu")


def offsets(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


@pytest.mark.parametrize(
    "lengths, T",
    [((3, 0, 3, 5), 11), ((3, 0, 3, 5), 17), ((0, 0), 4), ((1,) * 2048, 2048), ((8192, *range(1, 40)), 9000)],
    ids=["ragged", "tail", "only_empty", "one_token_each", "one_long"],
)
def test_groups_hold_every_token_once_and_no_padding(lengths, T):
    layout = Layout.of(1, T, offsets(*lengths))
    groups = list(layout.groups(CPU))
    assert layout.lengths == lengths and layout.used == sum(lengths)
    assert [group.length for group in groups] == sorted(set(lengths))
    assert sorted(torch.cat([group.sequences for group in groups]).tolist()) == list(range(len(lengths)))
    assert sorted(torch.cat([group.tokens.flatten() for group in groups]).tolist()) == list(range(sum(lengths)))
    for group in groups:
        for sequence, tokens in zip(group.sequences.tolist(), group.tokens.tolist()):
            start = sum(lengths[:sequence])
            assert tokens == list(range(start, start + lengths[sequence]))


def test_dense_batches_are_one_group():
    (group,) = Layout.of(3, 4, None).groups(CPU)
    assert group.tokens.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_chunks_of_all_sequences_lie_one_after_another():
    assert Layout.of(1, 20, offsets(5, 0, 8, 1)).chunk_slots(4) == [0, 2, 2, 4, 5]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_offsets_of_either_dtype(dtype):
    assert Layout.of(1, 4, torch.tensor([0, 1, 4], dtype=dtype)).lengths == (1, 3)


@pytest.mark.parametrize(
    "batch, given, message",
    [
        (2, [0, 4], "batch is 2, must be 1 with cu_seqlens"),
        (1, [1, 4], r"cu_seqlens is \[1, 4\], must start at 0"),
        (1, [0, 3, 2], r"cu_seqlens is \[0, 3, 2\], must start at 0, never fall"),
        (1, [0, 5], "end at 4 or before"),
        (1, [], r"cu_seqlens is \[\]"),
    ],
    ids=["batch", "start", "falling", "beyond", "empty"],
)
def test_contradictory_offsets_are_named(batch, given, message):
    with pytest.raises(ValueError, match=message):
        Layout.of(batch, 4, torch.tensor(given, dtype=torch.int64))


def problem(B, T, N, HV=2, K=3, V=4):
    generator = torch.Generator().manual_seed(T)
    randn = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    x = {name: randn(B, T, HV, K) for name in ("q", "k")}
    x |= {"v": randn(B, T, HV, V), "do": randn(B, T, HV, V), "g": -randn(B, T, HV, K).abs(), "beta": randn(B, T, HV)}
    return x | {"initial_state": randn(N, HV, K, V), "dht": randn(N, HV, K, V)}


def test_many_one_token_sequences_are_a_batch():
    x = problem(2048, 1, 2048)
    packed = {
        name: value if value.dim() == 4 and value.shape[1] > 1 else value.transpose(0, 1) for name, value in x.items()
    }
    packed |= {"initial_state": x["initial_state"], "dht": x["dht"], "cu_seqlens": torch.arange(2049)}
    dense, out = evaluate(x, Options()), evaluate(packed, Options())
    for name, value in dense.items():
        assert torch.equal(out[name], value if name in ("ht", "dh0") else value.transpose(0, 1)), name


@pytest.mark.parametrize("order", ["short_first", "long_first"])
def test_a_packed_sequence_is_the_sequence_alone(order):
    lengths = (2, 2, 0, 3, 60)[:: 1 if order == "short_first" else -1]
    x = problem(1, 70, len(lengths))
    options = Options(intermediates=True, chunk_size=16)
    out = evaluate(x | {"cu_seqlens": offsets(*lengths)}, options)
    chunk = 0
    for n, (first, last) in enumerate(zip(offsets(*lengths).tolist(), offsets(*lengths)[1:].tolist())):
        alone = {
            name: value[n : n + 1] if name in ("initial_state", "dht") else value[:, first:last]
            for name, value in x.items()
        }
        expected = evaluate(alone, options)
        chunks = expected["h"].shape[1]
        assert torch.equal(out["h"][:, chunk : chunk + chunks], expected.pop("h"))
        chunk += chunks
        for name, value in expected.items():
            got = out[name][n : n + 1] if name in ("ht", "dh0") else out[name][:, first:last]
            assert torch.equal(got, value), name
    assert chunk == out["h"].shape[1]
