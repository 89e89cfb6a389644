"""Raw requests against the real server of `klinic watch --web`: it leaks nothing and keeps serving.

Each request is sent as bytes, since clients mend what they send. `{port}` and `{token}` stand for
the server's own.
"""

import contextlib
import re
import socket
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest

pytest.importorskip("matplotlib")

from report.made import run_folder

WATCH = [sys.executable, "-P", "-m", "klinic.cli", "watch"]
PAGE = "Completions, token by token"
SECRET = "not-a-secret-but-of-this-run"  # noqa: S105 - a mark to look for
LONGEST = 70_000  # bytes: more than http.server takes of a line
SLOW = 60  # connections that never finish their request


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The server that is running."""

    port: int
    token: str
    process: subprocess.Popen

    def fill(self, request):
        """Return a request with the server's own port and address in it."""
        port, token = str(self.port).encode(), self.token.encode()
        return request.replace(b"{port}", port).replace(b"{token}", token)

    def send(self, request, *, wait=10.0):
        """Return everything that is answered to some bytes."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=wait) as connection:
            # the server may have closed a connection that it refuses
            with contextlib.suppress(ConnectionError):
                connection.sendall(self.fill(request))
                connection.shutdown(socket.SHUT_WR)
            answer = b""
            with contextlib.suppress(ConnectionError):
                while piece := connection.recv(1 << 16):
                    answer += piece
        return answer

    def version(self):
        """Return the status of a good request, and how long it took."""
        begun = time.monotonic()
        answer = self.send(b"GET /{token}/version HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n")
        return status_of(answer), time.monotonic() - begun


def status_of(answer):
    found = re.match(rb"HTTP/1\.[01] (\d{3})", answer)
    return int(found[1]) if found else None


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    run = run_folder(tmp_path_factory.mktemp("web") / "run")
    (run / "recipe.yaml").write_text(f"output:\n  project: {SECRET}\n")
    process = subprocess.Popen(
        [*WATCH, str(run), "--web"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    found = re.fullmatch(
        r"Open http://127\.0\.0\.1:(\d+)/([\w-]{20,})/\n", process.stdout.readline()
    )
    yield Served(port=int(found[1]), token=found[2], process=process)
    process.kill()
    process.communicate()


def get(path, *headers, host=b"127.0.0.1:{port}", method=b"GET", version=b"HTTP/1.1"):
    """Return a request."""
    lines = [method + b" " + path + b" " + version]
    lines += [] if host is None else [b"Host: " + host]
    return b"\r\n".join([*lines, *headers, b"", b""])


PAGE_OF = b"/{token}/"
HOSTS = {
    "none": get(PAGE_OF, host=None),
    "none in 1.0": get(PAGE_OF, host=None, version=b"HTTP/1.0"),
    "empty": get(PAGE_OF, host=b""),
    "another": get(PAGE_OF, host=b"evil.example"),
    "another with the port": get(PAGE_OF, host=b"evil.example:{port}"),
    "without a port": get(PAGE_OF, host=b"127.0.0.1"),
    "another port": get(PAGE_OF, host=b"127.0.0.1:1"),
    "a longer name": get(PAGE_OF, host=b"localhost.evil.example:{port}"),
    "a longer address": get(PAGE_OF, host=b"127.0.0.1.evil.example:{port}"),
    "a final dot": get(PAGE_OF, host=b"localhost.:{port}"),
    "twice": get(PAGE_OF, b"Host: evil.example:{port}"),
    "twice the same": get(PAGE_OF, b"Host: 127.0.0.1:{port}"),
    "IPv6": get(PAGE_OF, host=b"[::1]:{port}"),
    "any address": get(PAGE_OF, host=b"0.0.0.0:{port}"),
    "a short address": get(PAGE_OF, host=b"127.1:{port}"),
    "a decimal address": get(PAGE_OF, host=b"2130706433:{port}"),
    "a user": get(PAGE_OF, host=b"evil.example@127.0.0.1:{port}"),
    "forwarded": get(PAGE_OF, b"X-Forwarded-Host: 127.0.0.1:{port}", host=b"evil.example"),
    "a folded line": get(PAGE_OF, b" evil.example", host=b"127.0.0.1:{port}"),
    "bytes": get(PAGE_OF, host=b"\xff\xfe:{port}"),
}
TOKENS = {
    "none": get(b"/"),
    "none but a name": get(b"/version"),
    "no slash": get(b"/{token}"),
    "wrong": get(b"/AAAAAAAAAAAAAAAAAAAAAA/"),
    "longer": get(b"/{token}A/"),
    "encoded": get(b"/%7Btoken%7D/"),
    "in the query": get(b"/?token={token}"),
    "in a cookie": get(b"/", b"Cookie: token={token}"),
    "as authorization": get(b"/", b"Authorization: Bearer {token}"),
    "in the referrer": get(b"/", b"Referer: http://127.0.0.1:{port}/{token}/"),
    "later in the path": get(b"/x/{token}/"),
    "behind a parent": get(b"/../{token}/"),
    "behind a byte": get(b"/%00{token}/"),
    "bytes": get(b"/\xff\xfe\xfd/"),
    "a whole URL": get(b"http://127.0.0.1:{port}/{token}/"),
    "a proxied URL": get(b"http://evil.example/{token}/"),
    "a star": get(b"*"),
    "nothing in 0.9": b"GET /\r\n\r\n",
}
PATHS = {
    "parents": get(b"/{token}/../../../../etc/passwd"),
    "encoded parents": get(b"/{token}/%2e%2e%2f%2e%2e%2fetc%2fpasswd"),
    "backslashes": get(b"/{token}/..%5c..%5cetc%5cpasswd"),
    "absolute": get(b"/{token}//etc/passwd"),
    "recipe": get(b"/{token}/recipe.yaml"),
    "metrics": get(b"/{token}/metrics.jsonl"),
    "facts": get(b"/{token}/run.json"),
    "records": get(b"/{token}/records/"),
    "a dot": get(b"/{token}/."),
    "a query": get(b"/{token}/?x=1"),
    "a slash more": get(b"/{token}/version/"),
    "other letters": get(b"/{token}/VERSION"),
    "parameters": get(b"/{token}/version;x"),
    "a zero": get(b"/{token}/version%00"),
    "encoded lines": get(b"/{token}/%0d%0aSet-Cookie:%20evil=1"),
    "a carriage return": get(b"/{token}/\rSet-Cookie:evil=1"),
    "long": get(b"/{token}/" + b"a" * 60_000),
}
METHODS = {
    name: get(PAGE_OF, b"Content-Length: 2", method=name.encode()) + b"{}"
    for name in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
}
BROKEN = {
    "unknown method": get(PAGE_OF, method=b"BREW"),
    "small letters": get(PAGE_OF, method=b"get"),
    "connect": get(b"evil.example:443", method=b"CONNECT"),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "another version": get(PAGE_OF, version=b"HTTP/9.9"),
    "no version": get(PAGE_OF, version=b"HTTP/x"),
    "four words": get(b"/{token}/ and more"),
    "a long line": get(b"/{token}/" + b"a" * LONGEST),
    "a long header": get(PAGE_OF, b"X-Long: " + b"a" * LONGEST),
    "many headers": get(PAGE_OF, *[b"X-%d: 1" % n for n in range(150)]),
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    "noise": bytes(range(256)) * 4 + b"\r\n\r\n",
    "empty lines": b"\r\n\r\n\r\n",
    "nothing": b"",
    "half a line": b"GET /{token}",
}
GOOD = {
    "plain": get(PAGE_OF),
    "HTTP/1.0": get(PAGE_OF, version=b"HTTP/1.0"),
    "two slashes": get(b"//{token}/"),  # http.server takes them for one
    "localhost": get(PAGE_OF, host=b"LocalHost:{port}"),
    "another origin": get(PAGE_OF, b"Origin: http://evil.example"),
    "websocket": get(
        PAGE_OF, b"Connection: Upgrade", b"Upgrade: websocket", b"Sec-WebSocket-Version: 13"
    ),
    "a range": get(PAGE_OF, b"Range: bytes=0-10"),
    "a body": get(PAGE_OF, b"Content-Length: 99999999"),
}


def check_refused(served, answer):
    """Hold an answer against what may never be in one."""
    text = answer.decode("latin-1")
    assert PAGE not in text
    assert SECRET not in text
    assert "root:" not in text
    assert "Traceback" not in text
    head = text.partition("\r\n\r\n")[0]
    assert "Set-Cookie" not in head
    assert "Access-Control" not in head
    assert served.process.poll() is None


@pytest.mark.parametrize("request_", HOSTS.values(), ids=HOSTS)
def test_another_host_gets_nothing(served, request_):
    answer = served.send(request_)
    check_refused(served, answer)
    assert status_of(answer) in {400, 403}
    assert served.token not in answer.decode("latin-1")


@pytest.mark.parametrize("request_", TOKENS.values(), ids=TOKENS)
def test_without_the_address_there_is_nothing(served, request_):
    answer = served.send(request_)
    check_refused(served, answer)
    assert status_of(answer) in {400, 403, None}
    assert served.token not in answer.decode("latin-1")


@pytest.mark.parametrize("request_", PATHS.values(), ids=PATHS)
def test_no_file_is_served(served, request_):
    answer = served.send(request_)
    check_refused(served, answer)
    assert status_of(answer) in {400, 404}


@pytest.mark.parametrize("request_", METHODS.values(), ids=METHODS)
def test_the_page_is_only_looked_at(served, request_):
    answer = served.send(request_)
    check_refused(served, answer)
    assert status_of(answer) == 405


@pytest.mark.parametrize("request_", BROKEN.values(), ids=BROKEN)
def test_what_is_not_http_is_refused_and_the_next_is_answered(served, request_):
    answer = served.send(request_)
    check_refused(served, answer)
    assert status_of(answer) in {400, 403, 414, 431, 501, 505, None}
    assert served.version()[0] == 200


@pytest.mark.parametrize("request_", GOOD.values(), ids=GOOD)
def test_a_good_request_is_answered_in_full(served, request_):
    answer = served.send(request_, wait=60).decode("latin-1")
    head, _, body = answer.partition("\r\n\r\n")
    assert head.startswith("HTTP/1.0 200 ")
    assert PAGE in body
    assert "Access-Control" not in head
    assert "Upgrade" not in head


def test_head_has_no_body(served):
    answer = served.send(get(PAGE_OF, method=b"HEAD"), wait=60)
    assert status_of(answer) == 200
    assert answer.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    ("first", "status"), [(get(PAGE_OF, host=b"evil.example"), 403), (get(b"/{token}/x"), 404)]
)
def test_of_requests_in_one_connection_the_first_is_answered_alone(served, first, status):
    answer = served.send(first + get(PAGE_OF))
    check_refused(served, answer)
    assert status_of(answer) == status
    assert answer.count(b"HTTP/1.0 ") == 1


def test_a_request_inside_a_body_is_not_answered(served):
    hidden = get(PAGE_OF)
    outer = get(b"/{token}/x", b"Transfer-Encoding: chunked", b"Content-Length: 4", method=b"POST")
    answer = served.send(outer + b"0\r\n\r\n" + hidden)
    check_refused(served, answer)
    assert answer.count(b"HTTP/1.0 ") == 1


def test_slow_connections_keep_nobody_waiting(served):
    with contextlib.ExitStack() as opened:
        for _ in range(SLOW):
            address = ("127.0.0.1", served.port)
            connection = opened.enter_context(socket.create_connection(address, timeout=10))
            connection.sendall(served.fill(b"GET /{token}/ HTTP/1.1\r\nHost: 127.0"))
        status, took = served.version()
        assert status == 200
        assert took < 5
    assert served.version()[0] == 200


def test_there_are_more_requests_than_an_attacker_tried():
    assert sum(map(len, (HOSTS, TOKENS, PATHS, METHODS, BROKEN, GOOD))) >= 51
