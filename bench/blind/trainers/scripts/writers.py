"""Writers: each writes a Sim's records in one trainer's own files and field names."""
import os, json, sys, struct, types, zipfile, pickle, io, zlib, hashlib, uuid, random
from collections import OrderedDict
import numpy as np
from sim import *
BASE = os.path.join(os.environ['BLIND_OUT'], 'cases')
f32 = lambda x: float(np.float32(x))
def F(x): return [f32(v) for v in x]
def out(nn):
    d = os.path.join(BASE, nn)
    if os.path.isdir(d):
        import shutil; shutil.rmtree(d)
    os.makedirs(d); return d
def mk(*p):
    p = os.path.join(*p); os.makedirs(os.path.dirname(p), exist_ok=True); return p
def dumpl(path, rows, **kw):
    with open(mk(path), 'w') as f:
        for r in rows: f.write(json.dumps(r, **kw) + '\n')
def wstd(b):
    return [b['R'][b['grp'] == g].std(ddof=1) if (b['grp'] == g).sum() > 1 else 0.0 for g in np.unique(b['grp'])]
def diff(b):
    q = b['fgen'] > 0; return (b['fslp'] - b['old'])[q]
# ------------------------------------------------------------------ TRL
def trl_logs(s, per_epoch=50, beta_logged=None, sampling=True, lrmul=1e-5 / 0.03):
    H = []
    for b in s.recs:
        m = b['met']; L = b['L']; tr = np.array([f == 'length' for f in b['finish']]); k = b['k']; tl = L[~tr] if (~tr).any() else np.array([0.])
        e = {'loss': round(m['loss'], 4) if np.isfinite(m['loss']) else m['loss'], 'grad_norm': f32(m['grad_norm']) if np.isfinite(m['grad_norm']) else m['grad_norm'], 'learning_rate': b['lr'] * lrmul, 'num_tokens': float(b['seen']),
             'completions/mean_length': f32(L.mean()), 'completions/min_length': float(L.min()), 'completions/max_length': float(L.max()), 'completions/clipped_ratio': f32(tr.mean()),
             'completions/mean_terminated_length': f32(tl.mean()), 'completions/min_terminated_length': float(tl.min()), 'completions/max_terminated_length': float(tl.max())}
        for n, v in b['rw'].items(): e[f'rewards/{n}/mean'] = f32(np.nanmean(v)); e[f'rewards/{n}/std'] = f32(np.nanstd(v, ddof=1))
        sd = wstd(b); e['reward'] = f32(b['R'].mean()); e['reward_std'] = f32(np.mean(sd)) if s.steady else f32(b['R'].std(ddof=1)); e['frac_reward_zero_std'] = f32(np.mean(np.array(sd) < 1e-8))
        if sampling:
            d = np.abs(diff(b)); e['sampling/sampling_logp_difference/mean'] = f32(d.mean()); e['sampling/sampling_logp_difference/max'] = f32(d.max())
            with np.errstate(all='ignore'): r = np.exp(np.array([((b['old'] - b['fslp']) * b['fgen'])[b['row'] == i].sum() for i in range(b['n'])]))
            r = np.where(r > 3, 0, r); e['sampling/importance_sampling_ratio/min'] = f32(r.min()); e['sampling/importance_sampling_ratio/mean'] = f32(r.mean()); e['sampling/importance_sampling_ratio/max'] = f32(r.max())
        if s.beta or beta_logged: e['kl'] = m['kl']
        e.update({'entropy': m['entropy'], 'clip_ratio/low_mean': f32(m['clip_lo']), 'clip_ratio/low_min': f32(m['clip_lo']), 'clip_ratio/high_mean': f32(m['clip_hi']), 'clip_ratio/high_max': f32(m['clip_hi']), 'clip_ratio/region_mean': f32(m['clip_lo'] + m['clip_hi']),
                  'step_time': round(11.3 + .4 * np.sin(k) + .05 * L.mean(), 3), 'epoch': round(k / per_epoch, 4), 'step': k}); H.append(e)
    return H
def trainer_state(path, H, G, bs, name='checkpoint'):
    json.dump({'best_global_step': None, 'best_metric': None, 'best_model_checkpoint': None, 'epoch': H[-1]['epoch'], 'eval_steps': 500, 'global_step': H[-1]['step'], 'is_hyper_param_search': False, 'is_local_process_zero': True, 'is_world_process_zero': True,
               'log_history': H, 'logging_steps': 1.0, 'max_steps': H[-1]['step'], 'num_input_tokens_seen': int(H[-1].get('num_tokens', 0) or 0), 'num_train_epochs': 1, 'save_steps': 500, 'stateful_callbacks': {'TrainerControl': {'args': {'should_epoch_stop': False, 'should_evaluate': False, 'should_log': False, 'should_save': True, 'should_training_stop': True}, 'attributes': {}}},
               'total_flos': 0.0, 'train_batch_size': bs, 'trial_name': None, 'trial_params': None}, open(mk(path), 'w'), indent=2, sort_keys=True)
def trl(s, nn, H=None, parquet=True, **kw):
    import pyarrow as pa, pyarrow.parquet as pq
    d = out(nn); H = H or trl_logs(s, **kw); trainer_state(f'{d}/checkpoint-{H[-1]["step"]}/trainer_state.json', H, s.G, s.G)
    if parquet:
        for b in s.recs:
            t = {'step': [b['k']] * b['n'], 'prompt': [s.prompt_text(p) for p in b['pid']], 'completion': [text(x) for x in b['ids']], **{n: [float(x) for x in v] for n, v in b['rw'].items()}, 'advantage': F(b['A'])}
            pq.write_table(pa.table(t), mk(f'{d}/completions/completions_{b["k"]:05d}.parquet'))
    return d
