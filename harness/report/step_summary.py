"""Authority on the page of a GitHub run: what failed, in Markdown, where the runner asks for it."""

import os
import sys
from collections.abc import Iterable


def section(title: str, lines: str, example: str, where: str) -> str:
    """One failure."""
    return f"### {title}\n\n```\n{lines}\n```\n```python\n{example}\n```\nreport: `{where}`\n\n"


def append(sections: Iterable[str]) -> None:
    """Add sections to the step summary, if there is one; one that cannot be written is said, and fails nothing."""
    target, text = os.environ.get("GITHUB_STEP_SUMMARY"), "".join(sections)
    if not target or not text:
        return
    try:
        with open(target, "a") as file:
            file.write(text)
    except OSError as error:
        print(f"kda: {target} could not be written ({error})", file=sys.stderr)
