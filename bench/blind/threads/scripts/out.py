"""Writers in the trainers' own formats. b: the dict of GRPO.step()."""
import os, json, sys, csv, numpy as np
from sim import *

ROOT = os.path.join(os.environ["BLIND_OUT"], "cases")
_r = np.random.default_rng(77)
HFID = np.sort(np.random.default_rng(5).choice(np.arange(256, 150000), V, replace=False)); HFID = np.random.default_rng(6).permutation(HFID)
HFID[PAD], HFID[IMS], HFID[EOS] = 151643, 151644, 151645
PADID = 151643


def case(n):
    p = os.path.join(ROOT, n); os.makedirs(p, exist_ok=True); return p


def ids(x): return [int(HFID[i]) for i in x]
def f32(x): return [float(np.float32(v)) for v in x]
def row(b, i):
    n = int(np.nonzero(b["mask"][i])[0].max()) + 1 if b["mask"][i].any() else P
    return b["tok"][i][:n], n


def resp(b, i):
    t, n = row(b, i); return t[P:]


import re
def plain(s): return re.sub(r"<\|[a-z_]+\|>", "", s)


def gap(b):
    m = b["mask"] > 0
    return (b["old"] - b["slp"])[m]


def jl(path, rows, mode="w"):
    with open(path, mode) as f:
        for r in rows: f.write(json.dumps(r) + "\n")


# ---------------- NeMo-RL
def nemo_dump(d, b, sample_mask=None):
    B = len(b["tok"]); L = b["tok"].shape[1]; rows = []
    for i in range(B):
        t, n = row(b, i); k = L - n
        z = lambda x: [f32(list(x[:n]) + [0.0] * k)]
        m = b["lm"][i][:n].astype(int)
        rows.append({"content": [text(t)], "rewards": [float(np.float32(b["rew"][i]))], "input_lengths": [n], "token_ids": [ids(t) + [PADID] * k],
                     "token_loss_mask": [m.tolist() + [0] * k], "sample_loss_mask": [1.0 if sample_mask is None else float(sample_mask[i])],
                     "advantages": z(b["A"][i][:n] * m), "generation_logprobs": z(b["slp"][i]), "prev_logprobs": z(b["old"][i] * b["mask"][i]), "idx": i})
    jl(os.path.join(d, f"train_data_step{b['step']}.jsonl"), rows)


def nemo_metrics(b, beta=0.0):
    g = gap(b); r = np.asarray(b["ratio"])
    js = lambda p, q: 0.5 * ((np.exp(p - (lm := np.logaddexp(p, q) - np.log(2))) - (p - lm) - 1) + (np.exp(q - lm) - (q - lm) - 1))
    m = b["mask"] > 0
    return {"loss": b["loss"], "grad_norm": b["gn"], "lr": b["lr"], "reward": float(b["rew"].mean()), "kl_penalty": beta * b["kl"],
            "probs_ratio": float(r[:, 0].mean()), "probs_ratio_clamped": float(np.clip(r[:, 0], .8, 1.2).mean()), "probs_ratio_min": float(r[:, 1].min()), "probs_ratio_max": float(r[:, 2].max()),
            "token_mult_prob_error": float(np.exp(np.abs(g)).mean()), "gen_kl_error": float((np.exp(g) - g - 1).mean()), "policy_kl_error": float((np.exp(-g) + g - 1).mean()),
            "js_divergence_error": float(js(b["old"][m], b["slp"][m]).mean()), "sampling_importance_ratio": float(np.exp(g).mean()), "approx_entropy": float(-(np.exp(g) * b["old"][m]).mean()),
            "mean_gen_tokens_per_sample": float(b["len"].mean()), "mean_prompt_length": float(P), "num_valid_samples": float(len(b["rew"])), "global_valid_toks": float(b["lm"].sum()),
            "advantages/mean": float(b["adv"].mean()), "advantages/max": float(b["adv"].max()), "advantages/min": float(b["adv"].min())}


