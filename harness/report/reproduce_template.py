"""A counterexample on its own: needs torch and the kernel's package. Exit status 1 while the fault lasts, 0 without it,
2 where the call does not run at all, or this script cannot show the fault, which says nothing about it.

SUMMARY

Without a GPU the kernel runs in Triton's interpreter, repaired by the harness if that is installed: Triton's own is
wrong in bf16, and refuses some products.
"""

import base64
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import itertools
import math
import os
import sys
import traceback
import warnings

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
interpreter = None  # that of the harness
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
    with contextlib.suppress(ImportError):
        from harness import interpreter

        interpreter.install()
SECONDS = 600  # a call that takes longer hangs
CALLS = 5  # to see whether results are the same every time
REPEATS = 12  # calls that must all keep memory before that is a leak ...
LEAST = 1 if DEVICE == "cuda" else 2**8  # ... and bytes; on a CPU a few of Python's own always come and go
BAND, FILL = 2**16, 255  # bytes on either side of every tensor, and what they hold: NaN in every format, or -1
SHOWN = 8
inf, nan = math.inf, math.nan


def numbers(dtype, shape, values):
    return torch.tensor(values, dtype=getattr(torch, dtype)).reshape(shape)


def packed(dtype, shape, text):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=getattr(torch, dtype)).reshape(shape)


# Another form of the call, if the failure is in one: what it changes, and which results must agree.
FORM, PROMISE = "", ""
OTHER = {}
OTHER_KEYWORDS = {}
KEPT = None
ITSELF = None
FACTOR, ALLOWED = 1.0, 0.0

# <embedded>
MODULE, ROOT, EXPRESSION = "", "", ""
ROUTE = None
ENTRY, QUANTITY, CLASS = "", "", ""
OUTPUTS = ()
GRADIENTS = {}
KEYWORDS = {}
TENSORS = {}
SHAPE, DTYPE = None, None
EXPECTED = None
TOLERANCE = None
ALLOWED_RMS = None
# </embedded>


def kernel_and_context():
    module = importlib.import_module(MODULE)
    if ROUTE is not None:
        return eval(EXPRESSION, vars(module)), lambda: module.force_route(ROUTE)
    return eval(EXPRESSION, {ROOT: getattr(module, ROOT)}), contextlib.nullcontext


def spread(x):
    """x as a view with gaps, which hold what no kernel may read."""
    gap = nan if x.is_floating_point() else 2**20
    wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1] + 1), gap)
    wide[..., 1::2] = x
    return wide[..., 1::2]


