"""malformed-prompt: prompts are templated twice, come again in completions, or are all the same."""

import re
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from klinic.checks.base import (
    Case,
    Check,
    Finding,
    Stage,
    failed_finding,
    no_data_finding,
    passed_finding,
    warning_finding,
)
from klinic.checks.measures import prompts_of_rows
from klinic.checks.row_texts import completion_texts, has_texts, prompt_texts
from klinic.evidence.record import StepRecord

MIN_FRACTION = 0.9  # of the rows
MIN_HEADED = 0.5  # of the completions begin with the header of an answer
MIN_ROWS = 8
MIN_PROMPTS = 3  # different ones: a single prompt may be of any form
MIN_ECHO = 20  # characters of a prompt that comes again; tokens may be a task of copying
MIN_LENGTH = 3  # tokens of every prompt
MIN_GROUPS = 4
NUM_GENERATIONS = 3
ROLE = r"(?:system|user|human|assistant)"
NESTED = re.compile(
    rf"<\|im_start\|>{ROLE}\s*<\|im_start\|>|<start_of_turn>\w+\s*<start_of_turn>|"
    rf"<\|start_header_id\|>{ROLE}<\|end_header_id\|>\s*(?:<\|begin_of_text\|>)?<\|start_header_id\|>|"
    rf"\[INST\]\s*(?:<s>)?\s*\[INST\]|^(?:<bos>|<s>|<\|begin_of_text\|>){{2}}|"
    rf"(?:^|\n){ROLE}\n(?:system|user)\n"
)
ONCE = ("<|im_start|>system", "<|start_header_id|>system", "<<SYS>>", "<|begin_of_text|>", "<bos>")
MESSAGES_AS_TEXT = re.compile(r"^\s*\[\{'(?:role|content)':")
ANSWER_HEADER = re.compile(r"^\s*(?:<\|(?:im_start|start_header_id)\|>)?assistant\b")


def judge_case(case: Case) -> Finding:
    """Flag prompts that are not the ones that the model was made for.

    Looks for
        One prompt in all groups of three generations; a token that begins a text, twice. In
        texts: completions that begin with their own prompt, a turn that begins inside the header
        of another, two system turns, a list of messages that was printed instead of templated,
        and completions that begin with the header of an answer.
    Why it matters
        A template that is applied twice, or not at all, costs accuracy that training then has to
        win back. A prompt inside the completion is trained on. With one prompt for all, the run
        learns one answer, and every curve looks good.
    Confirmed when
        Nine of ten rows are so, with three different prompts or more; or half of the completions
        begin with the header of an answer; or all groups, four or more, have one prompt in three
        generations. It is a warning if all have one index in the dataset: a run on one example
        may be meant.
    Ruled out when
        None is so.
    Confused with
        prompt-mismatch (the sampler got another prompt than the learner scores); stop-token-fault
        (prompts end with an end token).
    """
    record = case.record
    if record.num_rows < MIN_ROWS:
        return no_data_finding(f"{record.num_rows} rows, {MIN_ROWS} needed")
    prompts = prompts_of_rows(record) or ()
    if (found := _judge_repetition(case, prompts)) is not None:
        return found
    fault = _twice_begun_fault(record, prompts)
    if not fault and has_texts(case):
        fault = case.measure_once(_text_fault, record)
    if fault:
        return failed_finding(fault)
    return passed_finding("no prompt is templated twice, in its completion, or the only one")


