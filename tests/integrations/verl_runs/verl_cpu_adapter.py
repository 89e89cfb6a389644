"""The learner's side of the rollout of `verl_cpu.py`: sends the weights to the servers."""

import os

import ray
from verl.workers.rollout.base import BaseRollout


class Adapter(BaseRollout):
    async def resume(self, tags):
        pass

    async def release(self):
        pass

    async def update_weights(self, weights, wire_format="named_tensors", **kwargs):
        # every rank must consume the weights, which are gathered from all
        named = {name: tensor.detach().float().cpu().clone() for name, tensor in weights}
        if int(os.environ["RANK"]) == 0:  # all ranks share one server
            server = ray.get_actor("hf_server_0")
            await server.load.remote(named, kwargs.get("global_steps"))
