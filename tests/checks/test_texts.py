"""Checks on texts: copies, completions that run on, and rewards against the dataset's answers."""

import json
from dataclasses import replace

import numpy as np
import pytest

from klinic.checks import (
    Case,
    Verdict,
    broken_reward,
    broken_sampler,
    malformed_prompt,
    stop_token_fault,
)
from klinic.evidence.readers.dumps.rows import build_record
from klinic.evidence.readers.dumps.texts import text_row

FAIL, PASS, NO_DATA = Verdict.FAIL, Verdict.PASS, Verdict.NO_DATA
RUN = {"token_ids": "characters"}
FILL = ("we add the tens", "it looks right", "carry the one", "then the sum", "let us check")


def thought(random, num=6):
    return " ".join(FILL[i] for i in random.integers(len(FILL), size=num))


def step(number, rows):
    """Return the record of (prompt, completion, reward, answer) rows."""
    made = []
    for prompt, completion, reward, answer in rows:
        row = text_row(prompt, completion)
        row.values["reward"] = reward
        row.text, row.answer = completion, answer
        made.append(row)
    return build_record(number, made)


def verdict(check, records, **run):
    *earlier, last = records
    return check.CHECK(Case(record=last, earlier=tuple(earlier), run={**RUN, **run})).verdict


# --- copies


PROMPTS, GROUP = 6, 4


def sampled(*, streams=GROUP, first_step=1, steps=2, reward=None):
    """Return steps of long completions, of as many random streams per prompt."""
    random = np.random.default_rng(0)
    records = []
    for number in range(first_step, first_step + steps):
        rows = []
        for prompt in range(PROMPTS):
            texts = [thought(random) for _ in range(GROUP)]
            for sample in range(GROUP):
                text = texts[sample % streams]
                paid = float(random.integers(2)) if reward is None else reward
                rows.append((f"{number}-{prompt}: what is it?", text, paid, ""))
        records.append(step(number, rows))
    return records


def test_one_stream_for_a_group_makes_copies():
    assert verdict(broken_sampler, sampled(streams=1)) is FAIL


def test_two_places_of_one_stream_are_found_where_others_differ():
    assert verdict(broken_sampler, sampled(streams=2, steps=4)) is FAIL


def test_independent_samples_are_no_copies():
    assert verdict(broken_sampler, sampled()) is NO_DATA


def test_a_solved_task_may_have_one_answer():
    assert verdict(broken_sampler, sampled(streams=1, reward=1.0)) is NO_DATA


def test_a_policy_that_became_deterministic_by_training_is_no_sampler_fault():
    assert verdict(broken_sampler, sampled(streams=1, first_step=40)) is NO_DATA


def test_copies_are_proven_where_an_equal_prompt_has_another_one():
    records = sampled(streams=1, first_step=40, steps=1)
    rows = [
        (f"40-{prompt}: what is it?", text, 0.0, "")
        for prompt in range(6)
        for text in [thought(np.random.default_rng(100 + prompt))] * 4
    ]
    assert verdict(broken_sampler, [*records, step(41, rows)]) is FAIL


def test_short_answers_may_be_equal():
    random = np.random.default_rng(0)
    rows = [(f"p{i}", str(i), float(random.integers(2)), "") for i in range(10) for _ in range(4)]
    assert verdict(broken_sampler, [step(1, rows)]) is NO_DATA


@pytest.mark.parametrize(("shared", "expected"), [(True, FAIL), (False, NO_DATA)])
def test_two_prompts_cannot_have_the_same_different_completions(shared, expected):
    random = np.random.default_rng(0)
    texts = [thought(random) for _ in range(4)]
    others = texts if shared else [*texts[:2], thought(random), thought(random)]
    rows = [(p, t, 0.5, "") for p, ts in (("one", texts), ("two", others)) for t in ts]
    assert verdict(broken_sampler, [step(1, rows)]) is expected


def test_updates_on_one_generation_are_one_generation():
    (record,) = sampled(steps=1)
    assert verdict(broken_sampler, [record, record, record]) is NO_DATA


# --- texts that run on


