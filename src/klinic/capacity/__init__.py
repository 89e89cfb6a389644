"""Capacity planning: memory, FLOPs, bytes moved and throughput of a recipe, without training.

forecast.py        memory, sizes and cost of a recipe, from one step on meta tensors
prompt_lengths.py  prompt lengths of a recipe, counted or assumed
meta_policy.py     a policy and its reference built from configs alone
meta_ranks.py      one rank of a sharded learner, without weights and other ranks
meta_tensors.py    tensors with a shape but no data, and a memory meter
memory.py          bytes by phase and by kind of tensor
fitting.py         changes of a recipe with which it fits a GPU
flops.py           the shape of a model, and the FLOPs of a step
bytes_moved.py     bytes that a step sends between processes and writes to disk
throughput.py      seconds per step on many accelerators, and their best split
"""
