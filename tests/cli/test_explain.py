"""`klinic explain WORD`: every word that people look for has an answer that is true."""

import io
import re
from pathlib import Path

import pytest
import typer
from rich.console import Console

from klinic.checks import CHECKS
from klinic.checks import HYPOTHESES as GROUPS
from klinic.cli import explain as module
from klinic.cli.explain import explain
from klinic.cli.hypotheses import HYPOTHESES
from klinic.cli.lookup import known_words, look_up
from klinic.cli.words import WORDS
from klinic.doctor.scalars.examine import SIGNS
from klinic.errors import ConfigError
from klinic.evidence.metric_meanings import METRIC_MEANINGS
from klinic.recipe import aliases, keys

# words of other tools and of people, and a part of the answer
SOUGHT = {
    "--config": "klinic train --config",
    "--checkpoint": "klinic eval",
    "device mismatch": "klinic check RECIPE --device cuda",
    "r_policy_malformed": "levels: {malformed:",
    "r_env_malformed": "levels: {malformed:",
    "adaptive_kl_coefficient": "kl.controller=band",
    "kl_divergence": "the metric `kl`",
    "reward/mean": "the metric `reward`",
    "train/kl": "`kl` is a metric",
    "verifiers": "klinic verify FILE.py:FUNCTION",
    "single-batch test": "2 batches",
    "RookWorld": "jrahn/RookWorld-LM-124M",
    "SFT": "warm_start",
    "behavior cloning": "warm_start",
    "before after": "loop.show_completions_every",
    "961.858": "klinic verify importance-sampling",
    "sft_retention": "retention",
    "kl_beta": "kl.coef",
    "--kl-beta": "kl.coef",
    "num_generations": "loop.group_size",
    "reward_weights": "rewards: [{function: f, weight: 0.5}]",
    "coef": "Default: 0.01",
    "estimator": "unbiased",
    "k3": "a KL estimator",
    "reversed k3": "klinic verify direction",
    "dr_grpo": "a value of learner.loss",
    "0.012": "klinic verify importance-sampling",
    "musique": "--kl-beta 0.0 --batch-size 8",
    "ref_logp": "`logp_ref`",
    "kl/max": "`kl_k3/max`",
    "kl_k3/top_share": "largest 0.1% of tokens",
    "rewards/f1/mean": "by reward function",
    "reward/penalized": "summed k1",
    "LoRA sync": "stale-sampler",
    "full-parameter": "model.lora_rank=null",
    "compute_kl_divergence": "examples/starter.py",
    "scripts/verify_kl_direction.py": "klinic verify direction",
    "plot_kl_ablation.py": "klinic ablate --plot",
    "evaluate.py": "klinic eval --checkpoint",
    "papers": "docs/explanation/papers.md",
    "mixed precision": "model.dtype=bf16",
    "graduated rewards": "docs/how-to/rewards.md",
    "conservative": "recipes/conservative.yaml",
    "adaptive reference": "reference.reset_every",
    "KL cap": "kl.rollout_limit",
    "Qwen2.5-7B-Instruct": "recipes/qwen2.5-7b-lora.yaml",
    "KL between checkpoints": "klinic eval ONE --reference OTHER",
    "hypotheses": "klinic explain H01",
    "monitor": "klinic watch",
    "train": "klinic train --help",
    "importance sampling": "learner.importance_sampling",
}


ROOT = Path(__file__).parents[2]


def pages_named(answers):
    """Return the files of the repository that answers name."""
    return {
        page
        for text in answers
        for page in re.findall(r"\b(?:docs|recipes|examples)/[\w./-]+\w", text)
    }


