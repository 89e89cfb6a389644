"""`klinic.Recorder`: records, live doctor, report and watch for any training loop.

The loop hands over what it has: samples when it generates, trained rows when it updates. Trained
rows are joined to samples by their token ids. Nothing here needs torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console

from klinic.doctor.foreign_run_log import ForeignRunLog
from klinic.doctor.recorder_settings import (
    DoctorMode,
    DTypeName,
    LogprobMode,
    RecorderSettings,
    ReferenceName,
    check_token_texts,
    new_run_folder,
    read_settings,
    refuse_unknown_mode,
)
from klinic.doctor.recorder_values import (
    check_emitter_codes,
    check_finish_reasons,
    read_hashes,
    read_step,
    read_version,
)
from klinic.errors import EvidenceError
from klinic.evidence.batch_arrays import (
    BatchShape,
    Numbers,
    RowsOfNumbers,
    has_token_axis,
    split_ids,
    to_mask,
    to_number,
)
from klinic.evidence.metrics import clip_metrics, logged_metrics
from klinic.evidence.processes import (
    SINGLE_PROCESS,
    Processes,
    ProcessRows,
    call_on_rank_0,
    gather_rows,
    join_records,
)
from klinic.evidence.record import Fact, StepRecord
from klinic.evidence.rollout import concatenate_arrays, offsets_from_lengths
from klinic.evidence.row_join import Emission
from klinic.evidence.sample_history import SampleHistory
from klinic.evidence.sample_pool import JoinedSamples, group_by_prompt
from klinic.maths.masked import Aggregation
from klinic.recipe.sections import AdvantageName, EstimatorName, LossName

DTYPES: dict[str, type[np.generic]] = {
    "loss_mask": np.bool_,
    "emitted_by": np.int8,
    "group": np.int64,
    "process": np.int64,
    "loss_denominator": np.float64,
    "finish_reason": np.str_,
    "reward": np.float64,
    **dict.fromkeys(("logp", "logp_old", "logp_ref", "logp_teacher", "logp_sampler"), np.float32),
    **dict.fromkeys(("entropy", "advantage", "token_advantage"), np.float32),
}

METRICS = {"parse_rate": "completions/parse_rate", "eval_accuracy": "eval/accuracy"}
PROBES = {"rescore_difference": "rescore", "rescore_alone_difference": "rescore_alone"}
"""Arguments that are metrics or results of probes, and their names in the run folder."""


class Recorder:
    """Records the steps of any loop in a run folder and diagnoses them while it trains.

    `doctor` is `tell` (print a cause when it is found), `stop` (raise `RunStoppedError` as well) or
    `none`. With several processes each creates a recorder and passes its own rows, in every step;
    `processes` connects them, such as `klinic.TorchProcesses()`, and rank 0 writes and diagnoses.
    The other arguments are the settings of the run, as far as the loop knows them: None means
    unknown, and `RecorderSettings` describes each.
    """

    def __init__(  # noqa: PLR0913 - the run's settings, by keyword
        self,
        folder: str | Path,
        *,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        max_new_tokens: int | None = None,
        logprob_mode: LogprobMode | None = None,
        eos_ids: Sequence[int] | None = None,
        pad_id: int | None = None,
        vocabulary_size: int | None = None,
        advantage: AdvantageName | None = None,
        group_size: int | None = None,
        loss: LossName | None = None,
        aggregation: Aggregation | None = None,
        clip_low: float | None = None,
        clip_high: float | None = None,
        kl_estimator: EstimatorName | None = None,
        kl_target: float | None = None,
        reference: ReferenceName | None = None,
        reference_sync_every: int | None = None,
        reference_ema: float | None = None,
        importance_cap: float | None = None,
        dtype: DTypeName | None = None,
        sampler_dtype: DTypeName | None = None,
        dropout: float | None = None,
        num_experts: int | None = None,
        untrained: bool | None = None,
        max_version_lag: int | None = None,
        updates_per_generation: int | None = None,
        shared_forward: bool | None = None,
        max_steps: int | None = None,
        warmup_steps: int | None = None,
        seed: int | None = None,
        trainer: str | None = None,
        versions: Mapping[str, str] | None = None,
        token_texts: Mapping[int, str] | None = None,
        doctor: DoctorMode = "tell",
        processes: Processes | None = None,
        console: Console | None = None,
    ) -> None:
        given = {n: value for n, value in locals().items() if n in RecorderSettings.model_fields}
        refuse_unknown_mode(doctor)
        self._settings = read_settings(given)
        texts = check_token_texts(token_texts)
        self.folder = Path(folder).expanduser()
        self._processes = processes = processes or SINGLE_PROCESS
        self._samples = SampleHistory(self._settings.max_version_lag)
        self._step = self._num_steps = 0
        call_on_rank_0(processes, lambda: str(new_run_folder(self.folder)))
        self._log = ForeignRunLog(
            self.folder,
            doctor=doctor,
            console=console or Console(highlight=False),
            processes=processes,
        )
        self._log.begin_run(self._settings.run_facts(), texts)

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Write what is pending, and print the diagnosis of the last step."""
        self._log.end_run(self._step)

    def record_samples(  # noqa: PLR0913 - the quantities of a sample, by keyword
        self,
        *,
        prompt_ids: RowsOfNumbers,
        completion_ids: RowsOfNumbers,
        prompt_mask: RowsOfNumbers | None = None,
        completion_mask: RowsOfNumbers | None = None,
        logp_sampler: RowsOfNumbers | None = None,
        group: Numbers | None = None,
        reward: Numbers | None = None,
        weight_version: int | None = None,
    ) -> None:
        """Record completions as they were sampled; `record_step` joins rows to them by their ids.

        Give lists of rows, or padded arrays with `prompt_mask` and `completion_mask`. Calls before
        a step add up; the first call after a step begins a new generation. `weight_version` is the
        number of updates of the weights that sampled; by default they are the learner's.
        """
        where = f"samples before step {self._step + 1}"
        prompts, completions, shape = _split_batch(
            where, prompt_ids, prompt_mask, completion_ids, completion_mask
        )
        logp = shape.token_values("logp_sampler", logp_sampler, np.float32)
        rewards = shape.row_values("reward", reward, np.float64)
        groups = shape.row_values("group", group, np.int64)
        bounds, eos_ids = shape.row_offsets, self._settings.eos_ids
        emissions = [
            Emission(
                context=prompt,
                token_ids=ids,
                logp=None if logp is None else logp[bounds[row] : bounds[row + 1]],
                is_ended=eos_ids is None or bool(np.isin(ids[-1:], eos_ids).any()),
            )
            for row, (prompt, ids) in enumerate(zip(prompts, completions, strict=True))
        ]
        pool = self._samples.open_generation()
        pool.add_rows(
            emissions,
            version=read_version(where, "weight_version", weight_version),
            num_steps=self._num_steps,
            rewards=None if rewards is None else rewards.tolist(),
            groups=None if groups is None else groups.tolist(),
        )
        for name, values in (("reward", pool.rewards), ("group", pool.groups)):
            if len(values) not in (0, len(pool.emissions)):
                raise EvidenceError(
                    f"{where}: `{name}` was passed in some calls and not in others. Pass it in "
                    "every call, or in `record_step`."
                )

    def record_step(  # noqa: PLR0913 - the quantities of a step, by keyword
        self,
        *,
        prompt_ids: RowsOfNumbers,
        completion_ids: RowsOfNumbers,
        step: int | None = None,
        group: Numbers | None = None,
        prompt_mask: RowsOfNumbers | None = None,
        completion_mask: RowsOfNumbers | None = None,
        loss_mask: RowsOfNumbers | None = None,
        emitted_by: RowsOfNumbers | None = None,
        logp: RowsOfNumbers | None = None,
        logp_old: RowsOfNumbers | None = None,
        logp_ref: RowsOfNumbers | None = None,
        logp_teacher: RowsOfNumbers | None = None,
        logp_sampler: RowsOfNumbers | None = None,
        entropy: RowsOfNumbers | None = None,
        reward: Numbers | None = None,
        reward_parts: Mapping[str, Numbers] | None = None,
        advantage: Numbers | RowsOfNumbers | None = None,
        finish_reason: Sequence[str] | None = None,
        weight_version: int | Numbers | RowsOfNumbers | None = None,
        process: Numbers | None = None,
        rank_weights: Sequence[str] | None = None,
        learner_version: int | None = None,
        loss: float | None = None,
        loss_denominator: float | Numbers | None = None,
        kl_coef: float | None = None,
        kl_logged: float | None = None,
        entropy_coef: float | None = None,
        learning_rate: float | None = None,
        grad_norm: float | None = None,
        update_norm: float | None = None,
        weights_published: str | None = None,
        weights_loaded: str | None = None,
        rescore_difference: float | None = None,
        rescore_alone_difference: float | None = None,
        parse_rate: float | None = None,
        eval_accuracy: float | None = None,
    ) -> None:
        """Record one update: its rows, in the order of the loss, and what the loss used.

        Give lists of rows, or padded arrays with `prompt_mask` and `completion_mask`. `logp` is of
        the forward pass that carried the gradient, `logp_old` the denominator of the ratio: before
        the first update on the generation. `advantage` has one number per completion or per token.
        `rescore_difference` is the largest difference of a log-prob if the same rows are scored
        twice, `rescore_alone_difference` if a row is scored alone and unpadded. `loss_denominator`
        divides the summed loss over all processes, one number or one per completion;
        `rank_weights` are hashes of the weights of all processes. Without `loss_mask` every token
        is trained on. `group` and `reward` are those of the samples unless passed here. `step` is
        the loop's own number of the update, such as that of a resumed run; by default the next.
        """
        self._step = read_step(step, last=self._step) - 1
        where = f"step {self._step + 1}"
        prompts, completions, shape = _split_batch(
            where, prompt_ids, prompt_mask, completion_ids, completion_mask
        )
        by_token = advantage is not None and has_token_axis(advantage)
        step_divisor, row_divisors = _split_divisor(loss_denominator)
        given_tokens = {
            "loss_mask": loss_mask,
            "emitted_by": emitted_by,
            "logp": logp,
            "logp_old": logp_old,
            "logp_ref": logp_ref,
            "logp_teacher": logp_teacher,
            "logp_sampler": logp_sampler,
            "entropy": entropy,
            "token_advantage": advantage if by_token else None,
        }
        given_rows = {
            "group": group,
            "reward": reward,
            "advantage": None if by_token else advantage,
            "loss_denominator": row_divisors,
            "finish_reason": finish_reason,
            "process": process,
        }
        numbers = {
            "loss": loss,
            "loss_denominator": step_divisor,
            "kl_coef": kl_coef,
            "kl_logged": kl_logged,
            "entropy_coef": entropy_coef,
            "learning_rate": learning_rate,
            "grad_norm": grad_norm,
            "update_norm": update_norm,
        }
        facts: dict[str, Fact] = {n: to_number(where, n, v) for n, v in numbers.items()}
        facts |= read_hashes(where, rank_weights, weights_published, weights_loaded)
        version = self._step if learner_version is None else learner_version
        facts["learner_version"] = read_version(where, "learner_version", version)
        columns = _read_columns(where, shape, given_tokens, given_rows, weight_version)
        parts = _reward_parts(shape, reward_parts or {})
        record = self._build_record(prompts, completions, columns, parts, facts)
        measured = {
            "parse_rate": parse_rate,
            "eval_accuracy": eval_accuracy,
            "rescore_difference": rescore_difference,
            "rescore_alone_difference": rescore_alone_difference,
        }
        self._write_step(record, {n: to_number(where, n, v) for n, v in measured.items()})

    def _build_record(
        self,
        prompts: Sequence[np.ndarray],
        completions: Sequence[np.ndarray],
        columns: dict[str, np.ndarray | None],
        parts: Mapping[str, np.ndarray],
        facts: Mapping[str, Fact],
    ) -> StepRecord:
        """Return the record of the rows, with what their samples know."""
        if self._samples:
            joined = self._samples.join(
                prompts,
                completions,
                columns["advantage"],
                version_shift=int(facts["learner_version"] or 0) - self._num_steps,
            )
            columns = _fill_from_samples(columns, joined)
            facts = {
                **facts,
                "num_moved_rows": joined.num_moved,
                "num_changed_rows": joined.num_changed,
                "num_reencoded_rows": int(joined.is_reencoded.sum()),
                "generation_rows": joined.num_sampled,
                "updates_on_generation": self._samples.num_updates,
            }
        group, mask = columns.pop("group"), columns.pop("loss_mask")
        if group is None:
            raise EvidenceError(
                f"step {self._step + 1}: no `group` was passed, so rewards cannot be compared "
                "within a prompt. Pass it to `record_samples` or `record_step`."
            )
        eos_ids = self._settings.eos_ids
        if columns["finish_reason"] is None and eos_ids is not None:
            ends = [bool(np.isin(ids[-1:], eos_ids).any()) for ids in completions]
            columns["finish_reason"] = np.where(ends, "stop", "length")
        offsets = offsets_from_lengths([len(ids) for ids in completions])
        if mask is None:
            mask = np.ones(offsets[-1], np.bool_)
        if columns["logp_old"] is None and self._settings.shared_forward:
            columns["logp_old"] = columns["logp"]
        if columns["advantage"] is None:
            columns["advantage"] = _constant_advantage(columns["token_advantage"], mask, offsets)
        return StepRecord(
            step=self._step + 1,
            # those of other processes are numbered from the same given numbers
            group=group_by_prompt(group, prompts) if self._processes.size == 1 else group,
            row_offsets=offsets,
            prompt_offsets=offsets_from_lengths([len(prompt) for prompt in prompts]),
            prompt_ids=concatenate_arrays(prompts, np.int64),
            token_ids=concatenate_arrays(completions, np.int64),
            loss_mask=mask,
            reward_parts=parts,
            facts={name: value for name, value in facts.items() if value is not None},
            **columns,
        )

    def _write_step(self, own: StepRecord, measured: Mapping[str, float | None]) -> None:
        self._step = own.step
        self._num_steps += 1
        self._samples.end_step()
        known = {name: float(value) for name, value in measured.items() if value is not None}
        parts = gather_rows(self._processes, ProcessRows(record=own, values=known))
        if not parts:  # rank 0 has them
            self._log.record_step(None, {}, {})
            return
        record, known = _join_parts(parts)
        kl_coef = record.facts.get("kl_coef")
        metrics = logged_metrics(record, kl_coef=None if kl_coef is None else float(kl_coef))
        if (clip := self._settings.clip_range) is not None:
            metrics |= clip_metrics(record, clip_low=clip[0], clip_high=clip[1])
        metrics |= {METRICS[name]: value for name, value in known.items() if name in METRICS}
        probes = {PROBES[n]: {"largest": value} for n, value in known.items() if n in PROBES}
        self._log.record_step(record, metrics, probes)


