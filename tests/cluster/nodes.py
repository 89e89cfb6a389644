"""Three hosts on one machine: network namespaces on a bridge, each with a Ray node of its own."""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

RAY = str(Path(sys.executable).with_name("ray"))
BRIDGE = "klinic0"
PORT = 6379
IP = shutil.which("ip") or "ip"
QUICK = {  # how soon Ray's head gives up a node that does not answer
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "4",
}


def ip(*arguments):
    subprocess.run([IP, *arguments], check=True, capture_output=True)


def address(number):
    return f"10.77.0.{number + 1}"


class Nodes:
    """A head without room for workers, and nodes with room for one each."""

    def __init__(self, num, folder):
        self.num = num
        self.token = secrets.token_hex(32)
        self._folder = folder
        self._hosts = []

    def __enter__(self):
        ip("link", "add", BRIDGE, "type", "bridge")
        ip("link", "set", BRIDGE, "up")
        for number in range(self.num):
            self._hosts.append(self._host(number))
        for number in range(self.num):
            self._ray(number)
        return self

    def __exit__(self, *_):
        for number in range(len(self._hosts)):
            self.kill(number)
        for host in self._hosts:
            host.kill()
            host.wait()
        for number in range(self.num):
            subprocess.run(
                [IP, "link", "del", f"klinic-out{number}"], capture_output=True, check=False
            )
        ip("link", "del", BRIDGE)

    def _host(self, number):
        """Start a shell that holds a host's namespaces open, and connect it to the bridge."""
        # /tmp/ray is each host's own; everything else of the file system is shared, as on a cluster
        script = "mkdir -p /tmp/ray && mount -t tmpfs none /tmp/ray && sleep 100000"
        unshare = shutil.which("unshare") or "unshare"
        host = subprocess.Popen([unshare, "-m", "-n", "-u", "/bin/sh", "-c", script])
        time.sleep(0.5)
        ip(
            "link",
            "add",
            f"klinic-out{number}",
            "type",
            "veth",
            "peer",
            "name",
            f"klinic-in{number}",
        )
        ip("link", "set", f"klinic-in{number}", "netns", str(host.pid))
        ip("link", "set", f"klinic-out{number}", "master", BRIDGE, "up")
        inside = [*self.inside(number, host.pid), IP]
        for words in (
            ["addr", "add", f"{address(number)}/24", "dev", f"klinic-in{number}"],
            ["link", "set", f"klinic-in{number}", "up"],
            ["link", "set", "lo", "up"],
        ):
            subprocess.run([*inside, *words], check=True)
        subprocess.run([*self.inside(number, host.pid), "hostname", f"host{number}"], check=True)
        return host

    def inside(self, number, pid=None):
        """Return what runs a command on a host."""
        pid = self._hosts[number].pid if pid is None else pid
        return [shutil.which("nsenter") or "nsenter", "-t", str(pid), "-m", "-n", "-u"]

    def environment(self):
        return {
            **os.environ,
            **QUICK,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self.token,
            "RAY_USAGE_STATS_ENABLED": "0",
        }

    def _ray(self, number):
        how = ["--node-ip-address", address(number)]
        if number == 0:
            how += ["--head", "--port", str(PORT), "--num-cpus", "0", "--include-dashboard=false"]
        else:
            how += ["--address", f"{address(0)}:{PORT}", "--num-cpus", "1"]
        with (self._folder / f"ray-{number}.log").open("w") as log:
            subprocess.run(
                [*self.inside(number), RAY, "start", *how],
                env=self.environment(),
                stdout=log,
                stderr=log,
                check=True,
            )

    def pids(self, number):
        """Return the processes on a host."""
        if self._hosts[number].poll() is not None:  # it has lost power before
            return []
        there = str(Path(f"/proc/{self._hosts[number].pid}/ns/net").readlink())
        found = []
        for path in Path("/proc").glob("[0-9]*/ns/net"):
            try:
                if str(path.readlink()) == there:
                    found.append(int(path.parts[2]))
            except OSError:
                continue
        return [pid for pid in found if pid != self._hosts[number].pid]

    def kill(self, number):
        """Let a host lose power: everything on it is gone at once."""
        for pid in self.pids(number):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def cut(self, number):
        """Pull a host's cable."""
        ip("link", "set", f"klinic-out{number}", "down")
