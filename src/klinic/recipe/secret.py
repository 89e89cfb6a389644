"""Finds secrets in URLs: recipes are kept with runs, printed, and sent to trackers."""

import re
from collections.abc import Iterator
from urllib.parse import unquote, urlsplit

WORDS = frozenset(
    (
        *("key", "keys", "sig", "auth", "authorization", "pass", "pwd", "passphrase", "sas", "jwt"),
        *("credential", "credentials", "bearer", "session", "sessionid"),
    )
)
"""The last word of a parameter that holds a secret, in any case: `api_key`, `X-Sig`."""
ENDINGS = ("apikey", "accesskey", "secretkey", "token", "secret", "password", "passwd", "signature")
"""The end of one that is written in one word: `accesstoken`."""
LOGIN = re.compile(r"://[^/?#\s]*@")
PARAMETER = re.compile(r"([?&;#])([^=&;#?]*?)(=|%3[dD])([^&;#]+)")
HIDDEN = "***"
INSTEAD = (
    "and recipes are saved with runs. Put a password into ~/.netrc, which is read for the host of "
    "a judge, the key of a vLLM server into VLLM_API_KEY, and any other into the environment of a "
    "function of your own that asks the judge"
)


def refuse_secret(text: str) -> str:
    """Return text as it is, unless it is a URL that holds a password or a key."""
    if "://" not in text:
        return text
    found = "a password" if LOGIN.search(text) else next(_secrets(text), "")
    if found:
        raise ValueError(f"the URL of {_host(text)} holds {found}, {INSTEAD}")
    return text


def without_secrets(text: str) -> str:
    """Return text with what is secret in its URLs hidden.

    >>> without_secrets("see https://me:no@judge.example.org/v1?model=a&API-Key=not-a-secret.")
    'see https://***@judge.example.org/v1?model=a&API-Key=***'
    """
    if "://" not in text:
        return text

    def hidden(match: re.Match[str]) -> str:
        mark, name, equals, _ = match.groups()
        return f"{mark}{name}{equals}{HIDDEN}" if _is_secret(name) else match[0]

    return PARAMETER.sub(hidden, LOGIN.sub(f"://{HIDDEN}@", text))


def _secrets(text: str) -> Iterator[str]:
    for match in PARAMETER.finditer(text):
        if _is_secret(match[2]):
            yield f"a secret ({unquote(match[2])})"


def _is_secret(name: str) -> bool:
    """Whether a parameter holds a secret.

    >>> [_is_secret(name) for name in ("api_key", "accessToken", "X-Amz-Signature", "APIKEY")]
    [True, True, True, True]
    >>> [_is_secret(name) for name in ("model", "max_tokens", "monkey", "keyword", "author")]
    [False, False, False, False, False]
    """
    plain = unquote(unquote(name))
    words = re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", plain).lower())
    return bool(words) and (words[-1] in WORDS or "".join(words).endswith(ENDINGS))


def _host(url: str) -> str:
    try:
        return urlsplit(url).hostname or "no host"
    except ValueError:
        return "no host"
