"""Files, overrides, flags and calls become one recipe; a recipe becomes text and comes back."""

from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from klinic.errors import ConfigError
from klinic.maths.surrogate import SURROGATES
from klinic.recipe import dump_recipe, flags_to_overrides, from_keywords, load_recipe, yaml_text
from klinic.recipe.loading import MAX_PROBLEMS
from klinic.recipe.sections import MULTIPLICATIVE, LearnerSection

RECIPES = Path(__file__).parents[2] / "recipes"
GOOD = "model: tiny\ntask: arithmetic\n"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD)
    return path


def refusal(path, *overrides, text=None):
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_recipe(path, overrides)
    return str(error.value).replace(str(path), "mine.yaml")


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.name)
def test_every_recipe_of_ours_loads_without_an_alias_but_the_short_forms(path):
    assert load_recipe(path).notes == []


def test_the_arithmetic_recipe_is_what_its_comments_say():
    recipe = load_recipe(RECIPES / "arithmetic.yaml").recipe
    assert (recipe.kl.coef, recipe.kl.estimator) == (0.01, "unbiased")
    assert recipe.sizes().endswith("1 micro-batch of 64")
    assert recipe.warm_start is not None
    assert load_recipe(RECIPES / "arithmetic.yaml", ["kl=null"]).recipe.kl is None


def test_the_name_is_that_of_the_file_or_of_the_model(file):
    assert load_recipe(file).name == "mine"
    assert from_keywords(model="owner/name", task="t").name == "name"
    assert from_keywords(model="folder/name/", task="t").name == "name"


def test_a_typo_and_a_bad_value_are_both_said(file):
    text = GOOD + "learner: {learnin_rate: 1}\nloop: {group_size: 1}\n"
    assert refusal(file, text=text).splitlines() == [
        "mine.yaml: learner.learnin_rate is not a key of `learner`. "
        "Did you mean learner.learning_rate?",
        "mine.yaml: loop.group_size is 1: a group of one has zero advantage everywhere, so nothing "
        "is learned. Use 2 or more (8 is the default).",
    ]


def test_a_hundred_problems_are_counted_not_printed(file):
    lines = refusal(file, text=GOOD + "".join(f"zz{i}zz: 1\n" for i in range(100))).splitlines()
    assert len(lines) == MAX_PROBLEMS + 1
    assert lines[-1] == "... and 80 more problems."


def test_wrong_types_say_what_was_found_and_what_is_wanted(file):
    text = GOOD + "seed: 'x'\nkl: {coef: true}\nmodel.compile: 1\noutput.dir: 3\nrewards: [3]\n"
    assert sorted(refusal(file, text=text).splitlines()) == [
        "mine.yaml: kl.coef is true: it must be a number (0.01 is the default).",
        "mine.yaml: model.compile is 1: it must be true or false (false is the default).",
        "mine.yaml: output.dir is 3: it must be text. Put it in quotes if it is a name.",
        "mine.yaml: rewards[0] is 3: it must be a function, such as binary, or {function: binary, "
        "weight: 0.5}.",
        "mine.yaml: seed is 'x': it must be an integer (0 is the default).",
    ]


def test_a_misspelt_key_of_a_reward_is_named(file):
    message = refusal(file, text=GOOD + "rewards: [binary, {function: binary, wieght: 2}]")
    assert message.startswith("mine.yaml: rewards[1].wieght is not a key of a reward.")


def test_an_override_wins_over_the_file_however_either_is_spelt(file):
    file.write_text(GOOD + "kl_beta: 0.5\nloop: {max_steps: 3}\n")
    recipe = load_recipe(file, ["kl.coef=1e-3", "total_steps=7"]).recipe
    assert (recipe.kl.coef, recipe.loop.max_steps) == (0.001, 7)
    assert load_recipe(file, ["init-kl-coef=0.1"]).recipe.kl.coef == 0.1


@pytest.mark.parametrize("off", ["kl=null", "kl=", "kl.coef=null", "kl_beta=null", "kl=false"])
def test_an_override_takes_the_kl_away(file, off):
    file.write_text(GOOD + "kl: {coef: 0.5, estimator: k3}\n")
    assert load_recipe(file, [off]).recipe.kl is None


def test_an_override_switches_a_kl_on_that_the_file_switched_off_and_says_so(file):
    file.write_text(GOOD + "use_kl_penalty: false\n")
    loaded = load_recipe(file, ["kl.coef=0.2"])
    assert loaded.recipe.kl.coef == 0.2
    assert loaded.notes[-1] == "kl.coef switches kl on again"


def test_a_section_can_be_set_back_to_its_defaults(file):
    file.write_text(GOOD + "loop: {max_steps: 3, group_size: 4}\n")
    loop = load_recipe(file, ["loop=null", "group_size=2"]).recipe.loop
    assert (loop.max_steps, loop.group_size) == (100, 2)


def test_a_target_on_the_command_line_respects_the_controller_of_the_file(file):
    file.write_text(GOOD + "kl: {controller: ziegler}\n")
    assert load_recipe(file, ["target_kl=0.2"]).recipe.kl.controller == "ziegler"


def test_both_bounds_on_the_command_line_win_over_one_in_the_file(file):
    file.write_text(GOOD + "learner: {clip_high: 0.3}\n")
    assert load_recipe(file, ["epsilon=0.1"]).recipe.learner.clip_high == 0.1


def test_a_bad_override_is_not_blamed_on_the_file(file):
    assert refusal(file, "kl.coef=-1") == (
        "kl.coef is -1: a negative one rewards leaving the reference. "
        "Use 0 or more (0.01 is the default)."
    )
    assert refusal(file, "kl.target=0.1").startswith("kl.target is 0.1 with kl.controller fixed")
    assert refusal(file, "n=1").startswith("loop.group_size (written n) is 1: ")


