"""Authority on dividing the problems of a check among machines, so that each compiles what no other does."""

from collections import Counter
from collections.abc import Iterable

from harness.check import Task
from harness.options import Shard

COMPILED_FOR = "entry dtype gate_dtype gate heads group K V l2norm beta_sigmoid neg_eigval v_first packed chunk_size"


def compile_key(task: Task) -> str:
    """Problems with the same key run on the same compiled kernels, as far as names and sizes tell."""
    return " ".join([task.route, *(str(getattr(task.problem, name)) for name in COMPILED_FOR.split())])


def share(tasks: Iterable[Task], shard: Shard | None) -> list[Task]:
    """What one of several machines takes of the same tasks, in their order: each is in one share, and none is large."""
    tasks = list(tasks)
    if shard is None:
        return tasks
    sizes = Counter(map(compile_key, tasks))
    loads, owner = [0] * shard.count, {}
    for key in sorted(sizes, key=lambda key: (-sizes[key], key)):
        owner[key] = min(range(shard.count), key=loads.__getitem__)
        loads[owner[key]] += sizes[key]
    return [task for task in tasks if owner[compile_key(task)] == shard.index - 1]