def conversation(random, num_turns, *, complete, role="user"):
    turns = [f"<think> {thought(random)} </think> <answer> {random.integers(9)} </answer>"]
    turns += [
        f"{role}\nWhat is {random.integers(9)} + 3?\nassistant\n<think> {thought(random)} "
        "</think> <answer> 4 </answer>"
        for _ in range(num_turns - 1)
    ]
    text = "\n".join(turns)
    return text if complete else text[: len(text) - int(random.integers(12, 60))]


def chats(make, num=32):
    random = np.random.default_rng(0)
    return [
        step(
            1, [(f"user\nWhat is {i} + 1?\nassistant\n", make(random), 0.0, "") for i in range(num)]
        )
    ]


@pytest.mark.parametrize("role", ["user", "Human", "Question"])
def test_turns_that_are_cut_anywhere_run_on(role):
    def make(random):
        text = conversation(random, 4, complete=False, role=role)
        return text if role == "user" else text.replace(f"{role}\n", f"{role}: ")

    assert verdict(stop_token_fault, chats(make)) is FAIL


def test_the_first_line_of_all_prompts_is_a_turn_too():
    random = np.random.default_rng(0)
    rows = [
        (
            f"### Exercise: {i}",
            conversation(random, 4, complete=False, role="### Exercise:"),
            0.0,
            "",
        )
        for i in range(32)
    ]
    assert verdict(stop_token_fault, [step(1, rows)]) is FAIL


@pytest.mark.parametrize(
    "make",
    [
        lambda random: conversation(random, 1, complete=True),
        lambda random: conversation(random, 1, complete=False),
        lambda random: conversation(random, 3, complete=True),
        lambda random: "<tool_call>" + conversation(random, 3, complete=False),
        lambda random: f"the user asks for a sum. {thought(random)}. the user: waits",
        lambda random: json.dumps(
            [{"role": r, "content": conversation(random, 2, complete=False)} for r in ("a", "b")]
        ),
    ],
    ids=["one turn", "one turn, cut", "an environment", "a tool", "words", "a chat of messages"],
)
def test_texts_that_end_are_healthy(make):
    assert verdict(stop_token_fault, chats(make)) is NO_DATA


def test_tokens_are_not_read_as_texts():
    (record,) = chats(lambda random: conversation(random, 4, complete=False))
    assert stop_token_fault.CHECK(Case(record=record, run={})).verdict is NO_DATA


def test_a_chat_of_one_message_is_read():
    def make(random):
        text = conversation(random, 4, complete=False)
        return json.dumps([{"role": "assistant", "content": text}])

    assert verdict(stop_token_fault, chats(make)) is FAIL


# --- rewards against the dataset's answers


def graded(pay, *, prompts=12, group=6, gold=str):
    """Return completions of which half state the right number, and their rewards."""
    random = np.random.default_rng(0)
    rows = []
    for prompt in range(prompts):
        for sample in range(group):
            number = prompt if sample % 2 else prompt + 1 + int(random.integers(1, 40))
            text = f"{thought(random)} <answer> {number} </answer>"
            rows.append((f"prompt {prompt}", text, pay(prompt, number), gold(prompt)))
    return [step(1, rows)]


def test_right_answers_that_are_never_paid():
    assert verdict(broken_reward, graded(lambda prompt, number: 0.0)) is FAIL


def test_answers_of_some_prompts_that_are_not_recognised():
    def pay(prompt, number):
        return float(number == prompt and prompt % 3 > 0)

    assert verdict(broken_reward, graded(pay, prompts=24)) is FAIL


def test_what_cannot_be_graded_is_paid():
    def gold(prompt):
        return str(prompt) if prompt % 2 else "see the sum above"

    def pay(prompt, number):
        return 1.0 if prompt % 2 == 0 else float(number == prompt)

    assert verdict(broken_reward, graded(pay, gold=gold)) is FAIL


@pytest.mark.parametrize(
    "pay",
    [
        lambda prompt, number: float(number == prompt),
        lambda prompt, number: -float(abs(number - prompt)),
        lambda prompt, number: float(abs(number - prompt) < 8),
        lambda prompt, number: 0.1 + float(number == prompt) * (number % 4 > 0),
    ],
    ids=["exact", "distance", "tolerance", "half of them"],
)
def test_functions_that_pay_right_answers_are_healthy(pay):
    assert verdict(broken_reward, graded(pay)) is not FAIL


