"""Checks of a server that is to join a run, over real HTTP, against a tiny server that says what a test wants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relax_actors.config import Config
from relax_actors.engines.backends import inference_backend
from relax_actors.engines.sglang.external import answers, check_server
from relax_actors.errors import ConfigError, EngineError
from tests.support.adapters import adapter_config, base_folder
from tests.support.engine_servers import KEY, answers_of, server
from tests.support.models import QWEN3, config_of


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return config_of(tmp_path_factory.mktemp("run"), QWEN3, rollout={"backend": "sglang"})


@pytest.fixture(scope="module")
def said(config: Config) -> dict[str, Any]:
    return answers_of(config)


def test_a_server_of_the_same_model_is_accepted(config: Config, said: dict[str, Any]) -> None:
    with server(said) as url:
        check_server(config, url, KEY)
        assert answers(url, KEY) == ""
        ids_alone = said | {"/server_info": said["/server_info"] | {"skip_tokenizer_init": True}, "/tokenize": {}}
    with server(ids_alone) as url:
        check_server(config, url, KEY)


@pytest.mark.parametrize(
    ("path", "change", "message"),
    [
        ("/model_info", {"model_type": "llama"}, "model_type llama.*trains qwen3.*model folder"),
        ("/model_info", {"architectures": ["Other"]}, "architectures.*Other"),
        ("/model_info", {"is_generation": False}, "does not generate"),
        ("/server_info", {"version": "0.4.1"}, r"SGLang 0\.4\.1.*needs 0\.5"),
        ("/server_info", {"max_req_input_len": 8}, "sequences of 8 tokens.*--context-length"),
        ("/tokenize", {"tokens": [1, 2, 3]}, "another tokenizer.*--tokenizer-path"),
    ],
)
def test_a_server_of_something_else_is_refused(
    config: Config, said: dict[str, Any], path: str, change: dict[str, Any], message: str
) -> None:
    with server(said | {path: said[path] | change}) as url, pytest.raises(ConfigError, match=message):
        check_server(config, url, KEY)


def test_a_server_without_the_adapter_of_the_run_is_refused_with_its_arguments(
    tmp_path: Path, said: dict[str, Any]
) -> None:
    config = adapter_config(tmp_path, base_folder(tmp_path), {"targets": ["v_proj"]}, rollout={"backend": "sglang"})
    facts = {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ["k_proj", "q_proj", "v_proj", "o_proj"]}

    def check(**change: Any) -> None:
        with server(said | {"/server_info": said["/server_info"] | facts | change}) as url:
            check_server(config, url, KEY)

    check()
    check(lora_target_modules=["all"])
    for change in ({"enable_lora": None}, {"max_lora_rank": 2}, {"lora_target_modules": ["v_proj"]}):
        with pytest.raises(ConfigError, match=r"cannot serve the adapter.*--enable-lora.*--max-lora-rank 4"):
            check(**change)


def test_a_wrong_key_another_program_and_silence_are_told_apart(config: Config, said: dict[str, Any]) -> None:
    with server(said) as url:
        with pytest.raises(ConfigError, match=r"refuses the key.*`key`"):
            check_server(config, url, "wrong-key")
        assert "refuses the key" in answers(url, "wrong-key")
    with server({}) as url, pytest.raises(ConfigError, match="is it an SGLang server"):
        check_server(config, url, KEY)
    with pytest.raises(EngineError, match="does not answer"):
        check_server(config, url, KEY)
    assert "does not answer" in answers(url, KEY)


def test_other_backends_take_no_external_engine(tmp_path: Path) -> None:
    config = config_of(tmp_path, QWEN3, rollout={"backend": "transformers"})
    with pytest.raises(ConfigError, match=r"transformers.*external.*sglang"):
        inference_backend(config).check_engine(config, "http://127.0.0.1:1", "")
