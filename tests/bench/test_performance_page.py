"""The table of the page about performance is that of the raw files."""

from bench.catalogue import BENCHES
from bench.table import PAGE, kept, table, written


def test_the_table_is_made_of_the_raw_files():
    page = PAGE.read_text()
    assert written(page) == page, "run python -m bench.table"
    assert all(f"| {name} |" in page for name in kept())


def test_every_raw_file_is_that_of_a_measurement():
    assert {path.stem for path in PAGE.with_suffix("").glob("*.json")} <= set(BENCHES)


def test_what_was_not_measured_or_need_not_hold_is_left_empty():
    shown = {"median": 1.02, "must": None, "side": "at most", "ok": True}
    assert table({"cost": shown}).splitlines()[-1] == "| cost | 1.020 |  |  |  |  | yes |"
