"""report.html in a browser: nothing on the console, no request anywhere, and figures that can be seen."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

from harness.problem import materialise
from harness.report.page import page
from harness.results import environment
from tests.harness.test_report import PROBLEM, diagnosis

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: install the package `chromium`")
# What a reader would have to see, measured in the page itself.
PROBE = """<script>
addEventListener("load", () => setTimeout(() => {  // by then a request that failed is on record
const box = (node) => { const r = node.getBoundingClientRect(); return [r.width, r.height]; };
const figure = document.querySelector("#figure svg");
figure.querySelectorAll("rect.cell")[3].dispatchEvent(new MouseEvent("mousemove", {bubbles: true}));
const probe = document.createElement("pre");
probe.id = "probe";
probe.textContent = JSON.stringify({
  figure: box(figure), cells: figure.querySelectorAll("rect.cell").length,
  borders: figure.querySelectorAll(".border-sequence").length, curve: box(figure.querySelector(".curve")),
  colours: new Set([...figure.querySelectorAll("rect.cell")].map((node) => getComputedStyle(node).fill)).size,
  readout: document.getElementById("readout").textContent, width: document.documentElement.scrollWidth,
  asked: performance.getEntriesByType("resource").map((entry) => entry.name),
  background: getComputedStyle(document.body).backgroundColor,
});
document.body.appendChild(probe);
}, 50));
</script></body>"""
LIGHT, DARK = [], ["--blink-settings=preferredColorScheme=0"]


@pytest.fixture(scope="module")
def html(tmp_path_factory) -> str:
    """A report whose subject and values are as awkward as they get."""
    made = diagnosis(tmp_path_factory.mktemp("page"), "leaky", "o")
    return page(replace(made, subject="<b>leaky</b> & 'co'"), materialise(PROBLEM), environment("cpu"))


def opened(html: str, tmp_path: Path, width: int, flags: list[str]) -> tuple[dict, str]:
    """(what the probe saw, what the console said)."""
    file = tmp_path / "report.html"
    file.write_text(html.replace("</body>", PROBE))
    offline = ["--disable-background-networking", "--disable-component-update", "--host-resolver-rules=MAP * ~NOTFOUND"]
    command = [
        *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", *offline, *flags),
        *(f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr"),
        *(f"--window-size={width},900", "--virtual-time-budget=2000", "--dump-dom", file.as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    seen = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.S)
    assert seen, done.stderr
    console = "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)
    return json.loads(unescape(seen[1])), console


@pytest.mark.parametrize("width, flags", [(1200, LIGHT), (1200, DARK), (390, LIGHT)], ids=["light", "dark", "narrow"])
def test_the_page_is_silent_self_contained_and_visible(html, width, flags, tmp_path):
    seen, console = opened(html, tmp_path, width, flags)
    assert console == ""
    assert seen["asked"] == []
    assert seen["cells"] == 12 and seen["borders"] == 2  # 6 tokens x 2 channels of the worst head; a sequence, the tail
    assert seen["figure"][0] > 150 and seen["figure"][1] > 100 and seen["curve"][0] > 100
    assert seen["colours"] >= 2
    assert seen["readout"].startswith("o[0][3][1][0] got ")
    assert seen["width"] <= max(width, 500)  # nothing sticks out; Chromium's windows are 500 wide or more
    dark = sum(map(int, re.findall(r"\d+", seen["background"])[:3])) < 200
    assert dark == (flags is DARK)


IMAGE = '<img src="http://127.0.0.1:9/x.png"></main>'


@pytest.mark.parametrize("policy", [True, False], ids=["forbidden", "allowed"])
def test_a_request_would_be_seen(html, policy, tmp_path):
    """The page's own policy forbids every request; without it the probe sees one."""
    html = html.replace("</main>", IMAGE)
    html = html if policy else html.replace("Content-Security-Policy", "nothing")
    seen, console = opened(html, tmp_path, 1200, LIGHT)
    assert "Content Security Policy" in console if policy else seen["asked"] == ["http://127.0.0.1:9/x.png"]
