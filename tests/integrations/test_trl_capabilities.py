"""What `klinic.attach` needs of a trainer, and what it says about one that lacks it."""

import contextlib
import io
import types

import pytest
from rich.console import Console

from integrations.trainers import make_trainer, save_start

pytest.importorskip("trl")

import trl
from trl.extras.profiling import profiling_decorator

import klinic
from klinic.errors import ConfigError
from klinic.evidence import store
from klinic.integrations.trl.capabilities import has_method
from klinic.integrations.trl.loss_path import reject_hidden_loss

pytestmark = pytest.mark.timeout(300)
ONE_BATCH = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "max_steps": 1}


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return save_start(tmp_path_factory.mktemp("trl") / "start")


@pytest.fixture
def trainer(start, tmp_path):
    return make_trainer(start, tmp_path / "out", **ONE_BATCH)


def attached(trainer, run):
    """Train, attached; return what was said."""
    said = io.StringIO()
    klinic.attach(trainer, run, console=Console(file=said, width=400))
    trainer.train()
    return said.getvalue()


def as_kind(trainer, name, module="mine", **methods):
    """Make the trainer one of a subclass."""
    kind = type(name, (type(trainer),), {**methods, "__module__": module})
    trainer.__class__ = kind
    return trainer


def test_a_newer_version_that_has_all_methods_is_tried_with_a_warning(
    trainer, tmp_path, monkeypatch
):
    monkeypatch.setattr(trl, "__version__", "1.23.0")
    said = attached(trainer, tmp_path / "run")
    assert "TRL is 1.23.0, and klinic is tested with 1.14 to 1.16: no method" in said
    assert store.complete_steps(tmp_path / "run") == [1]


def test_a_tested_version_is_not_warned_about(trainer, tmp_path):
    assert "TRL is" not in attached(trainer, tmp_path / "run")


def test_an_optional_method_that_is_gone_is_named_and_the_rest_recorded(
    trainer, tmp_path, monkeypatch
):
    monkeypatch.setattr(trl, "__version__", "1.23.0")
    monkeypatch.setattr(trl.GRPOTrainer, "_get_tool_suffix_ids", None)
    said = attached(trainer, tmp_path / "run")
    assert "no method _get_tool_suffix_ids, so records lack the template's tokens" in said
    assert not has_method(trainer, "_get_tool_suffix_ids")
    assert store.complete_steps(tmp_path / "run") == [1]


def test_a_needed_method_that_is_gone_is_refused_by_name(trainer, tmp_path, monkeypatch):
    monkeypatch.setattr(trl, "__version__", "2.0.0")
    monkeypatch.setattr(trl.GRPOTrainer, "_calculate_rewards", None)
    message = r"TRL is 2\.0\.0.*no method _calculate_rewards.*1\.14 to 1\.16"
    with pytest.raises(ConfigError, match=message):
        klinic.attach(trainer, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_needed_parameter_that_is_gone_is_refused_by_name(trainer, tmp_path, monkeypatch):
    monkeypatch.setattr(trl.GRPOTrainer, "_compute_loss", lambda self, model, batch: None)
    with pytest.raises(ConfigError, match="no parameter inputs in _compute_loss"):
        klinic.attach(trainer, tmp_path / "run")


def test_unsloth_is_refused_by_name(trainer, tmp_path):
    as_kind(trainer, "UnslothGRPOTrainer", "unsloth_compiled_cache.UnslothGRPOTrainer")
    with pytest.raises(ConfigError, match=r"received Unsloth's UnslothGRPOTrainer.*Recorder"):
        klinic.attach(trainer, tmp_path / "run")


def test_a_vision_model_is_refused(trainer, tmp_path):
    trainer._is_vlm = True
    with pytest.raises(ConfigError, match="reads images"):
        klinic.attach(trainer, tmp_path / "run")


@pytest.mark.parametrize(
    "name", ["DistillationTrainer", "ServerDistillationTrainer", "GKDTrainer", "GOLDTrainer"]
)
def test_a_trainer_towards_a_teacher_is_refused_by_name(name):
    kind = type(name, (), {"__module__": "trl.trainer"})
    with pytest.raises(ConfigError, match=rf"{name}.*no log-prob of a token.*logp_teacher"):
        reject_hidden_loss(kind())


def test_the_asynchronous_trainer_is_refused_by_name():
    kind = type("AsyncGRPOTrainer", (), {"__module__": "trl.experimental.async_grpo"})
    with pytest.raises(ConfigError, match=r"AsyncGRPOTrainer.*queue.*klinic\.Recorder"):
        reject_hidden_loss(kind())


def own_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
    return model(inputs["completion_ids"]).logits.mean()


def test_a_subclass_with_a_loss_of_its_own_is_refused_by_name(trainer, tmp_path):
    as_kind(trainer, "MyTrainer", compute_loss=own_loss)
    with pytest.raises(ConfigError, match=r"MyTrainer whose compute_loss.*super\(\)\.compute_loss"):
        klinic.attach(trainer, tmp_path / "run")


def through_helper(self, model, inputs, return_outputs=False, num_items_in_batch=None):
    return self.scaled(model, inputs)


def scaled(self, model, inputs):
    return 0.5 * self._compute_loss(model, inputs)


def test_a_subclass_that_calls_trls_loss_is_recorded(trainer, tmp_path):
    as_kind(trainer, "MyTrainer", compute_loss=through_helper, scaled=scaled)
    attached(trainer, tmp_path / "run")
    assert store.complete_steps(tmp_path / "run") == [1]


@profiling_decorator
def timed_loss(self, model, inputs):
    return self._get_per_token_logps_and_entropies(model, **inputs)


@profiling_decorator
def timed_own_loss(self, model, inputs):
    return own_loss(self, model, inputs)


@pytest.mark.parametrize(
    ("loss", "is_refused"),
    [(timed_loss, False), (timed_own_loss, True), (print, False)],
    ids=["decorated", "decorated and hidden", "unreadable"],
)
def test_a_loss_is_read_behind_decorators_and_tried_if_it_cannot_be_read(loss, is_refused, trainer):
    as_kind(trainer, "MyTrainer", _compute_loss=loss)
    with pytest.raises(ConfigError) if is_refused else contextlib.nullcontext():
        reject_hidden_loss(trainer)


def test_steps_that_leave_no_batch_are_said(trainer, tmp_path):
    trainer.compute_loss = types.MethodType(own_loss, trainer)
    said = attached(trainer, tmp_path / "run")
    assert "This step was trained without TRL's _compute_loss" in said
    assert "1 steps were not recorded: nothing is known about them" in said
    assert "nothing was examined" in said
    assert "no cause was found" not in said