# ------------------------------------------------------------------ ms-swift
def swift(s, nn, H=None, args=None, **kw):
    d = out(nn) + '/v0-20261102-101500'; H = H or trl_logs(s, sampling=False, **kw); rows = []; n = len(H)
    for i, e in enumerate(H):
        e = dict(e); k = e['step']; e['global_step/max_steps'] = f'{k}/{H[-1]["step"]}'; e['percentage'] = f'{100 * (i + 1) / n:.2f}%'; e['elapsed_time'] = f'{15 * (i + 1)}s'; e['remaining_time'] = f'{15 * (n - i - 1)}s'; e['memory(GiB)'] = 41.2; e['train_speed(iter/s)'] = 0.066; rows.append({x: v for x, v in e.items() if x != 'step'})
    dumpl(f'{d}/logging.jsonl', rows)
    dumpl(f'{d}/completions.jsonl', [{'step': [str(b['k'])] * b['n'], 'prompt': [s.prompt_text(p) for p in b['pid']], 'completion': [text(x) for x in b['ids']], **{q: [float(x) for x in v] for q, v in b['rw'].items()}, 'advantages': F(b['A'])} for b in s.recs], ensure_ascii=False)
    a = {'model': 'Qwen/Qwen2.5-0.5B-Instruct', 'rlhf_type': 'grpo', 'num_generations': s.G, 'temperature': s.T, 'beta': s.beta, 'epsilon': s.clip_lo, 'epsilon_high': s.clip_hi, 'max_completion_length': s.max_len, 'num_iterations': s.epochs, 'use_vllm': True, 'vllm_mode': 'colocate', 'log_completions': True, 'learning_rate': 1e-5, 'gradient_checkpointing': True, **(args or {})}
    json.dump(a, open(mk(f'{d}/args.json'), 'w'), indent=2); trainer_state(f'{d}/checkpoint-{H[-1]["step"]}/trainer_state.json', H, s.G, s.G); return d
# ------------------------------------------------------------------ verl
def yaml(o, ind=0):
    r = ''
    for k, v in o.items():
        if isinstance(v, dict): r += ' ' * ind + f'{k}:\n' + yaml(v, ind + 2)
        else: r += ' ' * ind + f'{k}: {json.dumps(v) if not isinstance(v, str) else v}\n'
    return r
