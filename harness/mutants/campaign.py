"""Authority on many mutants at once: worker processes, progress, and a record from which nothing is lost."""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

import torch

from harness import interpreter
from harness.mutants.mutant import Mutant, Trial
from harness.mutants.trial import try_mutant
from harness.orphans import end_with_parent


def prepare(device: str) -> None:
    """What a worker process does first."""
    end_with_parent()
    torch.set_num_threads(1)
    if device == "cpu":
        interpreter.install()


def campaign(
    mutants: Sequence[Mutant],
    *,
    jobs: int,
    problems: int,
    seed: int = 0,
    device: str = "cpu",
    done: Callable[[Trial], None] = lambda trial: None,
) -> list[Trial]:
    """Try every mutant, `jobs` at a time; `done` hears of each as it ends. An interrupt ends what has not begun."""
    trials: list[Trial] = []
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=prepare, initargs=(device,)) as pool:
        waiting = [pool.submit(try_mutant, mutant, problems, seed, device) for mutant in mutants]
        try:
            for future in as_completed(waiting):
                trials.append(future.result())
                done(trials[-1])
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
    return trials
