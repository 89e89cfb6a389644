"""Batch dumps as other trainers write them, made up: a policy that fits in a table.

Each writer follows the source that its reader cites. The sampler may divide its logits by a
temperature, report its log-probs one place late, or be some updates behind.
"""

import json
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

VOCABULARY, GROUP, PROMPTS = 32, 4, 6


@dataclass
class Batch:
    """One step: a dict of columns per completion."""

    step: int
    rows: list


def log_softmax(logits):
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def batches(*, steps=4, length=48, seed=0, reward=None, **sampler):
    """Yield batches; `sampler` has its temperature, and by how many places it is late."""
    random = np.random.default_rng(seed)
    logits = random.normal(size=(VOCABULARY, VOCABULARY))
    start = logits.copy()
    for step in range(1, steps + 1):
        rows = [
            complete((logits, start), prompt, random, length, **sampler)
            for prompt in range(PROMPTS)
            for _ in range(GROUP)
        ]
        rewards = np.array([reward(row, random) if reward else row["even"] for row in rows])
        parts = rewards.reshape(-1, GROUP)
        deviation = parts.std(1, ddof=1, keepdims=True) + 1e-4
        advantages = ((parts - parts.mean(1, keepdims=True)) / deviation).ravel()
        for row, r, a in zip(rows, rewards, advantages, strict=True):
            row.update(reward=float(r), advantage=float(a))
        yield Batch(step, rows)
        logits = logits + 0.02 * random.normal(size=logits.shape)


def complete(policies, prompt, random, length, *, temperature=1.0, shift=0):
    logits, start = policies
    ids, told = [prompt, prompt + 1], []
    for _ in range(length):
        logp = log_softmax(logits[ids[-1]] / temperature)
        ids.append(int(random.choice(VOCABULARY, p=np.exp(logp))))
        told.append(float(logp[ids[-1]]))
    scored = log_softmax(logits[ids[1:-1]])
    reference = log_softmax(start[ids[1:-1]])
    place = np.arange(length), ids[2:]
    return {
        "prompt": ids[:2],
        "completion": ids[2:],
        "prompt_idx": prompt,
        "logp_sampler": np.roll(told, shift).tolist(),
        "logp_old": scored[place].tolist(),
        "logp_ref": reference[place].tolist(),
        "entropy": (-np.exp(scored) * scored).sum(-1).tolist(),
        "even": float(np.mean(np.array(ids[2:]) % 2 == 0)),
    }


def write_lines(path, entries):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def write_nemo_rl(folder, **how):
    for batch in batches(**how):
        width = max(len(r["prompt"]) + len(r["completion"]) for r in batch.rows) + 3
        write_lines(
            folder / f"train_data_step{batch.step}.jsonl",
            [nemo_rl_line(r, i, width) for i, r in enumerate(batch.rows)],
        )
    return folder


def nemo_rl_line(row, index, width):
    before, num = len(row["prompt"]), len(row["prompt"]) + len(row["completion"])

    def padded(values, fill=0.0):
        return [[fill] * before + list(values) + [fill] * (width - num)]

    ones = [1] * len(row["completion"])
    return {
        "content": [text(row)],
        "rewards": [row["reward"]],
        "input_lengths": [num],
        "token_ids": [row["prompt"] + row["completion"] + [0] * (width - num)],
        "token_loss_mask": padded(ones, 0),
        "sample_loss_mask": [1.0],
        "advantages": padded([row["advantage"]] * len(ones)),
        "generation_logprobs": padded(row["logp_sampler"]),
        "prev_logprobs": padded(row["logp_old"]),
        "idx": index,
    }


def text(row):
    return " ".join(map(str, row["completion"]))


def question(row):
    return f"question {row['prompt_idx']}"


def write_open_instruct(folder, **how):
    lines = [
        {
            "step": batch.step,
            "sample_idx": i,
            "prompt_idx": i // GROUP,
            "prompt_tokens": r["prompt"],
            "response_tokens": r["completion"],
            "reward": r["reward"],
            "advantage": r["advantage"],
            "finish_reason": "length",
            "dataset": "made-up",
            "ground_truth": None,
            "request_info": None,
            "logprobs": r["logp_sampler"],
        }
        for batch in batches(**how)
        for i, r in enumerate(batch.rows)
    ]
    write_lines(folder / "run_rollouts_000000.jsonl", lines[:50])
    write_lines(folder / "run_rollouts_000001.jsonl", lines[50:])
    return folder


