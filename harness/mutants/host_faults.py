"""Authority on the faults put into validation, dispatch, the chunk entry and the PyTorch backend."""

from functools import partial

from harness.mutants.mutant import Mutant, Patch

CONTRACT, REGISTRY, CHUNK, TORCH = "kda/contract.py", "kda/registry.py", "kda/chunk.py", "kda/backends/torch_backend.py"
_contract, _contents = partial(Patch, CONTRACT), partial(Patch, "kda/contents.py")
_refused = partial(Mutant, kind="validation", tests=("tests/kda/test_contract.py",))
ADMITTED, RELAUNCH = "kda/admitted.py", "kda/relaunch.py"
_remembered = partial(Mutant, kind="cache", tests=("tests/kda/test_admitted.py",))
_relaunched = partial(Mutant, kind="cache", tests=("tests/kda/test_relaunch.py",))
ALIGNED = "(x.dtype if x.data_ptr() % 16 == 0 else (x.dtype,))\n            if type(x) is Tensor"
_torch = partial(Mutant, route="torch", entry="recurrent")
OFFSETS = "        return self.cu_seqlens.long().clamp(0, self.q.shape[1]).cummax(0).values\n"
CACHED = """        kept = _KEPT.setdefault(self.sequences, self.cu_seqlens)
        return kept.long().clamp(0, self.q.shape[1]).cummax(0).values
"""

