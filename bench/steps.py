"""One training step at a time: by hand, with klinic, with TRL; the same model, sizes and settings.

Bare is what torch and transformers do when asked: `generate`, a forward pass, for a KL one more by
the reference, k3, backward, clipping, AdamW. It writes nothing and checks nothing.
"""

import contextlib
import io
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from bench.in_step_timing import Inside
from bench.models import prompts

RATE = 1e-6
FROM = 129
"""Of a long run: it asks and looks more often at its beginning, and what that costs is soon little.
Of the steps that follow, one in fifty takes the KL's gradient apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much a step has to do; all completions are equally long."""

    vocabulary: int
    prompts: int = 4
    group: int = 8
    prompt_length: int = 16
    completion_length: int = 32

    @property
    def rows(self) -> int:
        """Completions of a step."""
        return self.prompts * self.group

    def texts(self) -> list[str]:
        """Return the prompts that there are."""
        return prompts(8 * self.prompts, self.prompt_length, self.vocabulary)


def length_reward(completions: list[str], **_: Any) -> list[float]:
    """Return something that differs from completion to completion."""
    return [float(sum(map(ord, text)) % 10) for text in completions]


class Bare:
    """A step by hand."""

    def __init__(self, model: Path, sizes: Sizes, kl_coef: float) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._sizes, self._kl_coef = sizes, kl_coef
        self._lm: Any = AutoModelForCausalLM.from_pretrained(model)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self._reference: Any = AutoModelForCausalLM.from_pretrained(model) if kl_coef else None
        self._optimizer = torch.optim.AdamW(
            self._lm.parameters(), lr=RATE, weight_decay=0.0, fused=True
        )
        ids = self._tokenizer(sizes.texts(), return_tensors="pt").input_ids
        self._batches = ids.split(sizes.prompts)
        self._step = 0

    def __call__(self) -> None:
        """Make a step."""
        ids = self._batches[self._step % len(self._batches)].repeat_interleave(self._sizes.group, 0)
        self._step += 1
        rows = self._sampled(ids)
        advantage = self._advantage(rows[:, ids.shape[1] :])
        logp = self._logp(self._lm, rows)
        ratio = (logp - logp.detach()).exp()
        loss = -(torch.minimum(ratio, ratio.clamp(0.8, 1.2)) * advantage[:, None]).mean()
        if self._reference is not None:
            with torch.no_grad():
                logp_ref = self._logp(self._reference, rows)
            d = logp_ref - logp
            loss = loss + self._kl_coef * (d.exp() - 1 - d).mean()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self._lm.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def _sampled(self, ids: Tensor) -> Tensor:
        self._lm.eval()
        rows: Tensor = self._lm.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            max_new_tokens=self._sizes.completion_length,
        )
        self._lm.train()
        return rows

    def _advantage(self, completions: Tensor) -> Tensor:
        texts = self._tokenizer.batch_decode(completions, skip_special_tokens=True)
        reward = torch.tensor(length_reward(texts)).view(-1, self._sizes.group)
        spread = reward - reward.mean(1, keepdim=True)
        return (spread / (reward.std(1, keepdim=True) + 1e-4)).flatten()

    def _logp(self, lm: Any, rows: Tensor) -> Tensor:
        start = self._sizes.prompt_length
        logits = lm(rows, logits_to_keep=self._sizes.completion_length + 1).logits[:, :-1]
        return torch.log_softmax(logits, -1).gather(-1, rows[:, start:, None])[..., 0]


