"""Samplers: generate completions with the log-prob of every sampled token.

protocol.py        the interface that the training loop calls
rollouts.py        prompts to rollouts: start, remaining tokens, append a policy turn
conversation.py    multi-turn rollouts with a user-supplied environment function
transformers.py    in-process sampler on the learner's own weights
decoding.py        batched decoding with a KV cache
drawing.py         temperature, top-k, top-p, min-p and inverse-CDF sampling
growing_cache.py   preallocated KV cache and grouped-query attention for one token
random_streams.py  random numbers per completion
vllm.py            sampler on a vLLM engine
vllm_engine.py     engine interface, and an engine in a child process
vllm_server.py     a running vLLM server over HTTP
vllm_transfer.py   weight transfer, trainer side
vllm_worker.py     weight transfer, vLLM worker side
vllm_plugin.py     entry point that vLLM loads in each of its processes
sync_probe.py      compares engine and policy log-probs after each weight sync
weight_group.py    the gloo process group for weight broadcasts
"""
