"""Secrets in environments and command lines: what counts as one."""

from __future__ import annotations

import pytest

from relax_actors.config.masking import masked_argument
from relax_actors.supervision.environment import is_secret, without_secrets


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("WANDB_API_KEY", "x", True),
        ("HF_TOKEN", "x", True),
        ("AWS_SECRET_ACCESS_KEY", "x", True),
        ("AWS_ACCESS_KEY_ID", "x", True),
        ("mlflow_tracking_password", "x", True),
        ("GOOGLE_APPLICATION_CREDENTIALS", "/x", True),
        ("SSH_AUTH_SOCK", "/x", True),
        ("HTTPS_PROXY", "http://user:pw@proxy:1", True),
        ("HTTPS_PROXY", "http://proxy:1", False),
        ("TOKENIZERS_PARALLELISM", "false", False),
        ("PYTHONHASHSEED", "0", False),
        ("PATH", "/bin", False),
        ("KEYBOARD", "us", False),
        ("RELAX_TREE", "1-2", False),
    ],
)
def test_secrets_are_known_by_name_or_by_a_password_in_a_url(name: str, value: str, secret: bool) -> None:  # noqa: FBT001
    assert is_secret(name, value) is secret
    assert without_secrets({name: value}) == ({} if secret else {name: value})
    assert without_secrets({name: value}, [name]) == {name: value}


@pytest.mark.parametrize(
    ("argument", "shown"),
    [
        ("run.seed=3", "run.seed=3"),
        ("broker.url=nats://u:a=b@host:1", "broker.url=nats://***@host:1"),
        ("nats://u:p@a:1,nats://u:q@b:1", "nats://***@a:1,nats://***@b:1"),
        ("roles.judge.api_key=sk-1", "roles.judge.api_key=***"),
        ("--quiet", "--quiet"),
        ("a=", "a="),
    ],
)
def test_secrets_in_arguments_are_masked(argument: str, shown: str) -> None:
    assert masked_argument(argument) == shown
