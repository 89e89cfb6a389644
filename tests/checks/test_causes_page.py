"""The page of all causes says what `klinic explain` says."""

from pathlib import Path

from klinic.cli.explain import explain

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "causes.md"


def test_the_page_is_what_explain_prints(capsys):
    explain(every=True)
    printed = capsys.readouterr().out
    assert printed.strip() in PAGE.read_text()
