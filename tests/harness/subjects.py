"""Subjects for the harness's own tests: one that is right, and one for every way of being wrong."""

import os
import signal
import time
from types import SimpleNamespace

import torch

import kda
from harness.subject import Route, Subject
from kda.fused_recurrent import PRECISION


def _right(**kwargs):
    with kda.force_route("torch"):
        return kda.chunk_kda(**kwargs)


def _wrong(**kwargs):
    o, *rest = _right(**kwargs)
    return (o * 1.01, *rest)


def _segfault(**kwargs):
    os.kill(os.getpid(), signal.SIGSEGV)


def _segfault_on_two_heads(**kwargs):
    return _segfault() if kwargs["q"].shape[2] == 2 else _right(**kwargs)


def _hang(**kwargs):
    time.sleep(3600)


def _random(**kwargs):
    o, *rest = _right(**kwargs)
    return (o + torch.randn(o.shape) * 1e-6, *rest)


def _vandal(**kwargs):
    out = _right(**kwargs)
    with torch.no_grad():
        kwargs["v"].flatten()[0] += 1
    return out


def _uses_the_future(**kwargs):
    o, *rest = _right(**kwargs)
    return (o + kwargs["v"].mean(1, keepdim=True), *rest)


uses_the_future = Subject(
    "uses_the_future", "", (Route("chunk-unbounded", "chunk", _uses_the_future, PRECISION, invariant=True),)
)
right, wrong, segfault, segfault_on_two_heads, hang, random, vandal = (
    SimpleNamespace(chunk_kda=function)
    for function in (_right, _wrong, _segfault, _segfault_on_two_heads, _hang, _random, _vandal)
)