# ---------------- prime-rl
def prime_export(d, b, rank=0, temperature=None):
    p = os.path.join(d, f"step_{b['step']}"); os.makedirs(p, exist_ok=True); rows = []
    for i in range(len(b["tok"])):
        t, n = row(b, i); m = b["lm"][i][:n] > 0
        inf = np.where(b["mask"][i][:n] > 0, b["slp"][i][:n], 0.0).astype(np.float32); tr = np.where(b["mask"][i][:n] > 0, b["old"][i][:n], 0.0).astype(np.float32)
        lr = np.where(m, tr - inf, 0); ra = np.exp(lr)
        rows.append({"schema_version": 1, "step": b["step"], "rank": rank, "micro_step": i // 8, "micro_sequence_idx": i % 8, "export_sequence_idx": i, "env_name": "simple-math",
                     "token_ids": ids(t), "position_ids": list(range(n)), "loss_mask": m.tolist(), "advantages": f32(b["A"][i][:n] * m), "inference_logprobs": f32(inf), "trainer_logprobs": f32(tr),
                     "entropy": f32(np.where(m, b["ent"][i][:n], 0)), "mismatch_kl": f32(np.where(m, ra - lr - 1, 0)), "log_importance_ratio": f32(lr), "importance_ratio": f32(ra),
                     "prob_delta": f32(np.where(m, np.exp(tr) - np.exp(inf), 0)), "is_masked": [None] * n, "is_masked_low": [None] * n, "is_masked_high": [None] * n})
    jl(os.path.join(p, f"rank_{rank}.jsonl"), rows); open(os.path.join(p, "STABLE"), "w").close()


def prime_line(b, t0):
    g = gap(b); k = float((np.exp(g) - g - 1).mean())
    return f"{t0} SUCCESS Step {b['step']} | {3 + b['step'] % 3}.{b['step'] % 10}s | Loss {b['loss']:.4f} | Entropy {b['entm']:.4f} | Mismatch KL {k:.4f} | Grad. Norm {b['gn']:.4f} | LR {b['lr']:.2e} | Throughput {41000 + 37 * b['step']} tokens/s | MFU 31.{b['step'] % 10}% | Peak Mem. 61.2 GiB"


# ---------------- open-instruct
def oi_traces(path, b, G, gts=True, finish=None):
    rows = []
    for i in range(len(b["tok"])):
        t, n = row(b, i); r = t[P:]
        rows.append({"step": b["step"], "sample_idx": i, "prompt_idx": i // G, "prompt_tokens": ids(t[:P]), "response_tokens": ids(r), "reward": float(b["rew"][i]), "advantage": float(b["adv"][i]),
                     "finish_reason": "stop" if b["done"][i] else "length", "dataset": "math", "ground_truth": str(int(b["ab"][i].sum())), "request_info": None, "logprobs": f32(b["slp"][i][P:n])})
    jl(path, rows, "a")


def oi_metrics(b, G, beta, est=2, kls=None):
    g = gap(b); m = b["lm"] > 0; r = np.asarray(b["ratio"])
    lr = (b["old"] - b["ref"])[m]
    k = [lr.mean(), (lr ** 2 / 2).mean(), (np.exp(-lr) - 1 + lr).mean(), (1.0 * lr).mean()]
    return {"training_step": b["step"], "episode": b["step"] * len(b["rew"]), "scores": float(b["rew"].mean()), "objective/kl0_avg": k[0], "objective/kl1_avg": k[1], "objective/kl2_avg": k[2], "objective/kl3_avg": k[3],
            "loss/kl_avg": beta * k[est], "loss/policy_avg": b["loss"] - beta * b["kl"], "loss/total_avg": b["loss"], "policy/clipfrac_avg": b["cf"], "val/ratio": float(r[:, 0].mean()), "val/ratio_var": float(r[:, 0].var()),
            "debug/vllm_vs_local_logprob_diff_mean": float(np.abs(g).mean()), "debug/vllm_vs_local_logprob_diff_max": float(np.abs(g).max()), "debug/vllm_vs_local_logprob_diff_std": float(np.abs(g).std()),
            "debug/vllm_local_reverse_kl": float((np.exp(-g) - 1 + g).mean()), "val/sequence_lengths": float(b["len"].mean()), "val/sequence_lengths_min": float(b["len"].min()), "val/sequence_lengths_max": float(b["len"].max()),
            "val/stop_rate": float(b["done"].mean()), "val/advantages_mean": float(b["adv"].mean()), "val/advantages_min": float(b["adv"].min()), "val/advantages_max": float(b["adv"].max()),
            "optim/grad_norm": b["gn"], "lr": b["lr"], "batch/percent_solved_mean": float(b["rew"].mean())}