@pytest.mark.parametrize("override", ["kl.coef", "=3", "--seed 3", ""])
def test_an_override_without_key_or_value_is_refused(file, override):
    assert (
        refusal(file, override)
        == f"{override!r} is not a setting. Write key=value, such as kl.coef=0.02."
    )


def test_an_override_that_is_not_yaml_is_refused(file):
    assert refusal(file, "data.path=*.jsonl").endswith("Put the value in quotes if it is text.")


def test_an_override_given_twice_must_agree(file):
    assert load_recipe(file, ["seed=1", "seed=1"]).recipe.seed == 1
    assert refusal(file, "seed=1", "seed=2") == "seed is set twice, to 1 and 2. Keep one."


def test_an_unknown_override_is_told_the_nearest_key(file):
    assert refusal(file, "kl.ceof=1") == "kl.ceof is not a key of `kl`. Did you mean kl.coef?"
    assert refusal(file, "learnin_rate=1").endswith("Did you mean learner.learning_rate?")
    assert refusal(file, "max_steps.loop=1").startswith("max_steps.loop is not a key of a recipe.")


@pytest.mark.parametrize(
    ("args", "overrides"),
    [
        (["--kl-beta", "0.02"], ["kl_beta=0.02"]),
        (["--kl-beta=0.02"], ["kl_beta=0.02"]),
        (["--use-kl-penalty"], ["use_kl_penalty=true"]),
        (["--use-kl-penalty", "false", "seed=1"], ["use_kl_penalty=false", "seed=1"]),
        (["--use-kl-penalty", "seed=1"], ["use_kl_penalty=true", "seed=1"]),
        (["--gradient-checkpointing", "--bf16"], ["gradient_checkpointing=true", "bf16=true"]),
        (["--kl.coef", "-1"], ["kl.coef=-1"]),
        (["--loop.group-size", "4"], ["loop.group_size=4"]),
        (["--datasets", "a/b,c,train[:9]"], ["datasets=a/b,c,train[:9]"]),
        (["--output_dir=a=b"], ["output_dir=a=b"]),
        (["--warm-start", "seed=1"], ["warm_start=true", "seed=1"]),
        (["--no-such-flag"], ["no_such_flag=true"]),
        ([], []),
    ],
)
def test_flags_become_overrides(args, overrides):
    assert flags_to_overrides(args) == overrides


@pytest.mark.parametrize("args", [["--kl-beta"], ["--kl-beta", "--bf16"]])
def test_a_flag_that_needs_a_value_says_so(args):
    with pytest.raises(ConfigError, match="--kl-beta has no value"):
        flags_to_overrides(args)


def test_the_flags_of_a_familiar_command_line(file):
    line = "--kl-beta 0.0 --batch-size 4 --num-generations 6 --max-steps 50 --output_dir out"
    recipe = load_recipe(file, flags_to_overrides(line.split())).recipe
    assert (recipe.kl.coef, recipe.loop.prompts_per_step, recipe.loop.group_size) == (0.0, 4, 6)
    assert (recipe.loop.max_steps, recipe.output.dir) == (50, "out")


def test_keywords_take_paths():
    assert from_keywords(model=Path("a/b"), task="t", output_dir=Path("o")).recipe.output.dir == "o"


def test_no_keywords_at_all_say_what_is_needed():
    with pytest.raises(ConfigError) as error:
        from_keywords()
    assert [line.partition(":")[0] for line in str(error.value).splitlines()] == [
        "model is missing",
        "data is missing",
    ]


text = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=9)
number = st.floats(min_value=0, exclude_min=True, max_value=1, exclude_max=True)


@st.composite
def keywords(draw):
    controller = draw(st.sampled_from(["fixed", "dual_ascent", *MULTIPLICATIVE]))
    target = {} if controller == "fixed" else {"target": draw(number)}
    loss = draw(st.sampled_from(list(SURROGATES)))
    estimators = ["k3", "exact"] + ["sequence"] * (loss == "dapo")
    kl = {"coef": draw(number), "controller": controller, "reference": draw(st.none() | text)}
    advantage = get_args(LearnerSection.model_fields["advantage"].annotation)
    return {
        "seed": draw(st.integers(0, 2**63 - 1)),
        "model": {"name": draw(text), "compile": draw(st.booleans())},
        "data": {"task": draw(text), "skill": draw(text)},
        "rewards": draw(st.lists(st.fixed_dictionaries({"function": text, "weight": number}))),
        "kl": draw(
            st.just(kl | target | {"estimator": draw(st.sampled_from(estimators))}) | st.none()
        ),
        "learner": {
            "loss": loss,
            "learning_rate": draw(number),
            "advantage": draw(st.sampled_from(advantage)),
        },
        "warm_start": draw(st.booleans()),
        "sampling": {"top_p": draw(number), "top_k": draw(st.integers(0, 10**9))},
    }


@given(keywords())
def test_what_is_dumped_loads_back_equal(given_values):
    recipe = from_keywords(**given_values).recipe
    values = yaml_text.parse_yaml(dump_recipe(recipe), where="dump")
    back = from_keywords(**values)
    assert back.recipe == recipe
    assert back.notes == []


def test_a_dumped_file_loads_back_equal(file, tmp_path):
    recipe = load_recipe(file, ["model.name='1e5'", "kl=true", "lr=1e-7"]).recipe
    (tmp_path / "again.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(tmp_path / "again.yaml").recipe == recipe
    assert list(yaml_text.parse_yaml(dump_recipe(recipe), where="dump")) == list(
        type(recipe).model_fields
    )
