"""Runs all scalar checks on a log: possible causes, and the fields that would decide."""

from dataclasses import dataclass
from typing import Any

from klinic.doctor.advice import find_steps
from klinic.doctor.scalars import figures, kl, rewards, sampler
from klinic.doctor.scalars.check import ScalarCheck, ScalarFinding, finding_to_json
from klinic.evidence.readers.log import ScalarLog
from klinic.evidence.verdict import RunVerdict, Verdict

SIGNS: tuple[ScalarCheck, ...] = (*figures.SIGNS, *rewards.SIGNS, *kl.SIGNS, *sampler.SIGNS)

TOKEN_FIELDS = (
    *("record.logp_sampler", "record.logp_old", "record.logp_ref", "record.loss_mask"),
    *("record.reward", "record.advantage", "record.entropy"),
)
"""Fields that the checks of most causes need."""

CORE_METRICS = {
    "KL": ("kl", "kl_k1/mean"),
    "reward": ("reward",),
    "sampler gap": tuple(sampler.LIMITS),
}
"""Metrics by topic; a log without any of them does not show whether a run is healthy."""


NUM_LIKELY = 3  # causes whose fixes are printed
ONE_CAUSE = 0.9  # probability of a cause that alone fits the scalars


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalarCause:
    """A cause that fits the failed signs of a log."""

    name: str
    confidence: float
    explains: tuple[str, ...]
    """The failed signs that it fits."""
    steps: tuple[str, ...]
    """What to do, in the settings of the log's trainer if they are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalarDiagnosis:
    """The findings of all checks on a scalar log."""

    log: ScalarLog
    findings: tuple[tuple[ScalarCheck, ScalarFinding], ...]

    def with_verdict(self, verdict: Verdict) -> list[tuple[ScalarCheck, ScalarFinding]]:
        """Return the checks and findings with a verdict, the earliest first."""
        matches = [
            (check, finding) for check, finding in self.findings if finding.verdict is verdict
        ]
        return sorted(matches, key=lambda pair: pair[1].step or 0)

    @property
    def decisive_check(self) -> tuple[ScalarCheck, ScalarFinding] | None:
        """The earliest failed check with its finding, if it leaves one cause."""
        failed = self.with_verdict(Verdict.FAIL)
        return failed[0] if failed and len(failed[0][1].could_be) == 1 else None

    @property
    def cause(self) -> str | None:
        """The only remaining cause, or None."""
        return None if self.decisive_check is None else self.decisive_check[1].could_be[0]

    @property
    def sick(self) -> bool:
        """Whether a check failed."""
        return bool(self.with_verdict(Verdict.FAIL))

    @property
    def not_found(self) -> tuple[str, ...]:
        """Which of KL, reward and sampler gap the log does not have."""
        # rewards that are always non-finite are a finding, not a missing metric
        logged = {
            name for name, columns in CORE_METRICS.items() if any(map(self.log.has_metric, columns))
        }
        logged |= {"reward"} & self.log.columns.keys()
        return tuple(name for name in CORE_METRICS if name not in logged)

    @property
    def causes(self) -> tuple[ScalarCause, ...]:
        """The causes that fit, the most likely first.

        A sign divides its probability over its causes: the first counts twice, since signs list
        the likeliest first. Signs that fail later can be effects and only add to these causes.
        """
        failed = self.with_verdict(Verdict.FAIL)
        if not failed:
            return ()
        weights: dict[str, float] = {}
        for _, finding in failed:
            for rank, name in enumerate(finding.could_be):
                if name in failed[0][1].could_be:
                    share = (2 if rank == 0 else 1) / (len(finding.could_be) + 1)
                    weights[name] = weights.get(name, 0.0) + share
        total = ONE_CAUSE / max(sum(weights.values()), 1e-9)
        return tuple(
            ScalarCause(
                name=name,
                confidence=weight * total,
                explains=tuple(sign.name for sign, f in failed if name in f.could_be),
                steps=self._steps_of(name),
            )
            for name, weight in sorted(weights.items(), key=lambda item: -item[1])
        )

    def _steps_of(self, cause: str) -> tuple[str, ...]:
        return find_steps(cause, self.log.trainer.name.lower()) or (find_fix(cause) or "",)

    @property
    def verdict(self) -> RunVerdict:
        """`unread` if no core metric was logged and no check failed."""
        if self.sick:
            return RunVerdict.LIKELY if self.cause is None else RunVerdict.CAUSE
        is_unread = len(self.not_found) == len(CORE_METRICS)
        return RunVerdict.UNREAD if is_unread else RunVerdict.NONE

    @property
    def missing(self) -> tuple[str, ...]:
        """Token-level fields that would decide more: those of the failed checks, else `TOKENS`."""
        wanted = [name for sign, _ in self.with_verdict(Verdict.FAIL) for name in sign.decided_by]
        return tuple(dict.fromkeys(wanted or TOKEN_FIELDS))

    def to_json(self) -> dict[str, Any]:
        """Return the diagnosis as `--json` prints it."""
        failed = self.with_verdict(Verdict.FAIL)
        return {
            "evidence": "scalars",
            "verdict": str(self.verdict),
            "not_found": list(self.not_found),
            "read": self.log.to_json(),
            "cause": self.cause,
            "confidence": round(self.causes[0].confidence, 4) if self.causes else 0.0,
            "causes": [
                {
                    "name": cause.name,
                    "confidence": round(cause.confidence, 4),
                    "explains": list(cause.explains),
                    "steps": list(cause.steps),
                }
                for cause in self.causes
            ],
            "unexplained": [],
            "not_read": list(self.log.unknown),
            "findings": [finding_to_json(check, finding) for check, finding in self.findings],
            "ruled_out": [],
            "missing": list(self.missing),
            "fix": find_fix(self.cause),
            "change": {},
            "first_step": failed[0][1].step if failed else None,
        }


def examine_log(log: ScalarLog) -> ScalarDiagnosis:
    """Run every scalar check on a log."""
    return ScalarDiagnosis(log=log, findings=tuple((check, check(log)) for check in SIGNS))


def find_fix(cause: str | None) -> str | None:
    """Return the fix of a cause from the catalogue of checks."""
    if cause is None:
        return None
    from klinic.checks import CHECKS

    return next(check.fix for check in CHECKS if check.name == cause)
