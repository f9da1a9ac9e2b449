"""`python -m harness.diagnosis` measures the diagnoses of the chosen mutants and writes docs/diagnosis.md."""

import argparse

from harness import interpreter
from harness.diagnosis import page
from harness.diagnosis.chosen import chosen
from harness.diagnosis.measure import measured

parser = argparse.ArgumentParser(prog="python -m harness.diagnosis", description=__doc__)
parser.add_argument("--page", action="store_true", help="write the page from the record, and measure nothing")
if not parser.parse_args().page:
    interpreter.install()
    before = page.load()
    rows = []
    for mutant in chosen():
        rows.append(measured(mutant))
        print(f"{mutant.id}: {rows[-1].seconds:.0f} s, {rows[-1].problem or 'not found'}", flush=True)
    page.save(rows, before["again"], before["tuned"])
page.write()
