"""Check an environment that holds nothing but the base package."""

import json
import subprocess
import sys
import time
from importlib.metadata import distribution, distributions
from importlib.util import find_spec
from pathlib import Path

HEAVY = ("torch", "ray", "vllm", "transformers")
KLINIC = Path(sys.executable).with_name("klinic")
LIMIT = 0.4
INSTALLERS = {"pip", "setuptools"}


def main() -> None:
    """Fail on the first thing that is not as the base install promises."""
    present = [name for name in HEAVY if find_spec(name)]
    assert not present, f"the base install brought {present}"

    listed = check_sbom()

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

    print(f"no {', '.join(HEAVY)}; {listed} packages in the bill of materials")
    print(f"klinic --help in {median:.2f} s; {refused.stderr.strip()}")


def check_sbom() -> int:
    """Compare the wheel's bill of materials with what is installed here."""
    wheel = distribution("klinic")
    (place,) = [file for file in wheel.files or [] if file.parent.name == "sboms"]
    text = Path(str(place.locate())).read_text()
    bom = json.loads(text)
    assert (bom["bomFormat"], bom["specVersion"]) == ("CycloneDX", "1.6"), place
    assert bom["metadata"]["component"]["version"] == wheel.version, place
    assert "://" not in text, f"{place} names an address"
    assert "timestamp" not in bom["metadata"], f"{place} has a time: no build is like another"
    assert "serialNumber" not in bom, f"{place} has a random number: no build is like another"
    listed = {(found["name"], found["version"]) for found in bom["components"]}
    installed = {(found.metadata["Name"], found.version) for found in distributions()}
    others = {pair for pair in installed if pair[0] not in INSTALLERS | {"klinic"}}
    assert listed == others, f"the bill of materials and the install differ: {listed ^ others}"
    return len(listed)


main()