class Klinic:
    """A run of klinic, a step at a time, with all that it writes."""

    def __init__(
        self, model: Path, sizes: Sizes, kl_coef: float | None, folder: Path, **settings: Any
    ) -> None:
        from klinic.recipe.loading import from_keywords
        from klinic.training.run_folder import open_folder, write_recipe
        from klinic.training.source import FROM_PYTHON, PythonInputs, load_task_data
        from klinic.training.train import assemble_run, start_new_run

        how: dict[str, Any] = {
            "data.path": FROM_PYTHON,
            "sampling.max_new_tokens": sizes.completion_length,
            "loop.max_steps": 10**6,
            "loop.prompts_per_step": sizes.prompts,
            "loop.group_size": sizes.group,
            "loop.checkpoint_every": 0,
            "loop.eval_every": 0,
            "learner.micro_batch_size": sizes.rows,
            "learner.learning_rate": RATE,
            "learner.advantage": "group_std",
            "output.trackers": [],
            "output.dir": str(folder),
            **settings,
        }
        if kl_coef is not None:
            how["kl.coef"] = kl_coef
        else:
            how["kl"] = None
        recipe = from_keywords(model=str(model), **how).recipe
        rows = [{"prompt": text} for text in sizes.texts()]
        source = load_task_data(recipe, PythonInputs(reward_functions=[length_reward], rows=rows))
        open_folder(recipe, folder.name, resume=False)
        write_recipe(folder, recipe)
        self._run = assemble_run(recipe, folder, source, Console(quiet=True))
        self._run.__enter__()
        self._state = replace(start_new_run(self._run), step=FROM)
        self._run.open_doctor(after=0)
        self.thread = threading.main_thread()

    def time_evidence(self, clock: Inside) -> None:
        """Let a clock run while questions are asked, a step is judged, and a record is written."""
        run: Any = self._run
        parts = ((run, "run_probes"), (run.doctor, "submit_step"), (run._record_writer, "put"))
        for owner, name in parts:
            setattr(owner, name, clock.added(getattr(owner, name)))

    def __call__(self) -> None:
        """Make a step and keep it."""
        from klinic.training.step import run_step

        with deterministic():
            done, self._state = run_step(self._run, self._state)
            self._run.record_step(done, self._state)

    def close(self) -> None:
        """Write what is left to write."""
        self._run.__exit__(None, None, None)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Let torch work as klinic has it work, and others as they have it."""
    torch.use_deterministic_algorithms(mode=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode=False)


class Trl:
    """TRL's trainer, a step at a time: it trains in a thread that waits after every step."""

    def __init__(
        self,
        model: Path,
        sizes: Sizes,
        kl_coef: float,
        folder: Path,
        *,
        attached: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin to train; `attached` are arguments of `klinic.attach`, if it is to be there."""
        from datasets import Dataset
        from transformers import TrainerCallback
        from trl import GRPOConfig, GRPOTrainer

        go, done = threading.Semaphore(0), threading.Semaphore(0)

        class Gate(TrainerCallback):  # type: ignore[misc]
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                go.acquire()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                done.release()

        with contextlib.redirect_stdout(io.StringIO()):
            self._trainer = GRPOTrainer(
                str(model),
                reward_funcs=length_reward,
                args=GRPOConfig(
                    output_dir=str(folder),
                    use_cpu=True,
                    bf16=False,
                    gradient_checkpointing=False,
                    model_init_kwargs={"dtype": "float32"},
                    beta=kl_coef,
                    per_device_train_batch_size=sizes.rows,
                    num_generations=sizes.group,
                    max_completion_length=sizes.completion_length,
                    max_steps=10**6,
                    learning_rate=RATE,
                    lr_scheduler_type="constant",
                    save_strategy="no",
                    report_to="none",
                    disable_tqdm=True,
                    logging_strategy="no",
                ),
                train_dataset=Dataset.from_dict({"prompt": sizes.texts()}),
            )
        self._go, self._done = go, done
        if attached is not None:
            import klinic

            quiet = Console(file=io.StringIO())
            klinic.attach(self._trainer, folder / "run", console=quiet, **attached)
        self._trainer.add_callback(Gate())  # the last: what others do at the end belongs to a step
        self.thread = threading.Thread(target=self._trainer.train, daemon=True)

    def __call__(self) -> None:
        """Make a step. The batch of the next is generated when it begins."""
        if self.thread.ident is None:  # not before: another trainer that is made resets Accelerate
            self.thread.start()
        self._go.release()
        self._done.acquire()


Arm = Callable[[], None]