MUTANTS = (
    _refused(
        "contract-gate-rank",
        fault="a gate without its K axis is let through",
        patches=(
            _contract('_check_tensor("g", call.g, "[B, T, HV, K]", 4, (B, T, HV, K), FLOAT_DTYPES, q)\n', "pass\n"),
        ),
    ),
    _refused(
        "contract-half-state",
        fault="an initial state in half precision is let through",
        patches=(_contract("call.state_shape, (torch.float32,), call.q)", "call.state_shape, FLOAT_DTYPES, call.q)"),),
    ),
    _refused(
        "contract-value-heads",
        fault="value heads that are no multiple of the query heads are let through",
        patches=(_contract("if H < 1 or HV % H or HV < H:", "if H < 1 or HV < H:"),),
    ),
    _refused(
        "contract-bound-nan",
        fault="a lower bound of NaN is let through",
        patches=(_contract("if not -FP32_MAX <= bound < 0:", "if bound >= 0 or bound < -FP32_MAX:"),),
    ),
    _refused(
        "contract-bound-just-below",
        fault="safe_gate takes a lower bound just below -5",
        patches=(_contract("call.lower_bound < SAFE_BOUND):", "call.lower_bound < SAFE_BOUND - 1e-3):"),),
    ),
    _refused(
        "contract-negative-without-sigmoid",
        fault="allow_neg_eigval without beta's sigmoid is let through",
        patches=(_contract("if call.allow_neg_eigval and not call.use_beta_sigmoid_in_kernel:", "if False:"),),
    ),
    _refused(
        "contract-offsets-fall",
        fault="offsets that fall are let through",
        patches=(_contents("if b < a:", "if b < 0:"),),
    ),
    _refused(
        "contract-offsets-beyond",
        fault="a last offset beyond the tokens is let through",
        patches=(_contents("if offsets[-1] > tokens:", "if offsets[-1] > 2 * tokens:"),),
    ),
    _refused(
        "contract-packed-batch",
        fault="a packed batch of more than one row is let through",
        patches=(_contract("if call.q.shape[0] != 1:", "if call.q.shape[0] < 1:"),),
    ),
    _refused(
        "contract-parameters-without-gate",
        fault="A_log without the in-kernel gate is ignored instead of refused",
        patches=(
            _contract(
                '            if x is not None:\n                refuse(name, "given"',
                '            if x is None and not in_kernel and False:\n                refuse(name, "given"',
            ),
        ),
    ),
    Mutant(
        "contract-offsets-cached",
        "cache",
        "offsets are kept by the number of sequences, whatever they are",
        (
            _contract(OFFSETS, CACHED, "offsets"),
            _contract(
                "FP32_MAX = torch.finfo(torch.float32).max\n", "FP32_MAX = torch.finfo(torch.float32).max\n_KEPT = {}\n"
            ),
        ),
        families=("ragged",),
    ),
    Mutant(
        "contract-beta-range",
        "ignored_argument",
        "allow_neg_eigval does not double beta",
        (_contract("return 2.0 if self.allow_neg_eigval else 1.0", "return 1.0"),),
        families=("saturated_beta", "generic"),
    ),
    Mutant(
        "contract-chunks-of-empty",
        "ragged",
        "empty sequences take a chunk",
        (
            _contract(
                "return torch.nn.functional.pad(chunks.cumsum(0), (1, 0))",
                "return torch.nn.functional.pad(chunks.clamp(1).cumsum(0), (1, 0))",
            ),
        ),
        entry="chunk",
        families=("intermediates", "ragged"),
    ),
    Mutant(
        "contract-chunk-bound",
        "ragged",
        "memory for the chunks of a packed batch as if it were one sequence",
        (
            _contract(
                "return self.q.shape[1] // self.chunk_size + self.sequences",
                "return -(-self.q.shape[1] // self.chunk_size)",
            ),
        ),
        families=("ragged",),
    ),
    Mutant(
        "chunk-size-ignored",
        "ignored_argument",
        "chunk_size is always 64",
        (Patch(CHUNK, "chunk_size=chunk_size,", "chunk_size=64,"),),
        entry="chunk",
        families=("intermediates",),
    ),
    Mutant(
        "chunk-final-state-dropped",
        "ignored_argument",
        "the chunk entry does not hand on the initial state",
        (Patch(CHUNK, "initial_state=initial_state,", "initial_state=None,"),),
        entry="chunk",
        families=("generic",),
    ),
    Mutant(
        "registry-force-ignored",
        "dispatch",
        "a forced route does not keep the others from serving the call",
        (Patch(REGISTRY, "if forced and route.id != forced:", "if forced and route.id == forced:"),),
        families=("generic",),
    ),
    Mutant(
        "registry-float64",
        "dispatch",
        "kernels take float64 and compute in fp32",
        (Patch(REGISTRY, "if any(x.dtype == torch.float64 for x in present):", "if False:"),),
        tests=("tests/kda/test_routes.py",),
    ),
    Mutant(
        "registry-forbidden-ignored",
        "dispatch",
        "forbidden routes serve calls",
        (Patch(REGISTRY, "elif route.id in forbidden:", "elif route.id in ():"),),
        tests=("tests/kda/test_routes.py",),
    ),
    _remembered(
        "admitted-without-types",
        fault="a call whose arguments equal those of a legal one is legal, True for 1.0",
        patches=(Patch(ADMITTED, "tuple(map(type, arguments.values())), ", ""),),
    ),
    _remembered(
        "admitted-without-shapes",
        fault="a call is known again whatever the shapes of its tensors",
        patches=(Patch(ADMITTED, "(x.dtype, x.shape, x.device, x.layout)", "(x.dtype, x.device, x.layout)"),),
    ),
    _remembered(
        "admitted-without-conditions",
        fault="a call keeps its route when another one is forced or forbidden",
        patches=(Patch(ADMITTED, ", registry.conditions())", ")"),),
    ),
    _remembered(
        "admitted-contents-unread",
        fault="the data of a call like an earlier one is not looked at",
        patches=(
            Patch(
                "kda/ops.py",
                "        call = contract.with_floats(call)\n        contents.check(call)\n",
                "        call = contract.with_floats(call)\n",
            ),
        ),
    ),
    _relaunched(
        "relaunch-any-address",
        fault="a kernel compiled for multiples of 16 bytes is launched on any address",
        patches=(Patch(RELAUNCH, ALIGNED, "x.dtype\n            if type(x) is Tensor"),),
    ),
    _relaunched(
        "relaunch-any-constants",
        fault="a kernel compiled for other constants is launched again",
        patches=(Patch(RELAUNCH, "*kinds, *constants, *constants.values()", "*kinds"),),
    ),
    _relaunched(
        "relaunch-any-device",
        fault="a kernel loaded on another device is launched again",
        patches=(Patch(RELAUNCH, "place = driver.active.get_current_device(), _runtime", "place = 0, _runtime"),),
    ),
    _torch(
        "torch-norm-eps",
        "precision",
        "eps is added to the norm, not under the root",
        (
            Patch(
                TORCH,
                "x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2NORM_EPS.value)",
                "x / (x.norm(dim=-1, keepdim=True) + L2NORM_EPS.value)",
            ),
        ),
        families=("magnitudes",),
    ),
    _torch(
        "torch-heads-tiled",
        "head",
        "query heads are tiled, not repeated, to the value heads",
        (Patch(TORCH, "x.repeat_interleave(HV // H, dim=2)", "x.repeat(1, 1, HV // H, 1)"),),
        families=("generic",),
    ),
    _torch(
        "torch-decay-gradient",
        "formula",
        "the gradient of the state is not decayed",
        (
            Patch(
                TORCH,
                "return (grad * decayed).sum(-1), torch.where(a == 0, 0.0, a * grad)",
                "return (grad * decayed).sum(-1), grad",
            ),
        ),
        families=("spikes_resets",),
    ),
    _torch(
        "torch-softplus-far-left",
        "precision",
        "softplus by log(1 + e^z)",
        (
            Patch(
                TORCH, "return z.clamp(min=0) + torch.log1p(torch.exp(-z.abs()))", "return torch.log(1 + torch.exp(z))"
            ),
        ),
        families=("gate_extremes",),
    ),
)
