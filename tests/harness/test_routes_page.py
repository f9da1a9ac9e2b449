"""docs/routes.md is current, and what it says of a route is what the launch record says ran."""

import pytest
import torch

import kda
from harness import routes_page
from harness.routes_page import ENTRIES, FORCED, NOT_AN_ENTRY, WORKS, arguments, cell, of_entry

CELLS = [
    pytest.param(entry, option, route, id=f"{entry}-{route.id}-{option.name.replace(' ', '_')}")
    for entry in ENTRIES
    for option in of_entry(entry)
    if option.runs
    for route in kda.routes()
    if entry in route.entries
]


def test_page_is_current():
    assert routes_page.PAGE.read_text() == routes_page.text(), "run `python -m harness.routes_page`"


def test_every_cell_has_an_answer():
    rows = [line.split(" | ") for line in routes_page.text().splitlines() if line.startswith("| ")]
    assert len(rows) == sum(1 + len(of_entry(entry)) for entry in ENTRIES)
    assert all(answer.strip(" |") for row in rows for answer in row)


def test_rows_are_told_apart():
    """No two rows of an entry make the same call."""
    for entry in ENTRIES:
        names = [option.name for option in of_entry(entry)]
        assert len(set(names)) == len(names)


def test_a_route_without_the_entry_says_so():
    (gate,) = (route for route in kda.routes() if route.id == "gate")
    assert cell(of_entry("chunk")[0], "chunk", gate) == NOT_AN_ENTRY


def there(call: dict[str, object], device: str) -> dict[str, object]:
    """The call with its tensors on a device, leaves as before; the copy of the offsets stays."""
    move = lambda x: x.detach().to(device).requires_grad_(x.requires_grad)  # noqa: E731
    moves = lambda name, x: isinstance(x, torch.Tensor) and name != "cu_seqlens_cpu" and device != "cpu"  # noqa: E731
    return {name: move(x) if moves(name, x) else x for name, x in call.items()}


@pytest.mark.parametrize("entry, option, route", CELLS)
def test_what_is_said_of_a_cell_is_what_happens(entry, option, route, device):
    if device != "cpu" and option.dtype == torch.float64:
        pytest.skip("float64 is legal on the CPU only")
    call, answer = there(arguments(option, entry), device), cell(option, entry, route)
    with kda.force_route(route.id), kda.record_launches() as launches:
        if answer != WORKS and not answer.startswith(FORCED):
            with pytest.raises(ValueError, match="no route takes this call") as refusal:
                ENTRIES[entry](**call)
            assert f"{route.id}: refused, {answer}" in str(refusal.value)
            return
        results = ENTRIES[entry](**call)
        results = [results] if isinstance(results, torch.Tensor) else [x for x in results if x is not None]
        if option.requires_grad:
            results[0].sum().backward()
    assert all(torch.isfinite(x).all() for x in results)
    ran = {launch.route for launch in launches}
    assert ran == {route.id} or (not ran and not option.sequences * option.tokens), "nothing needs no kernel"
    if option.requires_grad:
        assert all(x.grad is not None for x in call.values() if isinstance(x, torch.Tensor) and x.requires_grad)


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_first_route_that_works_serves_the_call(entry, device):
    """On the machine that this is, for rows that it can have."""
    for option in (option for option in of_entry(entry) if option.runs and device == "cpu"):
        able = [route.id for route in kda.routes() if cell(option, entry, route) == WORKS]
        assert kda.explain(ENTRIES[entry], **arguments(option, entry)).route == able[0]
