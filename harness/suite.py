"""Authority on the ready-made test of a subject: `pytest -p harness.pytest_plugin --pyargs harness.suite`."""

import pytest

from harness.gating import NOT_RUN, ROUTE
from harness.holding import NotHeld


def test_route(kda_task, kda_hold, kda_gate, request):
    """The route is right on the problem; what the subject does not take, or there is no time for, is no pass."""
    properties = request.node.user_properties
    properties.append((ROUTE, kda_task.route))
    if kda_gate.time_is_up():
        properties.append((NOT_RUN, "out of time"))
        pytest.skip("--kda-budget is spent")
    try:
        kda_hold(kda_task.route, kda_task.problem)
    except NotHeld as reason:
        properties.append((NOT_RUN, "not covered"))
        pytest.skip(str(reason))
