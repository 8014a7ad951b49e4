"""Checks of an SGLang server that the run does not start, before the run uses it. Imports no torch."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import httpx

from relax_actors.config import Config
from relax_actors.data.adapter import form_of
from relax_actors.data.model_folder import measure
from relax_actors.data.nested_config import text_fields
from relax_actors.data.prompt_maker import room
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.engines.sglang.adapter_form import adapted_layers, adapter_arguments, short_names
from relax_actors.engines.torch.architectures import causal_model_class
from relax_actors.errors import ConfigError, EngineError

CONNECT_SECONDS, ANSWER_SECONDS = 5.0, 15.0
OK, UNAUTHORIZED, FORBIDDEN = 200, 401, 403
PROBE_TOKENS = 64
"""Tokens of the text that server and run must tokenize in the same way."""
RESERVED_TOKENS = 16
"""Tokens of its context that a server keeps for itself, at most."""
TESTED = "0.5.23"
"""Version of SGLang that the engine was written for; used where none is installed here."""


class ExternalServer:
    """Asks a server what it serves."""

    def __init__(self, url: str, key: str) -> None:
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS)
        self._client = httpx.Client(base_url=self.url, headers=headers, timeout=timeout)

    def request(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """Send a request, and return the JSON object of the answer.

        Raises:
            EngineError: the server does not answer.
            ConfigError: it refuses the key or the request, or answers something else.
        """
        try:
            answer = self._client.request(method, path, json=body)
        except httpx.HTTPError as error:
            msg = f"the server at {self.url} does not answer {path}: {error or type(error).__name__}"
            raise EngineError(msg) from error
        if answer.status_code in (UNAUTHORIZED, FORBIDDEN):
            msg = f"the server at {self.url} refuses the key ({answer.status_code}); give its API key with `key`"
            raise ConfigError(msg)
        try:
            body_of_answer = answer.json() if answer.status_code == OK else None
        except ValueError:
            body_of_answer = None
        if not isinstance(body_of_answer, dict):
            msg = f"{self.url}{path} is answered with status {answer.status_code}; is it an SGLang server?"
            raise ConfigError(msg)
        return body_of_answer

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


def answers(url: str, key: str) -> str:
    """Return why a server does not answer; empty if it does."""
    server = ExternalServer(url, key)
    try:
        server.request("GET", "/model_info")
    except (EngineError, ConfigError) as error:
        return str(error)
    finally:
        server.close()
    return ""


def check_server(config: Config, url: str, key: str) -> None:
    """Check that a server serves the model of the run: architecture, tokenizer, context length and version.

    Raises:
        EngineError: it does not answer.
        ConfigError: it is no server for this run.
    """
    server = ExternalServer(url, key)
    try:
        _check_model(server, config.model_path)
        facts = server.request("GET", "/server_info")
        _check_settings(server, config, facts)
        if not facts.get("skip_tokenizer_init"):  # such a server reads and writes token ids alone
            _check_tokenizer(server, config.model_path)
    finally:
        server.close()


def _check_model(server: ExternalServer, model: Path) -> None:
    facts = server.request("GET", "/model_info")
    fields = text_fields(json.loads((model / "config.json").read_text()))
    own = {
        "model_type": measure(model).model_type,
        "architectures": list(fields.get("architectures") or [causal_model_class(model)]),
    }
    for name, wanted in own.items():
        if (served := facts.get(name)) != wanted:
            msg = (
                f"the server at {server.url} serves a model of {name} {served}, and the run trains {wanted}; start it "
                f"with the run's model folder {model}"
            )
            raise ConfigError(msg)
    if not facts.get("is_generation", True):
        msg = f"the server at {server.url} does not generate; start it without --is-embedding"
        raise ConfigError(msg)


def _check_settings(server: ExternalServer, config: Config, facts: dict[str, Any]) -> None:
    try:
        wanted = version("sglang")
    except PackageNotFoundError:
        wanted = TESTED
    given = str(facts.get("version", "unknown"))
    if given.split(".")[:2] != wanted.split(".")[:2]:
        msg = f"the server at {server.url} runs SGLang {given}, and the run needs {wanted}; install that version there"
        raise ConfigError(msg)
    if config.model.fp32_lm_head and not facts.get("enable_fp32_lm_head"):
        msg = f"the server at {server.url} runs without --enable-fp32-lm-head, which model.fp32_lm_head needs"
        raise ConfigError(msg)
    _check_adapter(server, config, facts)
    longest, needed = facts.get("max_req_input_len"), room(config)
    if isinstance(longest, int) and longest + RESERVED_TOKENS < needed:
        msg = (
            f"the server at {server.url} takes sequences of {longest} tokens, and those of the run have up to "
            f"{needed}; start it with a larger --context-length and --max-total-tokens"
        )
        raise ConfigError(msg)


def _check_adapter(server: ExternalServer, config: Config, facts: dict[str, Any]) -> None:
    """Check that a server computes with the run's adapter beside the weights."""
    if not (needed := adapter_arguments(config, cuda=True)):
        return
    assert config.lora is not None  # noqa: S101 without an adapter no arguments are needed
    form = form_of(config.lora)
    names = set(short_names(adapted_layers(config.model_path, form)))
    served = set(facts.get("lora_target_modules") or ())
    has_rank = facts.get("enable_lora") and (facts.get("max_lora_rank") or 0) >= form.rank
    if not has_rank or not (names <= served or "all" in served):
        msg = f"the server at {server.url} cannot serve the adapter of [lora]; start it with {' '.join(needed)}"
        raise ConfigError(msg)


def _check_tokenizer(server: ExternalServer, model: Path) -> None:
    tokenizer = Tokenizer(model)
    text = tokenizer.decode(range(PROBE_TOKENS))
    own = tokenizer.encode_any(text, special=False).tolist()
    body = {"prompt": text, "add_special_tokens": False}
    if (ids := server.request("POST", "/tokenize", body).get("tokens")) != own:
        msg = (
            f"the server at {server.url} has another tokenizer: it reads {text[:40]!r} as tokens {str(ids)[:60]}, "
            f"and the run as {str(own)[:60]}; start it with --tokenizer-path {model}"
        )
        raise ConfigError(msg)
