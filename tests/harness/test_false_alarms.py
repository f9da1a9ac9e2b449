"""Authority on the balance of the criterion: float32 emulations of kernels, written apart from the oracle, are no bugs;
the same emulations with one step wrong are."""

import math

import pytest
import torch
import torch.nn.functional as F

from harness.verdict import judge
from kda.precision import PrecisionSpec
from oracle.operator import Options

STORED = dict(o="io", dq="io", dk="io", dv="io", dbeta="fp32", dg="fp32", ht="fp32", dh0="fp32")
RECURRENT = PrecisionSpec("recurrent", STORED)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CHUNK = {
    "bf16": PrecisionSpec("chunk", STORED | dict(operand="bf16", intra="tf32", merge="tf32", stored_inverse="bf16")),
    "fp32": PrecisionSpec("chunk", STORED | dict.fromkeys(("operand", "intra", "merge", "stored_inverse"), "fp32")),
}
T, K, V, SCALE = 40, 16, 16, 0.25


def stored(x, fmt):
    if fmt == "tf32":  # the hardware truncates
        return (x.contiguous().view(torch.int32) & -8192).view(torch.float32)
    return x.to(DTYPES[fmt]).float()


def problem(regime: str, seed: int, io: str) -> dict[str, torch.Tensor]:
    """One sequence and head, without their axes: q, k, g `[T, K]`, v, do `[T, V]`, beta `[T]`, h0, dht `[K, V]`."""
    generator = torch.Generator().manual_seed(seed)
    randn = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    unit = lambda x: x / x.norm(dim=-1, keepdim=True)  # noqa: E731
    x = {"q": unit(randn(T, K)), "k": unit(randn(T, K)), "v": randn(T, V), "do": randn(T, V)}
    x |= {"g": -0.5 * F.softplus(randn(T, K) - 1), "beta": torch.sigmoid(randn(T))}
    x |= {"h0": 0.5 * randn(K, V), "dht": 0.5 * randn(K, V)}
    if regime == "zero_gate":
        x["g"] = torch.zeros(T, K)
    elif regime == "fast":
        x["g"] = torch.full((T, K), -5.0)
    elif regime == "mixed":
        x["g"] = torch.where(torch.arange(K) % 2 == 0, -5.0, -1e-3).expand(T, K).clone()
    elif regime == "repeated_keys":  # with beta = 2 every step reflects: rounding errors never decay
        x |= {"k": x["k"][:1].expand(T, K).clone(), "beta": torch.full((T,), 2.0), "g": torch.zeros(T, K)}
    elif regime == "near_collinear":
        x |= {"k": unit(x["k"][:1] + 0.01 * randn(T, K)), "beta": torch.full((T,), 0.9997), "g": x["g"] * 0.01}
    elif regime == "constant":
        x |= {name: x[name][:1].expand_as(x[name]).clone() for name in ("q", "k", "v", "g", "beta")}
    elif regime == "zero_keys":
        x["k"][::3] = 0
    elif regime == "zero_beta":
        x["beta"] = torch.zeros(T)
    elif regime == "large_state":
        x["h0"] = 1e4 * x["h0"]
    elif regime == "reset":
        x["g"][T // 3] = -math.inf
    return x | {name: stored(x[name], io) for name in ("q", "k", "v", "do")}


REGIMES = [
    "random",
    "zero_gate",
    "fast",
    "mixed",
    "repeated_keys",
    "near_collinear",
    "constant",
    "zero_keys",
    "zero_beta",
]
REGIMES += ["large_state", "reset"]


def recurrent(x, fault=None):
    """A float32 kernel that runs the recurrence token by token, and backwards with the states kept."""
    q, k, v, beta, do, decay = x["q"], x["k"], x["v"], x["beta"], x["do"], torch.exp(x["g"])
    S, steps, o = x["h0"], [], []
    for t in range(T):
        decayed = S if fault == "no_decay" and t == 9 else decay[t, :, None] * S
        r = v[t] - k[t] @ decayed
        S = decayed + k[t, :, None] * (beta[t] * r)
        if fault == "bf16_state":
            S = stored(S, "bf16")
        steps.append((decayed, r, S))
        o.append(SCALE * (q[t] @ (decayed if fault == "old_state" and t == 9 else S)))
    out, D = {"o": torch.stack(o), "ht": S}, x["dht"]
    grads = []
    for t in reversed(range(T)):
        decayed, r, S = steps[t]
        D = D + SCALE * q[t, :, None] * do[t]
        pull = k[t] @ D
        rest = D - k[t, :, None] * (beta[t] * pull)
        dk = D @ (beta[t] * r) - (0 if fault == "half_dk" and t == 9 else decayed @ (beta[t] * pull))
        grads.append((SCALE * (S @ do[t]), dk, beta[t] * pull, (rest * decayed).sum(-1), pull @ r))
        D = decay[t, :, None] * rest
    out |= dict(zip(("dq", "dk", "dv", "dg", "dbeta"), map(torch.stack, zip(*grads[::-1]))))
    return out | {"dh0": D}


class _Product(torch.autograd.Function):
    """Operands and the incoming gradient in `fmt`, sums in float32."""

    @staticmethod
    def forward(ctx, a, b, fmt):
        a, b = stored(a, fmt), stored(b, fmt)
        ctx.save_for_backward(a, b)
        ctx.fmt = fmt
        return a @ b

    @staticmethod
    def backward(ctx, grad):
        (a, b), grad = ctx.saved_tensors, stored(grad, ctx.fmt)
        return grad @ b.mT, a.mT @ grad, None


class _Store(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fmt):
        return stored(x, fmt)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def _within(q, k, G, beta, spec, fault):
    """(A_qk, the stored inverse) of one chunk: pairwise decays, substitution row by row; left block by tensor cores."""
    C, intra = len(G), spec.stages["intra"]
    lower = torch.ones(C, C, dtype=torch.bool).tril()[..., None]
    pairs = torch.exp2(torch.where(lower, G[:, None] - G[None], -math.inf)) * k[None]
    qk, kk = (q[:, None] * pairs).sum(-1), (k[:, None] * pairs).sum(-1)
    if C > 16:  # the block left of the diagonal: tensor cores, around the decay at its first row
        anchor = G[16:17].detach()
        columns = (k[:16] * torch.exp2(anchor - G[:16])).mT
        for x, whole in ((q, qk), (k, kk)):
            whole[16:, :16] = _Product.apply(x[16:] * torch.exp2(G[16:] - anchor), columns, intra)
    L = torch.tril(kk if fault == "no_beta" else kk * beta[:, None], -1)
    R = [torch.eye(C)[0]]
    for i in range(1, C):
        R.append(torch.eye(C)[i] - L[i, :i] @ torch.stack(R))
    return torch.tril(qk), _Store.apply(torch.stack(R), spec.stages["stored_inverse"])


def chunked(x, io, fault=None, C=32):
    """A float32 kernel of the chunkwise form, operands in the declared formats; gradients by autograd through it."""
    spec, names = CHUNK[io], ("q", "k", "v", "g", "beta", "h0")
    leaves = {name: x[name].clone().requires_grad_() for name in names}
    fmt, S, o = spec.stages["operand"], leaves["h0"], []
    for first in range(0, T, C):
        q, k, v, g, beta = (leaves[name][first : first + C] for name in names[:5])
        G = g.cumsum(0) * math.log2(math.e)
        if fault == "exclusive":
            G = G - g * math.log2(math.e)
        A, R = _within(q, k, G, beta, spec, fault)
        w = _Product.apply(R, beta[:, None] * k * torch.exp2(G), fmt)
        u = _Store.apply(_Product.apply(R, beta[:, None] * v, fmt), fmt)
        new = u - _Product.apply(w, S, fmt)
        scale = 1.0 if fault == "no_scale" and first else SCALE
        o.append(scale * _Product.apply(q * torch.exp2(G), S, fmt) + _Product.apply(SCALE * A, new, fmt))
        rest = k * torch.exp2(G[-1:] - G)
        S = torch.exp2(G[-1])[:, None] * S + _Product.apply(rest.mT, new, fmt)
    o = torch.cat(o)
    grads = torch.autograd.grad([o, S], list(leaves.values()), [x["do"], x["dht"]])
    return {"o": o.detach(), "ht": S.detach()} | {f"d{name}": grad for name, grad in zip(names, grads)}


def verdicts(x, y, io, spec, seed=0):
    """Judged as a call of one sequence and one head."""
    token, state = (lambda z: z[None, :, None]), (lambda z: z[None, None])
    inputs = {name: token(x[name]).to(DTYPES[io]) for name in ("q", "k", "v", "do")}
    inputs |= {"g": token(x["g"]), "beta": token(x["beta"]), "initial_state": state(x["h0"]), "dht": state(x["dht"])}
    outputs = {name: (state if name in ("ht", "dh0") else token)(z) for name, z in y.items()}
    outputs |= {name: outputs[name].to(DTYPES[io]) for name in ("o", "dq", "dk", "dv")}
    found = judge(inputs, Options(scale=SCALE), outputs, entry="recurrent", spec=spec, seed=seed)
    return {verdict.quantity: verdict for verdict in found}


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("io", ["fp32", "bf16", "fp16"])
def test_a_correct_recurrent_kernel_is_right(regime, io):
    for seed in range(4):
        x = problem(regime, seed, io)
        found = verdicts(x, recurrent(x), io, RECURRENT, seed)
        assert {name: str(v) for name, v in found.items() if v.klass != "OK"} == {}


# A chunk kernel's cumulative sum cannot subtract -inf again: resets are not emulated.
@pytest.mark.parametrize("regime", REGIMES[:-1])
@pytest.mark.parametrize("io", ["fp32", "bf16"])
def test_a_correct_chunk_kernel_is_no_bug(regime, io):
    for seed in range(3):
        x = problem(regime, seed, io)
        found = verdicts(x, chunked(x, io), io, CHUNK[io], seed)
        assert {name: str(v) for name, v in found.items() if v.klass in ("BUG", "NOT_COVERED")} == {}


@pytest.mark.parametrize("io", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "fault, seen_in",
    [
        ("no_decay", {"o", "ht", "dq", "dg"}),
        ("old_state", {"o"}),
        ("bf16_state", {"ht", "dg", "dbeta"}),
        ("half_dk", {"dk"}),
    ],
)
def test_a_recurrent_kernel_with_one_step_wrong_is_a_bug(fault, seen_in, io):
    for seed in range(4):
        x = problem("random", seed, io)
        found = verdicts(x, recurrent(x, fault), io, RECURRENT, seed)
        assert seen_in <= {name for name, v in found.items() if v.klass == "BUG"}


@pytest.mark.parametrize("io", ["fp32", "bf16"])
@pytest.mark.parametrize("fault, seen_in", [("no_beta", {"o"}), ("exclusive", {"o", "dg"}), ("no_scale", {"o"})])
def test_a_chunk_kernel_with_one_step_wrong_is_a_bug(fault, seen_in, io):
    for seed in range(3):
        x = problem("random", seed, io)
        found = verdicts(x, chunked(x, io, fault), io, CHUNK[io], seed)
        assert seen_in <= {name for name, v in found.items() if v.klass == "BUG"}
