"""The harness inside pytest: its options, the repaired interpreter, Hypothesis profiles, and a header that says what
is tested where.
"""

import os

import pytest
import torch
import triton
from hypothesis import settings

from harness import interpreter, options, profiles


def pytest_addoption(parser: pytest.Parser) -> None:
    options.add_to_pytest(parser.getgroup("kda", "KDA kernels against the oracle"))


def pytest_configure(config: pytest.Config) -> None:
    if triton.knobs.runtime.interpret:
        interpreter.install()
    profiles.register()
    chosen = "ci" if os.environ.get("CI") else config.getoption("--kda-profile")
    settings.load_profile(chosen)
    if os.environ.get("PYTEST_XDIST_WORKER"):
        torch.set_num_threads(1)


def pytest_report_header(config: pytest.Config) -> str:
    where = "interpreter" if triton.knobs.runtime.interpret else torch.cuda.get_device_name()
    subject = config.getoption("--kda-subject") or os.environ.get("KDA_SUBJECT") or "kda"
    return f"kda: subject {subject}, {where}, torch {torch.__version__}, triton {triton.__version__}"


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    """Where tensors of a test live: --kda-device, else a GPU if there is one."""
    return request.config.getoption("--kda-device") or options.default_device()
