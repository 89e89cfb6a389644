"""What the cases of this folder share, right as it stands: data, rewards, a config, a rollout, and the call of klinic."""
import os

for _k, _v in {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false"}.items():
    os.environ.setdefault(_k, _v)
import json
import random
import re
import shutil
import sys
import tempfile
from pathlib import Path

import torch

torch.set_num_threads(1)
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

FULL = os.environ["BLIND_FULL"]
EARLY = os.environ["BLIND_EARLY"]
SCRATCH = tempfile.mkdtemp(prefix="blind_trl_")


def folder():
    """The run folder, the one argument of every case."""
    return Path(sys.argv[1]).resolve()


def rows(n=600, lo=10, hi=99, seed=3, keep=lambda a, b: True):
    rng, out = random.Random(seed), []
    while len(out) < n:
        a, b = rng.randint(lo, hi), rng.randint(lo, hi)
        if keep(a, b):
            out.append({"prompt": f"{a}+{b}=", "answer": str(a + b)})
    return out


def data(**kw):
    return Dataset.from_list(rows(**kw))


def accuracy(completions, answer, **_):
    return [float(c.strip() == a) for c, a in zip(completions, answer)]


def closeness(completions, answer, **_):
    """Share of the digits that are right, from the left; nothing if it is no number or of another length."""
    out = []
    for c, a in zip(completions, answer):
        c = c.strip()
        out.append(sum(x == y for x, y in zip(c, a)) / len(a) if c.isdigit() and len(c) == len(a) else 0.0)
    return out


def number(text):
    """The answer in a completion, or None."""
    found = re.fullmatch(r"\s*(\d+)\s*", text)
    return found.group(1) if found else None


def config(**over):
    base = dict(
        output_dir=SCRATCH, seed=11, use_cpu=True, bf16=False, report_to="none", save_strategy="no", logging_steps=1,
        disable_tqdm=True, gradient_checkpointing=False, max_steps=14, per_device_train_batch_size=64, num_generations=8,
        max_completion_length=8, learning_rate=3e-4, lr_scheduler_type="constant", beta=0.04, loss_type="grpo",
    )
    base.update(over)
    return GRPOConfig(**base)


def load(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


@torch.no_grad()
def sample(model, tokenizer, contexts, temperature, length):
    """One completion per list of context ids: ids with the end token, and their log-probs as sampled from."""
    width = max(map(len, contexts))
    ids = torch.tensor([[tokenizer.pad_token_id] * (width - len(c)) + c for c in contexts])
    mask = torch.tensor([[0] * (width - len(c)) + [1] * len(c) for c in contexts])
    was = model.training
    model.eval()
    out = model.generate(
        input_ids=ids, attention_mask=mask, do_sample=True, temperature=temperature, top_k=0, top_p=1.0, max_new_tokens=length,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, return_dict_in_generate=True, output_scores=True,
    )
    model.train(was)
    logp = torch.stack(out.scores, 1).log_softmax(-1)
    new = out.sequences[:, width:]
    logp = logp.gather(-1, new[..., None])[..., 0]
    completions, logps = [], []
    for row, lp in zip(new.tolist(), logp.tolist()):
        end = row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row)
        completions.append(row[:end])
        logps.append(lp[:end])
    return completions, logps


class Watch(TrainerCallback):
    """Keeps the logs, for the proofs."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kw):
        if logs and "reward" in logs:
            self.logs.append({k: v for k, v in logs.items() if isinstance(v, (int, float))})


def go(trainer, proof, parse=number):
    """Attach as the documentation says, train, prove. `proof(trainer, logs, before)` returns numbers and asserts."""
    import klinic

    run = folder()
    watch = Watch()
    trainer.add_callback(watch)
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    more = {} if parse is None else {"parse": parse}
    klinic.attach(trainer, str(run), doctor=os.environ.get("BLIND_DOCTOR", "none"), **more)
    trainer.train()
    said = proof(trainer, watch.logs, before)
    say = {k: [round(float(x.get(k) or 0.0), 4) for x in watch.logs] for k in ("reward", "kl", "grad_norm", "learning_rate", "entropy")}
    run.with_name(run.name + ".proof.json").write_text(json.dumps({"proof": said, **say}, indent=1))
    shutil.rmtree(SCRATCH, ignore_errors=True)


def moved(trainer, before):
    return max(float((p.detach().float() - before[n].float()).abs().max()) for n, p in trainer.model.named_parameters() if n in before)