def _join_parts(parts: Sequence[ProcessRows]) -> tuple[StepRecord, dict[str, float]]:
    """Return the rows of all processes, and the largest probe results and mean metrics of them."""
    if len(parts) == 1:
        return parts[0].record, dict(parts[0].values)
    record = join_records([part.record for part in parts])
    record = replace(record, group=_join_groups(record))
    names = dict.fromkeys(name for part in parts for name in part.values)
    known = {n: [float(part.values[n]) for part in parts if n in part.values] for n in names}
    return record, {n: max(v) if n in PROBES else sum(v) / len(v) for n, v in known.items()}


def _join_groups(record: StepRecord) -> np.ndarray:
    """Return the groups of all processes: rows of one number and one prompt.

    Processes may number their groups alike. Only groups that mix prompts within a process are kept.
    """
    ids, offsets, process = record.prompt_ids, record.prompt_offsets, record.process
    assert ids is not None  # noqa: S101 - every part has prompts
    assert offsets is not None  # noqa: S101
    assert process is not None  # noqa: S101 - joined
    prompts = np.split(ids, offsets[1:-1])
    keys = [
        (group, prompt.tobytes())
        for group, prompt in zip(record.group.tolist(), prompts, strict=True)
    ]
    num_groups = len({*zip(process.tolist(), record.group.tolist(), strict=True)})
    if len({*zip(process.tolist(), keys, strict=True)}) > num_groups:
        return group_by_prompt(record.group, prompts)
    number = {key: index for index, key in enumerate(dict.fromkeys(keys))}
    return np.array([number[key] for key in keys], np.int64)