def write_trl(folder, *, chats=False, **how):
    (folder / "completions").mkdir(parents=True, exist_ok=True)
    for batch in batches(**how):
        prompts = [
            [{"role": "user", "content": question(r)}] if chats else question(r) for r in batch.rows
        ]
        answers = [
            [{"role": "assistant", "content": text(r)}] if chats else text(r) for r in batch.rows
        ]
        table = {
            "step": [batch.step] * len(prompts),
            "prompt": prompts,
            "completion": answers,
            "accuracy": [r["reward"] for r in batch.rows],
            "solution": ["4"] * len(prompts),
            "advantage": [r["advantage"] for r in batch.rows],
        }
        name = f"completions_{batch.step:05d}.parquet"
        pq.write_table(pa.table(table), folder / "completions" / name)
    return folder


def write_ms_swift(folder, **how):
    lines = [
        {
            "step": [str(batch.step)] * len(batch.rows),
            "prompt": [question(r) for r in batch.rows],
            "completion": [text(r) for r in batch.rows],
            "Accuracy": [r["reward"] for r in batch.rows],
            "advantages": [r["advantage"] for r in batch.rows],
            "solution": ["4"] * len(batch.rows),
        }
        for batch in batches(**how)
    ]
    write_lines(folder / "completions.jsonl", lines)
    return folder


def write_areal(folder, **how):
    for batch in batches(**how):
        for i, r in enumerate(batch.rows):
            version = batch.step - 1
            path = folder / str(version) / f"{r['prompt_idx']}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            line = {
                "task_id": r["prompt_idx"],
                "sample_idx": i % GROUP,
                "seqlen": len(r["prompt"]) + len(r["completion"]),
                "prompt_len": len(r["prompt"]),
                "head_version": version,
                "tail_version": version,
                "reward": r["reward"],
                "prompt": question(r),
                "completion": text(r),
            }
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
    return folder


def write_verl(folder, **how):
    for batch in batches(**how):
        lines = [
            {"input": question(r), "output": text(r), "gts": "4", "score": r["reward"]}
            | {"step": batch.step, "uid": str(r["prompt_idx"])}
            for r in batch.rows
        ]
        write_lines(folder / f"{batch.step}.jsonl", lines)
    return folder


def write_traces(folder, **how):
    for batch in batches(**how):
        lines = [
            {"id": str(i), "group": {"id": str(r["prompt_idx"])}, "traces": [trace(r)]}
            for i, r in enumerate(batch.rows)
        ]
        path = folder / "rollouts" / f"step_{batch.step}" / "train" / "effective" / "traces.jsonl"
        write_lines(path, lines)
    return folder


def trace(row):
    middle = len(row["completion"]) // 2
    nodes = [node("user", row["prompt"], None, {})]
    for start, end in ((0, middle), (middle, None)):
        columns = {
            "logprobs": row["logp_sampler"][start:end],
            "trainer_logprobs": row["logp_old"][start:end],
            "reference_logprobs": row["logp_ref"][start:end],
            "entropies": row["entropy"][start:end],
            "advantages": [row["advantage"]] * len(row["completion"][start:end]),
        }
        columns = {k: [round(v, 4) for v in values] for k, values in columns.items()}
        nodes.append(node("assistant", row["completion"][start:end], len(nodes) - 1, columns))
    return {"nodes": nodes, "rewards": {"score": {"score": row["reward"], "weight": 1.0}}}


def node(role, ids, parent, columns):
    place = {} if parent is None else {"parent": parent}
    sampled = role == "assistant"
    mask = [sampled] * len(ids)
    message = {"role": role, "content": "x"}
    return {**place, "message": message, "token_ids": ids, "mask": mask, "logprobs": []} | columns


def write_prime_rl(folder, **how):
    write_traces(folder, **how)
    for batch in batches(**how):
        lines = [
            {
                "schema_version": 1,
                "step": batch.step,
                "rank": 0,
                "token_ids": r["prompt"] + r["completion"],
                "loss_mask": [False] * 2 + [True] * len(r["completion"]),
                "advantages": [0.0] * 2 + [r["advantage"]] * len(r["completion"]),
                "inference_logprobs": [0.0] * 2 + r["logp_sampler"],
                "trainer_logprobs": [0.0] * 2 + r["logp_old"],
                "entropy": [0.0] * 2 + r["entropy"],
            }
            for r in batch.rows
        ]
        write_lines(folder / "token_exports" / f"step_{batch.step}" / "rank_0.jsonl", lines)
    return folder


WRITERS = {
    "training data of NeMo-RL": write_nemo_rl,
    "traces of open-instruct": write_open_instruct,
    "completions of TRL": write_trl,
    "completions of ms-swift": write_ms_swift,
    "trajectories of AReaL": write_areal,
    "rollouts of verl": write_verl,
    "traces of verifiers": write_traces,
    "token export of prime-rl": write_prime_rl,
}
TEXTS = (
    "completions of TRL",
    "completions of ms-swift",
    "trajectories of AReaL",
    "rollouts of verl",
)
