"""Authority on launching kernels: by Triton's own dispatch, or again by the compiled kernel that it chose before."""

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction, driver
from triton.tools.tensor_descriptor import TensorDescriptor

# NOTE [Launching again]
# Triton's dispatch binds, specialises and spells out every argument of every launch, which costs more time than all
# else that the host does. What it goes by is little: of tensors the dtype, and whether the address is a multiple of 16
# bytes; of descriptors the dtype and the block; of numbers that are not specialised their type; the constants; the
# device; and two settings. A kernel that it chose for these is kept, and launched again as the dispatch would: by
# Triton's own call for compiled kernels where profilers listen, and by what that calls where nobody does. Any other
# argument, kernels with hooks of their own, a dispatch that was replaced, and versions of Triton on which this was not
# tried go by the dispatch. Interpreted kernels are never compiled.

AGAIN = triton.__version__.startswith(("3.6.", "3.9.")) and torch.version.hip is None  # where it was tried
MOST = 1024  # compiled kernels that are kept; beyond, all are forgotten
_dispatch, _runtime, _compilation = JITFunction.run, triton.knobs.runtime, triton.knobs.compilation
_kept: dict[tuple, tuple[CompiledKernel, tuple]] = {}
_by_value: set[object] = set()  # functions of kernels that are chosen by values of numbers


def launch(kernel: JITFunction, programs: int, arguments: tuple, constants: dict[str, object]) -> None:
    """Run a kernel on that many programs."""
    known = _key(kernel, arguments, constants) if AGAIN else None
    found = None if known is None else _kept.get(known)
    if found is None:
        _keep(known, kernel, kernel[(programs,)](*arguments, **constants), arguments, constants)
        return
    compiled, rest = found
    if _hooked():
        compiled[(programs, 1, 1)](*arguments, *rest)
        return
    stream = driver.active.get_current_stream(driver.active.get_current_device())
    how = (compiled.function, compiled.packed_metadata, None, None, None)  # no metadata and no hooks
    compiled.run(programs, 1, 1, stream, *how, *arguments, *rest)


def _hooked() -> bool:
    """Whether somebody listens to launches."""
    enter, leave = _runtime.launch_enter_hook, _runtime.launch_exit_hook
    return bool(getattr(enter, "calls", True) or getattr(leave, "calls", True))


def _key(kernel: JITFunction, arguments: tuple, constants: dict[str, object]) -> tuple | None:
    """What Triton's dispatch goes by; None if that may be something else."""
    if not isinstance(kernel, JITFunction) or kernel.pre_run_hooks or JITFunction.run is not _dispatch:
        return None
    if kernel.fn in _by_value:
        return None
    try:
        kinds = [
            (x.dtype if x.data_ptr() % 16 == 0 else (x.dtype,))
            if type(x) is Tensor
            else None
            if x is None
            else float
            if type(x) is float
            else x >> 31  # of int32 or not
            if type(x) is int
            else (x.base.dtype, *x.block_shape)
            if type(x) is TensorDescriptor
            else (x.dtype if x.data_ptr() % 16 == 0 else (x.dtype,))  # of a parameter
            for x in arguments
        ]
    except AttributeError:
        return None
    place = driver.active.get_current_device(), _runtime.debug, _compilation.instrumentation_mode
    return kernel.fn, *place, *kinds, *constants, *constants.values()


def _keep(
    known: tuple | None, kernel: JITFunction, made: object, arguments: tuple, constants: dict[str, object]
) -> None:
    """Remember what the dispatch chose, unless it is no kernel, or was chosen by the values of numbers."""
    if known is None or not isinstance(made, CompiledKernel):
        return
    given, rest = kernel.params[: len(arguments)], kernel.params[len(arguments) :]
    if any(type(x) is int and not param.do_not_specialize for x, param in zip(arguments, given)):
        _by_value.add(kernel.fn)
        return
    if len(_kept) >= MOST:
        _kept.clear()
    _kept[known] = made, tuple(constants[param.name] for param in rest)


def descriptor(x: Tensor, width: int, block: tuple[int, int]) -> TensorDescriptor:
    """The rows of `width` numbers of a dense tensor, block by block; x starts at a multiple of 16 bytes, as do rows.

    It is made without what TensorDescriptor checks in each instance, and this promises.
    """
    made = object.__new__(TensorDescriptor)
    made.base, made.block_shape = x, list(block)
    made.shape, made.strides = [x.numel() // width, width], [width, 1]
    return made
