"""Authority on what a finding's folder holds, and on losing nothing where it cannot be written."""

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from html import escape
from pathlib import Path

from safetensors.torch import save

from harness.diagnose import Diagnosis
from harness.problem import Case, materialise
from harness.report.markdown import markdown
from harness.report.page import Raw, document, page, table
from harness.report.script import script
from harness.results import Finding, Report, write_atomically

MOST_TENSOR_BYTES = 2**30


def write(made: Diagnosis, report: Report, env: Mapping[str, object]) -> Finding:
    """Fill the finding's folder; returns the finding with the path of its problem.json.

    What cannot be written is said on stderr with the reason; problem.json, which everything else can be made from, is
    then printed.
    """
    finding = report.save(replace(made.finding, lines=made.lines, like=made.like))
    if not finding.path:
        return finding
    folder, case = Path(finding.path).parent, materialise(made.finding.problem)
    made = replace(made, finding=finding)
    reproduce = script(made, case)
    scripted = reproduce is not None
    files: dict[str, Callable[[], str | bytes | None]] = {
        "report.html": lambda: page(made, case, env, scripted),
        "report.md": lambda: markdown(made, case, env, scripted),
        "reproduce.py": lambda: reproduce,
        "expected.safetensors": lambda: _tensors(made, case),
    }
    for name, content in files.items():
        made_of = content()
        if made_of is None:
            continue
        try:
            write_atomically(folder / name, made_of)
        except OSError as error:
            print(f"kda: {folder / name} could not be written ({error})", file=sys.stderr, flush=True)
    return finding


def _tensors(made: Diagnosis, case: Case) -> bytes | None:
    """inputs.NAME as the kernel got them; expected.NAME, tolerance.NAME and got.NAME in fp64; None if too large."""
    found = {f"inputs.{name}": x for name, x in case.inputs.items() if x is not None}
    for name, field in made.fields.items():
        found |= {f"got.{name}": field.got, f"expected.{name}": field.expected, f"tolerance.{name}": field.tolerance}
    if sum(x.numel() * x.element_size() for x in found.values()) > MOST_TENSOR_BYTES:
        return None
    metadata = {"problem": repr(made.finding.problem)[:10_000], "quantity": made.finding.quantity}
    return save({name: x.cpu().contiguous() for name, x in found.items()}, metadata | {"class": made.finding.klass})


def write_index(findings: Iterable[Finding], report: Report, subject: str, seed: int) -> Path | None:
    """index.html of a run: its findings, the worst first."""
    ordered = sorted(findings, key=lambda finding: -finding.ratio)
    rows = [
        (
            Raw(f'<span class="bad">{escape(finding.klass)}</span>'),
            Raw(
                f'<a href="{escape(finding.id)}/report.html">{escape(finding.quantity)} of {escape(finding.route)}</a>'
            ),
            f"{finding.ratio:.3g}",
            Raw("<br>".join(escape(text) for label, text in finding.lines if label in ("where", "how"))),
        )
        for finding in ordered
    ]
    body = f"<h1>{len(rows)} findings</h1><p class='sub'>{escape(subject)}, seed {seed}</p>"
    body += f'<section class="card">{table(("class", "finding", "ratio", "where and how"), rows)}</section>'
    path = report.folder / "index.html"
    try:
        write_atomically(path, document(f"{len(rows)} findings of {subject}", body))
    except OSError as error:
        print(f"kda: {path} could not be written ({error})", file=sys.stderr, flush=True)
        return None
    return path
