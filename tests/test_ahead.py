"""What the kernels cost on machines that are not here: no more of anything than the table says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

ROOT = Path(__file__).resolve().parents[1]
TABLE = json.loads((ROOT / "harness" / "ahead.json").read_text())
COMPILE_TIME = 1500  # seconds for one target on a loaded machine


def ahead(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own: here the interpreter is on."""
    command = [sys.executable, "-W", "ignore", "-m", "harness.ahead", "--jobs", "1", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=COMPILE_TIME)


PLANTED = """
from harness import ahead
import torch, triton, triton.language as tl

@triton.jit
def kernel(x, y, out, N, K: tl.constexpr, C: tl.constexpr, STAGES: tl.constexpr):
    o_k = tl.arange(0, K)[:, None]
    o_c = tl.arange(0, C)
    b_out = tl.zeros([K, C], tl.float32)
    for i in tl.range(0, N, num_stages=STAGES):
        b_x = tl.load(x + i * (K * C) + o_k * C + o_c[None, :])
        b_y = tl.load(y + i * (C * C) + o_c[:, None] * C + o_c[None, :])
        b_out = tl.dot(b_x, b_y, b_out)
    tl.store(out + o_k * C + o_c[None, :], b_out)

half, full = torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1)
for stages in (1, 3):
    constants = {"K": 128, "C": 64, "STAGES": stages, "num_warps": 4}
    print(ahead.in_flight(ahead.specialise(kernel, (half, half, full, 8), constants).compile("sm_90")))
"""


def test_products_in_flight_are_seen(tmp_path):
    """A loop that is not pipelined waits for its product; one that is lets it run on."""
    (tmp_path / "planted.py").write_text(PLANTED)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", str(tmp_path / "planted.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=COMPILE_TIME)
    assert done.stdout.split() == ["False", "True"], done.stdout + done.stderr[-2000:]


@pytest.mark.skipif(triton.__version__ not in TABLE, reason=f"no table for Triton {triton.__version__}")
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_kernels_cost_no_more_than_the_table_says(target):
    done = ahead("--targets", target)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "kernels as in the table" in done.stdout


def test_the_tables_have_the_same_kernels():
    first, *others = (
        {
            (target, case, kernel)
            for target, cases in table.items()
            for case, kernels in cases.items()
            for kernel in kernels
        }
        for table in TABLE.values()
    )
    assert others and all(other == first for other in others)


# DESIGN asks for none. All are faster so than the best that does not spill, measured on an H200.
FUSED = {
    *(
        (f"{route}-bf16", "kda_fused_prep_kernel")
        for route in ("fused-safe_gate", "fused-unbounded", "segment_parallel-unbounded")
    ),
    *(
        (f"{route}-bf16", "kda_fused_chunk_bwd_kernel")
        for route in ("fused-safe_gate", "fused-unbounded", "segment_parallel-unbounded")
    ),
}
KNOWN_SPILLS = {
    "3.9": FUSED,
    "3.6": {
        *FUSED,
        *(
            (f"chunk-{path}-bf16", f"kda_chunk_intra_{way}_kernel")
            for path in ("safe_gate", "unbounded", "unbounded-wide")
            for way in ("fwd", "bwd")
        ),
    },
}


@pytest.mark.parametrize("version", TABLE)
def test_nothing_of_bf16_spills_on_sm_90_but_what_is_known(version):
    spilling = {
        (case, kernel.split("#")[0])
        for case, kernels in TABLE[version]["sm_90"].items()
        if case.endswith("bf16")
        for kernel, costs in kernels.items()
        if costs["spills"]
    }
    assert spilling == KNOWN_SPILLS[version.rpartition(".")[0]]
