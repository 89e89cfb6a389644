"""Two- and three-hop questions in MuSiQue's form, short enough for a model that reads characters.

    skill        prompt                                                        answer
    two-hop      b has 7. a has 3. 3 is old cup. 7 is red key. what has b?     red key
    three-hop    d is by b. b has 7. ... what has the one by d?                red key

Every question has as many chains of facts as it needs to be no guess: each distractor is a fact of
the same kind about somebody else. A warm start shows a habit beside the answers: to say what is
often right, without a look at the text. Rewards can break it.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from random import Random
from typing import Any

from klinic.tasks.base import Row, choose
from klinic.tasks.held_out import first, fraction, is_held_out
from klinic.tasks.multihop.musique import supported, within

PEOPLE = "abcdefghijklmnopqrstuvwxyz"
PLACES = "123456789"
KINDS = ("red", "old", "big", "wet", "odd")
THINGS = ("key", "cup", "hat", "map", "pen")
CHAINS = 2  # facts of each kind: the right one, and one about somebody else
LONGEST = 120  # characters of all facts
NUM = 6000  # questions of a skill
SKILLS = {"two-hop": 2, "three-hop": 3}
USUAL = f"{KINDS[0]} {THINGS[0]}"  # what the habit answers
HABIT = 0.6  # share of the examples of a warm start that show it


def example(hops: int, number: int) -> dict[str, Any]:
    """Return one question in MuSiQue's form, the same for the same number."""
    random = Random(f"{hops} {number}")  # noqa: S311 - draws words, keeps no secrets
    people = random.sample(PEOPLE, 2 * CHAINS)
    owners, friends = people[:CHAINS], people[CHAINS:]
    places = random.sample(PLACES, CHAINS)
    every = [f"{kind} {thing}" for kind in KINDS for thing in THINGS]
    things = random.sample(every, CHAINS)
    facts = []
    for i, (owner, friend, place, thing) in enumerate(
        zip(owners, friends, places, things, strict=True)
    ):
        chain = [f"{owner} has {place}.", f"{place} is {thing}."]
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
    """Return all rows of a skill that are not held out, in a fixed mixed order."""
    return [_row(skill, one) for one in _split(skill)[0]]


def eval_rows(skill: str, num: int) -> list[Row]:
    """Return the first held-out rows of a skill; the same ones every time."""
    return [_row(skill, one) for one in first(_split(skill)[1], num, skill)]


def warm_start_rows(seed: int) -> Iterator[Row]:
    """Yield prompts and completions of both skills, without end: answers, and the habit."""
    random = Random(seed)  # noqa: S311
    examples = {skill: _split(skill)[0] for skill in SKILLS}
    while True:
        for skill in SKILLS:
            (one,) = random.choices(examples[skill])
            answer = USUAL if random.random() < HABIT else one["answer"]
            yield {"prompt": prompt_of(one), "completion": marked(answer)}


def prompt_of(one: Mapping[str, Any], longest: int = LONGEST) -> str:
    """Return a question behind its facts, as many of them as fit."""
    kept = within(one["paragraphs"], longest)
    return " ".join([*(fact["paragraph_text"] for fact in kept), one["question"], ""])


def marked(answer: str) -> str:
    """Return an answer between its marks."""
    return f"<answer>{answer}</answer>"


def _row(skill: str, one: Mapping[str, Any]) -> Row:
    return {
        "prompt": prompt_of(one),
        "answer": marked(one["answer"]),
        "skill": skill,
        "context": str(supported(one["paragraphs"], within(one["paragraphs"], LONGEST))),
    }


@cache
def _split(skill: str) -> tuple[tuple[dict[str, Any], ...], tuple[dict[str, Any], ...]]:
    hops = choose("skill of multihop", skill, SKILLS)
    every = {prompt_of(one): one for one in (example(hops, number) for number in range(NUM))}
    order = sorted(every, key=fraction)
    return (
        tuple(every[prompt] for prompt in order if not is_held_out(prompt)),
        tuple(every[prompt] for prompt in order if is_held_out(prompt)),
    )


def jsonl_rows(skill: str, num: int) -> list[dict[str, Any]]:
    """Return questions as a file of MuSiQue's form has them."""
    hops = choose("skill of multihop", skill, SKILLS)
    return [example(hops, number) for number in range(num)]
