"""Makes the reading questions: python recipes/reading/rows.py

A few facts about a few people, and a question about one of them. Held-out rows have people, places,
jobs and animals of their own. The questions about capitals are what training should not spoil.
"""

import json
import random
from pathlib import Path

PEOPLE = (
    "Anna Omar Lucy Pedro Nina Karl Sara Hugo Emma Ivan Lena Paul Rosa Igor Clara Felix Maria "
    "Jonas Tina Oscar Julia Adam Helen David Laura Simon Alice Peter Diana Frank"
).split()
CITIES = (
    "Paris London Rome Berlin Madrid Vienna Dublin Athens Oslo Cairo Tokyo Boston Chicago Lisbon "
    "Moscow Sydney Delhi Prague Zurich Toronto"
).split()
JOBS = (
    "doctor teacher farmer baker lawyer pilot nurse painter writer dentist cook driver singer "
    "carpenter engineer"
).split()
ANIMALS = "dog cat horse rabbit parrot goat duck turtle hamster sheep pig snake".split()

FACTS = {
    "{name} lives in {city}.": ("Where does {name} live?", "city"),
    "{name} works as a {job}.": ("What is the job of {name}?", "job"),
    "{name} owns a {animal}.": ("Which animal does {name} own?", "animal"),
}
TOLD = {"role": "system", "content": "Answer with one word."}

CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Spain": "Madrid", "Germany": "Berlin",
    "Egypt": "Cairo", "Russia": "Moscow", "Greece": "Athens", "England": "London",
    "China": "Beijing", "Portugal": "Lisbon", "Austria": "Vienna", "Ireland": "Dublin",
    "Norway": "Oslo", "Sweden": "Stockholm", "Cuba": "Havana", "Peru": "Lima", "Kenya": "Nairobi",
    "Poland": "Warsaw", "Hungary": "Budapest", "Turkey": "Ankara", "Canada": "Ottawa",
    "Australia": "Canberra", "Mexico": "Mexico City", "Argentina": "Buenos Aires",
    "South Korea": "Seoul", "Thailand": "Bangkok", "Finland": "Helsinki", "Denmark": "Copenhagen",
    "the Netherlands": "Amsterdam", "Belgium": "Brussels", "India": "New Delhi",
}  # fmt: skip


def question(world: dict[str, list[str]], draw: random.Random) -> dict[str, object]:
    """Return a row: facts about three people, and a question about one of them."""
    people = draw.sample(world["name"], 3)
    facts = []
    for name in people:
        text, (asked, kind) = draw.choice(list(FACTS.items()))
        answer = draw.choice(world[kind])
        facts.append((text.format(name=name, **{kind: answer}), asked.format(name=name), answer))
    _, asked, answer = draw.choice(facts)
    content = " ".join([*(fact for fact, _, _ in facts), asked])
    others = [other for _, _, other in facts if other != answer]
    messages = [TOLD, {"role": "user", "content": content}]
    return {"prompt": messages, "answer": answer, "others": others}


def capital(country: str, answer: str) -> dict[str, object]:
    """Return a row about something else."""
    content = f"What is the capital of {country}?"
    return {"prompt": [{"role": "user", "content": content}], "answer": answer}


def write(path: Path, rows: list[dict[str, object]]) -> None:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main(folder: Path, seed: int = 0) -> None:
    """Write the three files."""
    draw = random.Random(seed)  # noqa: S311 - nothing secret
    world = {"name": PEOPLE, "city": CITIES, "job": JOBS, "animal": ANIMALS}
    cut = {kind: len(words) * 2 // 3 for kind, words in world.items()}
    train = {kind: words[: cut[kind]] for kind, words in world.items()}
    held_out = {kind: words[cut[kind] :] for kind, words in world.items()}
    write(folder / "train.jsonl", [question(train, draw) for _ in range(600)])
    write(folder / "held_out.jsonl", [question(held_out, draw) for _ in range(200)])
    write(folder / "capitals.jsonl", [capital(*pair) for pair in CAPITALS.items()])


if __name__ == "__main__":
    main(Path(__file__).parent)
