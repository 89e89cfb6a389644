"""The learner: scores a batch, computes loss and gradient, and applies or discards the update.

Files:

    protocol        the interface between the loop and a learner
    local           `LocalLearner`: the learner in one process, alone or as one rank
    fsdp            `FsdpLearner`: the same, with weights sharded by FSDP2
    shard_loading   loads policy and reference shard by shard from safetensors
    rpc             rank 0 broadcasts each learner call to the other ranks
    row_shares      the rows of one rank, and their way to it
    step_rows       the rows of a step as one rank has them; sums over the ranks
    rank_batch      the batch of a step on one rank, through scoring, updates and writing
    process_group   the process group: rank, size and all-reduces
    settings        optimization, micro-batches, packing
    scored_batch    a batch between scoring and its updates
    packing         micro-batches of rows of similar length
    objective       the loss: policy term and KL terms with per-token weights
    micro_batch_loss  that loss as one number to differentiate, and sums of its terms
    frozen_states   hidden states of reference and teacher per micro-batch
    update          optimizer, learning-rate schedule, clipping
    step_results    per-token results, metrics and finiteness of a step
    diagnostics     schedule of the expensive diagnostics; each KL term's fraction of the gradient
    probes          active probes of the live learner, and comparison of gradients and log-probs
    checkpoint      weights and optimizer state as files
    sharded_files   the same as distributed checkpoints
    rank_records    each rank writes its rows of a record
"""
