"""A URL with a secret in it is refused, and the refusal does not repeat the secret."""

import pytest

from klinic.errors import ConfigError
from klinic.recipe import from_keywords, load_recipe

CANARY = "not-a-secret-canary"
HOST = "judge.example.org"
NAMES = (
    *("api_key", "API_KEY", "apikey", "apiKey", "api-key", "key", "Key", "token", "access_token"),
    *(
        "accessToken",
        "auth",
        "Authorization",
        "secret",
        "client_secret",
        "password",
        "passwd",
        "pwd",
    ),
    *("sig", "signature", "X-Amz-Signature", "X-Amz-Credential", "jwt", "bearer", "api%5Fkey"),
)
URLS = [
    *(f"https://{HOST}/v1/score?{name}={CANARY}" for name in NAMES),
    f"https://{HOST}/v1/score?model=a&top=3&api_key={CANARY}&b=c",
    f"https://{HOST}/v1/score?model=a;token={CANARY}",
    f"https://{HOST}/v1/score#access_token={CANARY}",
    f"https://{HOST}/v1/score?api_key%3D{CANARY}",
    f"https://me:{CANARY}@{HOST}/v1/score",
    f"https://{CANARY}@{HOST}/v1/score",
    f"ftp://me:{CANARY}@{HOST}/v1/score",
    f"http://me:{CANARY}@{HOST}:99999/v1/score",
    f"http://me:{CANARY}@[{HOST}/",
]


def refusal(**keys):
    with pytest.raises(ConfigError) as refused:
        from_keywords(model="tiny", **{"data": {"path": "rows.jsonl"}, "rewards": ["a:b"], **keys})
    return str(refused.value)


@pytest.mark.parametrize("url", URLS)
def test_a_judge_with_a_secret_is_refused(url):
    for rewards in ([url], [{"function": url, "weight": 0.5}], url):
        told = refusal(rewards=rewards)
        assert "holds a" in told
        assert "Put the password of a judge into ~/.netrc" in told
        assert CANARY not in told


@pytest.mark.parametrize("key", ["sampler.server", "reference.path", "cluster.address"])
def test_so_is_any_other_key(key):
    told = refusal(**{key: f"https://{HOST}/a?token={CANARY}"})
    start = f"{key} is 'https://{HOST}/a?token=***': the URL of {HOST} holds a secret (token), and"
    assert told.startswith(start)
    assert CANARY not in told


@pytest.mark.parametrize(
    "text",
    [
        "rewards: {function: 'URL', concurrency: many}",
        "rewards: ['URL']\nrewards2: 'URL'",
        "rewards: 'URL'\nkl: 'URL'",
        "rewards: [a:b, 'URL', 3]",
    ],
)
def test_no_other_mistake_repeats_it(tmp_path, text):
    file = tmp_path / "recipe.yaml"
    file.write_text("model: tiny\n" + text.replace("URL", URLS[0]))
    with pytest.raises(ConfigError) as refused:
        load_recipe(file, [f"reward_funcs={URLS[0]}", f"kl.coef={URLS[0]}"])
    assert CANARY not in str(refused.value)


@pytest.mark.parametrize("query", ["", "?model=a", "?max_tokens=5&monkey=b", "?token="])
def test_what_holds_none_is_taken(query):
    url = f"https://{HOST}/v1/score{query}"
    recipe = from_keywords(model="tiny", data={"path": "rows.jsonl"}, rewards=[url]).recipe
    assert recipe.rewards[0].function == url


def test_yaml_that_cannot_be_read_is_not_quoted(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(f"model: tiny\nrewards: ['{URLS[0]}'\nseed: [\n")
    with pytest.raises(ConfigError) as refused:
        load_recipe(file, [])
    assert CANARY not in str(refused.value)
