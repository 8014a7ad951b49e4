"""SGLang server of a frozen model: a child of the actor that uses it, such as a judge.

The weights do not change, so the server needs no keeper: it ends with its actor, and a lost one is started again.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import tempfile
from pathlib import Path

from broker.process import spawn, stop
from relax_actors.data.model_folder import measure, stored_shapes
from relax_actors.engines.protocols.server import ServerRecord, ServerSpec, free_port, generates
from relax_actors.engines.sglang.connection import SglangSettings
from relax_actors.engines.sglang.engine import SglangEngine
from relax_actors.engines.sglang.launch import FROZEN_VARIABLE
from relax_actors.engines.sglang.presence import RENAMED
from relax_actors.engines.sglang.weight_loaders import FileLoader, ModelFolder, has_checkpoint_names
from relax_actors.isolation.janitor import Janitor
from relax_actors.isolation.proc import process
from relax_actors.runtime import Context
from relax_actors.runtime.logs import rotate
from relax_actors.weights import files as weights

ASK_SECONDS, STOP_SECONDS = 5.0, 2.0


class FrozenServer:
    """The server of one actor, started when it is first looked for and whenever it has ended.

    Args:
        context: of the actor.
        spec: how servers are started and asked.
        model: folder of the model.
        device: torch device, or "auto".
        scores: whether it is a reward model, which writes nothing.
    """

    def __init__(self, context: Context, spec: ServerSpec, model: Path, device: str, *, scores: bool = False) -> None:
        self._spec, self._root, self._n = spec, context.folder.root, context.n
        self._log = context.folder.log(f"server.{context.role}.{context.n}")
        self.scratch = Path(tempfile.mkdtemp(prefix="relax-server-"))
        self._janitor = Janitor(str(self.scratch), spec.shared_memory)
        served = json.dumps({"model": str(model.absolute()), "device": device, "scores": scores})
        self._environment = {**os.environ, **spec.environment, FROZEN_VARIABLE: served, "TMPDIR": str(self.scratch)}
        self._child: subprocess.Popen[bytes] | None = None
        self._record: ServerRecord | None = None

    def find(self) -> ServerRecord | None:
        """Return the record of the server once it generates; None before."""
        if self._record is None or self._child is None or self._child.poll() is not None:
            self._record = self._started()
        return self._record if generates(self._record, self._spec, ASK_SECONDS) else None

    def _started(self) -> ServerRecord:
        key, port = secrets.token_urlsafe(32), free_port()
        command = [*self._spec.command, str(self._root), str(self._n), str(port)]
        environment = self._environment | {self._spec.key_variable: key} | self._janitor.environment
        self._log.parent.mkdir(parents=True, exist_ok=True)
        rotate(self._log)
        with self._log.open("ab") as log:
            self._child = spawn(command, log=log, environment=environment)
        own = process(self._child.pid)
        start = 0 if own is None else own.start
        return ServerRecord(f"http://127.0.0.1:{port}", key, secrets.token_hex(8), self._child.pid, start)

    def close(self) -> None:
        """Kill the server, and remove its files."""
        if self._child is not None:
            stop(self._child, STOP_SECONDS)
        self._janitor.close()


class FrozenEngine(SglangEngine):
    """Generates with the server of a frozen model, whose weights are version 0; implements `InferenceEngine`."""

    def __init__(self, context: Context, spec: ServerSpec, model: Path, device: str) -> None:
        config = context.config
        self._own = FrozenServer(context, spec, model, device)
        settings = SglangSettings(
            measure(model).context_length,
            rows=config.rollout.max_concurrent_prompts,
            group=config.most_samples,
            parts=RENAMED.get(measure(model).model_type, ()),
            patience=config.supervision.longest_start,
            stall=config.rollout.deadline / 2,
            grammars=True,
            keep_partial=not config.run.deterministic,
            progress=context.progress,
            stopping=context.stopping,
        )
        if has_checkpoint_names(stored_shapes(model)):
            folder = ModelFolder(model.absolute())
            super().__init__(self._own.find, folder, settings)
            self._staged = folder.weights()
            self.swap()
        else:
            super().__init__(self._own.find, FileLoader(self._own.scratch / "weights"), settings)
            shards = sorted(model.glob("*.safetensors"))
            self.load(0, weights.fingerprint_of_files(shards), shards)

    def close(self) -> None:
        """Disconnect from the server, and end it."""
        super().close()
        self._own.close()
