"""Authority on what the kernels cost on machines that are not here: registers, spills and shared memory per target.

Run as `python -m harness.compile_ahead`: every launch that a set of calls makes is recorded on CPU tensors (their contents do not
matter), then compiled for each target. Needs no GPU, and the real compiler, so TRITON_INTERPRET must be off in this process.
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

os.environ.setdefault("TRITON_INTERPRET", "0")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
LAUNCH_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")


@dataclass(frozen=True)
class Compilation:
    """One kernel specialised for one set of argument types and constants."""

    case: str
    kernel: JITFunction
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, object], ...]
    divisible: tuple[str, ...]
    options: tuple[tuple[str, int], ...]

    def compile(self, target: str):
        names = self.kernel.arg_names
        position = {name: (names.index(name),) for name in names}
        source = ASTSource(
            fn=self.kernel,
            signature={name: dict(self.signature)[name] for name in names},
            constexprs={position[name]: value for name, value in self.constants},
            attrs={position[name]: [["tt.divisibility", 16]] for name in self.divisible},
        )
        return triton.compile(source, target=TARGETS[target], options=dict(self.options))


def specialise(case: str, kernel: JITFunction, args: tuple, kwargs: dict) -> Compilation:
    """What Triton's own dispatch would compile for this launch, with every pointer 16-byte aligned."""
    named = {name: value for name, value in kwargs.items() if name in kernel.arg_names}
    bound = kernel.signature.bind(*args, **named)
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
    return Compilation(case, kernel, tuple(signature.items()), tuple(constants.items()), tuple(divisible), options)


@contextlib.contextmanager
def recorded_launches(case: str) -> Iterator[list[Compilation]]:
    """Collect, instead of running, every launch made inside the block."""
    launches: list[Compilation] = []
    run = JITFunction.run

    def record(self, *args, grid, warmup=False, **kwargs):
        launch = specialise(case, self, args, kwargs)
        if launch not in launches:
            launches.append(launch)

    JITFunction.run = record
    try:
        yield launches
    finally:
        JITFunction.run = run


def resources(compiled, target: str) -> dict[str, int]:
    """Registers, spilled bytes and shared memory of a compiled kernel.

    On AMD the spill column counts spilled vector registers, as its compiler reports them.
    """
    shared = compiled.metadata.shared
    if not target.startswith("sm_"):
        count = lambda name: int(re.search(rf"\.{name}:\s*(\d+)", compiled.asm["amdgcn"]).group(1))  # noqa: E731
        return {"registers": count("vgpr_count"), "spills": count("vgpr_spill_count"), "shared": shared}
    ptx = compiled.asm["ptx"]
    arch = re.search(r"\.target (sm_\d+a?)", ptx).group(1)
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [get_ptxas(int(re.sub(r"\D", "", arch))).path, "-v", f"--gpu-name={arch}", str(source), "-o", "/dev/null"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    report = done.stdout + done.stderr
    spills = [int(size) for size in re.findall(r"(\d+) bytes spill (?:stores|loads)", report)]
    return {"registers": int(re.search(r"Used (\d+) registers", report).group(1)), "spills": sum(spills), "shared": shared}
