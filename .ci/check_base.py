"""Check an environment that holds nothing but the base package."""

import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

HEAVY = ("torch", "ray", "vllm", "transformers")
KLINIC = Path(sys.executable).with_name("klinic")
LIMIT = 0.4


def main() -> None:
    """Fail on the first thing that is not as the base install promises."""
    present = [name for name in HEAVY if find_spec(name)]
    assert not present, f"the base install brought {present}"

    seconds = []
    for _ in range(7):
        start = time.perf_counter()
        subprocess.run([KLINIC, "--help"], check=True, capture_output=True)
        seconds.append(time.perf_counter() - start)
    median = sorted(seconds)[len(seconds) // 2]
    assert median <= LIMIT, f"klinic --help took {median:.2f} s (limit {LIMIT} s)"

    refused = subprocess.run([KLINIC, "verify"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2, f"klinic verify exits {refused.returncode} without torch"
    assert refused.stderr.count("\n") == 1, refused.stderr
    assert 'pip install "klinic[train]"' in refused.stderr, refused.stderr

    print(f"no {', '.join(HEAVY)}; klinic --help in {median:.2f} s; {refused.stderr.strip()}")


main()
