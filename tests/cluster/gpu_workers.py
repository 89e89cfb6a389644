"""Prints the GPU of every process of a cluster run, with Ray's logical GPUs and no real one.

Ray, klinic's reservation and klinic's pools are real; the workers hold no model, they report the
GPU that Ray gave them.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from unittest import mock

NUM_GPUS = 8


class LearnerWorker:
    """A learner rank that reports its GPU instead of training."""

    def run_rank(self, environment):
        return int(environment["RANK"]), visible_gpus()


class GpuWorker:
    """A sampler that reports its GPU instead of sampling."""

    def visible_gpus(self):
        return visible_gpus()


def visible_gpus():
    return os.environ["CUDA_VISIBLE_DEVICES"].split(",")


def gpus_of(recipe):
    """Return the GPUs of driver, samplers and learner ranks, by the ids of the machine."""
    from klinic.cluster.placement import SAMPLER
    from klinic.training.learner_processes import STORE_VARIABLE
    from klinic.training.ray_run import RayWorkers

    outside = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7").split(",")
    with tempfile.TemporaryDirectory() as folder:
        workers = RayWorkers(recipe, Path(folder))
        import ray  # klinic configures it first

        try:
            pool = workers._start_pool(SAMPLER, "GpuWorker", lambda _: {})
            members = pool.wait_ready(num=pool.size)
            samplers = ray.get([pool.submit(member, "visible_gpus") for member in members])
            ranks = []
            if recipe.learner.shards > 1:
                learners = workers.learner_processes(STORE_VARIABLE)
                learners.start(recipe.learner.shards)
                ranks = [gpus for _, gpus in sorted(ray.get(learners._refs))]
                index = device_of_rank_0()
                learners.stop()
            else:
                index = workers.learner_device.index
            return {"driver": [outside[index]], "samplers": samplers, "ranks": ranks}
        finally:
            workers.close()


def device_of_rank_0():
    """Return the device that rank 0 of a sharded learner takes in this process."""
    from klinic.training import learner_processes

    with (
        mock.patch("torch.cuda.set_device") as set_device,
        mock.patch("torch.distributed.init_process_group"),
    ):
        learner_processes._join_process_group(1)
    (index,) = set_device.call_args.args
    return index


def main():
    from klinic.recipe.recipe import Recipe
    from klinic.training import ray_run

    ray_run.WORKER_MODULE = "gpu_workers"
    found = {}
    for shape in sys.argv[1:]:
        shards, samplers, *visible = shape.split("+")
        samplers, _, engine_size = samplers.partition("x")
        if visible:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible[0]
        recipe = Recipe.model_validate(
            {
                "model": {"name": "tiny"},
                "data": {"task": "arithmetic"},
                "threads": 1,
                "cluster": {"samplers": int(samplers)},
                "sampler": {"type": "vllm", "tensor_parallel_size": int(engine_size or 1)},
                "learner": {"shards": int(shards)},
            }
        )
        num = len(visible[0].split(",")) if visible else NUM_GPUS
        with (
            mock.patch("torch.cuda.is_available", return_value=True),
            mock.patch("torch.cuda.device_count", return_value=num),
        ):
            found[shape] = gpus_of(recipe)
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
