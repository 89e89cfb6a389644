"""Sampling with vLLM: an engine in a child process or a running server, and its weight updates.

sampler.py          the sampler: rollouts from an engine, weight syncs
engine.py           the engine interface, and an engine that klinic starts
server.py           a running vLLM server over HTTP
weight_sender.py    weight transfer, trainer side
weight_receiver.py  weight transfer, vLLM worker side
plugin.py           entry point that vLLM loads in each of its processes
sync_check.py       compares engine and policy log-probs after each weight sync
"""
