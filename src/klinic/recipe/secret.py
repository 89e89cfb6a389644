"""Detects secrets in URLs: recipes are saved with runs, printed, and sent to trackers."""

import re
from collections.abc import Iterator
from urllib.parse import unquote, urlsplit

SECRET_WORDS = frozenset(
    (
        *("key", "keys", "sig", "auth", "authorization", "pass", "pwd", "passphrase", "sas", "jwt"),
        *("credential", "credentials", "bearer", "session", "sessionid"),
    )
)
"""Last words of parameter names that hold secrets, case-insensitive: `api_key`, `X-Sig`."""
SECRET_ENDINGS = (
    "apikey",
    "accesskey",
    "secretkey",
    "token",
    "secret",
    "password",
    "passwd",
    "signature",
)
"""Endings of names written as one word: `accesstoken`."""
LOGIN = re.compile(r"://[^/?#\s]*@")
PARAMETER = re.compile(r"([?&;#])([^=&;#?]*?)(=|%3[dD])([^&;#]+)")
MASK = "***"
ADVICE = (
    "and recipes are saved with runs. Put the password of a judge into ~/.netrc, the key of a vLLM "
    "server into VLLM_API_KEY, and any other secret into an environment variable that your own "
    "reward function reads"
)


def refuse_secret(text: str) -> str:
    """Return the text unchanged; raise ValueError if it is a URL with a password or key."""
    if "://" not in text:
        return text
    secret = "a password" if LOGIN.search(text) else next(_find_secrets(text), "")
    if secret:
        raise ValueError(f"the URL of {_host_name(text)} holds {secret}, {ADVICE}")
    return text


def mask_secrets(text: str) -> str:
    """Return text with the secrets in its URLs replaced by `***`.

    >>> mask_secrets("see https://me:no@judge.example.org/v1?model=a&API-Key=not-a-secret.")
    'see https://***@judge.example.org/v1?model=a&API-Key=***'
    """
    if "://" not in text:
        return text

    def mask_parameter(match: re.Match[str]) -> str:
        mark, name, equals, _ = match.groups()
        return f"{mark}{name}{equals}{MASK}" if _is_secret(name) else match[0]

    return PARAMETER.sub(mask_parameter, LOGIN.sub(f"://{MASK}@", text))


def _find_secrets(text: str) -> Iterator[str]:
    for match in PARAMETER.finditer(text):
        if _is_secret(match[2]):
            yield f"a secret ({unquote(match[2])})"


def _is_secret(name: str) -> bool:
    """Return whether a URL parameter of this name holds a secret.

    >>> [_is_secret(name) for name in ("api_key", "accessToken", "X-Amz-Signature", "APIKEY")]
    [True, True, True, True]
    >>> [_is_secret(name) for name in ("model", "max_tokens", "monkey", "keyword", "author")]
    [False, False, False, False, False]
    """
    plain = unquote(unquote(name))
    words = re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", plain).lower())
    return bool(words) and (words[-1] in SECRET_WORDS or "".join(words).endswith(SECRET_ENDINGS))


def _host_name(url: str) -> str:
    try:
        return urlsplit(url).hostname or "no host"
    except ValueError:
        return "no host"
