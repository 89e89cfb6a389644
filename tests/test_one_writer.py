"""Files are written by one module; what else can write is listed here with its reason."""

import ast
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "src" / "klinic"
WRITER = "evidence/writing.py"
METHODS = {
    *("write_text", "write_bytes", "touch", "symlink_to", "hardlink_to"),
    *("savefig", "save_pretrained", "save_file", "write_table", "to_parquet", "to_csv"),
    *("copyfile", "copy", "copy2", "copytree", "move", "rmtree", "mkfifo"),
    *("SummaryWriter", "ParquetWriter", "HuggingFaceStorageWriter", "NamedTemporaryFile"),
}
# of a module alone: `copy` is a method of dictionaries, too
OF_SHUTIL = {"copy", "copy2", "move"}
DRAFT = "into a folder that `make_fresh_folder` has made, and that is renamed when it is whole"
ALLOWED = {
    ("evidence/store.py", "write_table"): "into memory",
    ("evidence/processes.py", "write_table"): "into memory",
    ("lab/ablation/plots.py", "savefig"): "into memory",
    ("lab/ablation/results.py", "write_table"): "into memory",
    ("lab/confusion.py", "savefig"): "into memory",
    ("lab/demo/run.py", "rmtree"): "the new folder of a demo that ended before its first step",
    ("lab/pairs.py", "rmtree"): "a temporary folder of its own",
    ("lab/scoreboard.py", "rmtree"): "a temporary folder of its own",
    ("learner/checkpoint.py", "save_file"): DRAFT,
    ("learner/checkpoint.py", "save_pretrained"): DRAFT,
    ("learner/row_shares.py", "write_table"): "into a connection between processes",
    ("learner/sharded_files.py", "HuggingFaceStorageWriter"): DRAFT,
    ("trackers/tensorboard.py", "SummaryWriter"): "a new file in a run that has no link out",
    ("training/given_model.py", "save_pretrained"): DRAFT,
    ("training/warm_start.py", "copytree"): "from the cache to a folder that is not there yet",
    ("training/warm_start.py", "rmtree"): "drafts and damaged results in klinic's cache",
    ("model/adapter_files.py", "save_pretrained"): DRAFT,
    ("model/model_writer.py", "open"): DRAFT,
    ("model/model_writer.py", "save_pretrained"): DRAFT,
    ("model/model_writer.py", "write_bytes"): DRAFT,
    ("runtime/regular_file.py", "os.open"): "for reading: its flags are O_RDONLY",
    ("sampler/vllm/engine_sampler.py", "rmtree"): "a temporary folder of its own",
    ("runtime/user_code.py", "open"): "a standard stream, by its number",
    ("runtime/cleanup_process.py", "rmtree"): "a temporary folder of a process that is gone",
}


def calls_that_write(tree):
    """Yield the name of every call that may write a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = called(node.func)
            if name in {"open", "fdopen"} and mode_of(node) & set("wax+"):
                yield "open"
            elif name == "open" and is_of(node.func, "os"):
                if not (read_only(node) or ast.unparse(node.args[0]) == "os.devnull"):
                    yield "os.open"
            elif name in METHODS and (name not in OF_SHUTIL or is_of(node.func, "shutil")):
                yield name


def called(function):
    return getattr(function, "attr", None) or getattr(function, "id", None)


def is_of(function, module):
    return isinstance(function, ast.Attribute) and getattr(function.value, "id", "") == module


def read_only(call):
    flags = ast.unparse(call.args[1])
    return "O_RDONLY" in flags and "O_CREAT" not in flags


def mode_of(call):
    """Return the letters of the mode that a file is opened with."""
    if is_of(call.func, "os") and called(call.func) == "open":
        return set()
    place = 1 if isinstance(call.func, ast.Name) or called(call.func) == "fdopen" else 0
    given = [word.value for word in call.keywords if word.arg == "mode"]
    given += call.args[place : place + 1]
    return {
        letter for node in given if isinstance(node, ast.Constant) for letter in str(node.value)
    }


def found():
    for path in sorted(SOURCES.rglob("*.py")):
        name = path.relative_to(SOURCES).as_posix()
        if name != WRITER:
            for call in calls_that_write(ast.parse(path.read_text())):
                yield name, call


def test_no_other_module_writes_files():
    assert sorted(set(found()) - set(ALLOWED)) == []


def test_every_exception_is_still_there():
    assert sorted(set(ALLOWED) - set(found())) == []


def test_what_writes_is_seen():
    source = """
open(p, "w"); open(p, mode="ab"); p.open("x"); open(p); p.open("rb"); p.open()
p.write_text(t); shutil.copy(a, b); d.copy(); os.open(p, os.O_WRONLY); os.open(p, os.O_RDONLY)
os.fdopen(h, "wb")
"""
    seen = list(calls_that_write(ast.parse(source)))
    assert sorted(seen) == ["copy", "open", "open", "open", "open", "os.open", "write_text"]
