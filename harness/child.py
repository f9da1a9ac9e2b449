"""The child process of `isolate`: runs one subject's calls, answers over a pipe; what kills it kills only it."""

import dataclasses
import faulthandler
import json
import os
import sys
import traceback

import torch
from safetensors.torch import save_file

from harness import autotune, interpreter, memory
from harness.call import NotCovered, RouteDidNotRun
from harness.isolate import context_is_lost
from harness.orphans import end_with_parent
from harness.problem import Problem, materialise
from harness.subject import load_subject
from harness.variants import VARIANTS, run, stages

# How Python code says that it does not take an input.
REFUSALS = (TypeError, ValueError, NotImplementedError, AssertionError)


def answer(request: dict, device: str, subject) -> dict:
    """Run one request; outputs go to a file, everything else into the answer."""
    problem = Problem.from_json(request["problem"])
    route = subject.route(request["route"], problem.entry)
    case = materialise(problem, device)
    try:
        call = lambda: run(route, case, VARIANTS.get(request["variant"]))  # noqa: E731
        if request["stages"]:
            done = stages(route, case, VARIANTS.get(request["variant"]))
        else:
            done = memory.watched(call, device) if request["again"] else call()
    except NotCovered as reason:
        return {"status": "not_covered", "message": str(reason)}
    except RouteDidNotRun as reason:
        return {"status": "unproven", "message": str(reason)}
    except REFUSALS as refusal:
        return {"status": "not_covered", "message": f"refused: {type(refusal).__name__}: {refusal}"}
    # Clones: outputs may share storage, or be expanded, and a file of tensors knows neither.
    outputs = {name: x.cpu().clone(memory_format=torch.contiguous_format) for name, x in done.outputs.items()}
    save_file(outputs, request["outputs"])
    return {
        "status": "ran",
        "seconds": done.seconds,
        "compile_seconds": done.compile_seconds,
        "modified": done.modified,
        "peak_bytes": done.peak_bytes,
        "offences": [dataclasses.astuple(one) for one in done.offences],
    }


def main(subject_name: str, device: str, search_path: str, pin_autotune: str, memory_bytes: str) -> None:
    """Read requests, one JSON document a line, until the pipe closes."""
    sys.path[:0] = [entry for entry in json.loads(search_path) if entry not in sys.path]
    # The subject may print: the protocol keeps the pipe, and everything else goes to stderr.
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    faulthandler.enable(all_threads=False)
    end_with_parent()
    if device == "cpu":
        interpreter.install()
    if pin_autotune == "1":
        autotune.pin()
    subject = load_subject(subject_name)
    allowed = memory.limit(device, int(memory_bytes) if memory_bytes else None)
    print(json.dumps({"status": "ready", "allowed": allowed}), file=channel)
    for line in sys.stdin:
        try:
            reply = answer(json.loads(line), device, subject)
        except Exception as error:
            sticky = device != "cpu" and context_is_lost()
            reply = {
                "status": "raised",
                "message": f"{type(error).__name__}: {error}",
                "trace": traceback.format_exc(),
                "sticky": sticky,
            }
        print(json.dumps(reply), file=channel)


if __name__ == "__main__":
    main(*sys.argv[1:6])
