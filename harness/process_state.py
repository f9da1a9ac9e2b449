"""Authority on what a call must leave in its process as it found it: torch's defaults, modes, device and stream."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Setting:
    """One thing that code after the call depends on; without `write` it cannot be put back."""

    name: str
    read: Callable[[], object]
    write: Callable[[object], object] | None = None


def _attribute(name: str, owner: object, attribute: str) -> Setting:
    return Setting(name, lambda: getattr(owner, attribute), lambda value: setattr(owner, attribute, value))


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_default_device(device: object) -> None:
    torch.set_default_device(None if device == torch.device("cpu") else device)


def _flushes_denormals() -> bool:
    return float(torch.tensor([1e-40]) * 1.0) == 0


# Random number generators are not here: a call may draw. The formats of products are read by their newer names, since
# the older ones (allow_tf32) raise once code has used the newer.
_EVERYWHERE = (
    Setting("default dtype", torch.get_default_dtype, torch.set_default_dtype),
    Setting("default device", torch.get_default_device, _set_default_device),
    Setting("grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
    Setting("inference mode", torch.is_inference_mode_enabled),
    Setting("anomaly mode", torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    Setting("number of threads", torch.get_num_threads, torch.set_num_threads),
    Setting("flushing of denormals", _flushes_denormals, torch.set_flush_denormal),
    Setting(
        "deterministic algorithms (on, only warning)",
        _deterministic,
        lambda on: torch.use_deterministic_algorithms(on[0], warn_only=on[1]),
    ),
    _attribute("filling of uninitialised memory", torch.utils.deterministic, "fill_uninitialized_memory"),
    _attribute("fp32 products of matmul", torch.backends.cuda.matmul, "fp32_precision"),
    _attribute("fp32 products of cuDNN convolutions", torch.backends.cudnn.conv, "fp32_precision"),
    _attribute("fp32 products of cuDNN RNNs", torch.backends.cudnn.rnn, "fp32_precision"),
    _attribute("fp16 sums of matmul", torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction"),
    _attribute("bf16 sums of matmul", torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
    _attribute("cuDNN", torch.backends.cudnn, "enabled"),
    _attribute("cuDNN benchmarking", torch.backends.cudnn, "benchmark"),
    _attribute("cuDNN determinism", torch.backends.cudnn, "deterministic"),
)
_CUDA = (
    Setting("current device", lambda: torch.cuda.current_device(), lambda device: torch.cuda.set_device(device)),
    Setting("current stream", lambda: torch.cuda.current_stream(), lambda stream: torch.cuda.set_stream(stream)),
)


def _autocast(device: str) -> tuple[Setting, Setting]:
    return (
        Setting(
            f"autocast on {device}",
            lambda: torch.is_autocast_enabled(device),
            lambda on: torch.set_autocast_enabled(device, on),
        ),
        Setting(
            f"autocast dtype on {device}",
            lambda: torch.get_autocast_dtype(device),
            lambda dtype: torch.set_autocast_dtype(device, dtype),
        ),
    )


OF_DEVICE = {"cpu": (*_EVERYWHERE, *_autocast("cpu")), "cuda": (*_EVERYWHERE, *_autocast("cuda"), *_CUDA)}


@dataclass
class Watched:
    """What a block left otherwise than it was, one line for each; complete once the block has ended."""

    changes: list[str] = field(default_factory=list)


@contextlib.contextmanager
def watched(device: torch.device) -> Iterator[Watched]:
    """Notes what the block changes, and puts it back so that later calls do not suffer from it."""
    settings, seen = OF_DEVICE["cuda" if device.type == "cuda" else "cpu"], Watched()
    before = [_value(setting) for setting in settings]
    try:
        yield seen
    finally:
        for setting, was in zip(settings, before):
            now = _value(setting)
            if now != was:
                seen.changes.append(f"{setting.name} is {now} after the call, and was {was} before it")
                _put_back(setting, was)


def _value(setting: Setting) -> object:
    try:
        return setting.read()
    except RuntimeError as error:
        return f"not to be read ({str(error).splitlines()[0]})"


def _put_back(setting: Setting, value: object) -> None:
    if setting.write is not None:
        with contextlib.suppress(RuntimeError, TypeError, ValueError):
            setting.write(value)
