"""`python -m harness.diagnosis` measures the diagnoses of the chosen mutants and writes docs/diagnosis.md."""

import argparse
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

from harness.diagnosis import page
from harness.diagnosis.chosen import chosen
from harness.diagnosis.measure import Row, measured
from harness.mutants.campaign import prepare

TWICE = 4  # mutants that are measured twice: those whose first measurement took least

parser = argparse.ArgumentParser(prog="python -m harness.diagnosis", description=__doc__)
parser.add_argument("--page", action="store_true", help="write the page from the record, and measure nothing")
parser.add_argument("--jobs", type=int, default=1, help="mutants measured at a time")


def main(jobs: int) -> None:
    """Measure all mutants, a record of those that are done written after each, then some of them again."""
    mutants, tuned, made = chosen(), page.load()["tuned"], {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=prepare, initargs=("cpu",)) as pool:
        for mutant, row in zip(mutants, pool.map(measured, mutants)):
            made[mutant] = row
            print(f"{row.mutant}: {row.seconds:.0f} s, {row.stage or 'not found'}", flush=True)
            page.save(list(made.values()), {}, tuned)
        quickest = sorted((m for m in mutants if made[m].problem), key=lambda m: made[m].seconds)[:TWICE]
        again: list[Row] = list(pool.map(measured, quickest))
    page.save(list(made.values()), {row.mutant: row.problem for row in again}, tuned)


if __name__ == "__main__":
    arguments = parser.parse_args()
    if not arguments.page:
        main(arguments.jobs)
    page.write()
