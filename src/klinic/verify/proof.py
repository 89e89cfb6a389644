"""The result of `klinic verify`: estimators, identities, and effects of averages and advantages."""

from collections.abc import Callable
from dataclasses import dataclass

from klinic.maths.kl_estimators import ESTIMATORS
from klinic.verify.estimators import Row, Setting, row
from klinic.verify.identify import TOLERANCE, worst
from klinic.verify.identities import Check, checks
from klinic.verify.meaning import AdvantageRow, AggregationRow, advantage_rows, aggregation_rows
from klinic.verify.world import off_policy_worlds, on_policy_worlds


@dataclass(frozen=True, kw_only=True)
class Proof:
    """All measurements, and whether they match what klinic promises."""

    rows: list[Row]
    checks: list[Check]
    aggregation: list[AggregationRow]
    advantage: list[AdvantageRow]

    @property
    def ok(self) -> bool:
        """Whether every estimator has its promised gradient and every identity holds."""
        return all(row.ok for row in self.rows) and all(check.ok for check in self.checks)

    @property
    def worst_identity_error(self) -> float:
        """The largest error of the identities with a tolerance of 1e-9."""
        return worst(check.error for check in self.checks if check.tolerance == TOLERANCE)


def prove(progress: Callable[[str], None] = lambda _: None) -> Proof:
    """Measure every estimator in every world; `progress` receives the name of each stage."""
    progress("every completion")
    on_policy, off_policy = Setting.of(on_policy_worlds()), Setting.of(off_policy_worlds())
    rows = []
    for estimator in ESTIMATORS.values():
        progress(f"the gradient of {estimator.name}")
        rows.append(row(estimator, on_policy, off_policy))
    progress("averages and advantages")
    averages = aggregation_rows()
    return Proof(
        rows=rows,
        checks=checks(on_policy, off_policy, averages),
        aggregation=averages,
        advantage=advantage_rows(),
    )
