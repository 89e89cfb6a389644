"""A run whose output.dir is a URL: it trains in a local folder and publishes its state there."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from klinic.errors import ConfigError, EvidenceError, KlinicError
from klinic.evidence.files import read_json
from klinic.evidence.remote.fetching import fetch_run, find_snapshot
from klinic.evidence.remote.object_store import ObjectStore
from klinic.evidence.remote.publishing import PUBLISHED, RunPublisher
from klinic.evidence.remote.snapshot import newest_snapshot
from klinic.evidence.remote.url import is_url, local_folder
from klinic.evidence.writing import make_fresh_folder
from klinic.training.run_folder import is_unused_folder, rename_aside

FETCHED = ".unfinished"  # ending of a folder that is being fetched
NOT_PUBLISHED = "not published"
RecordEvent = Callable[[int, str, str], None]


def prepare_working_folder(chosen: str | None, *, start: str, say: Callable[[str], None]) -> None:
    """Make the local folder of a run at a URL ready: fetched to resume it, free to start one."""
    if chosen is None or not is_url(chosen):
        return
    folder, store = local_folder(chosen), ObjectStore(chosen)
    if start == "over":
        raise ConfigError(
            f"output.dir is {chosen}, and --start-over only moves local folders aside. Give "
            "another output.dir, or remove the run there."
        )
    if start == "resume":
        _fetch_newest(store, folder, say)
        return
    if newest_snapshot(store) is not None:
        raise ConfigError(
            f"output.dir is {chosen}, where a run is already. Continue that run with --resume, or "
            "give another output.dir."
        )
    if folder.is_dir() and not is_unused_folder(folder):
        say(f"A run that is no longer at {chosen} was moved to {rename_aside(folder)}.")


def _fetch_newest(store: ObjectStore, folder: Path, say: Callable[[str], None]) -> None:
    """Fetch the newest state into the local folder, unless that state was published from it."""
    snapshot = find_snapshot(store)
    if folder.is_dir():
        if _writer_of(folder) == snapshot.writer:
            return  # at least as new: nobody else continued the run
        say(f"{folder} is older than {store.url}: it was moved to {rename_aside(folder)}.")
    draft = folder.with_name(folder.name + FETCHED)
    make_fresh_folder(draft)
    snapshot = fetch_run(store, draft)
    draft.rename(folder)
    say(f"Fetched {len(snapshot.files)} files from {store.url}.")


def _writer_of(folder: Path) -> str | None:
    """Return the process that published the state of a local folder last."""
    try:
        writer = read_json(folder / PUBLISHED).get("writer")
    except (EvidenceError, OSError):
        return None
    return writer if isinstance(writer, str) else None


class Publishing:
    """What a run publishes and when; nothing, if its output.dir is no URL."""

    def __init__(self, publisher: RunPublisher | None) -> None:
        self._publisher = publisher
        self._is_failing = False
        self._record_event: RecordEvent = lambda *_: None
        self.has_claimed = False

    def claim(self, record_event: RecordEvent) -> None:
        """Publish the state at the start; problems later on become events."""
        if self._publisher is not None:
            self._record_event = record_event
            self._publisher.claim()
            self.has_claimed = True

    def wait(self, step: int) -> None:
        """Wait until the files of the state on its way are there: they may be removed now."""
        if self._publisher is not None and self.has_claimed:
            self._report(step, self._publisher.wait())

    def publish(self, step: int, *, at_once: bool = False) -> None:
        """Start publishing the state after a step, if one is due or wanted at once."""
        publisher = self._publisher if self.has_claimed else None
        if publisher is not None and (at_once or publisher.is_due()):
            self._report(step, publisher.start())

    def _report(self, step: int, problem: str | None) -> None:
        """Record a problem once until a state is published again."""
        if problem is None:
            return
        if problem and not self._is_failing:
            self._record_event(
                step, NOT_PUBLISHED, f"The run goes on, and is not published now: {problem}"
            )
        self._is_failing = bool(problem)


@contextmanager
def publish_run(folder: Path, chosen: str | None) -> Iterator[Publishing]:
    """Publish a run while it trains, and its last state at the end, also after an error."""
    if chosen is None or not is_url(chosen):
        yield Publishing(None)
        return
    publisher = RunPublisher(folder, chosen)
    publishing = Publishing(publisher)
    try:
        yield publishing
    except BaseException:
        with suppress(KlinicError, OSError):  # the first error counts
            if publishing.has_claimed:
                publisher.finish()
        raise
    else:
        publisher.finish()
    finally:
        publisher.close()
