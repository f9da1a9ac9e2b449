"""Authority on what the kernels cost on machines that are not here: registers, spills and shared memory per target.

`python -m harness.ahead` records every launch of a set of calls on CPU tensors, whose contents do not matter, compiles
each for each target, and compares with the table beside this file; `--write` makes the table's entry for this Triton.
Needs no GPU, and the real compiler: a process of its own, without TRITON_INTERPRET.
"""

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type

from kda import decode, fused, fused_fwd, fused_segments
from kda.chunk_bwd import chunk_kda_staged
from kda.contract import Call, DecodeCall
from kda.fused_recurrent import run as recurrent_run

TABLE = Path(__file__).with_name("ahead.json")
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
MAX_SHARED = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}
COSTS = ("registers", "spills", "shared")
LAUNCH_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")


def _arguments(dtype: torch.dtype, T: int, H: int = 2, K: int = 128) -> dict[str, object]:
    """Everything of everyday shape that a kernel may be compiled for, but for the states."""
    wide = lambda *shape: torch.zeros(1, T, H, *shape, dtype=dtype, requires_grad=True)  # noqa: E731
    raw = {"use_gate_in_kernel": True, "A_log": torch.zeros(H), "dt_bias": torch.zeros(H * K)}
    flags = dict.fromkeys(("use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel"), True)
    x = {"q": wide(K), "k": wide(K), "v": wide(K), "g": wide(K), "beta": wide()}
    return {**x, **raw, **flags, "scale": K**-0.5}


def _call(dtype: torch.dtype, entry: str = "chunk", K: int = 128, **options: object) -> Call:
    state = torch.zeros(1, 2, K, K, requires_grad=True)
    return Call(entry, **_arguments(dtype, 128, K=K), initial_state=state, output_final_state=True, **options)


def _decode_call(dtype: torch.dtype, pool: torch.dtype) -> DecodeCall:
    states = {"state_pool": torch.zeros(4, 2, 128, 128, dtype=pool), "slots": torch.zeros(1, 4, dtype=torch.int32)}
    counts = torch.ones(1, dtype=torch.int32)
    return DecodeCall("decode", **_arguments(dtype, 4), **states, num_accepted_tokens=counts, lower_bound=-5.0)


def _both_ways(run: Callable[[Call], tuple], call: Call) -> None:
    o, ht, *_ = run(call)
    torch.autograd.grad([o, ht], [call.q, call.initial_state], [torch.zeros_like(o), torch.zeros_like(ht)])


CASES: dict[str, Callable[[], None]] = {
    "chunk-safe_gate-bf16": lambda: _both_ways(
        lambda call: chunk_kda_staged(call, "chunk-safe_gate"), _call(torch.bfloat16, lower_bound=-5.0, safe_gate=True)
    ),
    "chunk-unbounded-bf16": lambda: _both_ways(
        lambda call: chunk_kda_staged(call, "chunk-unbounded"), _call(torch.bfloat16)
    ),
    "chunk-unbounded-wide-bf16": lambda: _both_ways(
        lambda call: chunk_kda_staged(call, "chunk-unbounded"), _call(torch.bfloat16, K=256)
    ),
    "chunk-unbounded-fp32": lambda: _both_ways(
        lambda call: chunk_kda_staged(call, "chunk-unbounded"), _call(torch.float32)
    ),
    "fused-safe_gate-bf16": lambda: _both_ways(
        lambda call: fused.chunk_kda_fused(call, "fused-safe_gate"),
        _call(torch.bfloat16, lower_bound=-5.0, safe_gate=True),
    ),
    "fused-unbounded-bf16": lambda: _both_ways(
        lambda call: fused.chunk_kda_fused(call, "fused-unbounded"), _call(torch.bfloat16)
    ),
    "segment_parallel-unbounded-bf16": lambda: _both_ways(
        lambda call: fused_segments.run(call, fused_segments.UNBOUNDED), _call(torch.bfloat16)
    ),
    "decode-bf16": lambda: decode.run(_decode_call(torch.bfloat16, torch.float32)),
    "decode-pool-bf16": lambda: decode.run(_decode_call(torch.bfloat16, torch.bfloat16)),
    "recurrent-bf16": lambda: _both_ways(recurrent_run, _call(torch.bfloat16, "recurrent", lower_bound=-5.0)),
}


@dataclass(frozen=True)
class Compilation:
    """One kernel specialised for one set of argument types and constants."""

    kernel: JITFunction
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, object], ...]
    divisible: tuple[str, ...]
    options: tuple[tuple[str, int], ...]

    def compile(self, target: str):
        names = self.kernel.arg_names
        place = {name: (names.index(name),) for name in names}
        source = ASTSource(
            fn=self.kernel,
            signature={name: dict(self.signature)[name] for name in names},
            constexprs={place[name]: value for name, value in self.constants},
            attrs={place[name]: [["tt.divisibility", 16]] for name in self.divisible},
        )
        return triton.compile(source, target=TARGETS[target], options=dict(self.options))


def specialise(kernel: JITFunction, args: tuple, kwargs: dict) -> Compilation:
    """What Triton's own dispatch would compile for this launch, with every pointer 16-byte aligned."""
    bound = kernel.signature.bind(*args, **{name: x for name, x in kwargs.items() if name in kernel.arg_names})
    bound.apply_defaults()
    signature, constants, divisible = {}, {}, []
    for parameter in kernel.params:
        value = bound.arguments[parameter.name]
        folded = type(value) is int and value == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or folded:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        signature[parameter.name] = mangle_type(value)
        aligned = hasattr(value, "data_ptr") or (type(value) is int and value % 16 == 0)
        if aligned and not parameter.do_not_specialize:
            divisible.append(parameter.name)
    options = tuple((name, kwargs[name]) for name in LAUNCH_OPTIONS if name in kwargs)
    return Compilation(kernel, tuple(signature.items()), tuple(constants.items()), tuple(divisible), options)


