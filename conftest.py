"""The test session's authority on devices: which GPU a worker sees, and the interpreter where there is none."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # xdist workers already fill the cores


def _pin_worker_to_gpu() -> None:
    """Spread xdist workers over the visible GPUs; must run before anything initialises CUDA."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None:
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        import torch

        visible = ",".join(map(str, range(torch.cuda.device_count())))  # NVML count: creates no context
    devices = [device for device in visible.split(",") if device]
    if devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[int(worker.removeprefix("gw")) % len(devices)]


_pin_worker_to_gpu()

import harness  # noqa: E402, F401  sets TRITON_INTERPRET without a GPU, before kda is imported

pytest_plugins = ["harness.pytest_plugin"]
