"""Authority on measuring a criterion: the smallest fault of a kind that it sees, for every quantity at once."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from harness.detection.policies import Policy, Sample

STEPS_PER_OCTAVE = 4
SMALLEST, LARGEST = -26 * STEPS_PER_OCTAVE, 5 * STEPS_PER_OCTAVE  # sizes 2^(step / STEPS_PER_OCTAVE)
PLACES = 5  # a fault is tried at this many places, and the median counts

Fault = Callable[[Tensor, Tensor, int, int], Tensor]  # (output, exact, size's step, place) -> a wrong output


def size_of(step: int) -> float:
    return 2.0 ** (step / STEPS_PER_OCTAVE)


def element(got: Tensor, exact: Tensor, step: int, place: int) -> Tensor:
    """One element is off by that share of its row's rms."""
    wrong = got.clone().flatten()
    index = int(torch.randint(wrong.numel(), (), generator=torch.Generator().manual_seed(place)))
    row = exact.flatten()[index // exact.shape[-1] * exact.shape[-1] :][: exact.shape[-1]]
    wrong[index] = (wrong[index].double() + size_of(step) * row.square().mean().sqrt()).to(got.dtype)
    return wrong.view(got.shape)


def gain(got: Tensor, exact: Tensor, step: int, place: int) -> Tensor:
    """The whole quantity is larger by that share, before its output is rounded."""
    return (got.double() + size_of(step) * exact).to(got.dtype)


def smallest(
    sample: Sample, policy: Policy, fault: Fault, outputs: Mapping[str, Tensor], places: int = PLACES
) -> dict[str, int | None]:
    """The smallest step of a fault's size at which each quantity is flagged: the median over places.

    None where it is flagged without any fault, or never.
    """
    alarms = policy(sample, outputs)
    found: dict[str, list[int]] = {name: [] for name in outputs}
    for place in range(places):
        below = dict.fromkeys(outputs, SMALLEST - 1)
        above = dict.fromkeys(outputs, LARGEST + 1)
        while any(above[name] - below[name] > 1 for name in outputs):
            step = {name: (above[name] + below[name]) // 2 for name in outputs}
            wrong = {name: fault(x, sample.exact[name], step[name], place) for name, x in outputs.items()}
            flagged = policy(sample, wrong)
            for name in outputs:
                (above if name in flagged else below)[name] = step[name]
        for name in outputs:
            found[name].append(above[name])
    medians = {name: sorted(steps)[len(steps) // 2] for name, steps in found.items()}
    return {name: None if name in alarms or step > LARGEST else step for name, step in medians.items()}


def zeroed_unnoticed(sample: Sample, policy: Policy, outputs: Mapping[str, Tensor]) -> dict[str, float]:
    """The largest share of each output's elements, smallest ones that are not 0 first, that may be 0 unnoticed."""
    order = {name: exact.abs().flatten().argsort()[int((exact == 0).sum()) :] for name, exact in sample.exact.items()}
    below, above = dict.fromkeys(outputs, 0), {name: len(order[name]) + 1 for name in outputs}
    while any(above[name] - below[name] > 1 for name in outputs):
        count = {name: (above[name] + below[name]) // 2 for name in outputs}
        wrong = {name: _without(x, order[name][: count[name]]) for name, x in outputs.items()}
        flagged = policy(sample, wrong)
        for name in outputs:
            (above if name in flagged else below)[name] = count[name]
    return {name: below[name] / x.numel() for name, x in outputs.items()}


def _without(x: Tensor, elements: Tensor) -> Tensor:
    return x.flatten().index_fill(0, elements, 0.0).view(x.shape)
