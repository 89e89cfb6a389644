"""A judge behind HTTP, asked over a real connection."""

import json
import threading
import time
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from klinic.errors import ConfigError, RewardError
from klinic.recipe.rewards import RewardEntry
from klinic.rewards import concurrency, http_judge
from klinic.rewards.entry import build_reward
from klinic.rewards.runner import score
from rewards.rollouts import rollout

pytest.importorskip("httpx2")

ROWS = [rollout(text, index=i, prompt=f"p{i}", answer=f"{i}") for i, text in enumerate("abcdef")]


class Server(ThreadingHTTPServer):
    """Answers as `answer` says: status, headers and body, for a request as JSON."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, answer):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer, self.asked = answer, []
        self.now = self.most = 0
        self.lock = threading.Lock()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/v1/score"

    def handle_error(self, request, client_address):
        """A client that has left is no error of the test."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        server = self.server
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.asked.append(asked)
            server.headers = self.headers
            server.now += 1
            server.most = max(server.most, server.now)
        try:
            status, headers, body = server.answer(asked)
        finally:
            with server.lock:
                server.now -= 1
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def serve():
    servers = []

    def start(answer):
        server = Server(answer)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        servers.append((server, thread))
        return server

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(concurrency, "FIRST_BACKOFF", 0.001)


def good(reward=1.0):
    return 200, {}, json.dumps({"reward": reward}).encode()


def judged(url, rows=ROWS, **keys):
    return score(
        rows, [build_reward(RewardEntry(function=url, **keys), task_reward={}.__getitem__)]
    )


def failing_at(text, response):
    """Answer well, but to one completion."""
    return lambda asked: response if asked["completion"] == text else good()


def test_each_completion_is_posted_and_its_number_comes_back(serve):
    server = serve(lambda asked: good(float(asked["columns"]["answer"])))
    scores = judged(server.url)
    assert scores.total.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert list(scores.parts) == ["score"]
    assert {"prompt": "p2", "completion": "c", "columns": {"answer": "2"}} in server.asked
    assert len(server.asked) == 6


def test_null_is_no_opinion_and_no_failure(serve):
    scores = judged(serve(failing_at("b", good(None))).url)
    assert (scores.num_missing, scores.lost["failed"]) == (1, 0)


def test_columns_are_json_that_all_languages_read(serve):
    server = serve(lambda _: good())
    columns = {"price": float("nan"), "moves": ("e4", np.int64(3)), "name": "ü\ud800"}
    judged(server.url, [rollout("a", columns=columns)])
    assert server.asked[0]["columns"] == {"price": None, "moves": ["e4", 3], "name": "ü\ud800"}
    with pytest.raises(RewardError, match=r"column 'price', which holds bytes.*\(row 1 "):
        judged(server.url, [rollout("a", price=b"1")])


def test_the_password_of_netrc_goes_to_its_host_alone(serve, tmp_path, monkeypatch):
    server = serve(lambda _: good())
    for host, expected in (("127.0.0.1", "Basic bWU6bm90LWEtc2VjcmV0"), ("other.example", None)):
        file = tmp_path / host
        file.write_text(f"machine {host} login me password not-a-secret")
        monkeypatch.setenv("NETRC", str(file))
        judged(server.url)
        assert server.headers["Authorization"] == expected


def test_a_netrc_that_cannot_be_read_is_named_and_not_quoted(serve, tmp_path, monkeypatch):
    (tmp_path / "netrc").write_text("machine here login me\npassword: not-a-secret")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(ConfigError, match="netrc, line 2: cannot be read") as refused:
        judged("http://127.0.0.1:1/score")
    assert "not-a-secret" not in str(refused.value)


@pytest.mark.parametrize("concurrency", [1, 3])
def test_no_more_are_asked_at_once_than_said(serve, concurrency):
    def slow(asked):
        for _ in range(1000):  # until so many are here, or long after
            if server.most == concurrency:
                break
            time.sleep(0.01)
        time.sleep(0.05)
        return good()

    server = serve(slow)
    judged(server.url, concurrency=concurrency)
    assert server.most == concurrency


@pytest.mark.parametrize("status", [500, 503, 429, 408])
def test_a_server_in_trouble_is_asked_again(serve, status):
    answers = iter([(status, {}, b"busy"), (status, {}, b"busy")])
    server = serve(lambda _: next(answers, good()))
    assert judged(server.url, ROWS[:1]).total.tolist() == [1.0]
    assert len(server.asked) == 3


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_a_refusal_is_an_error_at_once_that_says_what_the_server_said(serve, status):
    server = serve(failing_at("c", (status, {}, b"no such\x1b[31m field: completion")))
    with pytest.raises(RewardError) as caught:
        judged(server.url, concurrency=1)
    message = str(caught.value)
    assert f"score was refused: {server.url} answered {status}: no such" in message
    assert "field: completion, first at completion 2 (row 3 of the dataset" in message
    assert "\x1b" not in message
    assert len(server.asked) == 3


@pytest.mark.parametrize("form", ["seconds", "date"])
def test_retry_after_is_honoured(serve, form):
    wait = "1" if form == "seconds" else formatdate(time.time() + 2, usegmt=True)
    answers = iter([(429, {"Retry-After": wait}, b"")])
    server = serve(lambda _: next(answers, good()))
    start = time.monotonic()
    assert judged(server.url, ROWS[:1]).total.tolist() == [1.0]
    assert time.monotonic() - start >= 0.9


GARBAGE = {
    "no JSON": b"<html>hello</html>",
    "no reward": b'{"score": 1.0}',
    "a list": b"[1.0]",
    "a text": b'{"reward": "1.0"}',
    "nothing": b"",
    "no text": b"\xff\xfe\x00",
    "deep": b"[" * 50_000,
    "long": b'{"reward": 1.0, "why": "' + b"x" * 100_000 + b'"}',
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_no_reward(serve, name):
    server = serve(failing_at("b", (200, {}, GARBAGE[name])))
    scores = judged(server.url, retries=1)
    np.testing.assert_array_equal(scores.total, [1.0, np.nan, 1.0, 1.0, 1.0, 1.0])
    assert scores.lost["failed"] == 1
    assert len(server.asked) == 7


def test_a_number_that_is_not_finite_is_counted_as_such(serve):
    scores = judged(serve(failing_at("b", (200, {}, b'{"reward": NaN}'))).url)
    assert (scores.num_nonfinite, scores.lost["failed"]) == (1, 0)


def test_a_server_that_hangs_costs_its_time_and_no_more(serve):
    def hangs(asked):
        if asked["completion"] == "b":
            time.sleep(5)
        return good()

    scores = judged(serve(hangs).url, timeout=2, retries=0)
    assert np.isnan(scores.total).tolist() == [False, True, False, False, False, False]
    assert scores.lost["failed"] == 1


def test_a_server_that_is_not_there_is_named():
    with pytest.raises(
        RewardError, match=r"score failed on all of 6 .*127\.0\.0\.1:9/score cannot"
    ):
        judged("http://127.0.0.1:9/score", retries=1)


def test_completions_go_to_no_other_address(serve):
    other = serve(lambda _: good())
    server = serve(lambda _: (307, {"Location": other.url}, b""))
    with pytest.raises(RewardError, match=f"to {other.url}"):
        judged(server.url)
    assert other.asked == []


def test_the_wait_that_a_server_asks_for_has_an_end():
    assert http_judge._retry_after_seconds("inf") == 0.0
    assert (
        concurrency._backoff_seconds(0, http_judge._retry_after_seconds("86400"))
        == concurrency.MAX_BACKOFF
    )
