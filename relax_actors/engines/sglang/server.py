"""A server's control: weights, pause and abort, by short requests that are waited for.

Each raises `ServerGoneError` if the server does not answer, and `EngineError` with its own words if it refuses.
"""

from __future__ import annotations

import base64
import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import torch
from torch import Tensor

from relax_actors.engines.sglang.record import ServerRecord
from relax_actors.errors import EngineError

CONNECT_SECONDS, ANSWER_SECONDS, LOAD_SECONDS = 5.0, 60.0, 600.0
OK = 200
UNFINISHED = "unfinished"


class ServerGoneError(EngineError):
    """The server does not answer."""


class Server:
    """The server of a record.

    Args:
        record: where it is.
    """

    def __init__(self, record: ServerRecord) -> None:
        self.record = record
        self._client = httpx.Client(
            base_url=record.url,
            headers=authorization(record),
            timeout=httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS),
            verify=record.url.startswith("https:"),  # what that needs takes time to load
            trust_env=not record.is_own,
        )

    def identity(self) -> str:
        """The name that its weights were given when they were loaded."""
        return str(self._ask("GET", "/model_info")["weight_version"])

    def load_files(self, folder: Path, identity: str) -> None:
        """Load a folder of safetensors, and drop keys and values of other weights."""
        body = {"model_path": str(folder), "load_format": "auto", "weight_version": identity, "flush_cache": True}
        self._unname()
        self._ask("POST", "/update_weights_from_disk", body, LOAD_SECONDS)

    def load_tensors(self, payload: str, ranks: int, identity: str) -> None:
        """Load what `pickled` made, in each of its ranks."""
        body = {"serialized_named_tensors": [payload] * ranks, "weight_version": identity, "flush_cache": True}
        self._update("/update_weights_from_tensor", body)

    def join_group(self, host: str, port: int, size: int, name: str, backend: str) -> None:
        """Join a process group as its ranks from 1 on; rank 0 is at an address."""
        body = {"master_address": host, "master_port": port, "rank_offset": 1, "world_size": size}
        self._ask("POST", "/init_weights_update_group", body | {"group_name": name, "backend": backend}, LOAD_SECONDS)

    def load_broadcast(self, tensors: Mapping[str, Tensor], group: str, identity: str) -> None:
        """Load tensors that rank 0 of a group broadcasts meanwhile, one by one."""
        body = {
            "names": list(tensors),
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
            "group_name": group,
            "weight_version": identity,
            "flush_cache": True,
        }
        self._update("/update_weights_from_distributed", body)

    def _update(self, path: str, body: dict[str, Any]) -> None:
        self._unname()
        self._ask("POST", "/begin_weight_update", {})
        self._ask("POST", path, body, LOAD_SECONDS)
        self._ask("POST", "/end_weight_update", {}, LOAD_SECONDS)

    def _unname(self) -> None:
        """Have the weights in use go by no name from now on: an update that is cut off or refused leaves a mixture."""
        self._ask("POST", "/update_weight_version", {"new_version": UNFINISHED, "abort_all_requests": False})

    def end_update(self) -> None:
        """End what a life before this one has left open that was killed in the middle of an update.

        The weights may have their name by then, but not yet the form that is computed with.
        """
        self._send("POST", "/end_weight_update", {}, LOAD_SECONDS)

    def pause(self) -> None:
        """Stop between two tokens; what runs is put back, so that keys and values can be dropped."""
        self._ask("POST", "/pause_generation", {"mode": "retract"})

    def resume(self) -> None:
        """Go on with what was put back, which is read again."""
        self._ask("POST", "/continue_generation", {})

    def abort(self) -> None:
        """End all requests."""
        self._ask("POST", "/abort_request", {"abort_all": True})

    def is_idle(self) -> bool:
        """Whether no request runs or waits; keys and values are dropped then."""
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
        """Close its connections."""
        self._client.close()


def authorization(record: ServerRecord) -> dict[str, str]:
    """The header that a server wants."""
    return {"Authorization": f"Bearer {record.key}"} if record.key else {}


def pickled(tensors: Mapping[str, Tensor]) -> str:
    """Tensors as SGLang takes them in a request: names and tensors, pickled by value, in base64.

    They are copied: a view, such as of what came in one piece, would be pickled with all that it is a view of.
    """
    file = io.BytesIO()
    pickle.dump([(n, t.detach().clone(memory_format=torch.contiguous_format)) for n, t in tensors.items()], file)
    return base64.b64encode(file.getvalue()).decode()
