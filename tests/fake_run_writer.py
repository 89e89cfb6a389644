"""A process that writes a run without training: `python writing.py FOLDER`, told by lines.

step N, torn N, event JSON, back N, half N (the first bytes of a line), rest (the others), end
"""

import json
import os
import subprocess
import sys
from pathlib import Path

LOCK = ".lock"


class Writer:
    """The other process, from this side."""

    def __init__(self, folder, **how):
        environment = {**os.environ, **how.pop("env", {})}
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(folder), json.dumps(how)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def __call__(self, *lines):
        for line in lines:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
            assert self.process.stdout.readline() == "done\n"
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()


def main(folder, how):  # noqa: PLR0915 - a list of what can be told
    import fcntl

    from klinic.evidence import store
    from klinic.evidence.files import Journal, json_bytes
    from klinic.evidence.run_facts import METRICS, write_run_facts, write_tokens
    from report.made import VOCABULARY, record

    folder.mkdir(parents=True, exist_ok=True)
    lock = (folder / LOCK).open("a")
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    (folder / "recipe.yaml").write_text(
        f"model: tiny\ntask: arithmetic\nloop: {{max_steps: {how.pop('max_steps', 9)}}}\n"
    )
    write_run_facts(folder, {"eos_ids": [1], "logp_old": "scored"})
    text = how.pop("text", "t ")
    write_tokens(folder, dict.fromkeys(range(VOCABULARY), text))
    metrics, events, rest = Journal(folder / METRICS), Journal(folder / "events.jsonl"), b""
    for line in sys.stdin:
        name, _, value = line.strip().partition(" ")
        if name == "end":
            lock.close()
        elif name == "step":
            metrics.append(numbers(int(value)))
            store.write_record(folder, record(int(value), **how))
        elif name == "half":
            whole = json_bytes(numbers(int(value))) + b"\n"
            with (folder / METRICS).open("ab") as file:
                file.write(whole[:20])
            rest = whole[20:]
        elif name == "rest":
            with (folder / METRICS).open("ab") as file:
                file.write(rest)
        elif name == "event":
            events.append(json.loads(value))
        elif name == "back":
            store.remove_records_after(folder, int(value))
            metrics.rewind(lambda entry, last=int(value): entry["step"] <= last)
        print("done", flush=True)  # noqa: T201


def numbers(step):
    named = {"reward": step / 10, "kl": 0.01 * step, "grad_norm": 0.5, "entropy": 0.3}
    times = {"time/sample": 0.5, "time/reward": 0.1, "time/learn": 0.4, "num_tokens": 100}
    return {"step": step, **named, "kl_target": 0.05, "kl_coef": 0.01, **times}


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