def _judge_repetition(case: Case, prompts: Sequence[bytes]) -> Finding | None:
    """Return a finding if every group of the last generations has one prompt."""
    if len(set(prompts)) > 1:
        return None
    steps = {r.token_ids.tobytes(): r for r in case.recent_records if r.prompt_ids is not None}
    last = list(steps.values())[-NUM_GENERATIONS:]
    groups = [len(np.unique(record.group)) for record in last]
    if len(last) < NUM_GENERATIONS or min(groups) < MIN_GROUPS:
        return None
    if len({prompt for record in last for prompt in prompts_of_rows(record) or ()}) > 1:
        return None
    summary = f"all of {sum(groups)} groups in {len(last)} generations have one prompt (limit 2)"
    index = case.record.prompt_index
    if index is None or len(np.unique(index)) > 1:
        return failed_finding(summary, groups=float(sum(groups)))
    return warning_finding(f"{summary}, of one index of the dataset", groups=float(sum(groups)))


def _twice_begun_fault(record: StepRecord, prompts: Sequence[bytes]) -> str:
    """Return a message if every prompt begins with two equal tokens that are in no other place."""
    assert record.prompt_ids is not None  # noqa: S101 - needed
    assert record.prompt_offsets is not None  # noqa: S101 - needed
    starts = record.prompt_offsets[:-1]
    if len(set(prompts)) < MIN_PROMPTS or int(np.diff(record.prompt_offsets).min()) < MIN_LENGTH:
        return ""
    first = record.prompt_ids[starts]
    is_twice = (record.prompt_ids[starts + 1] == first).all() and (first == first[0]).all()
    num = int((record.prompt_ids == first[0]).sum() + (record.token_ids == first[0]).sum())
    if not is_twice or num != 2 * record.num_rows:
        return ""
    return (
        f"all prompts begin with token {first[0]} twice, which is in no other place (limit once): "
        "tokenizer and template both add it"
    )


def _text_fault(record: StepRecord) -> str:
    prompts, completions = prompt_texts(record), completion_texts(record)
    pairs = zip(prompts, completions, strict=True)
    echoes = [len(prompt) >= MIN_ECHO and text.startswith(prompt) for prompt, text in pairs]
    fraction = float(np.mean(echoes))
    if fraction >= MIN_FRACTION and len(set(prompts)) >= MIN_PROMPTS:
        return (
            f"{fraction:.0%} of the completions begin with their prompt (limit {MIN_FRACTION:.0%})"
        )
    return _template_fault(prompts, completions)


def _is_templated_twice(prompt: str) -> bool:
    return bool(NESTED.search(prompt)) or any(prompt.count(mark) > 1 for mark in ONCE)


def _template_fault(prompts: Sequence[str], completions: Sequence[str]) -> str:
    kinds: tuple[tuple[str, Callable[[str], object]], ...] = (
        ("have a turn in another's header, or two starts: a template twice", _is_templated_twice),
        ("are lists of messages as text: no template is applied", MESSAGES_AS_TEXT.search),
    )
    for sentence, is_so in kinds:
        fraction = float(np.mean([bool(is_so(prompt)) for prompt in prompts]))
        if fraction >= MIN_FRACTION and len(set(prompts)) >= MIN_PROMPTS:
            return f"{fraction:.0%} of the prompts {sentence} (limit {MIN_FRACTION:.0%})"
    headed = Counter(bool(ANSWER_HEADER.search(text)) for text in completions)[True]
    if headed >= MIN_HEADED * len(completions):
        return (
            f"{headed / len(completions):.0%} of the completions begin with the header of an "
            f"answer (limit {MIN_HEADED:.0%}): the template opens none"
        )
    return ""


CHECK = Check(
    name="malformed-prompt",
    description="prompts are templated twice, come again in completions, or are all the same",
    stage=Stage.ALIGNMENT,
    needs=("record.prompt_ids",),
    fix="Apply the chat template once, with add_generation_prompt, to messages and not to text; "
    "return completions without their prompt; and make each row of the dataset an object of its "
    "own.",
    judge=judge_case,
    explains=("malformed-output", "cliff-rewards", "equal-rewards"),
    reads=(
        "record.token_ids",
        "record.prompt_offsets",
        "record.prompt_index",
        "record.group",
        "record.row_offsets",
        "run.token_ids",
    ),
)
