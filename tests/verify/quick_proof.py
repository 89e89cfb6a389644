"""The identities of `klinic verify` in one world of each kind: exit code 1 and the broken ones."""

import sys

import torch

from klinic.verify.coefficient_meaning import measure_aggregations
from klinic.verify.correction import check_corrections, measure_uncapped_biases
from klinic.verify.estimators import WorldSet
from klinic.verify.identities import check_identities
from klinic.verify.teacher import check_teacher
from klinic.verify.toy_policies import make_world


def broken() -> list[str]:
    """Return the names of the statements that do not hold."""
    kind = {"shared": True, "ends_early": True}
    fresh = make_world("fresh", seed=6, drift=1.0, **kind)
    stale = make_world("stale", seed=7, drift=1.0, sampler_drift=0.4, **kind)
    off_policy = WorldSet.from_worlds([stale])
    found = [
        *check_identities(WorldSet.from_worlds([fresh]), off_policy, measure_aggregations()),
        *check_corrections(off_policy, measure_uncapped_biases(off_policy)),
        *check_teacher([fresh]),
    ]
    return [check.name for check in found if not check.ok]


if __name__ == "__main__":
    torch.set_num_threads(1)
    names = broken()
    sys.stdout.write("; ".join(names))
    sys.exit(1 if names else 0)
