"""Client of a running vLLM server.

The server must be started for training: with klinic's weight-transfer backend, and with log-probs
of the distribution that is sampled from. Otherwise the error names the command that starts it
correctly.
"""

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from klinic.errors import ConfigError, SamplerError
from klinic.model.tensor_prints import TensorPrint
from klinic.sampler.rollouts import GenerationOutput, ReportedLogp, token_array
from klinic.sampler.vllm.engine import (
    Adapter,
    EngineConfig,
    EngineMemory,
    GenerationRequest,
    vllm_sampling_params,
)
from klinic.sampler.vllm.outputs import parse_prints, to_finish_reason
from klinic.sampler.weight_group import LOOPBACK

API_KEY_VARIABLE = "VLLM_API_KEY"
MAX_CONCURRENT = 64  # concurrent requests; the server batches them
TIMEOUT_SECONDS = 600.0  # seconds to wait for a response
LOCAL_HOSTS = (LOOPBACK, "localhost", "::1")
DEV_MODE_VARIABLES = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
PROGRAM = "python -m vllm.entrypoints.openai.api_server"


def server_command(start: EngineConfig) -> str:
    """Return the command that starts a server with the configuration of klinic's own engine."""
    served = {"host": LOOPBACK, "port": 8000, "enable_prompt_tokens_details": True}
    options = [
        _format_option(name, value)
        for name, value in {**start.engine_arguments(), **served}.items()
    ]
    around = [
        f"{name}={value}"
        for name, value in {**start.environment_variables(), **DEV_MODE_VARIABLES}.items()
    ]
    return " ".join([*around, PROGRAM, *filter(None, options)])


def _format_option(name: str, value: Any) -> str:
    """Return an engine argument as a command-line option; empty if it is unset.

    >>> options = {"max_lora_rank": 8, "enable_lora": True, "seed": None}
    >>> [_format_option(name, value) for name, value in options.items()]
    ['--max-lora-rank 8', '--enable-lora', '']
    """
    if value is None or value is False:
        return ""
    option = f"--{name.replace('_', '-')}"
    if value is True:
        return option
    return f"{option} {shlex.quote(json.dumps(value) if isinstance(value, dict) else str(value))}"


class ServerEngine:
    """A running vLLM server on this machine."""

    def __init__(
        self,
        url: str,
        *,
        started_by: str,
        dtype: str,
        sleep_level: int = 0,
        seeds_requests: bool = True,
    ) -> None:
        import httpx2

        host = urlsplit(url).hostname
        if host not in LOCAL_HOSTS:
            raise ConfigError(
                f"sampler.server is {url}, but weights are sent over the loopback interface, so it "
                "must run on this machine. Use http://127.0.0.1 and its port."
            )
        key = os.environ.get(API_KEY_VARIABLE)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx2.Client(
            base_url=url.rstrip("/"), headers=headers, timeout=TIMEOUT_SECONDS
        )
        self._started_by = started_by
        self.dtype = dtype
        self.sleep_level = sleep_level
        self.seeds_requests = seeds_requests
        self._executor = ThreadPoolExecutor(
            max_workers=MAX_CONCURRENT, thread_name_prefix="klinic-sample"
        )
        self._model = self._get("/v1/models")["data"][0]["id"]
        self.num_workers = int(self._get("/get_world_size")["world_size"])

    def generate(
        self, requests: Sequence[GenerationRequest], adapter: Adapter | None
    ) -> list[GenerationOutput]:
        """Return one completion per request, in order."""
        model = self._model if adapter is None else adapter.name
        return list(self._executor.map(lambda one: self._complete_request(one, model), requests))

    def _complete_request(self, request: GenerationRequest, model: str) -> GenerationOutput:
        body = {
            "model": model,
            "prompt": request.token_ids,
            "add_special_tokens": False,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            **vllm_sampling_params(request),
        }
        answer = self._post("/v1/completions", body)
        choice = answer["choices"][0]
        details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
        return GenerationOutput(
            token_ids=token_array(choice["token_ids"]),
            logp=np.array(choice["logprobs"]["token_logprobs"], np.float32),  # None is NaN
            finish_reason=to_finish_reason(choice["finish_reason"]),
            top=_report_top(choice["logprobs"]) if request.num_top else None,
            context=token_array(choice["prompt_token_ids"]),
            cached_tokens=int(details.get("cached_tokens") or 0),
        )

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Make every worker join the process group."""
        self._post("/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """Prepare every worker for new weights."""
        self._post("/start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Make every worker receive weights."""
        self._post("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Make every worker use the received weights."""
        self._post("/finish_weight_update", {"weight_version": weight_version})

    def received_weights(self) -> list[dict[str, TensorPrint]]:
        """Return the fingerprints of the tensors that arrived last, for each worker."""
        response = self._post("/collective_rpc", {"method": "klinic_received"})
        return [parse_prints(one) for one in response["results"]]

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache."""
        self._post("/reset_prefix_cache")

    def put_adapter(self, new: Adapter, old: Adapter | None) -> bool:
        """Replace an adapter with a new one."""
        if old is not None:
            self._post("/v1/unload_lora_adapter", {"lora_name": old.name})
        body = {"lora_name": new.name, "lora_path": str(new.folder)}
        self._post("/v1/load_lora_adapter", body)
        return new.name in {model["id"] for model in self._get("/v1/models")["data"]}

    def seed_workers(self, seed: int) -> None:
        """Seed the generators of the workers."""
        self._post("/collective_rpc", {"method": "klinic_seed", "args": [str(seed)]})

    def sleep(self) -> None:
        """Release the server's GPU memory."""
        self._post(f"/sleep?level={self.sleep_level}")

    def wake_up(self, what: EngineMemory) -> None:
        """Allocate the memory of weights or cache again."""
        self._post(f"/wake_up?tags={what}")

    def close(self) -> None:
        """Disconnect; the server keeps running."""
        self._executor.shutdown(wait=False)
        self._http.close()

    def _get(self, path: str) -> Any:
        return self._send_request("GET", path, None)

    def _post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        return self._send_request("POST", path, body)

    def _send_request(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        import httpx2

        try:
            response = self._http.request(method, path, json=body)
        except httpx2.HTTPError as error:
            raise SamplerError(
                f"sampler.server {self._http.base_url} does not respond ({error}). Start it with: "
                f"{self._started_by}"
            ) from error
        if response.status_code == 404:
            raise SamplerError(
                f"sampler.server {self._http.base_url} has no {path}: it was not started for "
                f"training. Start it with: {self._started_by}"
            )
        if response.status_code >= 400:
            raise SamplerError(
                f"sampler.server {self._http.base_url} rejected {path} ({response.status_code}): "
                f"{response.text[:300]}"
            )
        is_json = "json" in response.headers.get("content-type", "")
        return response.json() if is_json and response.content else {}


def _report_top(logprobs: Mapping[str, Any]) -> ReportedLogp:
    """Return the log-probs of the sampled and of the most likely tokens of a completion."""
    steps = [step or {} for step in logprobs["top_logprobs"] or []]
    keys = [key.removeprefix("token_id:") for step in steps for key in step]
    return ReportedLogp(
        positions=np.repeat(np.arange(len(steps)), [len(step) for step in steps]),
        token_ids=np.array(keys, np.int64),
        logp=np.array([value for step in steps for value in step.values()], np.float64),
    )
