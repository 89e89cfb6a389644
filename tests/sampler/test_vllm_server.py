"""A vLLM server that the printed command starts is sampled from; what is not one is refused."""

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from vllm_cases import GAP, gap_of, loaded, moved, prompts, sampler_of, section, start, tiny

from klinic.errors import ConfigError, SamplerError
from klinic.model.loading import load_policy
from klinic.model.weights import fingerprint
from klinic.sampler.vllm.server import ServerEngine, server_command
from open_ports import listening

STARTS_WITHIN = 180.0  # seconds


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextmanager
def served(folder, rank=None):
    """Start the printed command as a user would, but on a free port; yield its URL and process."""
    port = free_port()
    line = server_command(start(folder, rank)).replace("--port 8000", f"--port {port}")
    line = line.replace("python -m", f"{shlex.quote(sys.executable)} -m")
    with (folder.parent / "server.log").open("wb") as log:
        process = subprocess.Popen(
            ["/bin/bash", "-c", line], stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield f"http://127.0.0.1:{port}", process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def connected(url, process):
    """Return the engine as soon as its server answers."""
    deadline = time.monotonic() + STARTS_WITHIN
    while True:
        try:
            return ServerEngine(url, dtype="float32", started_by="(the command)")
        except SamplerError:
            assert process.poll() is None, "the server has ended"
            assert time.monotonic() < deadline, "the server does not start"
            time.sleep(1)


@pytest.mark.engine
@pytest.mark.slow  # an engine of its own for each
@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rank", [None, 4], ids=["whole", "adapter"])
def test_a_server_started_by_the_printed_command_follows_every_update(tmp_path, rank):
    model = tiny(tmp_path / "model")
    policy = load_policy(section(model, rank), temperature=1.0, seed=0)
    with served(model, rank) as (url, process):
        sampler = sampler_of(policy, connected(url, process))
        for version in range(3):
            told = loaded(sampler, policy, version)
            assert told.fingerprint == fingerprint(policy.lm)
            assert max(told.sync_gaps["repeated"], told.sync_gaps["fresh"]) < GAP
            groups = list(sampler.sample(prompts(), step=version))
            assert gap_of(policy, groups) < GAP
            moved(policy)
        found = listening(process.pid)
        sampler.close()
    assert found
    assert all(address.is_loopback for address in found)


class Another(BaseHTTPRequestHandler):
    """A server of something else, or of vLLM as it is started to serve only."""

    def do_GET(self):
        known = self.path == "/v1/models"
        self.send_response(200 if known else 404)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "m"}]}' if known else b"{}")

    def log_message(self, *_):
        pass


def test_a_server_that_was_not_started_for_training_is_told_with_the_command(tmp_path):
    with HTTPServer(("127.0.0.1", 0), Another) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(SamplerError, match=r"not started for training.*--dtype float32"):
            ServerEngine(url, dtype="float32", started_by=server_command(start(tmp_path / "model")))
        server.shutdown()


def test_a_server_that_is_not_there_is_told_with_the_command(tmp_path):
    with pytest.raises(SamplerError, match=r"does not respond.*--logprobs-mode processed_logprobs"):
        ServerEngine(
            f"http://127.0.0.1:{free_port()}",
            dtype="float32",
            started_by=server_command(start(tmp_path / "model")),
        )


def test_a_server_elsewhere_is_refused():
    with pytest.raises(ConfigError, match="must run on this machine"):
        ServerEngine("http://example.org:8000", dtype="float32", started_by="")
