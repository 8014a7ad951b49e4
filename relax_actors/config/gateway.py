"""The sections [gateway] and [agent]."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from relax_actors.config.players import PlayersSection
from relax_actors.config.sections import NonNegativeInt, PoolSection, Positive, PositiveFloat


class GatewaySection(PoolSection):
    """[gateway]: HTTP endpoints on the live policy, and sessions for agents; needs `relax-actors[gateway]`."""

    host: str = "127.0.0.1"
    """Address to listen on. An address that other machines can reach needs `token_file` and TLS."""
    port: Annotated[int, Field(ge=0, lt=65536)] = 0
    """Port of actor 0; actor n takes the port n above it. With 0 each takes a free port, the same one after a
    restart. The addresses are in the files `<run folder>/gateway/url.<n>`."""
    token_file: Path | None = None
    """File with the bearer tokens that the gateway accepts, one a line, of mode 600. If not set, a random token is
    written to `<run folder>/gateway/token`."""
    operator_token_file: Path | None = None
    """File with the bearer tokens of operators, who may scale the run and add engines, one a line, of mode 600. If not
    set, a random token is written to `<run folder>/gateway/operator-token`."""
    certificate: Path | None = None
    """TLS certificate, in PEM; with `certificate_key`."""
    certificate_key: Path | None = None
    """Private key of `certificate`, in PEM."""
    model: str = "policy"
    """Name of the model, as clients see it."""
    max_body_bytes: Annotated[int, Field(gt=0, le=8_000_000)] = 2 << 20
    """Largest body of a request, in bytes. The broker takes no larger message."""
    max_concurrent: Positive = 256
    """Most requests that an actor works on at once; more are refused with status 429."""
    max_connections: Positive = 1024
    """Most connections to an actor at once."""
    request_seconds: PositiveFloat = 600.0
    """Seconds after which a request without an answer is refused with status 504."""

    @model_validator(mode="after")
    def _address(self) -> GatewaySection:
        if (self.certificate is None) != (self.certificate_key is None):
            msg = "gateway.certificate and gateway.certificate_key come together; set both or none"
            raise ValueError(msg)
        if is_loopback(self.host):
            return self
        if self.token_file is None or self.certificate is None:
            msg = (
                f"gateway.host = {self.host!r} can be reached from other machines: set gateway.token_file, "
                "gateway.certificate and gateway.certificate_key, or listen on 127.0.0.1 behind a proxy of your own"
            )
            raise ValueError(msg)
        return self


class AgentSection(PlayersSection):
    """[agent]: samples are worked out by agents that own their loop, and ask the policy through the gateway.

    With `command` or `function`, actors of the role `agent` run the agents. With neither, agents that are started
    elsewhere take samples from the gateway (`POST /sessions`).
    """

    title: ClassVar[str] = "agent"

    command: list[str] = Field(default_factory=list)
    """Program to run for each sample, with its arguments; it finds its task in the environment variables
    RELAX_TASK_FILE, RELAX_RESULT_FILE, OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY. A
    path of the program that has a slash is relative to the folder of the configuration; relative paths in its arguments
    are the program's own, relative to `cwd`."""
    function: str = ""
    """Dotted path of a coroutine function to call for each sample instead. Its argument is an `AgentTask` of
    `relax_actors.serving.session_client`; it returns the reward, an `AgentResult` or None, and never blocks."""
    cwd: Path | None = None
    """Working directory of `command`; an empty folder of the sample if not set."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Further environment variables of `command`. Of the actor's own it gets PATH, HOME, LANG and TMPDIR alone."""
    concurrency: Positive = 8
    """Agents that an actor runs at once."""
    seconds: PositiveFloat = 600.0
    """Seconds that an agent has for a sample; then it is killed, and the sample ends as it is with reason `timeout`."""
    lease_seconds: Annotated[float, Field(ge=1)] = 15.0
    """Seconds without a sign of life of an agent's actor after which its sample is given to another one."""
    idle_seconds: Annotated[float, Field(ge=1)] = 300.0
    """Seconds without a request after which the sample of an agent that is started elsewhere is given to another."""
    retries: NonNegativeInt = 2
    """Times that a sample is given out again after its agent failed or was lost; then it ends with reason `error`."""
    on_error: Literal["exclude", "refill", "zero"] = "exclude"
    """What happens to a sample whose agent failed. It is given to another agent, which gets the recorded answers again;
    with "refill" an agent that failed is followed by one that gets other answers. After `retries`, the group's
    advantages are computed without the sample; with "zero" it is trained with reward 0. A sample whose agent ends well
    but reports no reward, where `reward.function = "environment"`, is not given out again: it is left out of its group,
    or with "zero" trained with reward 0."""
    max_turns: Positive = 64
    """Answers of the policy in a sample; further requests are refused, and the sample ends with reason `max_turns`."""
    branches: Literal["all", "last"] = "all"
    """Where an agent did not only continue its conversation: train all branches, or the one with the last answer; with
    players, that of each player."""
    on_rewrite: Literal["branch", "error"] = "branch"
    """What happens to a request that does not continue the tokens of its conversation, because the chat template drops
    earlier reasoning or the agent has changed or left out an answer: "branch" begins a new token sequence, "error"
    refuses the request with status 400. A conversation that begins with other messages is a new one, and is answered in
    both cases."""
    max_output_bytes: Positive = 1 << 20
    """Output of `command` that is kept in `agents/<session>/output.log` of the run's folder; the rest is discarded."""
    gateway_url: str = ""
    """Address of the gateway for agents on another machine than the run's folder; with `gateway_token_file`."""
    gateway_token_file: Path | None = None
    """File with a token of that gateway."""
    shows_answer: bool = False
    """Whether the task that an agent gets holds the reference answer."""

    @model_validator(mode="after")
    def _one_way(self) -> AgentSection:
        if self.command and self.function:
            msg = "agent.command and agent.function exclude each other; set one of them"
            raise ValueError(msg)
        return self


def is_loopback(host: str) -> bool:
    """Whether an address reaches this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
