"""Sampling with vLLM: an engine in a child process or a running server, and its weight updates.

sampler.py          the sampler: an engine and its weight syncs
engine_sampler.py   rollouts from an engine, whoever sends its weights
engine.py           the engine interface, and an engine that klinic starts
server.py           a running vLLM server over HTTP
outputs.py          vLLM's outputs as arrays
weight_receiver.py  weight transfer, vLLM worker side
plugin.py           entry point that vLLM loads in each of its processes
sync_check.py       compares engine and policy log-probs after each weight sync
"""
