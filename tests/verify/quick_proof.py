"""The identities of `klinic verify` in one world of each kind: exit code 1 and the broken ones."""

import sys

import torch

from klinic.verify.estimators import Setting
from klinic.verify.identities import checks
from klinic.verify.meaning import aggregation_rows
from klinic.verify.world import make_world


def broken() -> list[str]:
    """Return the names of the statements that do not hold."""
    kind = {"shared": True, "ends_early": True}
    fresh = make_world("fresh", seed=6, drift=1.0, **kind)
    stale = make_world("stale", seed=7, drift=1.0, sampler_drift=0.4, **kind)
    found = checks(Setting.of([fresh]), Setting.of([stale]), aggregation_rows())
    return [check.name for check in found if not check.ok]


if __name__ == "__main__":
    torch.set_num_threads(1)
    names = broken()
    sys.stdout.write("; ".join(names))
    sys.exit(1 if names else 0)