@contextlib.contextmanager
def filled_with_nan():
    """Memory that torch allocates without a value holds NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.use_deterministic_algorithms(False)


def storage_of(x):
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


def within(room, x):
    """The bytes of `room` between its bands, as what x is of its own storage."""
    first = BAND // x.element_size() + x.storage_offset()
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(room.untyped_storage(), first, x.shape, x.stride())


def guarded(x):
    """x with a band on either side: those bytes, all of them."""
    held = storage_of(x)
    room = torch.full((len(held) + 2 * BAND,), FILL, dtype=torch.uint8, device=x.device)
    room[BAND : BAND + len(held)] = held
    return room


def strayed(name, room, x):
    """What was written into `room` where no element of x is, in words; "" if nothing was."""
    after = room.clone()
    within(after, x).copy_(x)
    places = (after != guarded(x)).nonzero().flatten()
    if not len(places):
        return ""
    end = BAND + len(storage_of(x))
    before, behind = places[places < BAND], places[places >= end]
    said = [f"{len(before)} before {name}, the first {BAND - 1 - int(before[-1])} bytes away"] if len(before) else []
    said += [f"{len(behind)} behind {name}, the first {int(behind[0]) - end} bytes away"] if len(behind) else []
    between = len(places) - len(before) - len(behind)
    return " and ".join(said + ([f"{between} between the elements of {name}"] if between else []))


@contextlib.contextmanager
def sanitized():
    """Every access of a kernel checked, programs in another order."""
    with interpreter.sanitize(), interpreter.shuffle(1):
        yield


AROUND = {"nan_filled": filled_with_nan, "watched": sanitized}


def other_form():
    """(arguments, keywords, what is around the call) of the other form"""
    tensors = {name: x for name, x in {**TENSORS, **OTHER}.items() if x is not None}
    return tensors, OTHER_KEYWORDS, AROUND.get(FORM, contextlib.nullcontext)


def call(form=False):
    """(every output and gradient by name, the arguments that the call changed, what it wrote outside of them)"""
    kernel, context = kernel_and_context()
    tensors, keywords, around = other_form() if form else (TENSORS, KEYWORDS, contextlib.nullcontext)
    given = {name: x.clone().to(DEVICE) for name, x in tensors.items()}
    if form and FORM == "strided":
        given = {name: spread(x) if x.dim() else x for name, x in given.items()}
    whole = {name: (guarded(x), x) for name, x in given.items()}
    given = {name: within(room, x) for name, (room, x) in whole.items()}
    arriving = {name: given.pop(name) for name in ("do", "dht") if name in given}
    leaves = [given[name].requires_grad_() for name in GRADIENTS.values()]
    with around(), context():
        returned = kernel(**given, **keywords)
        results = returned if isinstance(returned, tuple) else (returned,)
        found = {name: x for name, x in zip(OUTPUTS, results) if x is not None}
        if leaves:
            pairs = [(found[n], arriving[d]) for n, d in (("o", "do"), ("ht", "dht")) if n in found and d in arriving]
            pairs = [(x, grad) for x, grad in pairs if x.requires_grad]
            grads = torch.autograd.grad([x for x, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True)
            zeros = (torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, grads))
            found.update(zip(GRADIENTS, zeros))
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    changed = [name for name, x in given.items() if not same_bits(x, tensors[name])]
    stray = [said for name, (room, x) in whole.items() if (said := strayed(name, room, x))]
    return {name: x.detach().cpu() for name, x in found.items()}, changed, stray


def same_bits(a, b):
    # Clones: a single element counts as contiguous whatever its stride, and then has no bytes to view.
    flat = (x.detach().cpu().flatten().clone(memory_format=torch.contiguous_format) for x in (a, b))
    as_bytes = [x.view(torch.uint8) for x in flat]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*as_bytes)


def place(flat, shape):
    index = []
    for size in reversed(shape):
        index.append(flat % size)
        flat //= size
    return QUANTITY + "".join(f"[{i}]" for i in reversed(index))


def compared(got):
    """True while the quantity is wrong; prints its worst elements."""
    form = None if got is None else (list(got.shape), str(got.dtype).removeprefix("torch."))
    if form is None or form[0] != SHAPE or form[1] != (DTYPE or form[1]):
        print(f"{QUANTITY}: got {form}, expected {SHAPE, DTYPE}")
        return True
    if EXPECTED is None:
        return False
    value = got.double()
    error = (value - EXPECTED).abs()
    measured = ~TOLERANCE.isnan()
    ratio = torch.where(error > 0, error / TOLERANCE, torch.zeros_like(error))
    ratio = torch.where(value.isfinite(), ratio, torch.full_like(ratio, inf))
    ratio = torch.where(measured, ratio, torch.zeros_like(ratio)).flatten()
    for flat in torch.argsort(ratio, descending=True)[:SHOWN].tolist():
        numbers = [float(x.flatten()[flat]) for x in (value, EXPECTED, TOLERANCE)]
        print(f"{place(flat, got.shape):24} got {numbers[0]:<14.7g} expected {numbers[1]:.7g} +- {numbers[2]:.2g}")
    over = int((~(ratio <= 1)).sum())
    print(f"{QUANTITY}: {over} of {ratio.numel()} elements are over their tolerance")
    if ALLOWED_RMS is None:
        return over > 0
    rms = float((value - EXPECTED).nan_to_num().square().mean().sqrt())
    print(f"{QUANTITY}: root mean square error {rms:.3g}, at most {ALLOWED_RMS:.3g} is rounding")
    return over > 0 or rms > ALLOWED_RMS


def in_unwritten_memory(first):
    """True while the quantity is wrong where memory that nobody has written holds NaN, whatever it held at first."""
    if compared(first.get(QUANTITY)):
        return True
    print("again, with NaN in memory that nobody has written:")
    with filled_with_nan():
        again = call()[0]
    return compared(again.get(QUANTITY))


def differs(first):
    """True while the quantity, or any other one, is not the same bits in every call, the last with NaN in memory that
    nobody has written.
    """
    runs = [first, *(call()[0] for _ in range(CALLS - 2))]
    with filled_with_nan():
        runs.append(call()[0])
    unsteady = [name for name in first if not all(same_bits(run[name], first[name]) for run in runs)]
    for name in unsteady:
        widest = max(float((run[name].double() - first[name].double()).abs().max()) for run in runs)
        print(f"{name}: differs between {CALLS} calls, by up to {widest:.3g}")
    return bool(unsteady)


def disagrees(itself):
    """True while the quantity in the other form is not what the call itself says."""
    varied = call(form=True)[0]
    print(f"{PROMISE}: the call itself against another form of it ({FORM})")
    if QUANTITY not in itself:
        return False
    got, own = varied[QUANTITY].double().flatten(), itself[QUANTITY].double().flatten() * FACTOR
    if KEPT is not None:
        got, own = (torch.cat([torch.zeros(1).double(), x]) for x in (got, own))
        got, own = got[KEPT.long().flatten()], own[ITSELF.long().flatten()]
    if got.shape != own.shape:
        print(f"{QUANTITY}: {got.numel()} elements, expected {own.numel()}")
        return True
    same = (got == own) | (got.isnan() & own.isnan())
    if ALLOWED:
        same |= ~(got.isfinite() & own.isfinite()) | ((got - own).abs() <= ALLOWED)
    wrong = (~same).nonzero().flatten().tolist()
    for flat in wrong[:SHOWN]:
        number = flat if KEPT is None else int(ITSELF.flatten()[flat]) - 1
        where = place(number, itself[QUANTITY].shape) if number >= 0 else "added"
        print(f"{where:24} got {float(got[flat]):<16.9g} the call itself says {float(own[flat]):.9g}")
    print(f"{QUANTITY}: {len(wrong)} of {same.numel()} elements differ")
    return bool(wrong)


# What code after a call depends on; see `harness.process_state`, which has the same names.
SETTINGS = {
    "default dtype": torch.get_default_dtype,
    "default device": torch.get_default_device,
    "grad mode": torch.is_grad_enabled,
    "inference mode": torch.is_inference_mode_enabled,
    "anomaly mode": torch.is_anomaly_enabled,
    "number of threads": torch.get_num_threads,
    "flushing of denormals": lambda: float(torch.tensor([1e-40]) * 1.0) == 0,
    "deterministic algorithms (on, only warning)": lambda: (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    ),
    "filling of uninitialised memory": lambda: torch.utils.deterministic.fill_uninitialized_memory,
    "fp32 products of matmul": lambda: torch.backends.cuda.matmul.fp32_precision,
    "fp32 products of cuDNN convolutions": lambda: torch.backends.cudnn.conv.fp32_precision,
    "fp32 products of cuDNN RNNs": lambda: torch.backends.cudnn.rnn.fp32_precision,
    "fp16 sums of matmul": lambda: torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
    "bf16 sums of matmul": lambda: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    "cuDNN": lambda: torch.backends.cudnn.enabled,
    "cuDNN benchmarking": lambda: torch.backends.cudnn.benchmark,
    "cuDNN determinism": lambda: torch.backends.cudnn.deterministic,
    f"autocast on {DEVICE}": lambda: torch.is_autocast_enabled(DEVICE),
    f"autocast dtype on {DEVICE}": lambda: torch.get_autocast_dtype(DEVICE),
}
if DEVICE == "cuda":
    SETTINGS |= {"current device": torch.cuda.current_device, "current stream": torch.cuda.current_stream}


def leaves_changed():
    """True while settings of the process are not what they were before the call."""
    before = {name: read() for name, read in SETTINGS.items()}
    call(form=bool(FORM))
    after = {name: read() for name, read in SETTINGS.items()}
    changed = [name for name in SETTINGS if after[name] != before[name]]
    for name in changed:
        print(f"{name} is {after[name]} after the call, and was {before[name]} before it")
    print(f"settings of the process that the call changed: {len(changed)} of {len(SETTINGS)}")
    return bool(changed)


class Mallinfo(ctypes.Structure):
    NAMES = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in NAMES.split()]


def in_use():
    """Bytes that are allocated: by torch on a GPU, by malloc on a CPU; None where that does not say."""
    gc.collect()
    if DEVICE == "cuda":
        return torch.cuda.memory_allocated()
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return None
    libc.mallinfo2.restype = Mallinfo
    info = libc.mallinfo2()
    return info.uordblks + info.hblkhd


def leaks():
    """True while every call with the same arguments keeps memory; None where nobody counts it."""
    held = []
    for _ in range(REPEATS + 2):
        call(form=bool(FORM))
        held.append(in_use())
    if None in held:
        print("how much memory is in use is not known here")
        return None
    kept = [after - before for before, after in itertools.pairwise(held[1:])]
    print(f"memory kept by {REPEATS} calls with the same arguments, in bytes: {', '.join(map(str, kept))}")
    return min(kept) >= LEAST


def is_seen_by_sanitizer():
    """True while the interpreter's sanitizer stops the call; None where there is none."""
    if interpreter is None or DEVICE == "cuda":
        print("only the sanitizer sees this, which is the harness's and runs kernels in Triton's interpreter: install")
        print("kda-harness and hide the GPU (CUDA_VISIBLE_DEVICES=), or use `kda replay problem.json`")
        return None
    try:
        call(form=True)
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
        return True
    print("every access of every kernel was in order")
    return False


