"""Torch models: loading, LoRA adapters, chat templates, log-probs, references.

Loading and adapters
    loading           load a causal LM as a `Policy`: weights, tokenizer, adapter, log-prob check
    weight_files      the safetensors files of a model, read by rows
    skeleton          a model without values, whose ranks load their shards alone
    outline           a policy without values, for its tokenizer and shapes
    model_writer      write a model's tensors while they are streamed
    adapters          LoRA adapters on a model in memory: add, load, freeze, merge
    frozen_base       store the frozen weights under an adapter in bf16
    adapter_files     read, check and write an adapter folder in PEFT's format
    tiny              the built-in models `tiny`, `tiny-small` and `tiny-gpt2`
    chat              prompts and chats as token ids
    weights           digests and fingerprints of weights
    weight_stream     weights as whole tensors, in buckets of bounded size
    policy_source     the policy in training, for samplers with weights of their own
    tensor_prints     fingerprints of single tensors, before and after a transfer
    zero_shards       weights that DeepSpeed ZeRO-3 splits over processes
    start_digests     digests of a policy at the start of a run, computed once

Log-probs
    layout            completions as padded or packed rows of a forward pass
    scorer            the one log-prob function, in chunks over the vocabulary
    token_filters     top-k, top-p, min-p: the tokens that a truncated sampler keeps
    head              hidden states to logits
    selected_logp     log-probs of the sampled tokens, with a memory-saving backward pass
    fused             loss and gradient chunk by chunk inside the forward pass
    token_scores      per-token results of a forward pass
    dropout           set every dropout to 0; refuse a random forward pass
    determinism       make torch bitwise reproducible
    device            the device of a one-process run
    attention         the attention kernel: which can be used, and how to select one
    equivalence       fixed tokens on which two models are compared

References
    reference         the policy that the KL term is computed against
    moving_reference  a reference that follows the policy (EMA or periodic reset)
"""
