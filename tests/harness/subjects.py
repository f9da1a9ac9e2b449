"""Subjects for the harness's own tests: one that is right, and one for every way of being wrong."""

import os
import signal
import time
from types import SimpleNamespace

import torch

import kda
from harness.call import DIFFERENTIABLE, keywords
from harness.subject import Route, Subject
from kda import contract
from kda.chunk_bwd import PRECISION, chunk_kda_staged
from kda.chunk_fwd import UNBOUNDED
from kda.chunk_stages import chunk_stages
from kda.fused_recurrent import PRECISION as RECURRENT


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


def _abort(**kwargs):
    os.abort()


def _greedy(**kwargs):
    """More memory than there is, in one piece."""
    return torch.empty(2**50, device=kwargs["q"].device)


def _hungry(**kwargs):
    """More memory than there is, a little at a time."""
    pieces = []
    while True:
        pieces.append(torch.ones(2**20))


_kept = []


def _hoards(**kwargs):
    o, *rest = _right(**kwargs)
    _kept.append(o.detach().clone())
    return (o, *rest)


def _caches(**kwargs):
    """Memory kept for the arguments of the first call, which is no leak."""
    o, *rest = _right(**kwargs)
    if not _kept:
        _kept.append(torch.ones(2**20))
    return (o, *rest)


def _untidy(**kwargs):
    out = _right(**kwargs)
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = True
    return out


def _other_stream(**kwargs):
    out = _right(**kwargs)
    torch.cuda.set_stream(torch.cuda.Stream())
    return out


def _illegal_on_two_heads(**kwargs):
    """An assertion on the device, after which its context is lost."""
    q = kwargs["q"]
    return q.flatten()[q.new_full((1,), 2**40, dtype=torch.int64)] if q.shape[2] == 2 else _right(**kwargs)


def _overruns(**kwargs):
    """One element behind v."""
    out = _right(**kwargs)
    v = kwargs["v"].detach()
    behind = torch.empty(0, dtype=v.dtype, device=v.device).set_(
        v.untyped_storage(), v.storage_offset() + v.numel(), (1,), (1,)
    )
    behind.fill_(7)
    return out


def _writes_into_gaps(**kwargs):
    """The gaps between the elements of q, where it has some."""
    out = _right(**kwargs)
    q = kwargs["q"].detach()
    if not q.is_contiguous():
        torch.as_strided(q, q.shape, q.stride(), q.storage_offset() - 1).zero_()
    return out


def _uses_the_future(**kwargs):
    o, *rest = _right(**kwargs)
    return (o + kwargs["v"].mean(1, keepdim=True), *rest)


uses_the_future = Subject(
    "uses_the_future", "", (Route("chunk-unbounded", "chunk", _uses_the_future, RECURRENT, invariant=True),)
)


def _short(**kwargs):
    o, *rest = _right(**kwargs)
    return (o[:, :-1], *rest)


def _crash(**kwargs):
    raise RuntimeError("invalid configuration")


def _reported(**kwargs):
    """Right, but a sanitizer has something to say."""
    from tests.harness.test_sanitizers import MEMCHECK

    with open(os.environ["SANITIZER_LOG"], "a") as log:
        log.write(MEMCHECK)
    return _right(**kwargs)


def _unwritten(**kwargs):
    """Right, but for what memory that nobody wrote adds: nothing, unless it holds NaN."""
    o, *rest = _right(**kwargs)
    return (o + 0 * torch.empty(o.shape).nan_to_num(nan=torch.inf, posinf=1.0, neginf=1.0), *rest)


def _leaky(**kwargs):
    """The last head of a sequence starts from where the sequence before it ended."""
    with torch.no_grad():
        _, ends, *_ = _right(**{**kwargs, "output_final_state": True})
    start = torch.zeros_like(ends) if kwargs.get("initial_state") is None else kwargs["initial_state"]
    leak = torch.zeros_like(ends)
    leak[1:, -1] = ends[:-1, -1]
    return _right(**{**kwargs, "initial_state": start + leak})


def _staged(**kwargs):
    """kda's staged kernels, called by name, with their intermediates."""
    o, ht, h = chunk_kda_staged(_call(kwargs), UNBOUNDED)
    return (o, ht, h) if kwargs.get("return_intermediate_states") else (o, ht)


def _call(words):
    words = {**words, "scale": contract.default_scale(words["q"], words.get("scale"))}
    return contract.validate(contract.Call("chunk", **words))


def _stages(case):
    tensors = {name: case.inputs.get(name) for name in DIFFERENTIABLE}
    call = _call({**tensors, **keywords(case, "chunk")})
    return chunk_stages(call, UNBOUNDED, do=case.inputs.get("do"), dht=case.inputs.get("dht"))


_staged.precision, _staged.stages = PRECISION[UNBOUNDED], _stages

FUNCTIONS = (
    _right,
    _wrong,
    _short,
    _crash,
    _reported,
    _leaky,
    _unwritten,
    _staged,
    _segfault,
    _segfault_on_two_heads,
    _abort,
    _greedy,
    _hungry,
    _hoards,
    _caches,
    _untidy,
    _other_stream,
    _illegal_on_two_heads,
    _overruns,
    _writes_into_gaps,
    _hang,
    _random,
    _vandal,
)
globals().update((function.__name__[1:], SimpleNamespace(chunk_kda=function)) for function in FUNCTIONS)