def is_wrong():
    """True while the fault is there; None where that cannot be said."""
    alone = {"process": leaves_changed, "memory": leaks}
    if FORM == "watched":
        return is_seen_by_sanitizer()
    if QUANTITY in alone:
        return alone[QUANTITY]()
    of_form = bool(FORM) and QUANTITY == "bands"
    found, changed, stray = call(form=of_form)
    if QUANTITY == "inputs":
        wrong = bool(changed)
        print(f"arguments that the call changed: {', '.join(changed) or 'none'}")
    elif QUANTITY == "bands":
        wrong = bool(stray)
        print(f"bytes that the call wrote outside of its arguments: {'; '.join(stray) or 'none'}")
    elif FORM:
        wrong = disagrees(found)
    elif CLASS == "NONDETERMINISTIC":
        wrong = differs(found)
    else:
        wrong = SHAPE is not None and in_unwritten_memory(found)
    return wrong


def main():
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    there = False
    try:
        kernel_and_context()  # first: a package that is not there is no crash, and its import no change by the call
        there = True
        wrong = is_wrong()
    except Exception:
        traceback.print_exc()
        if not there or CLASS != "CRASH":
            print("the call does not run here: nothing is known of the fault")
            return 2
        wrong = True
    if wrong is None:
        print("this script cannot show the fault here: nothing is known of it")
        return 2
    print("the fault is there" if wrong else "the fault is gone")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
