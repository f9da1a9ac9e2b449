"""Options: one definition for the command and for pytest."""

import argparse

import pytest

from harness import options
from harness.globs import matches
from harness.profiles import PROFILES


@pytest.mark.parametrize("text, expected", [("30s", 30), ("20m", 1200), ("8h", 28800), ("300", 300), ("1.5m", 90)])
def test_budgets(text, expected):
    assert options.seconds(text) == expected


@pytest.mark.parametrize(
    "parse, text",
    [
        (options.seconds, "-3s"),
        (options.seconds, "1d"),
        (options.device, "cuda:99"),
        (options.device, "gpu"),
        (options.seed, "-1"),
        (options.shape, "0x1x4x4"),
        (options.shard, "0/8"),
        (options.shard, "9/8"),
        (options.shard, "3"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_nonsense_is_refused_by_name(parse, text):
    with pytest.raises(
        argparse.ArgumentTypeError, match=f"{'budget' if parse is options.seconds else parse.__name__} is"
    ):
        parse(text)


@pytest.mark.parametrize(
    "globs, chosen",
    [
        ("*", {"ragged", "shapes"}),
        ("ragged", {"ragged"}),
        ("ragg*, shapes", {"ragged", "shapes"}),
        ("", set()),
    ],
)
def test_names_are_selected_by_one_glob_or_several(globs, chosen):
    assert {name for name in ("ragged", "shapes") if matches(name, globs)} == chosen


def test_defaults_of_the_command():
    parser = argparse.ArgumentParser()
    options.add_to_parser(parser)
    given = parser.parse_args([])
    assert (given.routes, given.families, given.seed, given.profile) == ("*", "*", 0, "dev")
    assert parser.parse_args(["--shape", "2x1x64x32"]).shape == options.Shape(2, 1, 64, 32)
    assert given.profile in PROFILES


def test_pytest_has_the_same_options(pytestconfig):
    for option in options.OPTIONS:
        if option.pytest:
            assert pytestconfig.getoption(f"--kda-{option.name}") == option.default or option.default is None
