"""Weights gathered in bf16, and sets of ranks that each hold all weights, change no gradient."""

import json
from pathlib import Path

import pytest
from test_shard_loading import run_ranks

from klinic.errors import ConfigError
from klinic.recipe.loading import from_keywords

AT_WORK = Path(__file__).parent / "gather_ranks.py"


@pytest.mark.engine
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("size", "replicas"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_gradients_are_those_of_one_process(size, replicas, tmp_path):
    run_ranks(AT_WORK, size, tmp_path, str(replicas))
    found = json.loads((tmp_path / "found.json").read_text())
    for name, difference in found["differences"].items():
        assert difference < (1e-12 if name.startswith("double") else 1e-6), name
    assert found["fraction"] == pytest.approx(replicas / size, rel=0.05)


def test_replicas_without_shards_are_refused():
    with pytest.raises(ConfigError, match=r"learner\.replicas is 2 with learner\.shards 1"):
        from_keywords(model="tiny", task="arithmetic", **{"learner.replicas": 2})
    recipe = from_keywords(
        model="tiny", task="arithmetic", **{"learner.replicas": 2, "learner.shards": 3}
    ).recipe
    assert recipe.learner.num_ranks == 6
