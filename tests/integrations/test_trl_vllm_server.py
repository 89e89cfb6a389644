"""TRL with a vLLM server and klinic attached, in one process and in two.

pytest -m slow -s tests/integrations/test_trl_vllm_server.py

The server is the real one; only the way of its weights is replaced, see `vllm_file_transfer.py`.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import numpy as np
import pytest

from integrations.vllm_file_transfer import BACKEND, write_plugin
from klinic.checks import CHECKS
from klinic.doctor.cases import read_cases
from klinic.doctor.diagnosis import diagnose
from klinic.evidence import store

pytest.importorskip("vllm")
pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(1800)]

TESTS = Path(__file__).parents[1]
AROUND = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "ACCELERATE_USE_CPU": "true",
}
OPTIONS = (
    *("--dtype", "float32", "--max-model-len", "64", "--enforce-eager"),
    *("--kv-cache-memory-bytes", str(64 << 20), "--generation-config", "vllm"),
    *("--logprobs-mode", "processed_logprobs", "--host", "127.0.0.1"),
    *("--weight-transfer-config", json.dumps({"backend": BACKEND})),
)
SCRIPT = """
import sys
from pathlib import Path
import klinic
from integrations.trainers import make_trainer
from integrations.vllm_file_transfer import replace_transfer

start, folder, url, way = sys.argv[1:]
replace_transfer(Path(folder), is_stale=way == "stale")
trainer = make_trainer(
    start,
    Path(folder) / "out",
    max_steps=3,
    use_vllm=True,
    vllm_mode="server",
    vllm_server_base_url=url,
    per_device_train_batch_size=32,
    learning_rate=1e-3 if way == "stale" else 3e-4,  # at 1e-3 a healthy policy soon declines
    gradient_accumulation_steps=1,
)
klinic.attach(trainer, Path(folder) / "run")
trainer.train()
"""
STARTS_WITHIN = 600.0  # seconds
TWO = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


@pytest.fixture(scope="module")
def server(taught, tmp_path_factory):
    """The URL of a server of the start, and the environment of its trainers."""
    folder = tmp_path_factory.mktemp("server")
    write_plugin(folder / "plugin")
    path = os.pathsep.join([str(folder / "plugin"), str(TESTS), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **AROUND, "PYTHONPATH": path}
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--port", str(port)]
    log = folder / "server.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [*command, "--model", str(taught), *OPTIONS],
            env=environment,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
    try:
        wait_for_server(port, process, log)
        yield f"http://127.0.0.1:{port}", environment
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def free_port():
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return opened.getsockname()[1]


def wait_for_server(port, process, log):
    deadline = time.monotonic() + STARTS_WITHIN
    while not is_healthy(port):
        assert process.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() < deadline, log.read_text()[-4000:]
        time.sleep(1)


def is_healthy(port):
    connection = HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (HTTPException, OSError):
        return False
    finally:
        connection.close()


def train(server, start, folder, way, launcher=()):
    """Train a few steps; return the diagnosis and what was printed."""
    url, environment = server
    script = folder / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, *launcher, str(script), str(start), str(folder), url, way],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return diagnose(read_cases(folder / "run"), CHECKS), done.stdout


# first: the server has the weights of the start
def test_a_server_that_keeps_its_first_weights_is_named(server, taught, tmp_path):
    diagnosis, printed = train(server, taught, tmp_path, "stale")
    assert diagnosis.cause == "stale-sampler", diagnosis.headline
    assert "Cause: stale-sampler" in printed


@pytest.mark.parametrize("launcher", [(), TWO], ids=["one process", "two processes"])
def test_a_healthy_run_has_no_cause(server, taught, tmp_path, launcher):
    diagnosis, printed = train(server, taught, tmp_path, "synced", launcher)
    assert not diagnosis.sick, diagnosis.headline
    assert "3 steps examined: no cause was found" in printed
    for step in (1, 2, 3):
        record = store.read_record(tmp_path / "run", step)
        assert len(record.reward) == 32 * (2 if launcher else 1)
        np.testing.assert_allclose(record.logp_sampler, record.logp, atol=5e-5)
