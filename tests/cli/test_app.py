"""The command as a process: what it imports, how fast it answers, how it fails."""

import json
import resource
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import klinic
from processor_speed import allowed_seconds

HEAVY = ("torch", "ray", "vllm", "transformers", "numpy", "klinic.verify")
KLINIC = [sys.executable, "-c", "from klinic.cli import main; main()"]


def run(*arguments, cwd=None):
    return subprocess.run(
        [*KLINIC, *arguments], capture_output=True, text=True, cwd=cwd, check=False, timeout=100
    )


def test_help_imports_nothing_heavy():
    program = (
        "import sys\nfrom klinic.cli import main\nsys.argv = ['klinic', '--help']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip().endswith("[]")


def test_a_log_is_judged_without_numpy_and_arrow(tmp_path):
    lines = [{"step": step, "kl": 0.001 * step, "reward": 0.1 + 0.01 * step} for step in range(20)]
    log = tmp_path / "log.jsonl"
    log.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    program = (
        "import sys; from klinic.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "sys.exit(' '.join({'numpy', 'pyarrow', 'torch'} & sys.modules.keys()) or 0)"
    )
    command = [sys.executable, "-P", "-c", program, "diagnose", str(log)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_help_answers_at_once():
    # its own work, whoever else is at work; .ci/check_base.py looks at the clock, alone
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert run("--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < allowed_seconds(0.4)


def test_version():
    assert run("--version").stdout.strip() == f"klinic {klinic.__version__}"


@pytest.mark.skipif(find_spec("torch") is not None, reason="torch is installed here")
@pytest.mark.parametrize("target", [[], ["direction"], ["my:function"]])
def test_without_torch_verify_prints_the_line_that_installs_it(target):
    result = run("verify", *target)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.splitlines() == [
        'MissingExtraError: this needs torch. Install it with: pip install "klinic[train]"'
    ]


@pytest.mark.torch
def test_a_function_in_the_current_folder_is_found(tmp_path):
    (tmp_path / "mine.py").write_text("def kl(logp, logp_ref):\n    return logp - logp_ref\n")
    result = run("verify", "mine:kl", "--json", cwd=tmp_path)
    answer = json.loads(result.stdout)
    assert result.returncode == 1
    assert answer["command"] == "verify"
    assert answer["ok"] is False
    assert answer["gradient"] == "zero"
    assert answer["verdict"] == "wrong"
    assert {"value", "saturates_at", "overflows_at", "advice"} <= set(answer)


@pytest.mark.torch
@pytest.mark.parametrize("json_flag", [[], ["--json"]])
def test_what_cannot_be_used_is_one_sentence_and_exit_code_2(json_flag):
    result = run("verify", "nowhere.py:kl", *json_flag)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("FunctionError: nowhere.py is not a file")


@pytest.mark.torch
def test_what_a_function_prints_stays_out_of_the_object():
    talks = Path(__file__).parents[1] / "verify" / "kl_functions.py"
    result = run("verify", f"{talks}:talks", "--json")
    assert json.loads(result.stdout)["arguments"] == {"logp": "logp", "logp_ref": "logp_ref"}
    assert "hello" in result.stderr


@pytest.mark.torch
def test_a_mistake_of_our_own_is_a_sentence_and_exit_code_3(tmp_path):
    program = (
        "import sys\nfrom klinic.verify import proof\n"
        "def broken(_):\n    raise RuntimeError('two and two')\n"
        "proof.prove = broken\nsys.argv = ['klinic', 'verify']\n"
        "from klinic.cli import main\nmain()"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert result.returncode == 3
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("Internal error (a bug in klinic): RuntimeError: two and two\n")


@pytest.mark.torch
def test_verify_prints_its_object_and_nothing_else():
    result = run("verify", "--json")
    answer = json.loads(result.stdout)
    assert result.returncode == 0
    assert result.stderr == ""
    assert answer["ok"] is True
    assert answer["klinic"] == klinic.__version__
    assert answer["worst_identity_error"] < 1e-9
    keys = {"name", "kind", "gradient", "bias", "variance", "cap_bias", "ok"}
    assert all(keys <= set(row) for row in answer["rows"])


@pytest.mark.torch
def test_a_failing_identity_is_exit_code_1(monkeypatch, capsys):
    import typer

    from klinic.cli.verify import verify
    from klinic.verify import proof

    wrong = proof.IdentityCheck(name="a", statement="two and two are five", error=1.0)
    broken = proof.Proof(rows=[], checks=[wrong], aggregation=[], advantage=[], correction=[])
    monkeypatch.setattr(proof, "prove", lambda _: broken)
    with pytest.raises(typer.Exit) as exit_:
        verify()
    assert exit_.value.exit_code == 1
    assert "FAILS two and two are five" in capsys.readouterr().out


@pytest.mark.slow  # verify is proved, and printed for people, by tests/verify/test_proof.py
@pytest.mark.torch
def test_the_named_sections_print_for_people_and_machines():
    people = run("verify", "importance-sampling")
    machines = run("verify", "direction", "--json")
    assert people.returncode == machines.returncode == 0
    assert "chi-square" in people.stdout
    assert "TRL" in people.stdout
    answer = json.loads(machines.stdout)
    assert answer["command"] == "verify direction"
    assert {"kl", "chi_square", "reversed_error", "estimates"} <= set(answer["rows"][0])


def test_the_installed_script_is_there():
    script = Path(sys.executable).with_name("klinic")
    assert subprocess.run([script, "--version"], check=True, capture_output=True).returncode == 0


def test_the_flag_of_recorded_code_is_the_one_that_messages_name():
    from klinic.cli import recorded_code
    from klinic.recipe import recorded

    assert (recorded_code.FLAG, recorded_code.MODEL_CODE) == (recorded.FLAG, recorded.MODEL_CODE)
