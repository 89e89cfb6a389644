"""Loading a teacher: the same tokenizer, or the reason why not; padded outputs are removed."""

import pytest
import torch

from klinic.errors import ConfigError
from klinic.learner.checkpoint import save_model
from klinic.model.loading import load_scorer
from tiny_policies import small_model, small_policy


def saved(folder, policy):
    save_model(folder, policy)
    return str(folder)


def test_outputs_without_a_token_are_removed_from_a_teacher(tmp_path):
    policy = small_policy()
    size = policy.vocabulary_size
    padded = small_policy(model=small_model(vocab_size=size + 5))
    path = saved(tmp_path / "padded", padded)
    scorer = load_scorer(path, like=policy, seed=0, key="teacher.path", may_pad=True)
    head = scorer.lm.get_output_embeddings().weight
    assert head.shape[0] == size
    assert torch.equal(head, padded.lm.get_output_embeddings().weight[:size])
    with pytest.raises(ConfigError, match=r"reference.path is .*: it has \d+ outputs"):
        load_scorer(path, like=policy, seed=0)


def test_a_teacher_with_fewer_outputs_than_the_student_is_refused(tmp_path):
    policy = small_policy()
    larger = small_policy(model=small_model(vocab_size=policy.vocabulary_size + 5))
    with pytest.raises(ConfigError, match="infinite"):
        load_scorer(
            saved(tmp_path / "t", policy), like=larger, seed=0, key="teacher.path", may_pad=True
        )


def test_the_refusal_of_another_tokenizer_names_a_token_and_both_ids(tmp_path):
    policy, other = small_policy(), small_policy()
    swapped = other.tokenizer.get_vocab()
    swapped["0"], swapped["1"] = swapped["1"], swapped["0"]
    other.tokenizer.get_vocab = lambda: swapped
    path = saved(tmp_path / "t", policy)
    with pytest.raises(ConfigError, match=r"teacher.path is .* 2 tokens; '1' is id \d+ there and"):
        load_scorer(path, like=other, seed=0, key="teacher.path", may_pad=True)


def test_a_missing_folder_is_named_by_the_key_of_the_teacher():
    with pytest.raises(ConfigError, match=r"teacher\.path is \./nowhere: there is no such folder"):
        load_scorer("./nowhere", like=small_policy(), seed=0, key="teacher.path")
