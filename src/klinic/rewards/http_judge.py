"""HTTP judge: posts each completion as JSON and reads a reward.

POST {"prompt": ..., "completion": ..., "columns": {...}}
200  {"reward": 0.5}, or null to abstain
"""

import json
import math
import os
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from netrc import NetrcParseError
from numbers import Real
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from klinic.errors import ConfigError, MissingExtraError
from klinic.rewards.concurrency import CallLimits, RetryLater, call_judges
from klinic.rewards.json_values import json_columns, nan_to_null
from klinic.rewards.parse_result import RewardFault, RewardValues

MAX_RESPONSE_BYTES = 65_536  # bytes; a reward needs twenty
MAX_QUOTE_LENGTH = 200
RETRY_STATUSES = frozenset({408, 425, 429})  # retried, like all of 5xx
MOVED = "Redirects are not followed. Set the judge's final URL in the recipe."
REFUSED = "A retry would fail the same way: fix the request or the judge."


def http_judge(url: str, limits: CallLimits) -> Callable[..., Awaitable[RewardValues]]:
    """Return a reward function that posts completions to the judge at a URL."""
    client = _import_httpx()
    certificates = client.create_ssl_context()
    login = _netrc_auth(client)

    async def reward(
        prompts: list[Any],
        completions: list[Any],
        completion_ids: Any = None,  # noqa: ARG001 - the judge gets text
        **columns: list[Any],
    ) -> RewardValues:
        row_columns = json_columns({"prompt": prompts, "completion": completions, **columns})
        async with client.AsyncClient(
            timeout=None,  # ask_all limits each attempt
            follow_redirects=False,
            limits=client.Limits(max_connections=limits.concurrency),
            verify=certificates,
            auth=login,
        ) as connection:

            async def post_one(index: int) -> float | None:
                own = {name: values[index] for name, values in row_columns.items()}
                payload = {"prompt": own.pop("prompt"), "completion": own.pop("completion")}
                content = json.dumps(nan_to_null(payload | {"columns": own}), allow_nan=False)
                try:
                    return await _post_completion(connection, url, content, index)
                except client.TransportError as error:
                    what = str(error) or type(error).__name__
                    raise RetryLater(f"{url} cannot be reached ({what})") from error

            return await call_judges(post_one, len(completions), limits)

    reward.__name__ = judge_name(url)
    return reward


def judge_name(url: str) -> str:
    """Return the name of a judge in metrics: the last part of its URL.

    >>> judge_name("http://127.0.0.1:8000/v1/score"), judge_name("https://judge.example.org")
    ('score', 'judge.example.org')
    """
    parts = urlsplit(url)
    return parts.path.rstrip("/").rpartition("/")[2] or str(parts.hostname)


def _import_httpx() -> Any:
    try:
        import httpx2
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            'An HTTP judge needs the train extra: pip install "klinic[train]"'
        ) from error
    return httpx2


def _netrc_auth(client: Any) -> Any:
    """Return the netrc authentication; None without a ~/.netrc file."""
    file = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    if not file.is_file():
        return None
    try:
        return client.NetRCAuth(str(file))
    except (NetrcParseError, OSError, ValueError) as error:
        # the error message may quote a password: leave it out
        line = getattr(error, "lineno", None)
        where = f"{file}, line {line}" if line else str(file)
        raise ConfigError(
            f"{where}: cannot be read; it holds the logins of judges. Fix the file, or set NETRC "
            "to another one."
        ) from None


async def _post_completion(connection: Any, url: str, content: str, index: int) -> float | None:
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    headers["Accept-Encoding"] = "identity"  # no compression of a few bytes
    async with connection.stream("POST", url, content=content, headers=headers) as response:
        body = await _read_body(response)
        status = response.status_code
        response_text = f"{url} answered {status}: {_quote_body(body)}"
        if status in RETRY_STATUSES or status >= 500:
            raise RetryLater(
                response_text, _retry_after_seconds(response.headers.get("Retry-After"))
            )
        if 300 <= status < 400:
            target = response.headers.get("Location", "nowhere")
            raise RewardFault(
                f"got a redirect from {url} to {target[:MAX_QUOTE_LENGTH]}", index, MOVED
            )
        if status >= 400:
            raise RewardFault(f"was refused: {response_text}", index, REFUSED)
    return _parse_reward(body, response_text)


async def _read_body(response: Any) -> bytes:
    body = b""
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) > MAX_RESPONSE_BYTES:
            raise RetryLater(f"{response.url} answered with more than {MAX_RESPONSE_BYTES:,} bytes")
    return body


def _parse_reward(body: bytes, response_text: str) -> float | None:
    """Parse the reward from a response body."""
    try:
        reward = json.loads(body)["reward"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise RetryLater(f'{response_text}, which is not {{"reward": number}}') from None
    if reward is not None and not isinstance(reward, Real):
        raise RetryLater(f"{response_text}, whose reward is not a number")
    return None if reward is None else float(reward)


def _retry_after_seconds(retry_after: str | None) -> float:
    """Return the seconds of a `Retry-After` header, which holds seconds or a date.

    >>> _retry_after_seconds("7"), _retry_after_seconds(None), _retry_after_seconds("soon")
    (7.0, 0.0, 0.0)
    """
    try:
        seconds = float(retry_after or 0)
        return seconds if math.isfinite(seconds) else 0.0
    except ValueError:
        pass
    try:
        date = parsedate_to_datetime(str(retry_after))
        return max(0.0, (date - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):  # not a date, or without a time zone
        return 0.0


def _quote_body(body: bytes) -> str:
    """Return the start of a response body, without control characters."""
    text = body[: 4 * MAX_QUOTE_LENGTH].decode("utf-8", "replace")
    return (
        "".join(c if c.isprintable() else " " for c in text)[:MAX_QUOTE_LENGTH].strip() or "nothing"
    )
