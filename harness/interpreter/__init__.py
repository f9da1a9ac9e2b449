"""Triton's CPU interpreter, repaired: right bf16, memory checks, any program order, and fast enough for tests.

Stock, it computes bf16 on raw bits, truncates fp32 to bf16, hides races and out-of-bounds accesses, and patches the
language anew at every launch. `install()` mends that for the process; `sanitize()`, `shuffle(seed)` and
`tf32_operands()` are contexts, to be entered at any time.
"""

from harness.interpreter.repairs import install, tf32_operands
from harness.interpreter.sanitizer import MemoryFault, sanitize
from harness.interpreter.schedule import shuffle

__all__ = ["MemoryFault", "install", "sanitize", "shuffle", "tf32_operands"]
