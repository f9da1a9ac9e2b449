"""Authority on the pytest workers of one machine: which GPU each of them has, and how much of its memory."""

import os

import torch

SHARED = 0.9  # of a GPU, among its workers; the rest is for their contexts


def pin_to_gpu() -> None:
    """Deal the visible GPUs to the workers in turn; does nothing outside a worker.

    CUDA reads the variable once, so this must come before anything asks for a device.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    devices = _visible() if worker else []
    if devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[int(worker.removeprefix("gw")) % len(devices)]
        os.environ["KDA_WORKER_SHARE"] = str(_share(int(os.environ["PYTEST_XDIST_WORKER_COUNT"]), len(devices)))


def limit_memory() -> None:
    """Hold this worker to its share of its GPU, so that one that leaks fails itself and not its neighbours."""
    if "KDA_WORKER_SHARE" in os.environ and torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(share_of_gpu())


def share_of_gpu() -> float:
    """What a process may take of its GPU: a worker, or the child of one, its share."""
    return float(os.environ.get("KDA_WORKER_SHARE", SHARED))


def _visible() -> list[str]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        named = ",".join(map(str, range(torch.cuda.device_count())))  # counted by NVML: creates no context
    return [device for device in named.split(",") if device]


def _share(workers: int, devices: int) -> float:
    """Of its GPU, what a worker may take when so many are dealt out."""
    return SHARED / -(-workers // devices)
