"""Role `gateway`: HTTP on the live policy, and sessions for agents."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from broker.files import write_private
from relax_actors.config.gateway import GatewaySection
from relax_actors.data.checked_run import CheckedRun
from relax_actors.errors import ConfigError
from relax_actors.registry.role_spec import RoleSpec
from relax_actors.roles.registry import role_names, unscalable_roles
from relax_actors.runtime.service_role import ServiceRole
from relax_actors.serving.listening import is_free, listen

if TYPE_CHECKING:
    from relax_actors.serving.control.control import Control


class GatewayRole(ServiceRole):
    """Serves HTTP; see `relax_actors.serving`. It keeps no state that its clients need."""

    spec: ClassVar = RoleSpec(
        section="gateway", requires="gateway", requests=("generate",), operates=True, start_order=45
    )

    def check(self, run: CheckedRun) -> Iterator[str]:
        """Check that the files of the gateway can be used on this machine."""
        section = run.config.gateway or GatewaySection()
        if "gateway" in run.here:
            from relax_actors.serving.tokens import read_tokens  # noqa: PLC0415 as in `setup`

            if section.token_file is not None:
                read_tokens(section.token_file)
            if section.operator_token_file is not None:
                read_tokens(section.operator_token_file, "gateway.operator_token_file")
            if (pair := _certificate(section)) is not None:
                _check_certificate(*pair)
        yield from ()

    def setup(self) -> None:
        """Load the tokenizer and bind the address; raises ConfigError if one of them is impossible."""
        try:
            from relax_actors.serving.answers import Answers, Limits  # noqa: PLC0415 needs the extra
            from relax_actors.serving.app import Access, Gateway  # noqa: PLC0415
            from relax_actors.serving.prompts import PREPARE_SECONDS  # noqa: PLC0415
            from relax_actors.serving.run_policy import RunPolicy  # noqa: PLC0415
            from relax_actors.serving.server import HttpServer  # noqa: PLC0415
        except ImportError as error:
            msg = f"role gateway needs Starlette and uvicorn ({error}); pip install 'relax-actors[gateway]'"
            raise ConfigError(msg) from error
        from relax_actors.data.model_folder import measure  # noqa: PLC0415 `relax check` loads every role
        from relax_actors.data.tokenizer import Tokenizer  # noqa: PLC0415
        from relax_actors.media.family import family_of  # noqa: PLC0415

        config = self.context.config
        section = config.gateway or GatewaySection()
        lease = 300.0 if config.agent is None else config.agent.idle_seconds
        limits = Limits(section.max_body_bytes, section.max_concurrent, section.request_seconds, lease)
        path, folder = config.model_path, gateway_folder(config.folder)
        policy = RunPolicy(self.context)
        tokenizer = Tokenizer(path, turn_seconds=PREPARE_SECONDS / 2)
        family = family_of(path)
        kinds = () if family is None else family.kinds
        self._answers = Answers(policy, tokenizer, section.model, measure(path).context_length, limits, kinds)
        operators = operator_tokens(section, folder)
        access = Access(tokens_of(section, folder), session_secret(config.store_path), operators)
        app = Gateway(self._answers, access, limits, self._control()).app()
        port, certificate = self._port(section, folder), _certificate(section)
        remedy = "set gateway.host and gateway.port to a free address"
        listener = listen(section.host, port, "gateway", remedy)
        self._server = HttpServer(app, listener, certificate, section.max_connections)
        write_private(folder / f"url.{self.context.n}", self._server.url)

    def _control(self) -> Control:
        """Return what operators may do to the run."""
        from relax_actors.operations import OperationLog  # noqa: PLC0415 `relax check` loads every role
        from relax_actors.serving.control.control import Control, RunFacts  # noqa: PLC0415

        context = self.context
        config, names = context.config, role_names(context.config)
        author = f"{context.role}.{context.n}"
        facts = RunFacts(names, unscalable_roles(config, names), config.rollout.backend, config.store_path, author)
        return Control(OperationLog(context.table), context.state.leases, facts)

    def _port(self, section: GatewaySection, folder: Path) -> int:
        """Return the port to bind: the configured one, or that of a former incarnation."""
        if section.port:
            return section.port + self.context.n
        known = folder / f"url.{self.context.n}"
        port = known.read_text().rpartition(":")[2] if known.exists() else ""
        return int(port) if port.isascii() and port.isdigit() and is_free(section.host, int(port)) else 0

    async def start(self) -> None:
        """Begin to serve."""
        serving = await self._server.start()
        serving.add_done_callback(self._on_end)
        self.context.journal.event("gateway_ready", url=self._server.url)

    def _on_end(self, serving: asyncio.Task[None]) -> None:
        if not serving.cancelled() and (error := serving.exception()) is not None:
            self.fail(error)

    async def stop(self) -> None:
        """Finish the running requests or refuse them, and close."""
        await self._server.stop(self._answers.close)

    def handled(self) -> int:
        """Return the number of HTTP requests answered so far."""
        return self._answers.count

    def metrics(self) -> dict[str, float]:
        """Return the characters that the tokenizer lacked, escaped or dropped, if any."""
        return dict(self._answers.tokenizer.replaced)


def gateway_folder(folder: Path) -> Path:
    """Return the folder of the gateway's addresses and token, which only its owner may enter."""
    path = folder / "gateway"
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    return path


def tokens_of(section: GatewaySection, folder: Path) -> tuple[str, ...]:
    """Return the gateway's bearer tokens, the user's or a random one; raises ConfigError."""
    from relax_actors.serving.tokens import load_or_create_secret, read_tokens  # noqa: PLC0415 as in `setup`

    if section.token_file is not None:
        return read_tokens(section.token_file)
    return (load_or_create_secret(folder / "token"),)


def operator_tokens(section: GatewaySection, folder: Path) -> tuple[str, ...]:
    """Return the operators' bearer tokens, the user's or a random one; see `tokens_of`."""
    from relax_actors.serving.tokens import load_or_create_secret, read_tokens  # noqa: PLC0415 as in `setup`

    if section.operator_token_file is not None:
        return read_tokens(section.operator_token_file, "gateway.operator_token_file")
    return (load_or_create_secret(folder / "operator-token"),)


def session_secret(store: Path) -> str:
    """Return the secret of session tokens, shared by all nodes of a run in the store."""
    from relax_actors.serving.tokens import load_or_create_secret  # noqa: PLC0415 as in `setup`

    return load_or_create_secret(store / "gateway" / "secret")


def _certificate(section: GatewaySection) -> tuple[Path, Path] | None:
    if section.certificate is None or section.certificate_key is None:
        return None
    return section.certificate, section.certificate_key


def _check_certificate(certificate: Path, key: Path) -> None:
    for name, path in (("certificate", certificate), ("certificate_key", key)):
        if not path.is_file():
            msg = f"gateway.{name} {path} does not exist; give the path of a PEM file"
            raise ConfigError(msg)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=lambda: b"")
    except (OSError, ValueError) as error:
        msg = (
            f"gateway.certificate {certificate} with gateway.certificate_key {key} cannot be used ({error}); give a "
            "certificate in PEM, and its private key without a password"
        )
        raise ConfigError(msg) from error
