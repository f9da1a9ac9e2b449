"""Launches that skip Triton's dispatch: only where it would choose the same kernel again, and as it would launch it."""

from types import SimpleNamespace

import pytest
import torch
import triton.language as tl
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from kda import relaunch

STREAM = 77


def add(x, y, rows, n, scale, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    pass


class Chosen(CompiledKernel):
    """A compiled kernel that notes how it is launched."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, launches: list[tuple]):
        self.launches = launches

    def __del__(self):
        pass  # there is nothing to unload

    def run(self, *arguments: object) -> None:
        self.launches.append(arguments)

    def __getitem__(self, grid: tuple[int, int, int]):
        return lambda *arguments: self.launches.append((grid, *arguments))


@pytest.fixture
def gpu(monkeypatch):
    """As on a GPU, with a dispatch that compiles nothing: `kernel`, its `dispatched` launches and the `repeated`."""
    made = SimpleNamespace(dispatched=[], repeated=[], device=0)
    driver = SimpleNamespace(get_current_device=lambda: made.device, get_current_stream=lambda device: STREAM + device)

    def dispatch(self, *arguments, grid, warmup, **constants):
        made.dispatched.append((grid, *arguments, constants))
        return Chosen(made.repeated)

    monkeypatch.setattr(JITFunction, "run", dispatch)
    for name, value in {"AGAIN": True, "_dispatch": dispatch, "_kept": {}, "_by_value": set()}.items():
        monkeypatch.setattr(relaunch, name, value)
    monkeypatch.setattr(relaunch, "driver", SimpleNamespace(active=driver))
    made.kernel = JITFunction(add, do_not_specialize=["n"])
    return made


def numbers(count: int = 64, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(count, dtype=dtype)


def launch(gpu: SimpleNamespace, constants: dict[str, object] | None = None, **changes: object) -> tuple[int, int]:
    """(launches by the dispatch, launches without) so far, after one more."""
    rows = relaunch.descriptor(numbers(), 8, (4, 8))
    arguments = {"x": numbers(), "y": numbers(), "rows": rows, "n": 5, "scale": 0.5, **changes}
    constants = {"BLOCK": 4, "WIDE": False, "num_warps": 4, **(constants or {})}
    relaunch.launch(gpu.kernel, 3, tuple(arguments.values()), constants)
    return len(gpu.dispatched), len(gpu.repeated)


def test_a_second_launch_is_that_of_the_chosen_kernel(gpu):
    assert [launch(gpu), launch(gpu)] == [(1, 0), (1, 1)]
    grid, *given, constants = gpu.dispatched[0]
    assert grid == (3,) and constants == {"BLOCK": 4, "WIDE": False, "num_warps": 4}
    assert gpu.repeated[0][:9] == (3, 1, 1, STREAM, "function", "metadata", None, None, None)
    assert gpu.repeated[0][-4:] == (5, 0.5, 4, False) and len(gpu.repeated[0]) == 9 + len(given) + 2


SAME = {
    "other_numbers": {"n": 2**31 - 1, "scale": 1.0},
    "a_longer_tensor": {"x": numbers(640)},
    "a_parameter": {"x": torch.nn.Parameter(numbers())},
    "a_longer_descriptor": {"rows": relaunch.descriptor(numbers(640), 8, (4, 8))},
}


@pytest.mark.parametrize("changes", SAME.values(), ids=SAME)
def test_what_the_dispatch_does_not_go_by_is_no_other_launch(changes, gpu):
    launch(gpu)
    assert launch(gpu, **changes) == (1, 1)


OTHER = {
    "dtype": {"x": numbers(dtype=torch.float32)},
    "address": {"x": numbers()[1:]},
    "address_of_a_parameter": {"x": torch.nn.Parameter(numbers()[1:])},
    "none": {"y": None},
    "int64": {"n": 2**31},
    "whole_number": {"scale": 1},
    "block": {"rows": relaunch.descriptor(numbers(), 8, (2, 8))},
    "dtype_of_descriptor": {"rows": relaunch.descriptor(numbers(dtype=torch.float32), 8, (4, 8))},
    "constant": {"constants": {"BLOCK": 8}},
    "option": {"constants": {"num_warps": 8}},
    "new_option": {"constants": {"maxnreg": 8}},
}


@pytest.mark.parametrize("changes", OTHER.values(), ids=OTHER)
def test_what_the_dispatch_goes_by_is_another_launch(changes, gpu):
    launch(gpu)
    assert launch(gpu, **changes) == (2, 0)


def test_constants_are_told_apart_by_name(gpu):
    launch(gpu, {"BLOCK": 4, "WIDE": 8})
    relaunch.launch(gpu.kernel, 3, (numbers(), None, None, 1, 1.0), {"WIDE": 4, "BLOCK": 8, "num_warps": 4})
    assert (len(gpu.dispatched), len(gpu.repeated)) == (2, 0)


def test_each_device_has_its_own(gpu):
    launch(gpu)
    gpu.device = 1
    assert [launch(gpu), launch(gpu)] == [(2, 0), (2, 1)]
    assert gpu.repeated[0][3] == STREAM + 1


def test_settings_are_heeded(gpu, monkeypatch):
    launch(gpu)
    runtime = relaunch._runtime
    hooks = {name: getattr(runtime, name) for name in ("launch_enter_hook", "launch_exit_hook")}
    monkeypatch.setattr(relaunch, "_runtime", SimpleNamespace(debug=True, **hooks))
    assert launch(gpu) == (2, 0)


def test_numbers_that_choose_a_kernel_go_by_the_dispatch(gpu):
    gpu.kernel = JITFunction(add)
    assert [launch(gpu) for _ in range(3)] == [(1, 0), (2, 0), (3, 0)]


@pytest.mark.parametrize("reason", ["version", "hook_of_kernel", "replaced_dispatch", "unknown_argument"])
def test_everything_else_goes_by_the_dispatch(reason, gpu, monkeypatch):
    launch(gpu)
    changes = {"y": object()} if reason == "unknown_argument" else {}
    if reason == "version":
        monkeypatch.setattr(relaunch, "AGAIN", False)
    elif reason == "hook_of_kernel":
        gpu.kernel.pre_run_hooks.append(lambda *_, **__: None)
    elif reason == "replaced_dispatch":
        dispatch = JITFunction.run
        monkeypatch.setattr(JITFunction, "run", lambda *given, **named: dispatch(*given, **named))
    assert [launch(gpu, **changes) for _ in range(2)] == [(2, 0), (3, 0)]


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_profilers_hear_of_repeated_launches(hook, gpu, monkeypatch):
    launch(gpu)
    monkeypatch.setattr(getattr(relaunch._runtime, hook), "calls", [print])
    assert launch(gpu) == (1, 1)
    assert gpu.repeated[0][0] == (3, 1, 1)  # by the call that serves them


def test_memory_is_bounded(gpu, monkeypatch):
    monkeypatch.setattr(relaunch, "MOST", 2)
    for block in (2, 4, 8, 16, 32):
        launch(gpu, {"BLOCK": block})
        assert 1 <= len(relaunch._kept) <= 2


def test_descriptors_are_those_of_triton():
    x = torch.zeros(4, 6, 32, dtype=torch.bfloat16)
    made, expected = relaunch.descriptor(x, 32, (16, 32)), TensorDescriptor.from_tensor(x.view(-1, 32), [16, 32])
    fields = [name for name in TensorDescriptor.__dataclass_fields__ if name != "base"]
    of = lambda got: [list(x) if isinstance(x := getattr(got, name), tuple) else x for name in fields]  # noqa: E731
    assert type(made) is TensorDescriptor and of(made) == of(expected)
    assert (made.base.data_ptr(), made.base.dtype) == (x.data_ptr(), x.dtype)
