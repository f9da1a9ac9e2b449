"""The test session's authority on its environment: threads of a worker, and the plugin that brings the harness."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # xdist workers already fill the cores

import harness  # noqa: F401  GPU of this worker, and TRITON_INTERPRET without one, before kda is imported

pytest_plugins = ["harness.pytest_plugin"]
