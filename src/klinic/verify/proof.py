"""The result of `klinic verify`: estimators, identities, and effects of averages and advantages."""

from collections.abc import Callable
from dataclasses import dataclass

from klinic.maths.kl_estimators import ESTIMATORS
from klinic.verify.coefficient_meaning import (
    AdvantageRow,
    AggregationRow,
    measure_advantages,
    measure_aggregations,
)
from klinic.verify.correction import (
    CorrectionRow,
    check_corrections,
    measure_corrections,
    measure_uncapped_biases,
)
from klinic.verify.estimators import EstimatorRow, WorldSet, measure_estimator
from klinic.verify.identify import TOLERANCE, worst_error
from klinic.verify.identities import check_identities
from klinic.verify.identity_check import IdentityCheck
from klinic.verify.teacher import check_teacher
from klinic.verify.toy_policies import off_policy_worlds, on_policy_worlds
from klinic.verify.world_range import random_worlds


@dataclass(frozen=True, kw_only=True)
class Proof:
    """All measurements, and whether they match klinic's promises."""

    rows: list[EstimatorRow]
    checks: list[IdentityCheck]
    aggregation: list[AggregationRow]
    advantage: list[AdvantageRow]
    correction: list[CorrectionRow]

    @property
    def ok(self) -> bool:
        """Whether every estimator has its promised gradient and every identity holds."""
        return all(row.ok for row in self.rows) and all(check.ok for check in self.checks)

    @property
    def worst_identity_error(self) -> float:
        """The largest error of the identities with a tolerance of 1e-9."""
        return worst_error(check.error for check in self.checks if check.tolerance == TOLERANCE)


def prove(progress: Callable[[str], None] = lambda _: None) -> Proof:
    """Measure every estimator in every world; `progress` receives the name of each stage."""
    progress("every completion")
    on_policy, off_policy = (
        WorldSet.from_worlds(on_policy_worlds()),
        WorldSet.from_worlds(off_policy_worlds()),
    )
    progress("random worlds")
    random = WorldSet.from_worlds(random_worlds())
    rows = []
    for estimator in ESTIMATORS.values():
        progress(f"the gradient of {estimator.name}")
        rows.append(measure_estimator(estimator, on_policy, off_policy, random))
    progress("averages and advantages")
    aggregations = measure_aggregations()
    progress("the KL to a teacher")
    to_teacher = check_teacher(on_policy.worlds)
    progress("importance weights")
    uncapped_biases = measure_uncapped_biases(off_policy)
    return Proof(
        rows=rows,
        checks=[
            *check_identities(on_policy, off_policy, aggregations),
            *check_corrections(off_policy, uncapped_biases),
            *to_teacher,
        ],
        aggregation=aggregations,
        advantage=measure_advantages(),
        correction=measure_corrections(uncapped_biases),
    )
