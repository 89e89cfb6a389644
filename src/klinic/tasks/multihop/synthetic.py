"""Synthetic two- and three-hop questions in MuSiQue's format, short enough for character models.

    skill        prompt                                                        answer
    two-hop      b has 7. a has 3. 3 is old cup. 7 is red key. what has b?     red key
    three-hop    d is by b. b has 7. ... what has the one by d?                red key

Every question has a second chain of facts as a distractor, with facts of the same kind about other
entities. The warm start mixes in a fixed default answer that ignores the facts, a bad habit that
training can remove.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from random import Random
from typing import Any

from klinic.tasks.base import Row, look_up
from klinic.tasks.held_out import digest_fraction, first_rows, is_held_out
from klinic.tasks.multihop.musique import leading_paragraphs, supporting_fraction

PEOPLE = "abcdefghijklmnopqrstuvwxyz"
LABELS = "123456789"
KINDS = ("red", "old", "big", "wet", "odd")
THINGS = ("key", "cup", "hat", "map", "pen")
CHAINS = 2  # of facts per question: the supporting one and a distractor
MAX_FACTS_LENGTH = 120  # maximum characters of all facts
NUM_QUESTIONS = 6000  # questions per skill
SKILLS = {"two-hop": 2, "three-hop": 3}
DEFAULT_ANSWER = f"{KINDS[0]} {THINGS[0]}"  # the default answer
DEFAULT_ANSWER_RATE = 0.6  # fraction of warm-start examples with the default answer


def make_example(hops: int, number: int) -> dict[str, Any]:
    """Return question `number` in MuSiQue's format; deterministic."""
    random = Random(f"{hops} {number}")  # noqa: S311 - samples words, not secrets
    people = random.sample(PEOPLE, 2 * CHAINS)
    owners, friends = people[:CHAINS], people[CHAINS:]
    labels = random.sample(LABELS, CHAINS)
    every = [f"{kind} {thing}" for kind in KINDS for thing in THINGS]
    things = random.sample(every, CHAINS)
    facts = []
    for i, (owner, friend, label, thing) in enumerate(
        zip(owners, friends, labels, things, strict=True)
    ):
        chain = [f"{owner} has {label}.", f"{label} is {thing}."]
        if hops == 3:
            chain.insert(0, f"{friend} is by {owner}.")
        facts += [{"title": "", "paragraph_text": f, "is_supporting": i == 0} for f in chain]
    random.shuffle(facts)
    who = owners[0] if hops == 2 else f"the one by {friends[0]}"
    return {
        "question": f"what has {who}?",
        "paragraphs": facts,
        "answer": things[0],
        "answer_aliases": [f"the {things[0]}"],
    }


def train_rows(skill: str) -> list[Row]:
    """Return the training rows of a skill in a fixed shuffled order."""
    return [_make_row(skill, one) for one in _split_examples(skill)[0]]


def eval_rows(skill: str, num: int) -> list[Row]:
    """Return the first `num` held-out rows of a skill; deterministic."""
    return [_make_row(skill, one) for one in first_rows(_split_examples(skill)[1], num, skill)]


def warm_start_rows(seed: int) -> Iterator[Row]:
    """Yield prompts and completions of both skills endlessly: answers and default answers."""
    random = Random(seed)  # noqa: S311
    examples = {skill: _split_examples(skill)[0] for skill in SKILLS}
    while True:
        for skill in SKILLS:
            (one,) = random.choices(examples[skill])
            answer = DEFAULT_ANSWER if random.random() < DEFAULT_ANSWER_RATE else one["answer"]
            yield {"prompt": format_prompt(one), "completion": tag_answer(answer)}


def format_prompt(one: Mapping[str, Any], longest: int = MAX_FACTS_LENGTH) -> str:
    """Return the facts that fit, followed by the question."""
    facts = leading_paragraphs(one["paragraphs"], longest)
    return " ".join([*(fact["paragraph_text"] for fact in facts), one["question"], ""])


def tag_answer(answer: str) -> str:
    """Wrap an answer in tags."""
    return f"<answer>{answer}</answer>"


def _make_row(skill: str, one: Mapping[str, Any]) -> Row:
    return {
        "prompt": format_prompt(one),
        "answer": tag_answer(one["answer"]),
        "skill": skill,
        "context": str(
            supporting_fraction(
                one["paragraphs"], leading_paragraphs(one["paragraphs"], MAX_FACTS_LENGTH)
            )
        ),
    }


@cache
def _split_examples(skill: str) -> tuple[tuple[dict[str, Any], ...], tuple[dict[str, Any], ...]]:
    hops = look_up("skill of multihop", skill, SKILLS)
    every = {
        format_prompt(one): one
        for one in (make_example(hops, number) for number in range(NUM_QUESTIONS))
    }
    order = sorted(every, key=digest_fraction)
    return (
        tuple(every[prompt] for prompt in order if not is_held_out(prompt)),
        tuple(every[prompt] for prompt in order if is_held_out(prompt)),
    )


def jsonl_rows(skill: str, num: int) -> list[dict[str, Any]]:
    """Return questions in the format of a MuSiQue file."""
    hops = look_up("skill of multihop", skill, SKILLS)
    return [make_example(hops, number) for number in range(num)]
