"""A batch of verl 0.9.1 as its TransferQueue returns it, and the configuration of its run."""

from types import SimpleNamespace

import numpy as np

PROMPTS = [[5, 6], [5, 6], [7], [7]]
RESPONSES = [[8, 9, 1], [8, 1], [9, 9, 9], [9, 1]]
SAMPLER = [[-0.5, -0.25, -0.125], [-0.5, -1.0], [-2.0, -1.0, -0.5], [-2.0, -0.75]]
SCORES = [1.0, 0.0, 0.5, 0.25]
ADVANTAGES = [0.7, -0.7, 0.3, -0.3]


class Tokenizer:
    eos_token_id, pad_token_id, name_or_path = 1, 0, "/nowhere"

    def __len__(self):
        return 10

    def decode(self, ids):
        return "".join(f"<{number}>" for number in ids)


def configuration(**changes):
    """Return verl's configuration; `changes` are dotted keys with __ for the dots."""
    values = {
        "actor_rollout_ref": {
            "actor": {
                "strategy": "fsdp2",
                "fsdp_config": {},
                "use_kl_loss": True,
                "kl_loss_coef": 0.01,
                "kl_loss_type": "low_var_kl",
                "loss_agg_mode": "token-mean",
                "policy_loss": {"loss_mode": "vanilla"},
                "clip_ratio": 0.2,
                "clip_ratio_low": 0.2,
                "clip_ratio_high": 0.28,
                "ppo_mini_batch_size": 2,
                "ppo_epochs": 1,
                "entropy_coeff": 0,
                "optim": {"lr_warmup_steps": -1, "lr_warmup_steps_ratio": 0.1},
            },
            "rollout": {
                "n": 2,
                "temperature": 1.0,
                "top_p": 1,
                "top_k": -1,
                "dtype": "bfloat16",
                "logprobs_mode": "processed_logprobs",
                "calculate_log_probs": True,
                "agent": {"default_agent_loop": "single_turn_agent"},
                "multi_turn": {"enable": False},
            },
        },
        "algorithm": {
            "adv_estimator": "grpo",
            "norm_adv_by_std_in_grpo": True,
            "use_kl_in_reward": False,
            "kl_penalty": "kl",
            "kl_ctrl": {"kl_coef": 0.001},
            "rollout_correction": {"rollout_rs": None, "bypass_mode": False},
        },
        "data": {"train_batch_size": 2, "max_response_length": 3},
        "trainer": {"v1": {"trainer_mode": "sync", "sampler": {"max_off_policy_threshold": 8}}},
    }
    for name, value in changes.items():
        *path, last = name.split("__")
        section = values
        for part in path:
            section = section[part]
        section[last] = value
    return values


def fields(**changes):
    """Return the fields of a step: one array per row."""
    values = {
        "uid": ["a", "a", "b", "b"],
        "prompts": [np.array(ids) for ids in PROMPTS],
        "responses": [np.array(ids) for ids in RESPONSES],
        "response_mask": [np.ones(len(ids), np.int64) for ids in RESPONSES],
        "rollout_log_probs": [np.array(row, np.float32) for row in SAMPLER],
        "old_log_probs": [np.array(row, np.float32) - 0.125 for row in SAMPLER],
        "ref_log_prob": [np.array(row, np.float32) - 0.25 for row in SAMPLER],
        "entropy": [np.full(len(ids), 0.5, np.float32) for ids in RESPONSES],
        "advantages": [np.full(len(ids), a) for ids, a in zip(RESPONSES, ADVANTAGES, strict=True)],
        "rm_scores": [
            np.array([0.0] * (len(ids) - 1) + [score])
            for ids, score in zip(RESPONSES, SCORES, strict=True)
        ],
        "num_turns": [2, 2, 2, 2],
    }
    return {name: value for name, value in {**values, **changes}.items() if value is not None}


def batch_meta(version=2, **changes):
    """Return keys and tags of a step."""
    tags = [{"status": "success", "min_global_steps": version} for _ in RESPONSES]
    values = {"keys": ["a_0_0", "a_1_0", "b_0_0", "b_1_0"], "tags": tags, "partition_id": "train"}
    return SimpleNamespace(**{**values, **changes})


METRICS = {
    "actor/pg_loss": 0.5,
    "actor/kl_loss": 0.25,
    "actor/grad_norm": 1.5,
    "actor/lr": 1e-6,
    "val-core/sum/reward/mean@1": 0.5,
    "val-core/other/reward/mean@1": 0.25,
    "val-aux/sum/reward/mean@1": 9.0,
}
