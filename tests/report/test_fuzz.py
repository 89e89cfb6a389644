"""Thousands of completions that want to be more than text, through the real report."""

import http.server
import io
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from hostile_text import texts
from made import record
from rich.console import Console

from browser import Browser
from klinic.errors import EvidenceError
from klinic.evidence.files import Journal
from klinic.evidence.record import EmittedBy
from klinic.evidence.run_facts import (
    LARGEST_TOKENS,
    METRICS,
    write_run_facts,
    write_tokens,
)
from klinic.evidence.store import write_record
from klinic.report.page import render
from klinic.report.reading import read_run_report
from klinic.report.terminal import print_run_report
from terminal import Terminal, obeyed

STEPS, ROWS, TOKENS = 40, 4, 3  # what one page shows of completions
SHOWN = STEPS * ROWS
LARGEST = 2_000_000
PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser")


def hostile_run(folder, said, *, steps=STEPS, rows=ROWS):
    """Write a run whose every completion begins with a text of its own, cut into tokens."""
    folder.mkdir(parents=True)
    write_run_facts(folder, {"eos_ids": [1], "logp_old": "scored"})
    pieces = [piece for text in said for piece in cut(text)]
    write_tokens(folder, dict(enumerate(pieces)))
    events, metrics = Journal(folder / "events.jsonl"), Journal(folder / METRICS)
    for step in range(1, steps + 1):
        first = (step - 1) * rows * TOKENS
        ids = np.arange(first, first + rows * TOKENS) % len(pieces)
        made = record(step, lengths=(TOKENS,) * rows, moved=2.0)
        by_tool = np.full(made.num_tokens, int(EmittedBy.TOOL))  # a cause with marked tokens
        made = replace(made, token_ids=ids, prompt_ids=ids[: 2 * rows], emitted_by=by_tool)
        write_record(folder, made)
        metrics.append({"step": step, "reward": 0.1, f"rewards/{said[step][:80]}/mean": 0.5})
        event = {"step": step, "event": said[step][:50], "says": said[-step]}
        events.append({**event, "act": said[step][:9]})
    (folder / "recipe.yaml").write_text(f"name: {said[0]!a}\n")
    return folder


def cut(text):
    """Return a text as the tokens of a completion; a page shows the first letters of each."""
    return [text, text[24:48], text[48:72]]


class Elements(HTMLParser):
    """Every element and attribute of a page."""

    def __init__(self, page):
        super().__init__()
        self.names, self.attributes = [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        self.attributes += attrs


KNOWN = {
    *("html", "head", "meta", "title", "style", "body", "main", "h1", "h2"),
    *("h3", "div", "strong", "details", "summary", "ul", "ol", "li", "span"),
    *("p", "b", "pre", "dl", "dt", "dd", "section", "figure", "figcaption"),
    *("button", "noscript", "svg", "rect", "code", "script", "table", "caption", "thead"),
    *("tbody", "tr", "th", "td", "a", "mark", "i"),
}


def assert_harmless(page):
    assert len(page.encode()) <= LARGEST
    assert not {c for c in page if not (c.isprintable() or c in "\n\t")}
    found = Elements(page)
    assert set(found.names) <= KNOWN
    assert found.names.count("script") == 2
    for name, value in found.attributes:
        assert not name.startswith("on"), (name, value)
        if name in ("href", "src", "xlink:href", "action", "srcdoc"):
            assert value.startswith("#"), (name, value)


def test_a_page_of_hostile_completions_is_text(tmp_path):
    run = hostile_run(tmp_path / "run", texts(SHOWN))
    page = render([read_run_report(run)])
    assert_harmless(page)
    assert "<mark>" in page
    other = hostile_run(tmp_path / "<b onclick=x>other\x1b[2J", texts(SHOWN, seed=1))
    assert_harmless(render([read_run_report(run), read_run_report(other)]))


def test_long_tokens_in_every_place_fit(tmp_path):
    run = hostile_run(tmp_path / "run", ["\u202e" * 45_000] * 60, steps=5)
    assert (run / "tokens.json").stat().st_size > 0.95 * LARGEST_TOKENS
    assert_harmless(render([read_run_report(run)]))


def test_tokens_of_a_megabyte_in_every_place_are_refused(tmp_path):
    run = hostile_run(tmp_path / "run", ["\u202e" * 10**6] * 60, steps=1)
    with pytest.raises(EvidenceError, match=r"tokens\.json: is larger than 16 MB"):
        read_run_report(run)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))]
)
def test_a_terminal_prints_hostile_completions(tmp_path, seed):
    story = read_run_report(hostile_run(tmp_path / "run", texts(SHOWN, seed=seed)))
    for step in range(1, STEPS + 1, 3):
        file = io.StringIO()
        print_run_report(story, Console(file=file, width=80, force_terminal=True), step)
        assert not obeyed(file.getvalue())


