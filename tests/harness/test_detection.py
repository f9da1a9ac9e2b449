"""The smallest faults that the criterion sees, which may only become smaller; and what others do not see."""

import json

import pytest
import torch

from harness.detection import measure, page
from harness.detection.policies import POLICIES, Sample

RECORD = json.loads(page.RECORD.read_text())


@pytest.mark.parametrize("name", ["chunk-unbounded bf16 nearly exact"])
def test_smallest_sizes_do_not_grow(name):
    measured = page.record((name,))
    worse = {
        (key, quantity): (step, RECORD[key][quantity])
        for key, steps in measured.items()
        for quantity, step in steps.items()
        if step is None or step > RECORD[key][quantity]
    }
    assert worse == {}


def test_record_covers_every_sample_and_fault():
    assert set(RECORD) == {f"{name} {kind}" for name in page.SAMPLES for kind in page.FAULTS}
    assert all(step is not None for steps in RECORD.values() for step in steps.values())


@pytest.mark.parametrize("policy", POLICIES)
def test_policy_flags_a_lost_quantity_and_only_it(policy):
    sample = Sample.of(*page.SAMPLES["recurrent bf16"])
    outputs = {name: x for name, x in sample.rounded.items() if name in ("o", "dq", "dg")}
    assert POLICIES[policy](sample, outputs) & set(outputs) == set()
    assert POLICIES[policy](sample, {**outputs, "dq": torch.zeros_like(outputs["dq"])}) & set(outputs) == {"dq"}


def test_rms_ratio_misses_what_the_envelope_sees():
    sample = Sample.of(*page.SAMPLES["recurrent bf16"])
    wrong = {"ht": measure.element(sample.rounded["ht"], sample.exact["ht"], -10 * measure.STEPS_PER_OCTAVE, 0)}
    assert "ht" in POLICIES["envelope"](sample, wrong)
    assert "ht" not in POLICIES["rms ratio"](sample, wrong)
