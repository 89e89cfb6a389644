"""Serves the page of a running run to browsers on this machine only.

The server listens on 127.0.0.1. Every URL starts with a random token, which keeps out other users
of the machine and pages of other sites. A site that maps its own name to this server (DNS
rebinding) sends that name as `Host` and is refused.
"""

import hashlib
import hmac
import secrets
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from klinic.doctor.findings_cache import open_cache
from klinic.errors import KlinicError
from klinic.evidence import store
from klinic.evidence.run_facts import EVENTS, METRICS
from klinic.report.page import content_policy, render, render_waiting
from klinic.report.reading import read_run_report

HOST = "127.0.0.1"
VERSION = "version"
RENDER_BACKOFF = 4  # render times to wait before rendering again: the run needs the CPU
MIN_SECONDS = 2.0  # minimum seconds between two renders
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class PortTakenError(OSError):
    """The port cannot be bound."""


class LivePage:
    """The page of a run, rendered on request if the run has new data."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._page = b""
        self._version = ""
        self._not_before = 0.0

    def current_version(self) -> str:
        """Return an id of the next page's content; cheap, since browsers poll it every second."""
        if self._page and time.monotonic() < self._not_before:
            return self._version
        return _files_version(self._run)

    def current_page(self) -> bytes:
        """Return the newest page."""
        with self._lock:
            version = self.current_version()
            if version != self._version or not self._page:
                self._render_page(version)
            return self._page

    def _render_page(self, version: str) -> None:
        begun = time.monotonic()
        try:
            text = render([read_run_report(self._run, cache=open_cache())], version=version)
        except (KlinicError, OSError) as error:  # not started, or rolled back during the read
            text = "" if self._page else render_waiting(str(error), version=version)
        if text:
            self._page = text.encode("utf-8", "backslashreplace")
            self._version = version
        taken = time.monotonic() - begun
        self._not_before = time.monotonic() + max(MIN_SECONDS, RENDER_BACKOFF * taken)


class Server(ThreadingHTTPServer):
    """HTTP server of one run."""

    daemon_threads = True

    def __init__(self, run: Path, port: int) -> None:
        super().__init__((HOST, port), Handler)
        self.live = LivePage(run)
        self.token = secrets.token_urlsafe(16)

    @property
    def url(self) -> str:
        """The URL to open in a browser."""
        return f"http://{HOST}:{self.server_port}/{self.token}/"

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore connections that a browser closed."""


class Handler(BaseHTTPRequestHandler):
    """Handles one request."""

    server: Server
    server_version, sys_version = "klinic", ""
    timeout = 30

    def do_GET(self) -> None:
        """Send the page or its version."""
        path = self._allowed_path()
        if path is None:
            self._send_body(HTTPStatus.FORBIDDEN, b"Only by the address that klinic printed.\n")
        elif self.command not in ("GET", "HEAD"):
            self._send_body(HTTPStatus.METHOD_NOT_ALLOWED, b"Only to be looked at.\n")
        elif path == "":
            self._send_body(HTTPStatus.OK, self.server.live.current_page(), "text/html")
        elif path == VERSION:
            self._send_body(HTTPStatus.OK, self.server.live.current_version().encode())
        else:
            self._send_body(HTTPStatus.NOT_FOUND, b"Not here.\n")

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_GET  # noqa: N815

    def _allowed_path(self) -> str | None:
        """Return the path after the token; None if host or token is wrong."""
        hosts = self.headers.get_all("Host") or []
        allowed_hosts = {f"{name}:{self.server.server_port}" for name in (HOST, "localhost")}
        if len(hosts) != 1 or hosts[0].lower() not in allowed_hosts:
            return None
        token, _, rest = self.path.removeprefix("/").partition("/")
        right = hmac.compare_digest(token.encode("utf-8", "replace"), self.server.token.encode())
        return rest if right and self.path.startswith(f"/{self.server.token}/") else None

    def _send_body(self, status: HTTPStatus, body: bytes, kind: str = "text/plain") -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", f"{content_policy()}; frame-ancestors 'none'")
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Reject a malformed request without quoting any of it."""
        del message, explain
        self.close_connection = True
        self._send_body(HTTPStatus(code), b"Not a request that is answered here.\n")

    def log_message(self, *_: object) -> None:
        """Log nothing: the URL contains the token, and the path is untrusted text."""


def open_server(run: Path, port: int) -> Server:
    """Return a listening server; port 0 picks a free port."""
    try:
        return Server(run, port)
    except (OSError, OverflowError) as error:
        raise PortTakenError(
            f"cannot listen on port {port} of {HOST} ({error}). Choose another --port, or omit it "
            "to use a free one."
        ) from error


def _files_version(run: Path) -> str:
    """Return an id of the files that a run has written so far."""
    sizes = []
    for name in (METRICS, EVENTS):
        try:
            status = (run / name).stat()
            sizes.append((status.st_ino, status.st_size))
        except OSError:
            sizes.append((0, 0))
    try:
        last = store.complete_steps(run)[-1:]
    except (KlinicError, OSError):
        last = []
    return hashlib.sha256(repr((sizes, last)).encode()).hexdigest()[:16]
