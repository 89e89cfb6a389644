"""Runs at a URL on the command line: their evidence is fetched into klinic's cache."""

from pathlib import Path

from klinic.evidence.remote.url import local_folder, url_of_path


def fetch_if_url(run: Path, *, whole: bool = False) -> Path:
    """Return a path as it is; of a URL, a local copy of the run that is brought up to date.

    The copy has no checkpoints and no curves unless it is to be `whole`.
    """
    url = url_of_path(run)
    if url is None:
        return run
    from klinic.cli.progress import show_progress
    from klinic.evidence.remote.fetching import fetch_run, is_evidence
    from klinic.evidence.remote.object_store import ObjectStore
    from klinic.runtime.cache import cache_folder

    store = ObjectStore(url)
    folder = cache_folder("fetched") / local_folder(store.url).name
    with show_progress("Fetching the run"):
        if whole:
            fetch_run(store, folder)
        else:
            fetch_run(store, folder, wanted=is_evidence)
    return folder