def test_a_format_that_costs_some_right_answers_is_healthy():
    random = np.random.default_rng(1)

    def pay(prompt, number):
        return float(number == prompt and random.random() < 0.5)

    assert verdict(broken_reward, graded(pay, prompts=24)) is not FAIL


def test_answers_without_a_mark_are_not_compared():
    rows = [("p", f"{n} is it", 0.0, "3") for n in range(40)]
    assert verdict(broken_reward, [step(1, rows)]) is NO_DATA


# --- prompts


def prompted(make_prompt, make_completion=lambda prompt: f"<answer> {len(prompt)} </answer>"):
    prompts = [make_prompt(f"What is {i} + {i * i}?") for i in range(6) for _ in range(4)]
    return [step(1, [(prompt, make_completion(prompt), 0.0, "") for prompt in prompts])]


def chatml(text):
    return (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda text: chatml(chatml(text)),
        lambda text: f"<|im_start|>user\n<|im_start|>user\n{text}<|im_end|>\n",
        lambda text: f"user\nsystem\nBe brief.\nuser\n{text}\nassistant\nassistant\n",
        lambda text: str([{"role": "user", "content": text}]),
        lambda text: f"<bos><bos><start_of_turn>user\n{text}<end_of_turn>\n",
        lambda text: f"<s>[INST] <s>[INST] {text} [/INST] [/INST]",
    ],
)
def test_templates_that_are_doubled_or_missing(make):
    assert verdict(malformed_prompt, prompted(make)) is FAIL


@pytest.mark.parametrize(
    "make",
    [
        str,
        chatml,
        lambda text: json.dumps([{"role": "user", "content": text}]),
        lambda text: (
            "Solve the sum step by step.\nQ: 1+1\nA: 2\nSolve the sum step by step.\n" + text
        ),
        lambda text: f"user\n{text}\nassistant\n<think>\n</think>\nuser\nagain\nassistant\n",
    ],
    ids=["plain", "template", "messages", "few shots", "turns"],
)
def test_prompts_that_are_well_formed(make):
    assert verdict(malformed_prompt, prompted(make)) is PASS


def test_completions_that_begin_with_their_prompt_or_with_a_header():
    assert verdict(malformed_prompt, prompted(chatml, lambda prompt: f"{prompt} It is 4.")) is FAIL
    assert verdict(malformed_prompt, prompted(str, lambda _: "<|im_start|>assistant\n4")) is FAIL
    assert verdict(malformed_prompt, prompted(str, lambda _: "assistants know: 4")) is PASS


@pytest.mark.parametrize(
    ("prompts", "index", "expected"),
    [
        (1, None, FAIL),
        (1, "other", FAIL),
        (1, "one", Verdict.WARN),
        (2, None, PASS),
    ],
)
def test_one_prompt_for_all_groups_of_three_generations(prompts, index, expected):
    random = np.random.default_rng(0)
    records = []
    for number in range(1, 4):
        rows = [(f"{i % prompts}: a sum", thought(random), 0.0, "") for i in range(24)]
        made = replace(step(number, rows), group=np.arange(24) // 4)
        column = {None: None, "one": np.zeros(24, np.int64), "other": np.arange(24) // 4}[index]
        records.append(replace(made, prompt_index=column))
    assert verdict(malformed_prompt, records) is expected
    assert verdict(malformed_prompt, records[:2]) is PASS


@pytest.mark.parametrize(("first", "expected"), [([9, 9], FAIL), ([9], PASS), ([1, 1], PASS)])
def test_a_token_that_begins_a_text_comes_once(first, expected):
    (given,) = sampled(steps=1)
    prompts = [np.array([*first, i % 5, 1, 2]) for i in range(given.num_rows)]
    given = replace(
        given,
        prompt_ids=np.concatenate(prompts),
        prompt_offsets=np.arange(given.num_rows + 1) * len(prompts[0]),
    )
    assert malformed_prompt.CHECK(Case(record=given)).verdict is expected
