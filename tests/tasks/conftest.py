"""Few games: the engine plays for seconds instead of minutes."""

from importlib.util import find_spec

import pytest


@pytest.fixture(scope="session", autouse=True)
def few_games():
    if find_spec("chess") is None:
        yield
        return
    from klinic.tasks.chess import games

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(games, "DEFAULT", games.GameSettings(games=80, plies=16, nodes=100))
        yield