def _split_batch(
    where: str,
    prompt_ids: RowsOfNumbers,
    prompt_mask: RowsOfNumbers | None,
    completion_ids: RowsOfNumbers,
    completion_mask: RowsOfNumbers | None,
) -> tuple[list[np.ndarray], list[np.ndarray], BatchShape]:
    """Return prompts and completions without padding, and the shape of the batch."""
    mask = to_mask(where, "completion_mask", completion_mask)
    completions = split_ids(where, "completion_ids", completion_ids, mask)
    prompts = split_ids(where, "prompt_ids", prompt_ids, to_mask(where, "prompt_mask", prompt_mask))
    if len(prompts) != len(completions) or not completions:
        raise EvidenceError(
            f"{where}: `prompt_ids` has {len(prompts)} rows, `completion_ids` {len(completions)}. "
            "Pass one prompt per completion, and at least one: repeat it for each of its group."
        )
    return prompts, completions, BatchShape(where, completions, mask)


def _fill_from_samples(
    columns: Mapping[str, np.ndarray | None], joined: JoinedSamples
) -> dict[str, np.ndarray | None]:
    """Return the columns, with those of the samples where the step passed none."""
    sampled = {
        "emitted_by": joined.emitted_by,
        "logp_sampler": joined.logp_sampler,
        "weight_version": joined.weight_version,
        "reward": joined.reward,
        "group": joined.group,
    }
    filled = {name: sampled.get(name) if v is None else v for name, v in columns.items()}
    return {
        **filled,
        "prompt_ids_match": joined.prompt_ids_match,
        "round_trip": ~joined.is_reencoded,
    }


