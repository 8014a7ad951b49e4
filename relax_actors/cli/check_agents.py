"""Checks of the sections [agent] and [gateway]: on the machine that needs them, the agent and the files are there."""

from __future__ import annotations

import ssl
from collections.abc import Collection, Iterator
from pathlib import Path

from relax_actors.config import Config
from relax_actors.errors import ConfigError


def check_agent(config: Config, here: Collection[str]) -> Iterator[str]:
    """Check that the agent is found.

    Args:
        config: configuration of the run.
        here: roles whose actors start on this machine.

    Raises:
        ConfigError: its program, function, folder or token is missing.
    """
    section = config.local_agent
    if section is None or "agent" not in here:
        return
    from relax_actors.roles.agent import load_function
    from relax_actors.serving.agent_process import Program

    if section.command:
        Program(section.command, section.cwd, section.environment, section.max_output_bytes).check()
    else:
        load_function(section.function)
    if (path := section.gateway_token_file) is not None and not path.is_file():
        msg = f"agent.gateway_token_file {path} does not exist; copy a token of that gateway to it, of mode 600"
        raise ConfigError(msg)
    yield from ()


def check_gateway(config: Config, here: Collection[str]) -> Iterator[str]:
    """Check that the files of the gateway can be used; arguments as `check_agent`.

    Raises:
        ConfigError: one cannot.
    """
    section = config.gateway
    if section is None or "gateway" not in here:
        return
    from relax_actors.serving.tokens import read_tokens

    if section.token_file is not None:
        read_tokens(section.token_file)
    if section.certificate is not None and section.certificate_key is not None:
        _check_certificate(section.certificate, section.certificate_key)
    yield from ()


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
