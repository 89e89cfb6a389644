"""`python -m bench.scale_measured FOLDER`: what of docs/explanation/scale.md a CPU can measure.

Completions of a real model, drawn, scored and written as a run does it: bytes on disk and on the
wire for each token, and matrix products as torch counts them. Nothing is trained. Half of the rows
and all of them are written, so that what a file holds besides its tokens cancels out.
"""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from rich.console import Console

from klinic.capacity.bytes_moved import PROMPT_TOKEN_BYTES, SENT_TOKEN_BYTES, stored_per_token
from klinic.capacity.flops import decoder_shape
from klinic.evidence.record import StepRecord, first_rows
from klinic.evidence.rollout import Prompt, flatten_rollouts
from klinic.evidence.store import part_name, write_part
from klinic.learner.packing import make_micro_batches, split_rows
from klinic.learner.row_shares import encode_share, share_of_rank
from klinic.model.chat import PromptEncoder
from klinic.model.loading import Policy, load_policy, num_parameters
from klinic.model.scorer import TokenScorer
from klinic.recipe.sections import ModelSection
from klinic.sampler.token_sampling import SamplingParams
from klinic.sampler.transformers import TransformersSampler

QUESTIONS = (
    "Tell me about the capital of France.",
    "How do I bake a loaf of bread?",
    "Why is the sky blue?",
    "Write a short story about a lighthouse.",
)
GROUP, NEW_TOKENS = 4, 64
FOUND = ("logp", "logp_old", "logp_ref", "entropy", "rank", "kl_exact")


def record_of(policy: Policy) -> StepRecord:
    """Return real completions with everything that a step finds out about them."""
    encode = PromptEncoder(policy.tokenizer, policy.name)
    prompts = []
    for index, question in enumerate(QUESTIONS):
        chat = [{"role": "user", "content": question}]
        prompt = encode(chat if policy.tokenizer.chat_template else question)
        prompts.append(
            Prompt(index=index, text=prompt.text, token_ids=prompt.token_ids, columns={})
        )
    how = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
    sampler = TransformersSampler(
        policy, params=how, max_new_tokens=NEW_TOKENS, group_size=GROUP, seed=0
    )
    groups = {g[0].prompt.index: g for g in sampler.sample(prompts, step=1)}
    record = flatten_rollouts(
        [rollout for index in sorted(groups) for rollout in groups[index]], step=1
    )
    rewards = np.linspace(0, 1, record.num_rows)
    return scored(policy, replace(record, reward=rewards, advantage=rewards - 0.5))


@torch.no_grad()
def scored(policy: Policy, record: StepRecord) -> StepRecord:
    """Return the record with what policy and reference say; the latter is the model in bf16."""
    cpu = torch.device("cpu")
    batches = make_micro_batches(record, size=4, pad_id=policy.pad_id, device=cpu)
    ours = [policy.scorer(batch.layout) for batch in batches]
    other = TokenScorer(policy.lm, temperature=1.0, autocast=torch.bfloat16)
    theirs = [other(batch.layout) for batch in batches]
    logp, logp_ref = (torch.cat([s.logp for s in side]).numpy() for side in (ours, theirs))
    looked = np.repeat(record.sample == 0, np.diff(record.row_offsets))
    return replace(
        record,
        logp=logp,
        logp_old=logp,
        logp_ref=logp_ref,
        entropy=torch.cat([s.entropy for s in ours]).numpy(),
        rank=torch.cat([s.rank for s in ours]).numpy(),
        kl_exact=np.where(looked, np.square(logp - logp_ref), np.nan).astype(np.float32),
    )


def on_disk(record: StepRecord) -> dict[str, int]:
    """Return the bytes of each column on disk."""
    with tempfile.TemporaryDirectory() as folder:
        write_part(Path(folder), record, 0)
        (file,) = Path(folder).rglob(part_name(0))
        columns = pq.ParquetFile(file).metadata.row_group(0)
        sizes = {
            columns.column(i).path_in_schema.partition(".")[0]: columns.column(
                i
            ).total_compressed_size
            for i in range(columns.num_columns)
        }
        return sizes | {"file": file.stat().st_size}


def as_sent(record: StepRecord) -> StepRecord:
    """Return what of a record is known before it is scored."""
    return replace(record, **dict.fromkeys(FOUND))


def encode_rows(record: StepRecord) -> np.ndarray:
    """Return all rows as they are sent to one rank."""
    row_sets = split_rows(record, size=8, num_ranks=1)
    return encode_share(share_of_rank(record, row_sets, rank=0, num_ranks=1))


def main(folder: str) -> None:
    """Print what was measured beside what is computed."""
    say = Console(highlight=False, soft_wrap=True).print
    policy = load_policy(ModelSection(name=folder), temperature=1.0, seed=0)
    record = record_of(policy)
    half = first_rows(record, record.num_rows // 2)
    more = record.num_tokens - half.num_tokens
    counts = num_parameters(policy.lm)
    shape = decoder_shape(policy.lm, **counts)
    say(f"{folder}: {shape}")
    say(f"{record.num_rows} rows, {record.num_tokens} tokens")
    whole, part = on_disk(record), on_disk(half)
    for name, size in whole.items():
        say(f"  {name}: {size} B, {(size - part[name]) / more:.2f} B a token")
    expected = stored_per_token(shape, group=GROUP, reference=True)
    say(f"evidence: computed {expected:.2f} B a token, without prompts")
    sent, sent_half = encode_rows(as_sent(record)), encode_rows(as_sent(half))
    ids = PROMPT_TOKEN_BYTES * (len(record.prompt_ids) - len(half.prompt_ids))
    per_token = (len(sent) - len(sent_half) - ids) / more
    say(
        f"sent: {per_token:.2f} B a token with its rows, "
        f"computed {sum(SENT_TOKEN_BYTES.values()):.2f}"
    )


if __name__ == "__main__":
    main(sys.argv[1])
