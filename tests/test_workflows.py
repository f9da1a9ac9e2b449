"""The GitHub action and the workflows to copy: right by their schemas, and red and green on a toy repository."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from harness import options

ROOT = Path(__file__).resolve().parent.parent
ACTION, WORKFLOWS = ROOT / "action.yml", sorted((ROOT / "docs/workflows").glob("*.yml"))
TOY = '''
"""Plain PyTorch, token by token, with the signature of fla."""
import torch


def chunk_kda(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = v.shape[2] // q.shape[2]
    q, k = (x.float().repeat_interleave(group, 2) for x in (q, k))
    ends = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    o = torch.zeros(v.shape)
    pieces = [(b, s, e) for b in range(q.shape[0]) for s, e in zip(ends, ends[1:])]
    states = []
    for n, (b, start, end) in enumerate(pieces):
        S = torch.zeros(v.shape[2], q.shape[3], v.shape[3]) if initial_state is None else initial_state[n].float()
        for t in range(start, end):
            S = S * g[b, t].float().exp()[..., None]
            u = beta[b, t].float()[:, None] * (v[b, t].float() - torch.einsum("hk,hkv->hv", k[b, t], S))
            S = S + k[b, t][..., None] * u[:, None]
            o[b, t] = scale * torch.einsum("hk,hkv->hv", q[b, t], S)
        states.append(S)
    return o.to(v.dtype), torch.stack(states) if output_final_state else None
'''
FAULT = ("g[b, t].float().exp()", "g[b, t].float().mul(1.01).exp()")


def parsed(path: Path) -> dict:
    return YAML(typ="safe", pure=True).load(path.read_text())


def test_schemas():
    for schema, files in (("vendor.github-actions", [ACTION]), ("vendor.github-workflows", WORKFLOWS)):
        command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *map(str, files)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


def test_workflows_give_the_action_only_inputs_that_it_has():
    known = parsed(ACTION)["inputs"]
    assert [path.stem for path in WORKFLOWS] == ["cpu", "gpu"]
    for path in WORKFLOWS:
        (job,) = parsed(path)["jobs"].values()
        (given,) = (step["with"] for step in job["steps"] if "kda-harness" in step.get("uses", ""))
        assert given.keys() <= known.keys(), path
        assert {name for name, about in known.items() if about.get("required")} <= given.keys(), path


def test_the_action_uses_only_options_that_pytest_has():
    used = set(re.findall(r"--kda-(\w+)", ACTION.read_text()))
    assert used and used <= {option.name for option in options.OPTIONS if option.pytest}


def step(name: str, inputs: dict[str, str], folder: Path) -> tuple[int, str]:
    """Run one step of the action as a runner would."""
    described = parsed(ACTION)
    (found,) = (each for each in described["runs"]["steps"] if each["name"] == name)
    values = {key: about.get("default", "") for key, about in described["inputs"].items()} | inputs
    environment = {
        key: re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda match: values[match[1]], text)
        for key, text in found.get("env", {}).items()
    }
    own = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    paths = {"PATH": path, "PYTHONPATH": str(ROOT), "GITHUB_STEP_SUMMARY": str(folder / "summary.md")}
    command = ["bash", "-e", "-o", "pipefail", "-c", found["run"]]
    done = subprocess.run(
        command, cwd=folder, env=own | paths | environment, capture_output=True, text=True, timeout=300
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("known", [False, True], ids=["unknown", "known_failure"])
def test_a_fresh_repository_is_red_on_a_fault_and_green_after_the_fix(tmp_path, known):
    """What the copied CPU workflow runs, on a kernel whose gates are 1% too strong."""
    inputs = {"subject": "my_kernels", "profile": "dev", "families": "impulse", "workers": "0"}
    if known:
        (tmp_path / "known.txt").write_text("*impulse* 2999-01-01 gates are 1% too strong\n")
        inputs["xfail"] = "known.txt"
    hold = "Hold the subject against the oracle"
    (tmp_path / "my_kernels.py").write_text(TOY.replace(*FAULT))
    status, shown = step(hold, inputs, tmp_path)
    assert status == int(not known), shown
    if known:
        assert "xfailed" in shown
        return
    assert "what   BUG: " in shown and "BUG: " in (tmp_path / "summary.md").read_text()
    assert list(tmp_path.glob("kda-report/*/*/reproduce.py"))
    (tmp_path / "my_kernels.py").write_text(TOY)
    status, shown = step(hold, inputs, tmp_path)
    assert status == 0 and "problems held against the oracle" in shown, shown
