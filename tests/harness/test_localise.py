"""Localisation: where a quantity is wrong and what the wrong values are, said in the words that an author would use."""

import math

import pytest
import torch

from harness.field import Field
from harness.localise import locate, said
from harness.problem import Problem

PACKED = Problem(entry="chunk", lengths=(20, 0, 40), packed=True, tail=4, heads=2, group=2, K=3, V=4, chunk_size=32)
SHAPE = (1, 64, 4, 4)  # of o


def field(quantity: str, shape: tuple[int, ...], change) -> Field:
    """Distinct right values, and wrong ones where `change` (of a copy, in place) made them so."""
    expected = 1 + torch.arange(math.prod(shape), dtype=torch.float64).view(shape)
    got = expected.clone()
    change(got, expected)
    return Field(quantity, got, expected, torch.full(shape, 1e-3, dtype=torch.float64))


@pytest.mark.parametrize(
    "values, every, words",
    [
        ([0, 1, 2], [0, 1, 2], "all"),
        ([3], [0, 1, 2, 3], "3"),
        ([1, 2, 3], range(9), "1..3"),
        ([15, 31, 47], range(64), "15, 31, .. 47 (every 16)"),
        ([0, 5], range(9), "0, 5"),
        ([0, 1, 2, 4, 5, 6, 7, 8], range(9), "all but 3"),
        ([-1], range(-1, 4), "outside every sequence"),
    ],
    ids=["all", "one", "range", "step", "list", "all_but", "tail"],
)
def test_sets_of_places_in_words(values, every, words):
    assert said(values, list(every)) == words


def test_right_values_are_nowhere_wrong():
    assert locate(field("o", SHAPE, lambda got, expected: None), PACKED) is None


def test_the_place_by_every_axis():
    def change(got, expected):
        got[0, 36:40, 3] = 0

    place = locate(field("o", SHAPE, change), PACKED)
    assert (place.wrong, place.elements, place.nonfinite, place.alone) == (16, 1024, 0, True)
    assert place.first == (0, 36, 3, 0)
    at = {"sequence": 2, "token": 16, "chunk": 0, "block of 16": 1, "value head": 3, "channel": 0}
    assert place.first_at == at
    assert place.where == "sequence 2 of 3; tokens 16..19 of 40; value head 3 of 4"
    assert place.counts["block of 16"] == {-1: (0, 64), 0: (0, 512), 1: (16, 320), 2: (0, 128)}
    assert place.relation == "got is 0, at 16 of 16"


def test_states_are_located_by_sequence_and_channel():
    def change(got, expected):
        got[1, :, 2] = math.nan

    place = locate(field("ht", (3, 4, 3, 4), change), PACKED)
    assert place.where == "sequence 1 of 3; k channel 2 of 3"
    assert place.relation == "16 NaN and 0 infinite of 16"
    assert place.nonfinite == 16


def test_errors_that_only_count_together_are_where_they_are_largest():
    def change(got, expected):
        got += 1e-5
        got[0, 3] += 5e-4

    place = locate(field("o", SHAPE, change), PACKED)
    assert not place.alone
    assert place.where == "sequence 0 of 3; token 3 of 40"


def shifted(dim, step):
    return lambda got, expected: got.copy_(expected.roll(step, dim))


@pytest.mark.parametrize(
    "quantity, shape, change, words",
    [
        ("o", SHAPE, lambda got, expected: got[0, 8:].mul_(0.5), "got is 1/2 of expected"),
        ("o", SHAPE, lambda got, expected: got.neg_(), "got is -1 of expected"),
        ("o", SHAPE, lambda got, expected: got.mul_(math.log2(math.e)), "got is log2 e of expected"),
        ("o", SHAPE, lambda got, expected: got.mul_(1.01), "got is 1.01 times expected"),
        ("o", SHAPE, lambda got, expected: got.mul_(3**0.5), "got is 1 / scale of expected"),
        ("o", SHAPE, shifted(1, 1), "got is that of the token before"),
        ("o", SHAPE, shifted(2, -1), "got is that of the head after"),
        ("o", SHAPE, shifted(3, 1), "got is that of the channel before"),
        ("ht", (3, 4, 3, 4), shifted(0, 1), "got is that of the sequence before"),
        ("ht", (3, 4, 3, 3), lambda got, expected: got.copy_(expected.mT), "got is that of the transposed state"),
        ("o", SHAPE, lambda got, expected: got.fill_(7), "got is 7 everywhere"),
        ("o", SHAPE, lambda got, expected: got.square_(), "no simple relation: got / expected from 2 to"),
    ],
    ids=[
        "half",
        "sign",
        "base",
        "gain",
        "scale",
        "token",
        "head",
        "channel",
        "sequence",
        "transposed",
        "constant",
        "none",
    ],
)
def test_relations(quantity, shape, change, words):
    assert locate(field(quantity, shape, change), PACKED).relation.startswith(words)
