"""Processes of a gloo group that stay for several tests: each takes problems and returns what its tokens gave."""

import contextlib
import os
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import harness  # noqa: F401  TRITON_INTERPRET, before kda is imported
import kda
from harness import interpreter
from harness.call import DIFFERENTIABLE, keywords
from harness.problem import Case, Problem, materialise

BY_TOKEN = ("q", "k", "v", "g", "beta", "do")
SECONDS = 120  # that a test may take


@dataclass(frozen=True)
class Task:
    """A problem on the first `ranks` ranks; `shards`: tokens of each, of every sequence where it is not packed."""

    problem: Problem
    route: str
    shards: tuple[int, ...]

    @property
    def ranks(self) -> int:
        return len(self.shards)


@dataclass
class Share:
    """What one rank returned: results by quantity, and what its context says."""

    outputs: dict[str, torch.Tensor]
    sequences: tuple[int, ...]
    comes: bool
    goes_on: bool
    packed: bool
    launched: set[str] = field(default_factory=set)


def share_of(task: Task, group: dist.ProcessGroup | None, rank: int, device: str = "cpu") -> Share:
    """This rank's results and gradients."""
    case = materialise(task.problem, device)
    offsets = case.inputs.get("cu_seqlens")
    context = kda.build_cp_context(offsets, group, None if offsets is None else task.shards)
    sequences = tuple(range(case.inputs["q"].shape[0])) if offsets is None else context.sequences
    rows = slice(sum(task.shards[:rank]), sum(task.shards[: rank + 1]))
    given = {name: x for name, x in case.inputs.items() if x is not None}
    mine = {n: x[:, rows] if n in BY_TOKEN else x for n, x in given.items()}
    mine |= {n: x[list(sequences)] for n, x in given.items() if n in ("initial_state", "dht")}
    leaves = {n: mine[n].detach().clone().requires_grad_() for n in DIFFERENTIABLE if n in mine}
    words = {**keywords(case, "chunk"), "cu_seqlens": None, "cp_context": context}
    with kda.force_route(task.route), kda.record_launches() as launches:
        o, ht = kda.chunk_kda(**leaves, **words)
        if context.goes_on and "dht" in mine:
            mine["dht"] = mine["dht"].clone()
            mine["dht"][slice(None) if offsets is None else slice(-1, None)] = 0
        roots = [(x, mine[d]) for x, d in ((o, "do"), (ht, "dht")) if x is not None and d in mine]
        found = torch.autograd.grad([x for x, _ in roots], list(leaves.values()), [d for _, d in roots])
    outputs = {"o": o.detach(), **({} if ht is None else {"ht": ht.detach()})}
    outputs |= {DIFFERENTIABLE[name]: x for name, x in zip(leaves, found)}
    launched = {launch.route for launch in launches}
    return Share(outputs, sequences, context.comes, context.goes_on, offsets is not None, launched)


def _serve(rank: int, ranks: int, meeting: str, tasks: mp.Queue, results: mp.Queue) -> None:
    torch.set_num_threads(1)
    interpreter.install()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    groups = {n: dist.new_group(list(range(n))) for n in range(1, ranks + 1)}
    while (task := tasks.get()) is not None:
        try:
            results.put((rank, share_of(task, groups[task.ranks], rank)))
        except Exception:
            results.put((rank, traceback.format_exc()))


class Ranks:
    """The processes, all of one machine."""

    def __init__(self, count: int, meeting: Path):
        context = mp.get_context("forkserver")  # its children do not import anew, and it has no threads to lose
        context.set_forkserver_preload([__name__])
        self.results = context.Queue()
        self.tasks = [context.Queue() for _ in range(count)]
        arguments = [(rank, count, str(meeting), self.tasks[rank], self.results) for rank in range(count)]
        self.processes = [context.Process(target=_serve, args=one, daemon=True) for one in arguments]
        for process in self.processes:
            process.start()

    def run(self, task: Task) -> list[Share]:
        """What each rank returned."""
        for queue in self.tasks[: task.ranks]:
            queue.put(task)
        found: dict[int, Share] = {}
        while len(found) < task.ranks:
            rank, share = self.results.get(timeout=SECONDS)
            assert isinstance(share, Share), f"rank {rank}: {share}"
            found[rank] = share
        return [found[rank] for rank in range(task.ranks)]


@contextlib.contextmanager
def started(count: int, folder: Path) -> Iterator[Ranks]:
    ranks = Ranks(count, folder / "meeting")
    try:
        yield ranks
    finally:
        for queue in ranks.tasks:
            queue.put(None)
        for process in ranks.processes:
            process.join(1)
            process.kill()


def joined(case: Case, shares: Sequence[Share]) -> dict[str, torch.Tensor]:
    """The results of the whole call: tokens one after the other, states from the rank that has them."""
    out: dict[str, torch.Tensor] = {}
    for name in shares[0].outputs:
        parts = [share.outputs[name] for share in shares]
        if name in ("ht", "dh0"):
            whole = case.inputs["initial_state" if name == "dh0" else "dht"]
            out[name] = torch.full_like(whole, torch.nan)
            for share, part in zip(shares, parts):
                elsewhere = share.goes_on if name == "ht" else share.comes
                kept = range(len(share.sequences))
                if elsewhere:
                    kept = range(0) if not share.packed else kept[:-1] if name == "ht" else kept[1:]
                assert part[[i for i in range(len(part)) if i not in kept]].count_nonzero() == 0 or name == "ht"
                out[name][[share.sequences[i] for i in kept]] = part[list(kept)]
        elif name in ("dA_log", "ddt_bias"):
            assert all(torch.equal(part, parts[0]) for part in parts), f"{name} differs among the ranks"
            out[name] = parts[0]
        else:
            out[name] = torch.cat(parts, 1)
    return out