# ---------------- slime
def slime_pt(d, b, G, groups=None, kl=None, returns=None, version=None, top=None):
    import torch
    B = len(b["tok"]); R = os.path.join(d, "rollout_data"); Td = os.path.join(d, "train_data"); os.makedirs(R, exist_ok=True); os.makedirs(Td, exist_ok=True)
    s1, s2 = [], []; rid = b["step"] - 1
    t32 = lambda x: torch.tensor(np.asarray(x), dtype=torch.float32)
    for i in range(B):
        t, n = row(b, i); L = n - P; gi = i // G if groups is None else int(groups[i])
        s1.append({"group_index": gi, "index": rid * B + i, "rollout_id": None, "prompt": text(t[:P]), "tokens": ids(t), "multimodal_inputs": None, "multimodal_train_inputs": None, "multimodal_train_input_id": None,
                   "apply_chat_template_kwargs": {}, "response": text(t[P:]), "response_length": L, "label": str(int(b["ab"][i].sum())), "reward": float(b["rew"][i]), "loss_mask": b["lm"][i][P:n].astype(int).tolist(),
                   "weight_versions": [str(rid + 1 if version is None else version)], "rollout_log_probs": f32(b["slp"][i][P:n]), "rollout_top_p_token_ids": None, "rollout_top_p_token_offsets": None, "rollout_routed_experts": None,
                   "remove_sample": False, "teacher_log_probs": None, "status": "completed" if b["done"][i] else "truncated", "metadata": {}, "generate_function_path": None, "custom_rm_path": None, "train_metadata": None})
        k = (b["old"] - b["ref"])[i][P:n] if kl is None else kl[i][P:n]
        s2.append({"data_parallel_rank": 0, "sample_index": rid * B + i, "rollout_position": i, "tokens": torch.tensor(ids(t), dtype=torch.int64), "response_lengths": L, "total_lengths": n,
                   "loss_masks": torch.tensor(b["lm"][i][P:n], dtype=torch.int32), "truncated": int(not b["done"][i]), "rollout_log_probs": t32(b["slp"][i][P:n]), "log_probs": t32(b["old"][i][P:n]), "ref_log_probs": t32(b["ref"][i][P:n]),
                   "advantages": t32(b["A"][i][P:n]), "returns": t32(b["A"][i][P:n] if returns is None else returns[i][P:n]), "kl": t32(k), "entropy": t32(b["ent"][i][P:n])})
    torch.save({"rollout_id": rid, "samples": s1}, os.path.join(R, f"{rid}.pt"))
    torch.save({"format_version": 2, "rollout_id": rid, "rank": 0, "samples": s2, "dp_shards": [list(range(B))], "raw_reward": [float(x) for x in b["rew"]]}, os.path.join(Td, f"{rid}.pt"))


def slime_lines(b, beta, ts):
    g = gap(b); s = b["step"] - 1; m = b["lm"]; sm = lambda x: float(((x * m).sum(1) / m.sum(1)).mean())
    a = {"rollout/response_lengths": float(b["len"].mean()), "rollout/rewards": float(b["adv"].mean()), "rollout/truncated": float(1 - b["done"].mean()), "rollout/rollout_log_probs": sm(b["slp"]), "rollout/raw_reward": float(b["rew"].mean()),
         "rollout/total_lengths": float(b["len"].mean() + P), "rollout/ref_log_probs": sm(b["ref"]), "rollout/log_probs": sm(b["old"]), "rollout/advantages": sm(b["A"]), "rollout/returns": sm(b["A"])}
    c = {"train/loss": b["loss"], "train/pg_loss": b["loss"] - beta * b["kl"], "train/entropy_loss": b["entm"], "train/pg_clipfrac": b["cf"], "train/ppo_kl": b["ppo_kl"], "train/train_rollout_logprob_abs_diff": float(np.abs(g).mean()),
         "train/kl_loss": b["kl"], "train/grad_norm": b["gn"], "train/lr-pg_0": b["lr"], "train/lr-pg_1": b["lr"], "train/global_batch_size": len(b["rew"]), "train/step": s}
    return [f"[{ts}] train_metric_utils.py:135 - rollout {s}: {a}", f"[{ts}] model.py:918 - step {s}: {c}"]


