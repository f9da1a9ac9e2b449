"""Authority on the options that the command and pytest share: each defined once, here."""

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from harness import sanitizers
from harness.profiles import PROFILES

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def seconds(text: str) -> float:
    """30s, 20m, 8h, or a plain number of seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if not match:
        raise argparse.ArgumentTypeError(f"budget is {text!r}; it must look like 30s, 20m, 8h or 300")
    if not float(match[1]):
        raise argparse.ArgumentTypeError(f"budget is {text!r}; it must be more than 0")
    return float(match[1]) * _UNITS[match[2] or "s"]


def subject(text: str) -> str:
    """A name; an empty one, as an unset variable leaves it, would silently mean our own kernels."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"subject is {text!r}; it must be a name or module[:attribute]")
    return text


def count(text: str) -> int:
    """An integer from 1."""
    if not re.fullmatch(r"[1-9]\d{0,5}", text):
        raise argparse.ArgumentTypeError(f"the number is {text!r}; it must be an integer in 1..999999")
    return int(text)


def seed(text: str) -> int:
    """An integer from 0."""
    if not re.fullmatch(r"\d{1,9}", text):
        raise argparse.ArgumentTypeError(f"seed is {text!r}; it must be an integer in 0..999999999")
    return int(text)


def jobs(text: str) -> int:
    """A number of processes from 1."""
    if not re.fullmatch(r"[1-9]\d{0,2}", text):
        raise argparse.ArgumentTypeError(f"jobs is {text!r}; it must be an integer in 1..999")
    return int(text)


def device(text: str) -> str:
    """cpu, cuda or cuda:i, if it is there."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"device is {text!r}; it must be cpu, cuda or cuda:i")
    index = int(text.partition(":")[2] or 0)
    if text != "cpu" and index >= torch.cuda.device_count():
        raise argparse.ArgumentTypeError(f"device is {text!r}; this machine has {torch.cuda.device_count()} GPUs")
    return text


@dataclass(frozen=True)
class Shape:
    """Heads, value heads to each, K and V that every problem is held to: one compile key for subjects that tune for
    each.
    """

    heads: int
    group: int
    K: int
    V: int


def shape(text: str) -> Shape:
    """HxGxKxV, as in 2x1x64x64."""
    match = re.fullmatch(r"(\d+)x(\d+)x(\d+)x(\d+)", text)
    if not match or "0" in match.groups():
        raise argparse.ArgumentTypeError(
            f"shape is {text!r}; it must look like 2x1x64x64 (heads, value heads to each, K, V)"
        )
    return Shape(*map(int, match.groups()))


@dataclass(frozen=True)
class Shard:
    """One of `count` machines that divide the problems among them; `index` starts at 1."""

    index: int
    count: int


def shard(text: str) -> Shard:
    """3/8."""
    match = re.fullmatch(r"([1-9]\d{0,3})/([1-9]\d{0,3})", text)
    if not match or int(match[1]) > int(match[2]):
        raise argparse.ArgumentTypeError(f"shard is {text!r}; it must look like 3/8, from 1/8 to 8/8")
    return Shard(int(match[1]), int(match[2]))


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Option:
    """One option: `--NAME` of the command, `--kda-NAME` of pytest, or of one of the two."""

    name: str
    help: str
    default: object = None
    type: Callable[[str], object] = str
    choices: tuple[str, ...] | None = None
    metavar: str | None = None
    pytest: bool = True
    command: bool = True


OPTIONS = (
    Option(
        "subject",
        "implementation under test: kda, fla, flash_kda, attention_gym, vllm, sglang, a registered name, or "
        "module[:attribute]; with @FOLDER behind it the one in that folder (default: KDA_SUBJECT, else kda)",
        type=subject,
        metavar="NAME",
    ),
    Option("routes", "only routes that match this glob, or one of several (a*,b*)", "*", metavar="GLOB"),
    Option("families", "only families that match this glob, or one of several", "*", metavar="GLOB"),
    Option("device", "cpu, cuda or cuda:i (default: a GPU if there is one)", type=device, metavar="DEVICE"),
    Option("budget", "stop after this long: 30s, 20m, 8h (default: the profile's)", type=seconds, metavar="TIME"),
    Option("seed", "seed of generated problems", 0, type=seed, metavar="N"),
    Option("profile", "how much to try", "dev", choices=tuple(PROFILES)),
    Option(
        "shape",
        "hold every problem to HxGxKxV: one compile key, for subjects that tune for each",
        type=shape,
        metavar="SHAPE",
        pytest=False,
    ),
    Option(
        "jobs",
        "processes that check at the same time (default: as many as the machine has cores, one for foreign subjects on "
        "a GPU)",
        type=jobs,
        metavar="N",
        pytest=False,
    ),
    Option(
        "resume",
        "go on with a run that was killed or ran out of time, by its folder; it says what was asked for",
        type=Path,
        metavar="DIR",
        pytest=False,
    ),
    Option(
        "sanitizer",
        "run every call on a GPU under this tool of compute-sanitizer; what it reports is a finding",
        choices=sanitizers.TOOLS,
        pytest=False,
    ),
    Option(
        "database",
        "what other runners have found is checked first, and what this one finds is added: redis://…, "
        "github://OWNER/REPO[/ARTIFACT] (read only) or a folder (default: KDA_DATABASE)",
        metavar="URL|DIR",
    ),
    Option("shard", "only this share of the problems, as in 3/8: one of 8 machines", type=shard, metavar="I/N"),
    Option(
        "xfail",
        "file of known failures, one to a line: a pattern of test ids, the last day it holds, a reason",
        type=Path,
        metavar="FILE",
        command=False,
    ),
    Option("json", "also write the results as JSON to this file", type=Path, metavar="FILE", pytest=False),
    Option("report", "folder for findings and results", Path("report"), type=Path, metavar="DIR"),
)
PIN_HELP = "foreign subjects run the first configuration of each autotuner instead of timing them all"


def add_to_parser(parser: argparse.ArgumentParser, *names: str) -> None:
    """Give a subcommand these options, or all of them."""
    for option in OPTIONS:
        if option.command and (not names or option.name in names):
            extra = {"choices": option.choices} if option.choices else {"metavar": option.metavar}
            parser.add_argument(f"--{option.name}", help=option.help, default=option.default, type=option.type, **extra)
    if not names or "subject" in names:
        parser.add_argument("--pin-autotune", action="store_true", help=PIN_HELP)


def add_to_pytest(group) -> None:
    """The same options with the prefix --kda-."""
    for option in OPTIONS:
        if option.pytest:
            extra = {"choices": option.choices} if option.choices else {"metavar": option.metavar}
            group.addoption(f"--kda-{option.name}", help=option.help, default=option.default, type=option.type, **extra)
