"""Secrets that a run uses are in nothing that it writes or prints."""

import base64
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from commands import klinic

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]
PASSWORD = "canary-not-a-secret-password"  # noqa: S105 - and it is none
KEY = "canary-not-a-secret-key"
BASIC = base64.b64encode(f"me:{PASSWORD}".encode()).decode()
CANARIES = [PASSWORD.encode(), KEY.encode(), BASIC.encode()]
KEYED = """
import os

def keyed(completions, **columns):
    assert os.environ["JUDGE_KEY"]
    return [float(len(text) % 3) for text in completions]
"""


class Judge(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.logins.append(self.headers["Authorization"])
        body = json.dumps({"reward": 1.0}).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def judge():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    server.daemon_threads = True
    server.logins, server.status = [], 200
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(("status", "code"), [(200, 0), (403, 2)])
def test_no_canary_is_written_or_printed(tmp_path, judge, status, code):
    judge.status = status
    folder = tmp_path / "work"
    folder.mkdir()
    (tmp_path / "netrc").write_text(f"machine 127.0.0.1 login me password {PASSWORD}")
    (folder / "keyed.py").write_text(KEYED)
    (folder / "recipe.yaml").write_text("{model: tiny, task: arithmetic}")
    url = f"http://127.0.0.1:{judge.server_port}/v1/score"
    secret = {"NETRC": str(tmp_path / "netrc"), "JUDGE_KEY": KEY, "VLLM_API_KEY": KEY}
    secret |= {"WANDB_API_KEY": KEY, "HF_TOKEN": KEY}
    small = ["loop.max_steps=2", "loop.eval_prompts=1", "loop.prompts_per_step=2", "group_size=2"]
    rewards = f"rewards={json.dumps(['keyed.py:keyed', url])}"
    said = []
    for command in (
        ["train", "recipe.yaml", rewards, "output.dir=run", "warm_start.steps=5", *small],
        ["diagnose", "run", "--json"],
        ["report", "run"],
    ):
        env = {**os.environ, **secret, "KLINIC_CACHE": str(folder / "cache")}
        ended = klinic(*command, cwd=folder, env=env, timeout=110)
        said.append((ended.stdout + ended.stderr).encode())
        if command[0] == "train":
            assert ended.returncode == code, ended.stderr
    assert set(judge.logins) == {f"Basic {BASIC}"}  # they were used
    written = [path for path in folder.rglob("*") if path.is_file()]
    assert any(path.name == "recipe.yaml" and path.parent.name == "run" for path in written)
    for text in (*said, *(path.read_bytes() for path in written)):
        assert not [canary for canary in CANARIES if canary in text]