# ---------------- TRL / ms-swift
def trl_log(b, G, names=("accuracy_reward",), cols=None, beta=0.0, sampler=True, total=100, eps=None):
    st = group_std(b, G); g = gap(b); L = b["len"]; d = b["done"]; t = L[d] if d.any() else np.zeros(1)
    o = {"loss": round(b["loss"], 6), "grad_norm": b["gn"], "learning_rate": b["lr"], "num_tokens": float(b.get("ntok", 0)), "completions/mean_length": float(L.mean()), "completions/min_length": float(L.min()), "completions/max_length": float(L.max()),
         "completions/clipped_ratio": float(1 - d.mean()), "completions/mean_terminated_length": float(t.mean()), "completions/min_terminated_length": float(t.min()), "completions/max_terminated_length": float(t.max())}
    cols = [b["rew"]] if cols is None else cols
    for n, c in zip(names, cols):
        o[f"rewards/{n}/mean"] = float(np.nanmean(c)); o[f"rewards/{n}/std"] = float(np.nanstd(c, ddof=1))
    o |= {"reward": float(np.mean(b["rew"])), "reward_std": float(st.mean()), "frac_reward_zero_std": float((st == 0).mean())}
    if sampler:
        r = np.exp(g); seq = np.minimum(r, 2.0)
        o |= {"sampling/sampling_logp_difference/mean": float(np.abs(g).mean()), "sampling/sampling_logp_difference/max": float(np.abs(g).max()),
              "sampling/importance_sampling_ratio/min": float(seq.min()), "sampling/importance_sampling_ratio/mean": float(seq.mean()), "sampling/importance_sampling_ratio/max": float(seq.max())}
    if beta: o["kl"] = b["kl"]
    o |= {"entropy": b["entm"], "clip_ratio/low_mean": b["cf"] / 2, "clip_ratio/low_min": 0.0, "clip_ratio/high_mean": b["cf"] / 2, "clip_ratio/high_max": b["cf"], "clip_ratio/region_mean": b["cf"], "epoch": round(b["step"] / total, 4)}
    return o


def trl_state(d, logs, total, G, extra=None):
    s = {"best_global_step": None, "best_metric": None, "best_model_checkpoint": None, "epoch": logs[-1]["epoch"], "eval_steps": 500, "global_step": len(logs), "is_hyper_param_search": False, "is_local_process_zero": True,
         "is_world_process_zero": True, "log_history": [dict(l, step=i + 1) for i, l in enumerate(logs)], "logging_steps": 1, "max_steps": total, "num_input_tokens_seen": 0, "num_train_epochs": 1, "save_steps": 500, "total_flos": 0.0, "train_batch_size": G, "trial_name": None, "trial_params": None}
    json.dump(s, open(os.path.join(d, "trainer_state.json"), "w"), indent=2)


def trl_print(path, logs):
    with open(path, "w") as f:
        n = len(logs)
        for i, l in enumerate(logs): f.write(str(l) + "\n")


def trl_parquet(d, b, cols, extras=None):
    import pandas as pd
    p = os.path.join(d, "completions"); os.makedirs(p, exist_ok=True); B = len(b["tok"])
    t = {"step": [b["step"]] * B, "prompt": [plain(text(b["tok"][i][:P])) for i in range(B)], "completion": [plain(text(resp(b, i))) for i in range(B)]}
    t |= {k: [None if v is None else float(v) for v in c] for k, c in cols.items()}
    t |= extras or {}
    t["advantage"] = [float(x) for x in b["adv"]]
    pd.DataFrame(t).to_parquet(os.path.join(p, f"completions_{b['step']:05d}.parquet"))


