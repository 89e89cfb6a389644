"""A reward function is given TRL's arguments, or those of them that it names."""

from dataclasses import replace

import pytest

from klinic.errors import DataError, RewardError
from klinic.rewards.arguments import reward_arguments
from klinic.rewards.signature import accepted_arguments
from rewards.rollouts import rollout

ROLLOUTS = [
    rollout("ab", index=0, prompt="x", answer="ab", prompt_id=3),
    rollout("c", index=1, prompt="y", answer="d", source="web"),
]
EVERYTHING = {
    "prompts": ["x", "y"],
    "completions": ["ab", "c"],
    "completion_ids": [[97, 98], [99]],
    "answer": ["ab", "d"],
    "prompt_id": [3, None],
    "source": [None, "web"],
}
ASKED = ({"role": "system", "content": "Count."}, {"role": "user", "content": "1+1="})


def takes_everything(**kwargs): ...


def names_one_and_takes_everything(completions, **kwargs): ...


def names_two(completions, answer, scale=2): ...


def names_an_optional_one(source=None): ...


def asks_for_gold(completions, gold): ...


def asks_for_gold_and_takes_everything(completions, gold, **kwargs): ...


def takes_by_position(completions, /): ...


class Judge:
    names_two = staticmethod(names_two)

    def __call__(self, completions, answer):
        return self.names_two(completions, answer)


def given(function, rollouts=ROLLOUTS):
    return accepted_arguments("mine", function, reward_arguments(rollouts))


@pytest.mark.parametrize("function", [takes_everything, names_one_and_takes_everything])
def test_a_function_with_keywords_is_given_everything(function):
    assert given(function) == EVERYTHING


@pytest.mark.parametrize("function", [names_two, Judge()])
def test_a_function_without_is_given_what_it_names(function):
    assert given(function) == {"completions": ["ab", "c"], "answer": ["ab", "d"]}


def test_an_optional_argument_is_filled_from_a_column():
    assert given(names_an_optional_one) == {"source": [None, "web"]}


def test_ids_are_plain_numbers():
    ids = given(takes_everything)["completion_ids"]
    assert {type(number) for row in ids for number in row} == {int}


def test_columns_that_trl_keeps_to_itself_are_not_passed_on():
    columns = {"prompt": "1+1=", "completion": "2", "completion_ids": [9], "answer": "a"}
    found = given(takes_everything, [rollout("a", columns=columns)])
    assert found == {
        "prompts": ["1+1="],
        "completions": ["a"],
        "completion_ids": [[97]],
        "answer": ["a"],
    }


@pytest.mark.parametrize("name", ["prompts", "completions"])
def test_a_column_that_would_hide_the_completions_is_refused(name):
    with pytest.raises(DataError, match=rf"column '{name}'.*Rename the column"):
        given(takes_everything, [rollout("a", **{name: "gold"})])


@pytest.mark.parametrize("function", [asks_for_gold, asks_for_gold_and_takes_everything])
def test_an_argument_nobody_can_fill_is_named_with_those_that_can(function):
    with pytest.raises(RewardError, match=r"mine requires 'gold'.*answer, prompt_id, source"):
        given(function)


def test_an_argument_by_position_only_is_refused():
    with pytest.raises(RewardError, match="'completions' by position only"):
        given(takes_by_position)


def test_a_function_that_does_not_say_what_it_takes_is_given_everything():
    assert given(max) == EVERYTHING


def test_each_call_has_lists_of_its_own():
    first, second = given(takes_everything), given(takes_everything)
    first["completions"].clear()
    first["completion_ids"][0].clear()
    assert second == EVERYTHING
    assert ROLLOUTS[0].token_ids.tolist() == [97, 98]


def chat(text, said=()):
    made = rollout(text)
    return replace(made, prompt=replace(made.prompt, messages=ASKED), messages=said)


def test_a_chat_is_given_in_messages_as_trl_does():
    turns = (
        {"role": "assistant", "content": "look(1)"},
        {"role": "tool", "content": [{"type": "text", "text": "2"}]},
        {"role": "assistant", "content": "2"},
    )
    found = reward_arguments([chat("2"), chat("look(1)22", turns), rollout("2", prompt="1+1=")])
    assert found["prompts"] == [list(ASKED), list(ASKED), "1+1="]
    assert found["completions"] == [[{"role": "assistant", "content": "2"}], list(turns), "2"]


def test_messages_are_copies_that_a_function_may_change():
    turns = ({"role": "tool", "content": [{"type": "text", "text": "2"}]},)
    found = reward_arguments([chat("2", turns)])
    found["prompts"][0][0]["content"] = "changed"
    found["completions"][0][0]["content"][0]["text"] = "changed"
    assert ASKED[0]["content"] == "Count."
    assert turns[0]["content"][0]["text"] == "2"
    assert {type(m) for m in (*found["prompts"][0], *found["completions"][0])} == {dict}
