"""Control requests to a server: weights, pause and abort.

All methods block. They raise `ServerGoneError` if the server does not answer, and `EngineError` with its message if it
refuses.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from relax_actors.engines.protocols.server import ServerRecord
from relax_actors.errors import EngineError

if TYPE_CHECKING:  # the keeper of a server imports this module without torch
    from torch import Tensor

CONNECT_SECONDS, ANSWER_SECONDS, LOAD_SECONDS = 5.0, 60.0, 600.0
UNLOAD_SECONDS = 5.0
"""Time for a server to unload an adapter. It waits for requests that use it, and does so without a client, too."""
POLL_SECONDS = 0.05
LEAVE_SECONDS = 10.0
"""Time for a server whose actor was killed to leave its GPU; the next role waits for the memory twice as long."""
OK = 200
UNFINISHED = "unfinished"
"""Name of the weights while an update is in progress."""
AWAY = "away:"
"""Beginning of the name of weights that have left the GPU."""
GIB = 1 << 30


class ServerGoneError(EngineError):
    """The server does not answer."""


@dataclass(frozen=True, slots=True)
class ServerRoom:
    """What a server has room for, in tokens.

    Attributes:
        cache: tokens in the key-value cache; None if the server does not say.
        sequence: prompt and completion of a sample; None if the server does not say.
        leaving_bytes: bytes of GPU memory that `release_memory` frees; 0 on a CPU.
    """

    cache: int | None = None
    sequence: int | None = None
    leaving_bytes: int = 0


class Server:
    """Client of one server."""

    def __init__(self, record: ServerRecord) -> None:
        self.record = record
        self._client = httpx.Client(
            base_url=record.url,
            headers=authorization(record),
            timeout=httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS),
            verify=record.url.startswith("https:"),  # loading certificates takes time
            trust_env=not record.is_own,
        )

    def identity(self) -> str:
        """Return the name under which the weights in use were loaded."""
        return str(self._ask("GET", "/model_info")["weight_version"])

    def room(self) -> ServerRoom:
        """Return the tokens that the server has room for."""
        answer = self._send("GET", "/server_info", None, ANSWER_SECONDS)
        # Servers of other versions, which the run did not start, may not know the path.
        found = answer.json() if answer.status_code == OK else {}
        # A server takes prompts of fewer tokens than its `max_req_input_len`.
        return ServerRoom(found.get("max_total_num_tokens"), found.get("max_req_input_len"), _leaving_bytes(found))

    def load_files(self, folder: Path, identity: str) -> None:
        """Load a folder of safetensors and flush the key-value cache."""
        body = {"model_path": str(folder), "load_format": "auto", "weight_version": identity, "flush_cache": True}
        self._mark_unfinished()
        self._ask("POST", "/update_weights_from_disk", body, LOAD_SECONDS)

    def join_group(self, host: str, port: int, size: int, name: str, backend: str) -> None:
        """Have the server join a process group as ranks 1 to `size - 1`; rank 0 is at `host:port`."""
        body = {"master_address": host, "master_port": port, "rank_offset": 1, "world_size": size}
        self._ask("POST", "/init_weights_update_group", body | {"group_name": name, "backend": backend}, LOAD_SECONDS)

    def load_broadcast(self, tensors: Mapping[str, Tensor], group: str, identity: str) -> None:
        """Load tensors that rank 0 of the group broadcasts at the same time, one by one."""
        body = {
            "names": list(tensors),
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
            "group_name": group,
            "weight_version": identity,
            "flush_cache": True,
        }
        self._update("/update_weights_from_distributed", body)

    def classify(self, sequences: Sequence[Sequence[int]], seconds: float) -> list[list[float]]:
        """Return the scores of token sequences by a server of a reward model, which has so many seconds."""
        answer = self._send("POST", "/classify", {"input_ids": sequences}, seconds)
        if answer.status_code != OK:
            msg = f"the server at {self.record.url} refuses /classify ({answer.status_code}): {answer.text[:1000]}"
            raise EngineError(msg)
        return [one["embedding"] for one in answer.json()]

    def adapters(self) -> set[str]:
        """Return the names of the loaded adapters."""
        models = self._ask("GET", "/v1/models").get("data", [])
        return {model["id"] for model in models if model.get("parent") is not None}

    def load_adapter(
        self, name: str, config: Mapping[str, Any], payloads: Sequence[str], checksums: Mapping[str, str]
    ) -> None:
        """Load an adapter beside those that the server has; requests that name it may follow at once.

        `config` are the contents of its adapter_config.json, `payloads` results of `pickled_by_name` for each rank, and
        `checksums` the SHA-256 of the bytes of each tensor, which the server compares.
        """
        body = {"lora_name": name, "config_dict": config, "serialized_named_tensors": payloads}
        self._ask("POST", "/load_lora_adapter_from_tensors", body | {"expected_checksums": checksums}, LOAD_SECONDS)

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter; a server without it refuses, which changes nothing.

        Returns after `UNLOAD_SECONDS` at the latest, while the server may still wait for requests whose client is gone.
        """
        try:
            self._send("POST", "/unload_lora_adapter", {"lora_name": name}, UNLOAD_SECONDS)
        except ServerGoneError as error:
            if not isinstance(error.__cause__, httpx.ReadTimeout):
                raise

    def _update(self, path: str, body: dict[str, Any]) -> None:
        self._mark_unfinished()
        self._ask("POST", "/begin_weight_update", {})
        self._ask("POST", path, body, LOAD_SECONDS)
        self._ask("POST", "/end_weight_update", {}, LOAD_SECONDS)

    def _mark_unfinished(self) -> None:
        """Rename the weights in use before an update.

        A failed update leaves a mixture of two versions.
        """
        self._rename(UNFINISHED)

    def _rename(self, name: str) -> None:
        self._ask("POST", "/update_weight_version", {"new_version": name, "abort_all_requests": False})

    def end_update(self) -> None:
        """Complete an update that an earlier incarnation of the actor left open when it was killed.

        The weights may have their name by then without the processing that ends an update.
        """
        self._send("POST", "/end_weight_update", {}, LOAD_SECONDS)

    def release_memory(self, seconds: float = LOAD_SECONDS) -> None:
        """Free the GPU memory of weights, which stay in host memory, and of the key-value cache, which is lost.

        The name of the weights says so, for the next incarnation of the actor: to resume what was not released ends a
        server. The server must be idle. A server on a CPU answers, and frees nothing.
        """
        self._rename(AWAY + self.identity())
        self._ask("POST", "/release_memory_occupation", {}, seconds)

    def resume_memory(self) -> bool:
        """Take the memory back, and give the weights their name; return whether it was released."""
        if not (name := self.identity()).startswith(AWAY):
            return False
        self._ask("POST", "/resume_memory_occupation", {}, LOAD_SECONDS)
        self._rename(name.removeprefix(AWAY))
        return True

    def leave(self, is_held: Callable[[], bool]) -> None:
        """Have a server whose actor was killed in its turn leave its GPU.

        Does nothing to a server on a CPU, to one that has left, and while the actor holds the device: `is_held`.

        Raises:
            EngineError: it does not leave within `LEAVE_SECONDS`.
        """
        end = time.monotonic() + LEAVE_SECONDS
        if not self.room().leaving_bytes or self.identity().startswith(AWAY) or is_held():
            return
        if self.identity().startswith(AWAY):  # the actor had left between the two answers
            return
        self.abort()
        while not self.is_idle():
            if time.monotonic() > end:
                msg = f"the server at {self.record.url} does not end its requests within {LEAVE_SECONDS:g} s"
                raise EngineError(msg)
            time.sleep(POLL_SECONDS)
        if not is_held():
            self.release_memory(max(1.0, end - time.monotonic()))

    def pause(self) -> None:
        """Pause between two tokens; running samples return to the queue.

        The key-value cache can be flushed then.
        """
        self._ask("POST", "/pause_generation", {"mode": "retract"})

    def resume(self) -> None:
        """Resume generation; queued samples are prefilled again."""
        self._ask("POST", "/continue_generation", {})

    def abort(self) -> None:
        """Abort all requests."""
        self._ask("POST", "/abort_request", {"abort_all": True})

    def is_idle(self) -> bool:
        """Whether no request runs or waits; if so, the key-value cache is flushed."""
        return self._send("POST", "/flush_cache", None, ANSWER_SECONDS).status_code == OK

    def _ask(self, method: str, path: str, body: Any = None, seconds: float = ANSWER_SECONDS) -> dict[str, Any]:
        answer = self._send(method, path, body, seconds)
        if answer.status_code != OK:
            msg = f"the server at {self.record.url} refuses {path} ({answer.status_code}): {answer.text[:1000]}"
            raise EngineError(msg)
        found: Any = answer.json() if answer.content else {}
        return found if isinstance(found, dict) else {}

    def _send(self, method: str, path: str, body: Any, seconds: float) -> httpx.Response:
        timeout = httpx.Timeout(seconds, connect=CONNECT_SECONDS)
        try:
            return self._client.request(method, path, json=body, timeout=timeout)
        except httpx.TransportError as error:
            msg = f"the server at {self.record.url} does not answer {path}: {error or type(error).__name__}"
            raise ServerGoneError(msg) from error

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


def _leaving_bytes(info: Mapping[str, Any]) -> int:
    """Return the GPU memory of weights and key-value cache of all ranks of a server, from its `/server_info`."""
    if not str(info.get("device", "")).startswith("cuda"):
        return 0
    usages = [state.get("memory_usage", {}) for state in info.get("internal_states", ())]
    of_rank = sum(float(usage.get(name, 0)) for usage in usages for name in ("weight", "kvcache"))
    return int(of_rank * int(info.get("tp_size", 1)) * GIB)


def authorization(record: ServerRecord) -> dict[str, str]:
    """Return the authorization header for a server."""
    return {"Authorization": f"Bearer {record.key}"} if record.key else {}