def swift_row(b, cols, ent=True, extras=None):
    B = len(b["tok"]); m = b["mask"]
    t = {"step": [str(b["step"])] * B, "prompt": [text(b["tok"][i][:P]) for i in range(B)], "completion": [text([x for x in resp(b, i) if x != EOS]) for i in range(B)]}
    t |= {k: [None if v is None else float(v) for v in c] for k, c in cols.items()}
    t["advantages"] = [float(x) for x in b["adv"]]
    t |= extras or {}
    if ent: t["entropy"] = [float((b["ent"][i] * m[i]).sum() / max(1, m[i].sum())) for i in range(B)]
    return t


def swift_log(o, step, total):
    o = {k: v for k, v in o.items() if not k.startswith("sampling/")}
    sp = 21.3 + 0.01 * (step * 7 % 13)
    o["global_step/max_steps"] = f"{step}/{total}"; o["elapsed_time"] = f"{int(sp * step) // 60}m {int(sp * step) % 60}s"; rem = int(sp * (total - step)); o["remaining_time"] = f"{rem // 60}m {rem % 60}s"
    o["memory(GiB)"] = 64.31; o["train_speed(s/it)"] = round(sp, 6)
    return o


# ---------------- verl
def verl_metrics(b, beta=None, rollout=True, corr=False, maxr=None, in_reward=False):
    m = b["mask"] > 0; g = gap(b); o = {}
    st = lambda n, x: {f"{n}/mean": float(np.mean(x)), f"{n}/max": float(np.max(x)), f"{n}/min": float(np.min(x))}
    if rollout:
        d = np.abs(np.exp(b["old"][m]) - np.exp(b["slp"][m]))
        o |= {"training/rollout_probs_diff_valid": 1, "training/rollout_probs_diff_max": float(d.max()), "training/rollout_probs_diff_mean": float(d.mean()), "training/rollout_probs_diff_std": float(d.std()),
              "training/rollout_actor_probs_pearson_corr": float(np.corrcoef(np.exp(b["old"][m]), np.exp(b["slp"][m]))[0, 1])}
    if corr:
        n = m.sum(1); mt = (b["old"] * m).sum(1) / n; mr = (b["slp"] * m).sum(1) / n; d = mr - mt; G_ = (b["old"] - b["slp"]) * m
        w = np.exp(g)
        o |= {"rollout_corr/" + k: float(v) for k, v in {"training_ppl": np.exp(-mt).mean(), "training_log_ppl": (-mt).mean(), "kl": (-g).mean(), "k3_kl": (np.exp(g) - g - 1).mean(), "rollout_ppl": np.exp(-mr).mean(), "rollout_log_ppl": (-mr).mean(),
              "log_ppl_diff": d.mean(), "log_ppl_abs_diff": np.abs(d).mean(), "log_ppl_diff_max": d.max(), "log_ppl_diff_min": d.min(), "ppl_ratio": np.exp(d).mean(), "chi2_token": (np.exp(2 * g)).mean() - 1, "chi2_seq": np.exp(np.clip(2 * G_.sum(1), -40, 40)).mean() - 1,
              "rollout_is_mean": np.minimum(w, 2).mean(), "rollout_is_max": w.max(), "rollout_is_min": w.min(), "rollout_is_eff_sample_size": np.minimum(w, 2).mean() ** 2 / (np.minimum(w, 2) ** 2).mean()}.items()}
    o["actor/entropy"] = b["entm"]
    if beta is not None: o |= {"actor/kl_loss": b["kl"], "actor/kl_coef": beta}
    if in_reward: o |= {"actor/reward_kl_penalty": b["kl_seq"], "actor/reward_kl_penalty_coeff": in_reward}
    o |= {"actor/pg_loss": b["loss"] - (beta or 0) * b["kl"], "actor/pg_clipfrac": b["cf"], "actor/ppo_kl": b["ppo_kl"], "actor/pg_clipfrac_lower": 0.0, "actor/grad_norm": b["gn"], "perf/mfu/actor": 0.31 + 0.001 * (b["step"] % 7), "perf/max_memory_allocated_gb": 52.93, "perf/max_memory_reserved_gb": 61.07,
          "actor/lr": b["lr"], "training/global_step": b["step"], "training/epoch": 0}
    o |= st("critic/score", b["rew"]) | st("critic/rewards", b.get("rew2", b["rew"])) | st("critic/advantages", b["A"][m]) | st("critic/returns", b["A"][m]) | st("response_length", b["len"])
    o["response_length/clip_ratio"] = float((b["len"] == (maxr or 10 ** 9)).mean())
    o |= st("prompt_length", np.full(3, P)); o["prompt_length/clip_ratio"] = 0.0
    tt = 41.2 + (b["step"] * 13 % 7) * 0.31
    o |= {"timing_s/gen": tt * .55, "timing_s/old_log_prob": tt * .1, "timing_s/update_actor": tt * .28, "timing_s/step": tt, "perf/total_num_tokens": int(b["len"].sum() + P * len(b["len"])), "perf/time_per_step": tt, "perf/throughput": float((b["len"].sum() + P * len(b["len"])) / tt / 8)}
    return o


