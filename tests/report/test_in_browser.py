"""Size and speed of a report in headless Chromium, in processor time of its main thread.

python tests/report/test_in_browser.py       prints the figures
"""

import json
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from made import record, run_folder

from browser import Browser
from klinic.evidence.files import Journal
from klinic.evidence.record import EmittedBy
from klinic.evidence.run_facts import METRICS, write_run_facts, write_tokens
from klinic.evidence.store import write_record
from klinic.report.page import render
from klinic.report.reading import read_run_report

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser")
LARGEST = 1_500_000  # bytes
FIRST_PAINT, ACTION = 1.0, 0.1  # seconds
NUM_TOKENS = 100_000
WORDS = 2000
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(PROGRAM is None, reason="needs chromium"),
]

ACTIONS = {
    "scroll by a screen": "view.list.scrollTop += view.list.clientHeight; view.draw()",
    "scroll far": "view.list.scrollTop = (n / 6) * view.space.offsetHeight; view.draw()",
    "search a text": "inputs.search.value = `w${n}1`; view.apply()",
    "filter by reward": "inputs.search.value = ''; inputs.lowReward.value = n / 20; view.apply()",
    "filter by length": "inputs.lowReward.value = ''; inputs.shortest.value = 99 + n; view.apply()",
    "one step": "inputs.shortest.value = ''; inputs.step.selectedIndex = n % 5; view.apply()",
    "other order": "inputs.step.value = ''; inputs.sort.selectedIndex = n % 5; view.apply()",
    "other gap": "inputs.gap.selectedIndex = n % 2; view.useLane(inputs.gap.value)",
    "next token": "view.move(1)",
}


def long_run(folder, *, steps, rows, length):
    """Write a run with metrics, texts, and completions of different lengths."""
    folder.mkdir(parents=True)
    write_run_facts(folder, {"eos_ids": [1], "logp_old": "scored", "trainer": "klinic"})
    write_tokens(folder, {n: f" w{n}" for n in range(WORDS)})
    metrics, random = Journal(folder / METRICS), np.random.default_rng(0)
    for step in range(1, steps + 1):
        lengths = tuple(random.integers(length // 2, length * 3 // 2, rows).tolist())
        made = record(step, lengths=lengths, moved=0.2)
        noise = random.normal(0, 0.2, made.num_tokens).astype(np.float32)
        ids = random.integers(0, WORDS, made.num_tokens)
        write_record(folder, replace(made, token_ids=ids, logp_ref=made.logp - noise))
        names = ("reward", "kl", "loss", "entropy", "grad_norm", "completions/mean_length")
        metrics.append({"step": step, **{name: float(random.normal(1, 0.1)) for name in names}})
    return folder


def write_page(folder, **size):
    """Return the page of a run and its size in bytes."""
    run = long_run(folder / f"run-{size['steps']}", **size)
    page = folder / f"page-{size['steps']}.html"
    page.write_text(render([read_run_report(run)]), encoding="utf-8")
    return page, page.stat().st_size


def thread_time(browser):
    """Return the processor time of the page's main thread, in seconds."""
    metrics = browser.tell("Performance.getMetrics")["metrics"]
    return next(one["value"] for one in metrics if one["name"] == "ThreadTime")


def measure_opening(browser, page):
    """Return the seconds until the first paint and until all is drawn."""
    browser.open(page.as_uri())
    browser.run("pageReady")
    paint = browser.run("performance.getEntriesByType('paint').map((one) => one.startTime)[0]")
    return {
        "first paint, s of the clock": paint / 1000,
        "all drawn, s of the processor": thread_time(browser),
    }


def measure_actions(browser, times=5):
    """Return the largest of some times of each action, layout included."""
    slowest = {}
    for name, action in ACTIONS.items():
        for n in range(1, times + 1):
            before = thread_time(browser)
            browser.run(
                f"(() => {{ const [view, n] = [tokenViews[0], {n}], {{ inputs }} = view; {action};"
                " return view.list.offsetHeight; })()"
            )
            slowest[name] = max(slowest.get(name, 0.0), thread_time(browser) - before)
    return slowest


def measure(folder):
    """Return all figures of a page of 300 steps, and of one of more than 100,000 tokens."""
    folder.mkdir(exist_ok=True)
    figures = {}
    with Browser(PROGRAM, folder / "browser") as browser:
        browser.look_like(width=1200, height=900)
        browser.tell("Performance.enable", timeDomain="threadTicks")
        for name, size in (
            ("300 steps", {"steps": 300, "rows": 64, "length": 60}),
            ("100,000 tokens", {"steps": 40, "rows": 10, "length": 300}),
        ):
            page, num_bytes = write_page(folder, **size)
            opening = measure_opening(browser, page)
            tokens = browser.run("tokenViews[0].rows.reduce((n, row) => n + row.text.length, 0)")
            actions = measure_actions(browser)
            figures[name] = {"bytes": num_bytes, "tokens": tokens, **opening, **actions}
        figures["logged"] = browser.logged
        requests = (url for url in browser.asked if not url.startswith(("file:", "about:")))
        figures["requests"] = [url[:200] for url in requests]
    return figures


def test_a_report_is_small_and_fast(tmp_path):
    pytest.importorskip("websockets")
    figures = measure(tmp_path / "measured")
    assert figures.pop("logged") == figures.pop("requests") == []
    for name, page in figures.items():
        assert page["bytes"] <= LARGEST
        assert page["all drawn, s of the processor"] < FIRST_PAINT, name
        assert {action: page[action] for action in ACTIONS if page[action] > ACTION} == {}
    assert figures["100,000 tokens"]["tokens"] >= NUM_TOKENS


def test_links_and_addresses_open_their_token_or_step(tmp_path):
    pytest.importorskip("websockets")
    run = run_folder(tmp_path / "run", steps=4)
    for step in range(1, 5):
        made = record(step)
        by_tool = np.zeros(made.num_tokens, int)
        by_tool[4] = int(EmittedBy.TOOL)  # the second token of completion 1
        write_record(run, replace(made, emitted_by=by_tool))
    page = tmp_path / "page.html"
    page.write_text(render([read_run_report(run)]), encoding="utf-8")
    with Browser(PROGRAM, tmp_path / "browser") as browser:
        browser.look_like(width=1200, height=900)
        for address, action in (
            (page.as_uri(), "document.querySelector('.answers a[href*=completion]').click()"),
            (f"{page.as_uri()}#A-step-1-completion-1-token-1", "0"),
        ):
            browser.open(address)
            browser.run(f"pageReady.then(() => {action})")
            browser.run("new Promise((done) => setTimeout(done, 200))")
            shown = browser.run("(({row, i}) => [row.step, row.row, i])(tokenViews[0].current)")
            assert shown == [1, 1, 1]
        browser.run("document.querySelector('.answers a.place[href$=step-1]').click()")
        browser.run("new Promise((done) => setTimeout(done, 200))")
        assert browser.run("charts[0].values.textContent").startswith("step 1")
        assert browser.logged == []


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as where:
        sys.stdout.write(f"{json.dumps(measure(Path(where) / 'measured'), indent=1)}\n")
