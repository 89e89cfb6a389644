"""Run folders as a stranger could send them, each with one canary that writes a file when run."""

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from klinic.recipe.yaml_text import dump_yaml, parse_yaml

CODE = """
from pathlib import Path
Path({fired!r}).write_text("the code of the run folder ran")

def reward(prompts, completions, **columns):
    return [float(len(text)) for text in completions]

def row(row):
    return row

def reply(messages, **columns):
    return None
"""
MODELLING = """
from transformers import {kind}Config, {model}

class StrangerConfig({kind}Config):
    model_type = "stranger"

class Stranger({model}):
    config_class = StrangerConfig
"""
TOKENIZING = """
from transformers import PreTrainedTokenizerFast

class StrangerTokenizer(PreTrainedTokenizerFast):
    pass
"""
SCRIPT = """
import datasets

class Rows(datasets.GeneratorBasedBuilder):
    def _info(self):
        return datasets.DatasetInfo()
"""
TEMPLATE = (
    "{{{{ ().__class__.__base__.__subclasses__() }}}}{{{{ cycler.__init__.__globals__.os.system("
    "'touch {fired}') }}}}{{% for message in messages %}}{{{{ message.content }}}}{{% endfor %}}"
)


class Received:
    """A copy of a finished run, and the file that is there once its canary has run."""

    def __init__(self, run: Path, folder: Path) -> None:
        self.run = Path(shutil.copytree(run, folder / "run", symlinks=True))
        self.fired = folder / "fired"
        self.code = self.run / "evil.py"
        self.code.write_text(CODE.format(fired=str(self.fired)))

    @property
    def has_run(self) -> bool:
        """Whether the canary ran; ask once, it is taken away."""
        there = self.fired.exists()
        self.fired.unlink(missing_ok=True)
        return there

    def change_recipe(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Change what the recorded recipe says."""
        path = self.run / "recipe.yaml"
        recipe = parse_yaml(path.read_text(), where="")
        change(recipe)
        path.write_text(dump_yaml(recipe))

    def own_rows(self, rewards: list[str], **sections: Any) -> None:
        """Let the recorded recipe name rows of the run folder, and these rewards."""
        rows = self.run / "rows.jsonl"
        rows.write_text('{"prompt": "1+1="}\n{"prompt": "2+2="}\n')

        def change(recipe: dict[str, Any]) -> None:
            recipe["data"] = {"path": str(rows)}
            recipe["rewards"] = rewards
            for name, values in sections.items():
                recipe[name] = {**(recipe.get(name) or {}), **values}

        self.change_recipe(change)

    def models(self) -> list[Path]:
        """Return every folder of the run that holds a model."""
        return [config.parent for config in self.run.rglob("config.json")]

    def change_config(self, file: str, values: Mapping[str, Any]) -> None:
        """Add values to a JSON file of every model."""
        for model in self.models():
            config = json.loads((model / file).read_text())
            (model / file).write_text(json.dumps({**config, **values}))

    def reseal(self) -> None:
        """Give every checkpoint the digests of the files that it has now."""
        for checkpoint in (self.run / "checkpoints").iterdir():
            files = sorted(
                file
                for file in checkpoint.rglob("*")
                if file.is_file() and file.name != "manifest.json"
            )
            digests = {
                str(file.relative_to(checkpoint)): hashlib.sha256(file.read_bytes()).hexdigest()
                for file in files
            }
            over = hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()
            manifest = {"files": digests, "digest": over}
            (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def reward(received: Received) -> None:
    """A reward function of a task's run."""
    received.change_recipe(lambda recipe: recipe.update(rewards=[f"{received.code}:reward"]))


def killable_reward(received: Received) -> None:
    """A reward function in a process of its own."""
    entry = {"function": f"{received.code}:reward", "timeout": 30.0}
    received.change_recipe(lambda recipe: recipe.update(rewards=[entry]))


def own_reward(received: Received) -> None:
    """A reward function of a run on rows of its own."""
    received.own_rows([f"{received.code}:reward"])


def held_out_reward(received: Received) -> None:
    """A reward function of held-out rows."""
    rows = str(received.run / "rows.jsonl")
    held_out = {"path": rows, "rewards": [f"{received.code}:reward"]}
    received.own_rows(["klinic.tasks.arithmetic.rewards:binary"], eval=held_out)


def retention_reward(received: Received) -> None:
    """A reward function of rows that training should not spoil."""
    rows = str(received.run / "rows.jsonl")
    kept = {"path": rows, "rewards": [f"{received.code}:reward"]}
    received.own_rows(["klinic.tasks.arithmetic.rewards:binary"], retention=kept)


def data_map(received: Received) -> None:
    """A function that maps rows."""
    rows = str(received.run / "rows.jsonl")
    mapped = {"path": rows, "map": f"{received.code}:row"}
    received.own_rows(["klinic.tasks.arithmetic.rewards:binary"], data=mapped)


def reply(received: Received) -> None:
    """A function that answers in the middle of a completion."""
    answering = {"reply": f"{received.code}:reply"}
    received.own_rows(["klinic.tasks.arithmetic.rewards:binary"], sampling=answering)


def model_code(received: Received) -> None:
    """Python files beside the weights, with the recorded recipe's word that they may run."""
    _trust(received)
    fired = CODE.format(fired=str(received.fired))
    config = json.loads((received.models()[0] / "config.json").read_text())
    name = config["architectures"][0]
    kind = name.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
    for model in received.models():
        (model / "modelling_stranger.py").write_text(
            fired + MODELLING.format(kind=kind, model=name)
        )
    names = {"AutoConfig": "StrangerConfig", "AutoModelForCausalLM": "Stranger"}
    mapped = {auto: f"modelling_stranger.{name}" for auto, name in names.items()}
    received.change_config("config.json", {"model_type": "stranger", "auto_map": mapped})
    received.reseal()


def tokenizer_code(received: Received) -> None:
    """Python files of a tokenizer, with the recorded recipe's word that they may run."""
    _trust(received)
    for model in received.models():
        text = CODE.format(fired=str(received.fired)) + TOKENIZING
        (model / "tokenizing_stranger.py").write_text(text)
    mapped = {"AutoTokenizer": [None, "tokenizing_stranger.StrangerTokenizer"]}
    named = {"tokenizer_class": "StrangerTokenizer", "auto_map": mapped}
    received.change_config("tokenizer_config.json", named)
    received.reseal()


def pickle_alone(received: Received) -> None:
    """Weights that are a pickle, and no others."""
    _pickles(received)
    for model in received.models():
        (model / "model.safetensors").unlink()
    received.reseal()


def pickle_beside(received: Received) -> None:
    """A pickle beside the weights."""
    _pickles(received)
    received.reseal()


def dataset_script(received: Received) -> None:
    """A dataset folder with a loading script."""
    folder = received.run / "rows"
    folder.mkdir()
    script = CODE.format(fired=str(received.fired)) + SCRIPT
    (folder / "rows.py").write_text(script)
    received.own_rows(["klinic.tasks.arithmetic.rewards:binary"], data={"path": str(folder)})


def template(received: Received) -> None:
    """A chat template that reaches for Python's own objects."""
    text = TEMPLATE.format(fired=received.fired)
    for model in received.models():
        (model / "chat_template.jinja").write_text(text)
    received.reseal()


def _trust(received: Received) -> None:
    received.change_recipe(lambda recipe: recipe["model"].update(trust_remote_code=True))


def _pickles(received: Received) -> None:
    for model in received.models():
        for name in ("pytorch_model.bin", "adapter_model.bin", "training_args.bin"):
            (model / name).write_bytes(pickled_command(f"touch {received.fired}"))


def pickled_command(command: str) -> bytes:
    """Return a pickle that runs a command when it is loaded."""
    return b"cposix\nsystem\n(V" + command.encode() + b"\ntR."


FUNCTIONS = (
    *(reward, killable_reward, own_reward, held_out_reward),
    *(retention_reward, data_map, reply),
)
MODEL_CODE = (model_code, tokenizer_code)
FILES = (pickle_alone, pickle_beside, dataset_script, template)
KINDS = (*FUNCTIONS, *MODEL_CODE, *FILES)