def verl_line(o, step, pid="(TaskRunner pid=51840) "):
    return pid + " - ".join([f"step:{step}"] + [f"{k}:{v!r}" for k, v in o.items()])


def verl_rollout(d, b, extra=None):
    os.makedirs(d, exist_ok=True)
    rows = []
    for i in range(len(b["tok"])):
        r = {"input": text(b["tok"][i][:P]).replace("<|im_start|>", "").replace("<|im_end|>", ""), "output": text([x for x in resp(b, i) if x != EOS]), "gts": str(int(b["ab"][i].sum())), "score": float(b["rew"][i]), "step": b["step"]}
        if extra: r |= extra(i)
        rows.append(r)
    jl(os.path.join(d, f"{b['step']}.jsonl"), rows)


# ---------------- OpenRLHF
def orlhf_status(b, beta=0.0, vllm=True):
    g = gap(b); m = b["lm"] > 0
    o = {"policy_loss": b["loss"], "actor_lr": b["lr"], "actor_grad_norm": b["gn"], "ppo_clip_ratio": b["cf"], "ppo_kl": b["ppo_kl"]}
    if vllm: o["vllm_kl"] = float((-g).mean())
    o |= {"kl": float((b["old"] - b["ref"])[m].mean()) if "klm" not in b else b["klm"], "logprobs_diff": float((b["old"] - b["ref"])[m].mean()), "reward": float(b["rew"].mean()), "group_reward_std": float(b.get("gstd", 0.0)), "return": float(b["A"][m].mean()) if "ret" not in b else b["ret"],
          "response_length": float(b["len"].mean()), "total_length": float(b["len"].mean() + P), "truncated": float(1 - b["done"].mean()), "timing/make_experience": 9.8 + b["step"] % 3 * .2, "timing/ppo_train": 21.4, "timing/broadcast": 1.9, "timing/generation": 33.0 + b["step"] % 5 * .4}
    return o


# ---------------- tables
def wandb_csv(path, rows, xname="Step", run=None):
    keys = list(dict.fromkeys(k for r in rows for k in r))
    with open(path, "w", newline="") as f:
        w = csv.writer(f, quoting=csv.QUOTE_ALL); w.writerow([xname] + [k if run is None else f"{run} - {k}" for k in keys])
        for i, r in enumerate(rows): w.writerow([r.get("_step", i)] + ["" if k not in r else ("NaN" if isinstance(r[k], float) and np.isnan(r[k]) else r[k]) for k in keys])


def tensorboard(d, rows, prefix="train/", start=1):
    from tensorboardX import SummaryWriter
    w = SummaryWriter(d)
    for i, r in enumerate(rows):
        for k, v in r.items():
            if isinstance(v, (int, float)): w.add_scalar(prefix + k, v, i + start)
    w.close()


def truth(n, thread, trainer, what, decidable, why):
    os.makedirs(os.path.join(ROOT, "..", "truth"), exist_ok=True)
    json.dump({"thread": thread, "trainer": trainer, "truth": what, "decidable": decidable, "why": why}, open(os.path.join(ROOT, "..", "truth", n + ".json"), "w"), indent=1)