def _read_columns(
    where: str,
    shape: BatchShape,
    tokens: Mapping[str, RowsOfNumbers | Numbers | None],
    rows: Mapping[str, Numbers | RowsOfNumbers | Sequence[str] | None],
    weight_version: int | Numbers | RowsOfNumbers | None,
) -> dict[str, np.ndarray | None]:
    """Return the columns of a record, concatenated; refuse codes that are not known."""
    columns = {n: shape.token_values(n, v, DTYPES[n]) for n, v in tokens.items()}
    columns |= {n: shape.row_values(n, v, DTYPES[n]) for n, v in rows.items()}
    check_emitter_codes(where, columns["emitted_by"])
    check_finish_reasons(where, columns["finish_reason"])
    version = shape.spread_over_tokens("weight_version", weight_version, np.int64)
    return {**columns, "weight_version": version}


def _reward_parts(shape: BatchShape, parts: Mapping[str, Numbers]) -> dict[str, np.ndarray]:
    columns = {n: shape.row_values(f"reward_parts[{n}]", v, np.float64) for n, v in parts.items()}
    return {name: column for name, column in columns.items() if column is not None}


def _split_divisor(
    divisor: float | Numbers | None,
) -> tuple[float | None, Numbers | None]:
    """Return the divisor of the whole step, and those of the rows; one of them is None."""
    if divisor is None or isinstance(divisor, int | float):
        return divisor, None
    return None, divisor


def _constant_advantage(
    values: np.ndarray | None, mask: np.ndarray, row_offsets: np.ndarray
) -> np.ndarray | None:
    """Return one advantage for each row if all of its trained tokens have it, else None."""
    if values is None:
        return None
    rows = [
        v[m] for v, m in zip(*(np.split(a, row_offsets[1:-1]) for a in (values, mask)), strict=True)
    ]
    if any(row.size and np.ptp(row) > 0 for row in rows):
        return None
    return np.array([row[0] if row.size else 0.0 for row in rows], np.float32)