@contextlib.contextmanager
def recorded_launches() -> Iterator[list[Compilation]]:
    """Collect, instead of running, every launch made inside the block."""
    launches: list[Compilation] = []
    run = JITFunction.run

    def record(self, *args, grid, warmup=False, **kwargs):
        launch = specialise(self, args, kwargs)
        if launch not in launches:
            launches.append(launch)

    JITFunction.run = record
    try:
        yield launches
    finally:
        JITFunction.run = run


def resources(compiled, target: str) -> dict[str, int]:
    """Registers, spilled bytes and shared memory of a compiled kernel; on AMD, spills are spilled vector registers."""
    shared = compiled.metadata.shared
    if not target.startswith("sm_"):
        count = lambda name: int(re.search(rf"\.{name}:\s*(\d+)", compiled.asm["amdgcn"])[1])  # noqa: E731
        return {"registers": count("vgpr_count"), "spills": count("vgpr_spill_count"), "shared": shared}
    from triton.backends.nvidia.compiler import get_ptxas

    ptx = compiled.asm["ptx"]
    arch = re.search(r"\.target (sm_\d+a?)", ptx)[1]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        assembler = get_ptxas(int(re.sub(r"\D", "", arch))).path
        command = [assembler, "-v", f"--gpu-name={arch}", str(source), "-o", os.devnull]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    report = done.stdout + done.stderr
    spills = sum(int(size) for size in re.findall(r"(\d+) bytes spill (?:stores|loads)", report))
    return {"registers": int(re.search(r"Used (\d+) registers", report)[1]), "spills": spills, "shared": shared}


def in_flight(compiled) -> bool:
    """Whether warp-group products run on into the next iteration of a loop, whose loads may overwrite their operands.

    Triton keeps a spare buffer for that only where nothing else reads the operands, which a kernel cannot know: ours
    wait for every product in its iteration. The interpreter cannot see it.
    """
    return bool(re.search(r"warp_group_dot_wait.*pendings = [1-9]", compiled.asm.get("ttgir", "")))


def measured_on(case: str) -> tuple[str, ...]:
    """The targets of a case: fp32, and what differs little from another case, are compiled once, and the fused verifier
    refuses machines that are not NVIDIA's.
    """
    if case.endswith("fp32") or case.startswith("segment_parallel") or "wide" in case:
        return ("sm_90",)
    return tuple(target for target in TARGETS if target.startswith("sm_") or not case.startswith("fused"))


def compiled(case: str, target: str) -> dict[str, dict[str, int]]:
    """What every kernel of a case costs on a target; a kernel with several sets of constants is numbered."""
    fused_fwd.arch = lambda device: int(target.removeprefix("sm_")) if target.startswith("sm_") else 0
    with recorded_launches() as launches:
        CASES[case]()
    costs: dict[str, dict[str, int]] = {}
    for launch in launches:
        same = sum(name.split("#")[0] == launch.kernel.__name__ for name in costs)
        name = launch.kernel.__name__ + (f"#{same + 1}" if same else "")
        kernel = launch.compile(target)
        if in_flight(kernel):
            raise RuntimeError(f"{target} {case} {name}: products are in flight when their operands may be overwritten")
        costs[name] = resources(kernel, target)
    return costs


def measure(cases: list[str], targets: list[str], jobs: int) -> dict[str, dict[str, dict[str, dict[str, int]]]]:
    """Costs by target, case and kernel."""
    pairs = [(case, target) for target in targets for case in cases if target in measured_on(case)]
    with ProcessPoolExecutor(jobs) as pool:
        found = list(pool.map(compiled, *zip(*pairs)))
    table: dict = {target: {} for target in targets}
    for (case, target), costs in zip(pairs, found):
        table[target][case] = costs
    return table


def worse(found: dict, expected: dict) -> Iterator[str]:
    """Every way in which kernels cost more than the table says, or do not fit the machine, or are not in the table."""
    for target, cases in found.items():
        for case, kernels in cases.items():
            known = expected.get(target, {}).get(case, {})
            if kernels.keys() != known.keys():
                yield f"{target} {case}: kernels are {sorted(kernels)}, must be {sorted(known)}"
            for name, costs in kernels.items():
                if costs["shared"] > MAX_SHARED[target]:
                    yield f"{target} {case} {name}: shared is {costs['shared']}, must fit {MAX_SHARED[target]}"
                for cost in COSTS if name in known else ():
                    if costs[cost] > known[name][cost]:
                        yield f"{target} {case} {name}: {cost} is {costs[cost]}, must be at most {known[name][cost]}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m harness.ahead", description="What kernels cost, target by target.")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--write", action="store_true", help="make the table's entry for this Triton")
    arguments = parser.parse_args()
    found = measure(arguments.cases, arguments.targets, arguments.jobs)
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    if arguments.write:
        table[triton.__version__] = found
        TABLE.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
        return 0
    if triton.__version__ not in table:
        print(f"the table has no entry for Triton {triton.__version__}; it has {', '.join(table)}", file=sys.stderr)
        return 3
    problems = list(worse(found, table[triton.__version__]))
    print("\n".join(problems) or f"{sum(len(k) for c in found.values() for k in c.values())} kernels as in the table")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
