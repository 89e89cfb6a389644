"""The page on 127.0.0.1: for who has the address, and made anew only when the run has news."""

import http.client
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from made import record, run_folder

from browser import Browser
from klinic.evidence.files import Journal
from klinic.evidence.run_facts import METRICS
from klinic.evidence.store import write_record
from klinic.report import serving
from open_ports import listening

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser")
WATCH = [sys.executable, "-P", "-m", "klinic.cli", "watch"]


@pytest.fixture
def served(tmp_path):
    """Return the folder of a run, and a function that asks its server."""
    run = run_folder(tmp_path / "run")
    process = subprocess.Popen(
        [*WATCH, str(run), "--web"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    found = re.fullmatch(
        r"Open http://127\.0\.0\.1:(\d+)/([\w-]{20,})/\n", process.stdout.readline()
    )
    port, token = int(found[1]), found[2]

    def ask(path="", *, method="GET", host=None, token=token):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        headers = {} if host is None else {"Host": host.format(port=port)}
        connection.request(method, f"/{token}/{path}", headers=headers)
        answer = connection.getresponse()
        body = answer.read().decode()
        connection.close()
        return answer, body

    yield run, process, ask
    process.kill()
    process.communicate()


def test_who_has_the_address_gets_the_page_and_nobody_else_anything(served):
    _, process, ask = served
    assert {str(address) for address in listening(process.pid)} == {"127.0.0.1"}
    answer, body = ask()
    assert answer.status == 200
    assert "Completions, token by token" in body
    policy = answer.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert ask("version")[0].status == 200
    assert ask(host="localhost:{port}")[0].status == 200
    for path, how in (
        ("", {"token": "wrong"}),
        ("", {"token": ""}),
        ("version", {"token": "wrong"}),
        ("", {"host": "evil.example"}),
        ("", {"host": "evil.example:{port}"}),
        ("", {"host": "127.0.0.1"}),
        ("", {"token": "wrong", "method": "POST"}),
        ("", {"host": "evil.example", "method": "OPTIONS"}),
    ):
        refused, said = ask(path, **how)
        assert refused.status == 403, (path, how)
        assert "KL" not in said
    assert ask(method="POST")[0].status == 405
    assert ask("../../etc/passwd")[0].status == 404
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0


def test_a_port_that_is_taken_is_said(served, tmp_path):
    _, process, ask = served
    port = ask()[0].headers and listening_port(process.pid)
    done = subprocess.run(
        [*WATCH, str(tmp_path / "run"), "--web", "--port", str(port)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert f"cannot listen on port {port} of 127.0.0.1" in done.stderr


def listening_port(pid):
    from pathlib import Path

    inodes = {
        str(link.readlink())[8:-1]
        for link in Path(f"/proc/{pid}/fd").iterdir()
        if str(link.readlink()).startswith("socket:[")
    }
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return next(int(at[1].partition(":")[2], 16) for at in lines if at[9] in inodes)


@pytest.fixture
def made(monkeypatch):
    """Return the list of pages that were made."""
    pages, real = [], serving.render

    def render(*arguments, **how):
        pages.append(how)
        return real(*arguments, **how)

    monkeypatch.setattr(serving, "render", render)
    monkeypatch.setattr(serving, "MIN_SECONDS", 0.2)
    monkeypatch.setattr(serving, "RENDER_BACKOFF", 0)
    return pages


def test_the_page_is_made_anew_when_the_run_has_new_steps_and_only_then(tmp_path, made):
    run = run_folder(tmp_path / "run")
    live = serving.LivePage(run)
    first = live.current_page()
    time.sleep(0.3)
    assert live.current_page() is first
    assert len(made) == 1
    version = live.current_version()
    assert f'data-version="{version}"'.encode() in first
    write_record(run, record(4))
    Journal(run / METRICS).append({"step": 4, "reward": 1.0})
    assert live.current_version() != version
    second = live.current_page()
    assert second != first
    assert len(made) == 2
    assert f'data-version="{live.current_version()}"'.encode() in second


def test_however_fast_a_run_is_the_machine_is_mostly_its_own(tmp_path, made, monkeypatch):
    monkeypatch.setattr(serving, "MIN_SECONDS", 60)
    run = run_folder(tmp_path / "run")
    live = serving.LivePage(run)
    first = live.current_page()
    write_record(run, record(4))
    assert live.current_page() is first


def test_a_run_that_has_not_begun_is_waited_for(tmp_path, made):
    live = serving.LivePage(tmp_path / "<b>run")
    page = live.current_page().decode()
    assert "Nothing to show yet" in page
    assert "&lt;b&gt;run" in page
    run_folder(tmp_path / "<b>run")
    time.sleep(0.3)
    assert "Completions, token by token" in live.current_page().decode()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(PROGRAM is None, reason="needs chromium")
def test_a_browser_stays_at_the_step_it_looks_at(served, tmp_path):
    pytest.importorskip("websockets")
    run, process, ask = served
    token = ask.__kwdefaults__["token"]
    with Browser(PROGRAM, tmp_path / "browser") as browser:
        browser.look_like(width=900, height=700)
        browser.open(f"http://127.0.0.1:{listening_port(process.pid)}/{token}/")
        browser.run("pageReady")
        choose = "(s => { s.value = 2; s.dispatchEvent(new Event('input')); scrollTo(0, 150); })"
        browser.run(f"{choose}(tokenViews[0].inputs.step)")
        whole = "document.readyState === 'complete' && document.documentElement.dataset.version"
        first = browser.run(whole)
        write_record(run, record(4))
        Journal(run / METRICS).append({"step": 4, "reward": 1.0})
        limit = time.monotonic() + 200
        while browser.run(whole) in (first, False):
            assert time.monotonic() < limit
            time.sleep(0.5)
        browser.run("pageReady.then(() => new Promise((done) => setTimeout(done, 100)))")
        seen = "[tokenViews[0].inputs.step.value, scrollY, tokenViews[0].steps.length]"
        assert browser.run(seen) == ["2", 150, 4]
        process.kill()
        while "longer responds" not in browser.run("document.getElementById('live').textContent"):
            assert time.monotonic() < limit
            time.sleep(0.5)
        refused = "Failed to load resource: net::ERR_CONNECTION_REFUSED"
        assert set(browser.logged) <= {refused}
