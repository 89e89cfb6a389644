"""A run at a URL is read by its evidence alone, from a copy in klinic's cache."""

from pathlib import Path

import pytest

from evidence.records import full_record
from klinic.cli.fetched_run import fetch_if_url
from klinic.errors import ConfigError
from klinic.evidence import store
from klinic.evidence.remote.publishing import RunPublisher

pytest.importorskip("fsspec")


@pytest.fixture
def url(tmp_path, monkeypatch):
    monkeypatch.setenv("KLINIC_CACHE", str(tmp_path / "cache"))
    run = tmp_path / "run"
    (run / "checkpoints" / "step=000001").mkdir(parents=True)
    (run / "checkpoints" / "step=000001" / "manifest.json").write_text("{}")
    store.write_record(run, full_record())
    publisher = RunPublisher(run, f"file://{tmp_path}/shared")
    publisher.claim()
    publisher.close()
    return f"file://{tmp_path}/shared"


def test_a_url_as_a_path_is_fetched_without_weights(url):
    folder = fetch_if_url(Path(url))
    assert store.complete_steps(folder) == [1]
    assert not (folder / "checkpoints").exists()
    assert fetch_if_url(Path(url), whole=True) == folder
    assert (folder / "checkpoints").is_dir()


def test_a_path_stays_a_path(tmp_path):
    assert fetch_if_url(tmp_path) == tmp_path


def test_a_url_without_a_run_is_an_error_that_names_it(url):
    with pytest.raises(ConfigError, match=r"there is no run at file://.*/nothing"):
        fetch_if_url(Path(f"{url}/nothing"))
