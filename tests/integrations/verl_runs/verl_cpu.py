"""Lets verl 0.9.1 train on CPUs by its plug-in points: a platform, and a rollout of transformers.

Loaded in every process of verl by VERL_USE_EXTERNAL_MODULES; `launch.py` sets it. The faults that
a run is given are in `verl_faults.py`.
"""

import contextlib
import functools
import socket
import types

import torch
import torch.distributed as dist
import verl_faults
from verl.plugin.platform import PlatformBase, PlatformRegistry

AGENT_PORTS = ("metrics_agent_port", "dashboard_agent_listen_port", "runtime_env_agent_port")


def fix_agent_ports():
    """Give the agents of Ray's node fixed ports.

    The node waits for the port of an agent that chooses its own, for 15 s: too short on a busy
    machine, and compiled into Ray.
    """
    from ray._private.parameter import RayParams

    init = RayParams.__init__

    @functools.wraps(init)
    def init_with_ports(self, *args, **kwargs):
        init(self, *args, **{**free_ports(), **kwargs})

    RayParams.__init__ = init_with_ports


def free_ports():
    """Return a free port for each agent."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in AGENT_PORTS]
        for opened in sockets:
            opened.bind(("127.0.0.1", 0))
        ports = [opened.getsockname()[1] for opened in sockets]
    return dict(zip(AGENT_PORTS, ports, strict=True))


def patch_torch():
    """Accept two requests of verl that torch refuses without an accelerator."""
    init = dist.init_process_group

    def init_once(backend=None, *args, **kwargs):
        twice = backend == "cpu:gloo,cpu:gloo"  # verl names the backend once per device
        return init("cpu:gloo" if twice else backend, *args, **kwargs)

    dist.init_process_group = init_once
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self


class CPUModule(types.ModuleType):
    """torch.cpu with the functions of torch.cuda that verl calls."""

    def __getattr__(self, name):
        return getattr(torch.cpu, name)


def device_module():
    module = CPUModule("torch_cpu")
    nothing = ("empty_cache", "ipc_collect", "reset_peak_memory_stats", "set_device", "synchronize")
    for name in (*nothing, "set_per_process_memory_fraction"):
        setattr(module, name, lambda *args, **kwargs: None)
    for name in ("memory_allocated", "memory_reserved"):
        setattr(module, name, lambda *args, **kwargs: 0)
        setattr(module, f"max_{name}", lambda *args, **kwargs: 0)
    module.mem_get_info = lambda *args, **kwargs: (8 << 30, 24 << 30)
    module.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    module.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    module.get_device_name = lambda *args, **kwargs: "cpu"
    module.is_available = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: "cpu"
    return module


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = device_module()

    def is_available(self):
        return True

    def current_device(self):
        return "cpu"

    def device_count(self):
        return 1

    def set_device(self, device_index):
        pass

    def synchronize(self, device_index=None):
        pass

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings):
        pass

    def empty_cache(self):
        pass

    def get_device_capability(self, device_index=0):
        return None, None

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg):
        yield

    def profiler_start(self):
        pass

    def profiler_stop(self):
        pass

    def ray_resource_name(self):
        return "GPU"  # a logical resource: ray.init(num_gpus=N)

    def ray_noset_envvars(self):
        return []

    def is_ipc_supported(self):
        return False

    def cudart(self):
        return None


class Server:
    """Samples with transformers, one request at a time: the same requests give the same tokens."""

    def __init__(self, path, seed, limit):
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.seed, self.limit, self.step, self.num_requests = seed, limit, None, {}

    async def generate(self, request_id, prompt_ids, sampling_params, **_):
        from verl.workers.rollout.replica import TokenOutput

        key = (self.step or 0, tuple(prompt_ids))
        number = self.num_requests[key] = self.num_requests.get(key, -1) + 1
        generator = torch.Generator().manual_seed(
            (hash((key, number)) ^ self.seed) & 0x7FFFFFFF  # hashes of integers are the same
        )
        ids, logp, is_ended = self.sample(list(prompt_ids), sampling_params, generator)
        return TokenOutput(
            token_ids=ids,
            log_probs=verl_faults.reported_logp(logp),
            stop_reason="completed" if is_ended else "length",
            num_preempted=0,
            extra_fields={"global_steps": self.step},
        )

    @torch.no_grad()
    def sample(self, prompt_ids, params, generator):
        temperature = verl_faults.sampling_temperature(params.get("temperature", 1.0))
        limit = params.get("max_tokens") or self.limit
        eos = self.model.config.eos_token_id
        past, current, ids, reported = None, torch.tensor([prompt_ids]), [], []
        while len(ids) < limit:
            output = self.model(current, past_key_values=past, use_cache=True)
            past, logits = output.past_key_values, output.logits[0, -1].float()
            logp = torch.log_softmax(logits / (temperature or 1.0), -1)
            token = (
                torch.multinomial(logp.exp(), 1, generator=generator)
                if temperature
                else logp.argmax().reshape(1)
            )
            ids.append(int(token))
            reported.append(float(logp[token]))
            if int(token) == eos and not verl_faults.ignores_ends():
                return ids, reported, True
            current = token.reshape(1, 1)
        return ids, reported, False

    async def load(self, weights, step):
        if step == 0:
            self.num_requests = {}
        if not verl_faults.skips_sync() or step == 0:
            unexpected = self.model.load_state_dict(weights, strict=False).unexpected_keys
            assert not unexpected, unexpected
        self.step = step

    async def wake_up(self, *args, **kwargs):
        pass

    sleep = abort_all_requests = resume_generation = clear_kv_cache = wake_up
    release_kv_cache = resume_kv_cache = start_profile = stop_profile = wake_up


def load_replica():
    import ray
    from verl.workers.rollout.replica import RolloutReplica

    class Replica(RolloutReplica):
        async def launch_servers(self):
            name, config = f"hf_server_{self.replica_rank}", self.model_config
            path = config["path"] if hasattr(config, "keys") else config.path
            actor = ray.remote(Server).options(name=name, num_cpus=0, max_concurrency=1000)
            server = actor.remote(path, self.config.seed, self.config.response_length)
            self.servers, self._server_handle, self._server_address = [server], server, name

    return Replica


def register_rollout():
    from verl.workers.rollout import base, replica

    replica.RolloutReplicaRegistry.register("hf", load_replica)
    base._ROLLOUT_REGISTRY[("hf", "async")] = "verl_cpu_adapter.Adapter"


fix_agent_ports()
patch_torch()
register_rollout()