def verl(s, nn, cfg=None, extra=None, kl_logged=True, rollout_diff=True, corr=True, dump=True, name='qwen_grpo', reward_extra=None):
    d = out(nn); rows = []
    for b in s.recs:
        m = b['met']; L = b['L']; R = b['R']; q = b['fgen'] > 0; ta = b['tA'][q]; k = b['k']; o = b['old'][q]; r = b['fslp'][q]
        e = {'training/global_step': k, 'training/epoch': 0, 'critic/score/mean': f32(R.mean()), 'critic/score/max': f32(R.max()), 'critic/score/min': f32(R.min())}
        tr = b.get('R_kl', R); e |= {'critic/rewards/mean': f32(tr.mean()), 'critic/rewards/max': f32(tr.max()), 'critic/rewards/min': f32(tr.min()),
              'critic/advantages/mean': f32(ta.mean()), 'critic/advantages/max': f32(ta.max()), 'critic/advantages/min': f32(ta.min()), 'critic/returns/mean': f32(ta.mean()), 'critic/returns/max': f32(ta.max()), 'critic/returns/min': f32(ta.min()),
              'response_length/mean': f32(L.mean()), 'response_length/max': float(L.max()), 'response_length/min': float(L.min()), 'response_length/clip_ratio': f32((L == s.max_len).mean()), 'response/aborted_ratio': 0.0, 'prompt_length/mean': 7.0, 'prompt_length/max': 7.0, 'prompt_length/min': 7.0, 'prompt_length/clip_ratio': 0.0,
              'actor/entropy': f32((b['H'] * b['fgen']).sum() / b['fgen'].sum()), 'actor/pg_loss': f32(m['pg_loss']), 'actor/pg_clipfrac': f32(m['clip_lo'] + m['clip_hi']), 'actor/pg_clipfrac_lower': 0.0, 'actor/ppo_kl': f32(m['ppo_kl']), 'actor/grad_norm': f32(m['grad_norm']), 'actor/lr': b['lr'] * 1e-6 / .03}
        if kl_logged and s.beta: e |= {'actor/kl_loss': f32(m['kl']), 'actor/kl_coef': s.beta}
        if rollout_diff:
            with np.errstate(all='ignore'):
                pd = np.abs(np.exp(o) - np.exp(r)); e |= {'training/rollout_probs_diff_valid': 1, 'training/rollout_probs_diff_max': f32(pd.max()), 'training/rollout_probs_diff_mean': f32(pd.mean()), 'training/rollout_probs_diff_std': f32(pd.std(ddof=1)), 'training/rollout_actor_probs_pearson_corr': f32(np.corrcoef(np.exp(o), np.exp(r))[0, 1])}
        if corr:
            with np.errstate(all='ignore'):
                dd = o - r; ro = np.array([-r[b['row'][q] == i].mean() for i in range(b['n'])]); tr_ = np.array([-o[b['row'][q] == i].mean() for i in range(b['n'])])
                e |= {'rollout_corr/training_ppl': f32(np.exp(tr_).mean()), 'rollout_corr/training_log_ppl': f32(tr_.mean()), 'rollout_corr/kl': f32(-dd.mean()), 'rollout_corr/k3_kl': f32((np.exp(dd) - dd - 1).mean()), 'rollout_corr/rollout_ppl': f32(np.exp(ro).mean()), 'rollout_corr/rollout_log_ppl': f32(ro.mean()),
                      'rollout_corr/log_ppl_diff': f32((tr_ - ro).mean()), 'rollout_corr/log_ppl_abs_diff': f32(np.abs(tr_ - ro).mean()), 'rollout_corr/log_ppl_diff_max': f32((tr_ - ro).max()), 'rollout_corr/log_ppl_diff_min': f32((tr_ - ro).min()), 'rollout_corr/ppl_ratio': f32(np.exp(tr_ - ro).mean())}
        e |= {'perf/total_num_tokens': int(L.sum() + 7 * b['n']), 'perf/time_per_step': round(21 + .1 * L.mean(), 4), 'timing_s/gen': round(9 + .1 * L.mean(), 4), 'timing_s/old_log_prob': 2.1, 'timing_s/update_actor': 6.3}
        if extra: e |= extra(s, b)
        rows.append({'step': k, 'data': e})
    dumpl(f'{d}/verl_arith/{name}.jsonl', rows)
    if dump:
        for b in s.recs:
            dumpl(f'{d}/rollout_data/{b["k"]}.jsonl', [{'input': s.prompt_text(b['pid'][i]), 'output': text(b['ids'][i]), 'gts': str(s.ansd[b['pid'][i]]), 'score': f32(b['R'][i]), 'step': b['k'], **({n: float(v[i]) for n, v in b['rw'].items()} if reward_extra else {})} for i in range(b['n'])], ensure_ascii=False)
    c = {'actor_rollout_ref': {'actor': {'strategy': 'fsdp', 'ppo_mini_batch_size': max(1, s.n_prompts // s.n_mini), 'ppo_epochs': s.epochs, 'clip_ratio': s.clip_lo, 'clip_ratio_low': s.clip_lo, 'clip_ratio_high': s.clip_hi, 'entropy_coeff': s.ent_coef, 'use_kl_loss': bool(s.beta), 'kl_loss_coef': s.beta, 'kl_loss_type': 'low_var_kl', 'loss_agg_mode': 'token-mean', 'grad_clip': s.max_grad_norm, 'optim': {'lr': 1e-6}},
         'rollout': {'name': 'vllm', 'mode': 'async', 'temperature': s.T, 'top_p': 1.0, 'top_k': -1, 'n': s.G, 'calculate_log_probs': True}}, 'algorithm': {'adv_estimator': 'grpo', 'use_kl_in_reward': False, 'norm_adv_by_std_in_grpo': True}, 'data': {'train_batch_size': s.n_prompts, 'max_prompt_length': 64, 'max_response_length': s.max_len}, 'trainer': {'project_name': 'verl_arith', 'experiment_name': name, 'logger': ['console', 'file'], 'total_training_steps': len(s.recs), 'rollout_data_dir': 'rollout_data'}}
    def merge(a, b):
        for k, v in b.items():
            if isinstance(v, dict) and isinstance(a.get(k), dict): merge(a[k], v)
            else: a[k] = v
    merge(c, cfg or {}); open(mk(f'{d}/outputs/2026-11-02/10-15-00/.hydra/config.yaml'), 'w').write(yaml(c)); return d
# ------------------------------------------------------------------ TensorBoard event file
_T = []
for i in range(256):
    c = i
    for _ in range(8): c = (c >> 1) ^ 0x82F63B78 if c & 1 else c >> 1
    _T.append(c)
def crc32c(b):
    c = 0xFFFFFFFF
    for x in b: c = _T[(c ^ x) & 255] ^ (c >> 8)
    return c ^ 0xFFFFFFFF
def mcrc(b): c = crc32c(b); return (((c >> 15) | (c << 17)) + 0xa282ead8) & 0xFFFFFFFF
def vint(n):
    r = b''
    while True:
        if n < 128: return r + bytes([n])
        r += bytes([n & 127 | 128]); n >>= 7
def ld(t, b): return bytes([t << 3 | 2]) + vint(len(b)) + b
def tb(path, rows, t0=1793614500.0):
    rec = []
    rec.append(b'\x09' + struct.pack('<d', t0) + ld(3, b'brain.Event:2'))
    for step, e in rows:
        for k, v in e.items():
            if isinstance(v, str) or v is None: continue
            val = ld(1, k.encode()) + b'\x15' + struct.pack('<f', np.float32(v))
            rec.append(b'\x09' + struct.pack('<d', t0 + 15.0 * step) + b'\x10' + vint(int(step)) + ld(5, ld(1, val)))
    with open(mk(path), 'wb') as f:
        for r in rec:
            h = struct.pack('<Q', len(r)); f.write(h + struct.pack('<I', mcrc(h)) + r + struct.pack('<I', mcrc(r)))
def wandb_history(path, rows):
    dumpl(path, [{'_step': i, '_runtime': 15.0 * (i + 1), '_timestamp': 1793614500.0 + 15.0 * (i + 1), **e} for i, (k, e) in enumerate(rows)])
# ------------------------------------------------------------------ NeMo-RL
def nemo_rows(s):
    rows = []
    for b in s.recs:
        m = b['met']; q = (b['m'] > 0); o = b['old'][q]; g = b['fslp'][q]; ta = b['tA'][q]; L = b['L']
        with np.errstate(all='ignore'):
            d = o - g; e = {'loss': m['loss'], 'grad_norm': m['grad_norm'], 'reward': b['R'].mean(), 'mean_prompt_length': 7.0, 'total_num_tokens': float(L.sum() + 7 * b['n']), 'advantages/mean': ta.mean(), 'advantages/max': ta.max(), 'advantages/min': ta.min(), 'probs_ratio': m['ratio'], 'probs_ratio_clamped': m['ratio'], 'probs_ratio_min': m['ratio_min'], 'probs_ratio_max': m['ratio_max'],
                 'kl_penalty': m['kl'] if s.beta else 0.0, 'token_mult_prob_error': np.exp(np.abs(d)).mean(), 'gen_kl_error': (np.exp(d) - d - 1).mean(), 'policy_kl_error': (np.exp(-d) + d - 1).mean(), 'js_divergence_error': .125 * (d ** 2).mean(), 'sampling_importance_ratio': np.exp(d).mean(), 'num_valid_samples': b['n'], 'approx_entropy': -(np.exp(d) * o).mean(), 'lr': b['lr'] * 1e-5 / 3, 'wd': 0.01, 'global_valid_seqs': b['n'], 'global_valid_toks': float(q.sum()), 'mean_gen_tokens_per_sample': L.mean(), 'max_gen_tokens_per_sample': L.max(), 'mean_total_tokens_per_sample': L.mean() + 7, 'truncation_rate': np.mean([f == 'length' for f in b['finish']]), 'natural_termination_rate': np.mean([f == 'stop' for f in b['finish']])}
        rows.append((b['k'], {f'train/{k}': float(v) for k, v in e.items()}))
    return rows
def nemo(s, nn, cfg=None, dump=True, tbd=True, gen_null=None):
    d = out(nn); ex = f'{d}/logs/exp_001'
    if tbd: tb(f'{ex}/tensorboard/events.out.tfevents.1793614500.node0.1.0', nemo_rows(s))
    for b in s.recs if dump else []:
        M = 7 + int(b['L'].max()); rows = []
        for i in range(b['n']):
            q = b['row'] == i; n = int(b['L'][i]); p = s.prompt_ids(b['pid'][i]); pad = [0.0] * (M - 7 - n); z = [0.0] * 7
            rows.append({'content': [text(p + b['ids'][i], False)], 'rewards': [f32(b['R'][i])], 'input_lengths': [7 + n], 'token_ids': [p + b['ids'][i] + [0] * (M - 7 - n)], 'token_loss_mask': [[0] * 7 + [int(x) for x in b['fgen'][q]] + [0] * (M - 7 - n)], 'sample_loss_mask': [1.0],
                         'advantages': [z + F(b['tA'][q] * b['fgen'][q]) + pad], 'generation_logprobs': [z + F(b['fslp'][q]) + pad], 'prev_logprobs': [z + F(b['old'][q]) + pad], 'idx': i})
        dumpl(f'{ex}/train_data_step{b["k"]}.jsonl', rows)
    c = {'grpo': {'num_prompts_per_step': s.n_prompts, 'num_generations_per_prompt': s.G, 'max_num_steps': s.recs[-1]['k'], 'normalize_rewards': True, 'use_leave_one_out_baseline': False}, 'loss_fn': {'reference_policy_kl_penalty': s.beta, 'ratio_clip_min': s.clip_lo, 'ratio_clip_max': s.clip_hi, 'use_on_policy_kl_approximation': False, 'use_importance_sampling_correction': False, 'token_level_loss': True},
         'policy': {'generation': {'backend': 'vllm', 'temperature': s.T, 'top_p': 1.0, 'top_k': None, 'max_new_tokens': s.max_len}, 'precision': 'bfloat16', 'max_grad_norm': s.max_grad_norm}, 'logger': {'log_dir': 'logs', 'wandb_enabled': False, 'tensorboard_enabled': True}}
    for k, v in (cfg or {}).items(): c[k] = {**c.get(k, {}), **v}
    open(mk(f'{d}/results/grpo/step_{s.recs[-1]["k"]}/config.yaml'), 'w').write(yaml(c)); return d
# ------------------------------------------------------------------ prime-rl
def prime(s, nn, mask_hi=0.2, mask_lo=0.2, metrics_extra=None, cfg=None, export_hook=None):
    d = out(nn); met = []; R = random.Random(s.seed)
    jf = lambda x: None if not np.isfinite(x) else f32(x)
    for b in s.recs:
        k = b['k']; rows = []; eps = []; ent = b['H']; gid = {g: str(uuid.UUID(int=R.getrandbits(128))) for g in np.unique(b['grp'])}
        for i in range(b['n']):
            q = b['row'] == i; n = int(b['L'][i]); p = s.prompt_ids(b['pid'][i]); g = b['fgen'][q] > 0; z = [0.0] * 7
            with np.errstate(all='ignore'):
                tl = b['old'][q].astype(np.float32); il = b['fslp'][q].astype(np.float32); tA = b['tA'][q]; lr = tl - il; ra = np.exp(lr); pd = np.exp(tl) - np.exp(il); hi = g & (tA > 0) & (pd > mask_hi); lo = g & (tA < 0) & (pd < -mask_lo)
                rows.append({'schema_version': 1, 'step': k, 'rank': 0, 'micro_step': i // 8, 'micro_sequence_idx': i % 8, 'export_sequence_idx': i, 'env_name': 'arith', 'token_ids': p + b['ids'][i], 'position_ids': list(range(7 + n)), 'loss_mask': [False] * 7 + [bool(x) for x in g], 'advantages': z + [f32(x) if y else 0.0 for x, y in zip(tA, g)], 'inference_logprobs': z + [jf(x) for x in il], 'trainer_logprobs': z + [jf(x) for x in tl], 'entropy': z + [jf(x) for x in ent[q]],
                             'mismatch_kl': z + [jf(x) for x in ra - lr - 1], 'log_importance_ratio': z + [jf(x) for x in lr], 'importance_ratio': [1.0] * 7 + [jf(x) for x in ra], 'prob_delta': z + [jf(x) for x in pd], 'is_masked': [False] * 7 + [bool(x) for x in hi | lo | (g & (tA == 0) & (pd < -mask_lo))], 'is_masked_high': [False] * 7 + [bool(x) for x in hi], 'is_masked_low': [False] * 7 + [bool(x) for x in lo], 'rl_weights': [None] * (7 + n), 'ce_weights': [None] * (7 + n), 'ref_kl_weights': [None] * (7 + n)})
            tsk = {'type': 'arith', 'data': {'idx': int(b['pid'][i]), 'prompt': s.prompt_text(b['pid'][i]), 'answer': str(s.ansd[b['pid'][i]])}}; t0 = 1793614500.0 + 15 * k + .01 * i
            segs = []; cur = None
            for tkn, gg, l in zip(b['ids'][i], g, b['slp'][i]):
                if cur is None or cur[0] != bool(gg): cur = [bool(gg), [], []]; segs.append(cur)
                cur[1].append(int(tkn)); cur[2].append(l)
            nodes = [{'semantic_parents': [], 'message': {'role': 'user', 'content': s.prompt_text(b['pid'][i])}, 'sampled': False, 'timestamp': t0, 'token_ids': p, 'mask': [False] * 7, 'is_content': [], 'logprobs': []}]
            for j, (gg, tk, lg) in enumerate(segs):
                nd = {'parent': j, 'semantic_parents': [], 'message': {'role': 'assistant' if gg else 'user', 'content': text(tk)}, 'sampled': gg, 'timestamp': t0 + .001 * (j + 1), 'token_ids': tk, 'mask': [gg] * len(tk), 'is_content': [], 'logprobs': [round(x, 4) if np.isfinite(x) else None for x in lg] if gg else []}
                if gg: nd['advantages'] = [round(float(b['A'][i]), 4)] * len(tk)
                nodes.append(nd)
            eps.append({'id': '%032x' % R.getrandbits(128), 'env': {'id': 'arith'}, 'task': tsk, 'group': {'id': gid[b['grp'][i]]}, 'ok': True, 'is_timeout': False, 'errors': [], 'traces': [{'version': 1, 'id': '%032x' % R.getrandbits(128), 'verifiers': {'version': '0.4.0'}, 'task': tsk, 'agent': {'config': {}, 'timeout': {}, 'retries': {'max_retries': 0, 'rules': []}, 'network_notice': True}, 'name': 'agent', 'trainable': True, 'tools': [], 'nodes': nodes, 'calls': [], 'mm_token_type_id_map': {}, 'request_rewrites': [], 'response_rewrites': [], 'rewards': {'score': {'score': f32(b['R'][i]), 'weight': 1.0}}, 'metrics': {}, 'info': {}, 'extra_usage': [], 'is_completed': True, 'ok': True, 'is_timeout': False, 'errors': [], 'stop_condition': b['finish'][i], 'num_input_tokens': 7, 'num_output_tokens': n, 'num_total_tokens': 7 + n}]})
        dumpl(f'{d}/outputs/token_exports/step_{k}/rank_0.jsonl', rows, separators=(',', ':'), allow_nan=False); open(f'{d}/outputs/token_exports/step_{k}/STABLE', 'w').close()
        dumpl(f'{d}/outputs/rollouts/step_{k}/train/effective/traces.jsonl', eps, separators=(',', ':'))
        q = b['fgen'] > 0
        with np.errstate(all='ignore'):
            lr = (b['old'] - b['fslp'])[q].astype(np.float32); mm = np.exp(lr) - lr - 1; m = b['met']; t = 1793614500.0 + 15 * k; fin = lambda e: {x: v for x, v in e.items() if np.isfinite(v)}
            pd = (np.exp(b['old']) - np.exp(b['fslp']))[q]; ta = b['tA'][q]; im = np.where(ta > 0, pd > mask_hi, pd < -mask_lo); off = b.get('lag', 0)
            met += [{'step': k, 'time': t, 'train/arith/effective/reward/mean': float(b['R'].mean()), 'progress/tokens': int(b['L'].sum() + 7 * b['n']), 'progress/rollouts': b['n'], 'progress/tasks': len(np.unique(b['grp'])), 'off_policy/mean': float(off), 'off_policy/max': float(off), 'time/step': 14.2},
                    {'step': k, 'time': t + .1, **fin({'optim/lr': b['lr'] * 1e-6 / .03, 'optim/grad_norm': m['grad_norm']})},
                    {'step': k, 'time': t + .2, **fin({'loss/mean': m['loss'], 'loss/max': m['loss'], 'loss/min': m['loss'], 'entropy/all/mean': float(b['H'][q].mean()), 'entropy/all/max': float(b['H'][q].max()), 'entropy/all/min': float(b['H'][q].min()), 'mismatch_kl/all/mean': float(mm.mean()), 'mismatch_kl/all/max': float(mm.max()), 'is_masked/mean': float(im.mean()), 'masked_mismatch_kl/mean': float(mm[im].mean()) if im.any() else 0.0, 'unmasked_mismatch_kl/mean': float(mm[~im].mean()) if (~im).any() else 0.0})}]
    dumpl(f'{d}/outputs/metrics.jsonl', met)
    c = {'max_steps': len(s.recs), 'max_async_level': 1, 'sampling_temperature': s.T, 'rollouts_per_example': s.G, 'batch_size': s.G * s.n_prompts, 'seq_len': 2048, **(cfg or {})}
    open(mk(f'{d}/outputs/configs/rl.toml'), 'w').write(''.join(f'{k} = {json.dumps(v)}\n' for k, v in c.items())); return d
# ------------------------------------------------------------------ torch.save without torch
class _St:
    def __init__(s, a): s.a = a
class _Ten:
    def __init__(s, a): s.a = np.ascontiguousarray(a)
    def __reduce__(s): return (sys.modules['torch._utils']._rebuild_tensor_v2, (_St(s.a), 0, tuple(s.a.shape), tuple(int(x // s.a.itemsize) for x in s.a.strides), False, OrderedDict()))
def _fake():
    t = types.ModuleType('torch'); u = types.ModuleType('torch._utils')
    for n in ('FloatStorage', 'LongStorage', 'IntStorage'):
        c = type(n, (), {}); c.__module__ = 'torch'; setattr(t, n, c)
    def _rebuild_tensor_v2(*a): pass
    _rebuild_tensor_v2.__module__ = 'torch._utils'; _rebuild_tensor_v2.__qualname__ = '_rebuild_tensor_v2'; u._rebuild_tensor_v2 = _rebuild_tensor_v2; t._utils = u; sys.modules['torch'] = t; sys.modules['torch._utils'] = u
def torch_save(obj, path):
    if 'torch' not in sys.modules: _fake()
    t = sys.modules['torch']; st = []
    class P(pickle.Pickler):
        def persistent_id(s, o):
            if isinstance(o, _St):
                st.append(o.a); n = {'f': 'FloatStorage', 'i': 'LongStorage' if o.a.itemsize == 8 else 'IntStorage'}[o.a.dtype.kind]; return ('storage', getattr(t, n), str(len(st) - 1), 'cpu', int(o.a.size))
    f = io.BytesIO(); P(f, 2).dump(obj); name = os.path.splitext(os.path.basename(path))[0]
    with zipfile.ZipFile(mk(path), 'w', zipfile.ZIP_STORED) as z:
        w = lambda n, b: z.writestr(zipfile.ZipInfo(f'{name}/{n}', (1980, 1, 1, 0, 0, 0)), b)
        w('data.pkl', f.getvalue()); w('.format_version', b'1'); w('.storage_alignment', b'64'); w('byteorder', b'little')
        for i, a in enumerate(st): w(f'data/{i}', a.tobytes())
        w('version', b'3\n'); w('.data/serialization_id', ('%040d' % (zlib.crc32(f.getvalue()))).encode())
def slime(s, nn, extra=None, tbd=True):
    d = out(nn); rows = []
    tf = lambda x: _Ten(np.asarray(x, np.float32))
    for b in s.recs:
        k = b['k'] - 1; S = []; Tr = []
        for i in range(b['n']):
            q = b['row'] == i; n = int(b['L'][i]); p = s.prompt_ids(b['pid'][i]); g = [int(x) for x in b['fgen'][q]]; ks = np.exp(b['ref'][q] - b['old'][q]) + b['old'][q] - b['ref'][q] - 1
            S.append({'group_index': int(b['grp'][i]) + k * s.n_prompts, 'index': i, 'rollout_id': None, 'prompt': s.prompt_text(b['pid'][i]), 'tokens': p + b['ids'][i], 'multimodal_inputs': None, 'multimodal_train_inputs': None, 'multimodal_train_input_id': None, 'apply_chat_template_kwargs': {}, 'response': text(b['ids'][i], False), 'response_length': n, 'label': str(s.ansd[b['pid'][i]]), 'reward': f32(b['R'][i]), 'loss_mask': g, 'weight_versions': [str(b.get('version', 0))], 'rollout_log_probs': F(b['fslp'][q]), 'rollout_top_p_token_ids': None, 'rollout_top_p_token_offsets': None, 'rollout_routed_experts': None, 'remove_sample': False, 'teacher_log_probs': None, 'status': 'completed' if b['finish'][i] == 'stop' else 'truncated', 'metadata': {}, 'generate_function_path': None, 'custom_rm_path': None, 'train_metadata': None, 'session_id': None, 'non_generation_time': 0.0, 'spec_info': {'spec_accept_token_num': 0, 'spec_draft_token_num': 0, 'spec_verify_ct': 0, 'completion_token_num': 0}, 'prefix_cache_info': {'cached_tokens': 0, 'total_prompt_tokens': 7}})
            a = tf(b['tA'][q]); Tr.append({'data_parallel_rank': 0, 'sample_index': i, 'rollout_position': i, 'tokens': _Ten(np.asarray(p + b['ids'][i], np.int64)), 'response_lengths': n, 'total_lengths': 7 + n, 'loss_masks': _Ten(np.asarray(g, np.int32)), 'truncated': int(b['finish'][i] != 'stop'), 'rollout_log_probs': tf(b['fslp'][q]), 'log_probs': tf(b['old'][q]), 'ref_log_probs': tf(b['ref'][q]), 'advantages': a, 'returns': a, 'kl': tf(ks if s.beta else ks * 0), 'entropy': tf(b['H'][q])})
        torch_save({'rollout_id': k, 'samples': S}, f'{d}/dump_details/rollout_data/{k}.pt')
        ix = list(range(b['n'])); torch_save({'format_version': 2, 'rollout_id': k, 'rank': 0, 'samples': Tr, 'dp_shards': [{'rank': 0, 'data_parallel_rank': 0, 'sample_indices': ix, 'partition': ix, 'micro_batch_indices': [ix], 'num_microbatches': [1], 'global_batch_sizes': [b['n']]}], 'raw_reward': F(b['R'])}, f'{d}/dump_details/train_data/{k}.pt')
        m = b['met']; e = {'rollout/raw_reward': b['R'].mean(), 'rollout/response_len/mean': b['L'].mean(), 'rollout/truncated_ratio': np.mean([f == 'length' for f in b['finish']]), 'rollout/log_probs': b['old'].mean(), 'rollout/rollout_log_probs': b['fslp'].mean(), 'rollout/ref_log_probs': b['ref'].mean(), 'rollout/advantages': b['tA'].mean(), 'rollout/entropy': b['H'].mean(), 'train/loss': m['loss'], 'train/pg_loss': m['pg_loss'], 'train/entropy_loss': m['entropy'], 'train/pg_clipfrac': m['clip_lo'] + m['clip_hi'], 'train/ppo_kl': m['ppo_kl'], 'train/train_rollout_logprob_abs_diff': np.abs(b['old'] - b['fslp']).mean(), 'train/grad_norm': m['grad_norm'], 'train/lr-pg_0': b['lr'] * 1e-6 / .03}
        if s.beta: e['train/kl_loss'] = m['kl']
        if extra: e |= extra(s, b)
        rows.append((k, {x: float(v) for x, v in e.items()}))
    if tbd: tb(f'{d}/tensorboard_log/events.out.tfevents.1793614500.node0.7.0', rows)
    return d
# ------------------------------------------------------------------ AReaL
def areal(s, nn, cfg=None, extra=None):
    d = out(nn); rows = []; tid = 0
    for b in s.recs:
        k = b['k'] - 1; m = b['met']; q = b['fgen'] > 0; H, Tv = b['head'], b['tail']
        for g in np.unique(b['grp']):
            ii = np.nonzero(b['grp'] == g)[0]; tid = int(b.get('tid', np.arange(10 ** 6) + k * 1000)[g])
            dumpl(f'{d}/rollout/{int(max(Tv[ii]))}/{tid}.jsonl', [{'task_id': tid, 'sample_idx': j, 'seqlen': 7 + int(b['L'][i]), 'prompt_len': 7, 'head_version': int(H[i]), 'tail_version': int(Tv[i]), 'version_rle': b['rle'][i], 'reward': f32(b['R'][i]), 'prompt': text(s.prompt_ids(b['pid'][i]), False), 'completion': text(b['ids'][i], False)} for j, i in enumerate(ii)])
        d_ = (b['old'] - b['fslp'])[q]; st = lambda n, x: {f'ppo_actor/{n}/avg': float(np.mean(x)), f'ppo_actor/{n}/min': float(np.min(x)), f'ppo_actor/{n}/max': float(np.max(x))}
        e = {'ppo_actor/n_seqs': b['n'], 'ppo_actor/n_tokens': int(b['L'].sum() + 7 * b['n']), 'ppo_actor/n_valid_tokens': int(q.sum()), 'ppo_actor/correct_n_seqs': int((b['R'] > 0).sum()), 'ppo_actor/incorrect_n_seqs': int((b['R'] <= 0).sum())} | st('advantages', b['tA'][q]) | st('kl_rewards', 0.0) | st('final_reward', b['tA'][q]) | st('task_reward', b['R']) | st('seq_len', b['L'] + 7) | st('prompt_len', 7.0) | st('no_eos_ratios', np.array([f == 'length' for f in b['finish']], float))
        e |= {'ppo_actor/eps_clip': s.clip_lo, 'ppo_actor/use_dual_clip': 0, 'ppo_actor/update/lr': b['lr'] * 1e-5 / .03, 'ppo_actor/update/grad_norm': m['grad_norm'], 'ppo_actor/update/update_successful': 1.0}
        e |= st('update/importance_weight', np.array([m['ratio_min'], m['ratio_max'], m['ratio']])) | {'ppo_actor/update/importance_weight/avg': m['ratio']} | {f'ppo_actor/update/{n}/avg': float(v) for n, v in {'approx_kl': m['ppo_kl'], 'new_logp': b['old'][q].mean(), 'old_logp': b['fslp'][q].mean(), 'entropy': m['entropy'], 'actor_loss': m['pg_loss'], 'clip_ratio': m['clip_lo'] + m['clip_hi'], 'behave_imp_weight': np.exp(d_).mean(), 'behave_approx_kl': d_.mean()}.items()} | {'ppo_actor/update/behave_imp_weight/max': float(np.exp(d_).max()), 'ppo_actor/update/behave_imp_weight/min': float(np.exp(d_).min())}
        if extra: e |= extra(s, b)
        rows.append((k, e))
    for tid, ver, z in s.queue:                                   # accepted but not yet consumed: AReaL dumps when a trajectory is accepted
        z = dict(z, n=len(z['ids'])); r = sum(s.rewards(z).values())
        dumpl(f'{d}/rollout/{ver}/{tid}.jsonl', [{'task_id': int(tid), 'sample_idx': j, 'seqlen': 7 + len(x), 'prompt_len': 7, 'head_version': int(ver), 'tail_version': int(ver), 'version_rle': [[int(ver), len(x)]], 'reward': f32(r[j]), 'prompt': text(s.prompt_ids(z['pid'][j]), False), 'completion': text(x, False)} for j, x in enumerate(z['ids'])])
    tb(f'{d}/tensorboard/events.out.tfevents.1793614500.node0', rows)
    c = {'experiment_name': 'arith-grpo', 'trial_name': 'trial0', 'rollout': {'max_head_offpolicyness': 2, 'consumer_batch_size': s.n_prompts, 'max_concurrent_rollouts': 64, 'dump_to_file': True}, 'gconfig': {'n_samples': s.G, 'temperature': s.T, 'max_new_tokens': s.max_len}, 'actor': {'eps_clip': s.clip_lo, 'use_decoupled_loss': True, 'recompute_logprob': True}}
    for k, v in (cfg or {}).items(): c[k] = {**c.get(k, {}), **v} if isinstance(v, dict) else v
    open(f'{d}/config.yaml', 'w').write(yaml(c)); return d
# ------------------------------------------------------------------ OpenRLHF
def openrlhf_rows(s):
    rows = []
    for b in s.recs:
        m = b['met']; q = b['fgen'] > 0; d = (b['fslp'] - b['old'])[q]; tr = np.mean([f == 'length' for f in b['finish']])
        e = {'policy_loss': m['pg_loss'], 'actor_lr': b['lr'] * 5e-7 / .03, 'actor_grad_norm': m['grad_norm'], 'ppo_clip_ratio': m['clip_lo'] + m['clip_hi'], 'ppo_kl': m['ppo_kl'], 'vllm_kl': float(d.mean()), 'kl': m['kl'], 'logprobs_diff': m['k1'], 'reward': b['R'].mean(), 'return': b['A'].mean(), 'group_reward_std': np.mean(wstd(b)), 'response_length': b['L'].mean(), 'total_length': b['L'].mean() + 7, 'truncated': tr, 'rollout/reward_mean': b['R'].mean(), 'rollout/reward_std': b['R'].std(ddof=1), 'rollout/response_length_mean': b['L'].mean(), 'rollout/truncated_rate': tr, 'rollout/num_samples': b['n'], 'timing/make_experience': 8.1, 'timing/ppo_train': 6.4, 'timing/broadcast': 1.1, 'timing/generation': 9.7}
        rows.append((b['k'], {f'train/{k}': float(v) for k, v in e.items()}))
    return rows
# ------------------------------------------------------------------ SkyRL
def skyrl_rows(s, extra=None):
    rows = []
    for b in s.recs:
        m = b['met']; q = (b['fgen'] > 0) & (b['m'] > 0); d = np.abs(b['fslp'] - b['old'])[q]; L = b['L']; R = b['R']; pk = np.mean([R[b['grp'] == g].max() > 0 for g in np.unique(b['grp'])])
        e = {'trainer/epoch': 0, 'trainer/global_step': b['k'], 'generate/min_num_tokens': L.min(), 'generate/max_num_tokens': L.max(), 'generate/avg_num_tokens': L.mean(), 'generate/std_num_tokens': L.std(), 'generate/avg_tokens_non_zero_rewards': L[R > 0].mean() if (R > 0).any() else 0, 'generate/avg_tokens_zero_rewards': L[R <= 0].mean() if (R <= 0).any() else 0, f'reward/avg_pass_at_{s.G}': pk, 'reward/avg_raw_reward': R.mean(), 'reward/mean_positive_reward': np.maximum(R, 0).mean(), 'loss/avg_final_rewards': R.mean(), 'loss/avg_raw_advantages': b['tA'][b['fgen'] > 0].mean(), 'loss/avg_raw_advantages_abs': np.abs(b['tA'][b['fgen'] > 0]).mean(),
             'policy/rollout_train_logprobs_abs_diff_max': d.max() if len(d) else 0, 'policy/rollout_train_logprobs_abs_diff_min': d.min() if len(d) else 0, 'policy/rollout_train_logprobs_abs_diff_mean': d.mean() if len(d) else 0, 'policy/rollout_train_logprobs_abs_diff_std': d.std(ddof=1) if len(d) else 0, 'policy/final_loss': m['loss'], 'policy/policy_loss': m['pg_loss'], 'policy/policy_entropy': m['entropy'], 'policy/response_length': L.max(), 'policy/policy_lr': b['lr'] * 1e-6 / .03, 'policy/loss_metrics/clip_ratio': m['clip_lo'] + m['clip_hi'], 'policy/grad_norm': m['grad_norm'], 'timing/generate': 12.1, 'timing/step': 31.5}
        if s.beta: e['policy/policy_kl'] = m['kl']
        if extra: e |= extra(s, b)
        rows.append((b['k'], {k: float(v) for k, v in e.items()}))
    return rows
# ------------------------------------------------------------------ open-instruct
def openinstruct(s, nn, name='olmo_arith', hist=True):
    d = out(nn); rows = []; hr = []
    for b in s.recs:
        for i in range(b['n']):
            rows.append({'step': b['k'], 'sample_idx': i, 'prompt_idx': int(b['grp'][i]), 'prompt_tokens': s.prompt_ids(b['pid'][i]), 'response_tokens': b['ids'][i], 'reward': f32(b['R'][i]), 'advantage': f32(b['A'][i]), 'finish_reason': b['finish'][i], 'dataset': 'arith', 'ground_truth': str(s.ansd[b['pid'][i]]), 'request_info': None, 'logprobs': F(b['slp'][i])})
        m = b['met']; q = b['fgen'] > 0; d_ = np.abs(b['fslp'] - b['old'])[q]
        e = {'training_step': b['k'], 'episode': b['k'] * b['n'], 'scores': b['R'].mean(), 'val/sequence_lengths': b['L'].mean(), 'val/sequence_lengths_min': int(b['L'].min()), 'val/sequence_lengths_max': int(b['L'].max()), 'val/stop_rate': np.mean([f == 'stop' for f in b['finish']]), 'val/advantages_mean': b['A'].mean(), 'val/advantages_min': b['A'].min(), 'val/advantages_max': b['A'].max(), 'objective/kl0_avg': m['k1'], 'objective/kl1_avg': m['k2'], 'objective/kl2_avg': m['k3'], 'objective/kl3_avg': m['k1'], 'loss/kl_avg': m['kl'] * s.beta, 'loss/policy_avg': m['pg_loss'], 'loss/total_avg': m['loss'], 'policy/clipfrac_avg': m['clip_lo'] + m['clip_hi'], 'policy/entropy_avg': m['entropy'], 'val/ratio': m['ratio'], 'val/ratio_var': 0.0, 'lr': b['lr'] * 1e-6 / .03, 'optim/grad_norm': m['grad_norm'], 'debug/vllm_vs_local_logprob_diff_mean': d_.mean(), 'debug/vllm_vs_local_logprob_diff_max': d_.max(), 'debug/vllm_vs_local_logprob_diff_std': d_.std(), 'objective/verifiable_correct_rate': (b['R'] > 0).mean(), 'time/total': 33.1}
        hr.append((b['k'], {k: float(v) for k, v in e.items()}))
    dumpl(f'{d}/{name}_rollouts_000000.jsonl', rows)
    if hist: wandb_history(f'{d}/wandb_export/{name}_history.jsonl', hr)
    return d