@pytest.mark.skipif(sys.platform != "linux", reason="writes and reads pseudo-terminals")
def test_commands_in_a_terminal_print_hostile_completions(tmp_path):
    run = hostile_run(tmp_path / "run", texts(SHOWN, seed=9))
    klinic = [sys.executable, "-P", "-m", "klinic.cli"]
    with Terminal(*klinic, "report", "--terminal", str(run)) as terminal:
        assert terminal.ended(60) == 0
    printed = terminal.text.partition("policy - ")[2]  # before it, a spinner that is rich's own
    assert not obeyed(printed)
    with Terminal(*klinic, "watch", str(run)) as terminal:
        terminal.until("completion")
        terminal.press(b"q")
        assert terminal.ended(60) == 0
    assert not obeyed(terminal.text)


@pytest.fixture
def asked_for():
    """Return a server that notes who asks it for something: nobody should."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port, asked
    server.shutdown()
    server.server_close()


THROUGH = """(async () => {
  await pageReady;
  const view = tokenViews[0];
  const seen = new Set();
  let wide = 0;
  for (let top = 0; ; top += view.list.clientHeight) {
    view.list.scrollTop = top;
    view.draw();
    for (const one of document.querySelectorAll(".token")) {
      one.dispatchEvent(new Event("mouseover", { bubbles: true }));
    }
    for (const key of view.nodes.keys()) seen.add(key.split("/").slice(0, 2).join("/"));
    wide = Math.max(wide, document.documentElement.scrollWidth - innerWidth);
    if (top > view.list.scrollHeight) break;
  }
  for (const chart of charts) chart.read(0);
  view.inputs.search.value = "script";
  view.apply();
  await new Promise((done) => setTimeout(done, 50));
  const [scripts, images] = [document.scripts.length, document.images.length];
  return { title: document.title, shown: seen.size, wide, scripts, images };
})()"""


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.skipif(PROGRAM is None, reason="needs chromium")
def test_a_browser_shows_5000_hostile_completions_and_does_nothing_else(tmp_path, asked_for):
    pytest.importorskip("websockets")
    port, asked = asked_for
    shown = 0
    with Browser(PROGRAM, tmp_path / "browser") as browser:
        browser.look_like(width=390, height=800)
        for number in range(-(-5000 // SHOWN)):
            run = hostile_run(tmp_path / f"run-{number}", texts(SHOWN, port=port, seed=number))
            page = tmp_path / "page.html"
            text = render([read_run_report(run)])
            page.write_text(text, encoding="utf-8")
            assert_harmless(text)
            browser.open(page.as_uri())
            title = f"{run} - klinic"
            found = browser.run(THROUGH)
            shown += found.pop("shown")
            assert found == {"title": title, "wide": 0, "scripts": 2, "images": 0}
            shutil.rmtree(run)
        assert {
            url for url in browser.asked if not url.startswith(("file:", "about:", "data:"))
        } == set()
        assert browser.logged == []
        assert browser.dialogs == []
    assert asked == []
    assert shown >= 5000


def test_a_canary_would_be_seen(tmp_path, asked_for):
    """What the proof above rests on: a page that does run such a text is caught."""
    if PROGRAM is None:
        pytest.skip("needs chromium")
    port, asked = asked_for
    page = tmp_path / "page.html"
    # one that is waited for: the browser may be gone before a fetch has left it
    ask = f"r = new XMLHttpRequest(); r.open('GET', 'http://127.0.0.1:{port}/stolen', false)"
    page.write_text(f"<title>x</title><script>{ask}; r.send()</script>")
    subprocess.run(
        [PROGRAM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", page.as_uri()],
        capture_output=True,
        check=False,
        timeout=100,
    )
    assert asked == ["/stolen"]