def printed(word, *, width=None):
    file = io.StringIO()
    console = Console(
        file=file,
        width=width or 80,
        force_terminal=width is not None,
        color_system=None,
        highlight=False,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_make_console", lambda: console)
        patch.setattr(typer, "echo", lambda text: print(text, file=file))
        explain(word)
    return file.getvalue()


@pytest.mark.parametrize(("word", "answer"), SOUGHT.items())
def test_a_word_that_people_look_for_is_answered(word, answer):
    assert answer in " ".join(printed(word).split())


def test_every_name_of_another_trainer_is_answered():
    for name in (*aliases.ALIASES, *aliases.REFUSED):
        assert look_up(name), name


def test_every_key_is_answered_with_its_description():
    for key, field in keys.recipe_fields().items():
        assert " ".join((field.description or "").split()) in "\n".join(look_up(key)), key


def test_an_answer_names_keys_that_exist():
    known = {*keys.recipe_fields(), *keys.recipe_sections()}
    for answer in WORDS.values():
        for word in answer.replace("=", " ").replace(",", " ").split():
            section = word.partition(".")[0]
            if section in keys.recipe_sections() and "." in word.strip(".:"):
                assert word.strip(".:") in known, answer


def test_a_word_has_one_answer():
    words = [word for words in WORDS for word in words]
    assert len(words) == len(set(words))
    assert not {*words} & {check.name for check in CHECKS}


@pytest.mark.parametrize("number", GROUPS)
def test_a_hypothesis_has_title_priority_and_criteria(number):
    text = printed(number)
    assert HYPOTHESES[number].title in text
    assert "Priority: " in text
    assert "  1. " in text
    for name in GROUPS[number]:
        assert f"\n{name}\n" in text


def test_h03_has_four_criteria():
    assert len(HYPOTHESES["H03"].invalidated_by) == 4


def test_a_check_in_a_pipe_is_its_text_as_written():
    text = printed("stale sampler")
    check = next(check for check in CHECKS if check.name == "stale-sampler")
    assert text == f"stale-sampler\n\n{check.help_text}\nFix\n    {check.fix}\n"


@pytest.mark.parametrize("width", [60, 100, 200])
@pytest.mark.parametrize("word", [None, "H03", "stale-sampler", "gradient-explodes", "kl_beta"])
def test_a_terminal_of_any_width_breaks_no_word(word, width):
    text = printed(word, width=width)
    assert text.split() == printed(word).split()
    assert max(map(len, text.splitlines())) <= width


def test_all_checks_are_listed_by_stage():
    text = printed(None)
    assert text.index("\nAlignment:") < text.index("\nSampler:") < text.index("\nReporting:")
    for check in CHECKS:
        assert f"  {check.name}: {check.description}\n" in text


CAUSES = {check.name for check in CHECKS}
ONLY_SIGNS = [sign for sign in SIGNS if sign.name not in CAUSES]


@pytest.mark.parametrize("sign", ONLY_SIGNS, ids=lambda sign: sign.name)
def test_a_sign_says_what_to_do(sign):
    assert "klinic diagnose LOG" in printed(sign.name)


@pytest.mark.parametrize(
    ("typed", "meant"), [("stale-samplr", "stale-sampler"), ("kl_divergance", "kl_divergence")]
)
def test_a_word_that_is_nearly_right_is_guessed(typed, meant):
    assert meant in known_words() or meant in CAUSES
    with pytest.raises(ConfigError, match=f"Did you mean {meant}\\?"):
        explain(typed)


def test_words_without_an_entry_list_the_entries_that_mention_them():
    text = printed("gradient cosine to policy")
    assert "has no entry of its own" in text
    assert "kl/grad_norm_kl, kl/grad_share, kl/grad_cosine_policy: " in text


def test_every_metric_is_explained_once():
    names = [name for one in METRIC_MEANINGS for name in one.names]
    assert len(names) == len(set(names))
    for name in names:
        assert "a metric" in printed(name.replace("…", "mean")), name


@pytest.mark.parametrize("page", sorted(pages_named(WORDS.values())))
def test_an_answer_names_pages_that_exist(page):
    assert (ROOT / page).is_file()
