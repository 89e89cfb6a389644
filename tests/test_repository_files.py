"""Files for the repository's host: citation, issue forms, workflows."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

import klinic

ROOT = Path(__file__).parents[1]
FORMS = ROOT / ".github" / "ISSUE_TEMPLATE"
WORKFLOWS = ROOT / ".github" / "workflows"


def load(path):
    return yaml.safe_load(path.read_text())


def test_the_citation_is_of_this_version():
    citation = load(ROOT / "CITATION.cff")
    assert citation["version"] == klinic.__version__
    assert {"cff-version", "message", "title", "authors", "license"} <= set(citation)


def test_a_sick_run_comes_with_its_diagnosis():
    fields = {field.get("id"): field for field in load(FORMS / "sick_run.yml")["body"]}
    assert "`klinic diagnose RUN --json`" in fields["diagnosis"]["attributes"]["description"]
    assert fields["diagnosis"]["validations"]["required"]


@pytest.mark.parametrize("form", ["sick_run.yml", "bug.yml", "feature.yml"])
def test_forms_are_complete(form):
    content = load(FORMS / form)
    assert content["name"]
    assert content["description"]
    labels = [field["attributes"]["label"] for field in content["body"] if "id" in field]
    assert len(labels) == len(set(labels)) > 0


@pytest.mark.parametrize("path", sorted(WORKFLOWS.glob("*.yml")), ids=lambda path: path.name)
def test_workflows_may_write_only_where_they_publish(path):
    workflow = load(path)
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        writes = [right for right, level in job.get("permissions", {}).items() if level == "write"]
        assert name in {"deploy", "publish"} or writes == []
        assert "secrets." not in str(job)


def test_a_release_is_tested_and_built_by_the_scripts_of_the_repository():
    runs = [
        step.get("run", "") for step in load(WORKFLOWS / "release.yml")["jobs"]["build"]["steps"]
    ]
    for script in (".ci/run", ".ci/build"):
        assert any(script in run for run in runs)
        assert (ROOT / script).is_file()


@pytest.mark.skipif(find_spec("towncrier") is None, reason="needs towncrier")
def test_the_changelog_has_a_new_fragment(tmp_path):
    for name in (".ci/changelog.py", "pyproject.toml", "CHANGELOG.md", "src/klinic/__init__.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / "changes").mkdir()
    (tmp_path / "changes" / "1.feature.md").write_text("A new thing.\n")
    script = [sys.executable, tmp_path / ".ci" / "changelog.py"]
    outdated = subprocess.run([*script, "--check"], capture_output=True, text=True, check=False)
    assert outdated.returncode == 1
    assert "run python .ci/changelog.py" in outdated.stderr
    subprocess.run(script, check=True)
    subprocess.run([*script, "--check"], check=True)
    text = (tmp_path / "CHANGELOG.md").read_text()
    section = "<!-- unreleased -->\n## Unreleased\n\n### Features\n\n- A new thing.\n<!-- end"
    assert section in text
    (tmp_path / "changes" / "1.feature.md").unlink()
    subprocess.run(script, check=True)
    assert "A new thing" not in (tmp_path / "CHANGELOG.md").read_text()


def test_an_example_without_its_arguments_says_how_it_is_called():
    script = [sys.executable, ROOT / "examples" / "smollm2.py"]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("Usage: python examples/smollm2.py PACKAGE.whl FOLDER")
