"""Samplers: generate completions with the log-prob of every sampled token.

protocol.py        the interface that the training loop calls
rollouts.py        prompts to rollouts: start, remaining tokens, append a policy turn
multi_turn.py      multi-turn rollouts with a user-supplied environment function
transformers.py    in-process sampler on the learner's own weights
decoding.py        batched decoding with a KV cache
token_sampling.py  temperature, top-k, top-p, min-p and inverse-CDF sampling
kv_cache.py        preallocated KV cache and grouped-query attention for one token
random_streams.py  random numbers per completion
weight_sender.py   sends streams of weights to engines and sampler processes
weight_group.py    the gloo process group for weight broadcasts
vllm/              sampler on a vLLM engine
"""
