"""A cluster of three hosts: one loses power, another its cable, and a stranger has no token."""

import os
import subprocess
import sys
import time

import pytest
from killing import KLINIC, differences, environment, num_steps, run_whole
from nodes import PORT, Nodes, address
from started import until

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, cache):
    """A run with two samplers on one machine."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run_whole(folder, cache, "cluster.samplers=2")
    return folder / "run"


def train(nodes, folder, cache, recipe):
    """Start a run on the first host, with its samplers on the others."""
    (folder / "recipe.yaml").write_text(recipe.read_text())
    line = [
        *(str(KLINIC), "train", str(folder / "recipe.yaml"), f"output.dir={folder / 'run'}"),
        *("cluster.samplers=2", f"cluster.address={address(0)}:{PORT}"),
    ]
    with (folder / "out.txt").open("w") as out:
        return subprocess.Popen(
            [*nodes.inside(0), *line],
            env={**nodes.environment(), **environment(cache, supervised=True)},
            stdout=out,
            stderr=out,
        )


@pytest.mark.parametrize("what", ["kill", "cut"])
def test_a_host_is_lost_and_the_run_is_the_same(tmp_path, undisturbed, cache, what):
    with Nodes(3, tmp_path) as nodes:
        process = train(nodes, tmp_path, cache, undisturbed.parent / "recipe.yaml")
        try:
            run = tmp_path / "run"
            assert until(lambda: num_steps(run) >= 3 or process.poll() is not None, 240)
            assert process.poll() is None, (tmp_path / "out.txt").read_text()
            at, before = time.monotonic(), num_steps(run)
            getattr(nodes, what)(2)
            assert until(lambda: num_steps(run) >= before + 2, 240)
            sys.stdout.write(f"\n{what}: two more steps after {time.monotonic() - at:.1f} s\n")
            process.wait(300)
        finally:
            process.kill()
        said = (tmp_path / "out.txt").read_text()
        assert process.returncode == 0, said
        assert "Lost sampler" in said
    assert differences(undisturbed, run) == []


def test_without_the_token_nobody_is_let_in(tmp_path):
    asks = (
        "import ray\n"
        f"ray.init('{address(0)}:{PORT}', log_to_driver=False)\n"
        "print('in', ray.get(ray.remote(lambda: 1).remote()))\n"
    )
    with Nodes(2, tmp_path) as nodes:
        for token, lets_in in ((nodes.token, True), ("0" * 64, False)):
            done = subprocess.run(
                [*nodes.inside(0), sys.executable, "-c", asks],
                env={**nodes.environment(), "RAY_AUTH_TOKEN": token},
                capture_output=True,
                text=True,
                timeout=200,
                check=False,
            )
            assert ("in 1" in done.stdout) == lets_in, done.stdout + done.stderr
