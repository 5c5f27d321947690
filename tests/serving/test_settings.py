from __future__ import annotations

import pytest

from common.errors import SettingError
from engine.settings import Settings as EngineSettings
from serving.settings import Settings


def test_options_win_over_the_environment_and_one_port_can_serve_both() -> None:
    environment = {"SAGEMAKER_BIND_TO_PORT": "9123", "MANAGEMENT_PORT": "9124", "HOST": ""}
    settings = Settings.read(["--port", "9000"], environment)
    assert (settings.port, settings.management_port) == (9000, 9124)
    assert settings.host == Settings.host
    assert Settings.read([], {}).ports == (8080, 8081)
    assert Settings.read([], {"SAGEMAKER_BIND_TO_PORT": "8081"}).ports == (8081,)


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"SAGEMAKER_BIND_TO_PORT": "많이"}, "SAGEMAKER_BIND_TO_PORT"),
        ({"SAGEMAKER_BIND_TO_PORT": "0"}, "SAGEMAKER_BIND_TO_PORT"),
        ({"MANAGEMENT_PORT": "65536"}, "MANAGEMENT_PORT"),
        ({"GRPC_PORT": "65536"}, "GRPC_PORT"),
        ({"GRPC_PORT": "8080"}, "a port of its own"),
        ({"SCRIPT_WORKERS": "0"}, "SCRIPT_WORKERS"),
        ({"MAX_WAITING": "0"}, "MAX_WAITING"),
        ({"REQUEST_TIMEOUT_S": "1.5"}, "REQUEST_TIMEOUT_S"),
        ({"SHOW_EXAMPLES": "yes"}, "SHOW_EXAMPLES"),
        ({"SAGEMAKER_MODEL_SERVER_WORKERS": "둘"}, "SAGEMAKER_MODEL_SERVER_WORKERS"),
        ({"SAGEMAKER_HANDLER": "/home/model-server/handler.py:handle"}, "a file in the models"),
        ({"SAGEMAKER_HANDLER": "my.module:handle"}, "a file in the models"),
        ({"SAGEMAKER_MODEL_NAME": "../x"}, "SAGEMAKER_MODEL_NAME"),
        ({"SAGEMAKER_MODEL_NAME": "봄" * 400}, "SAGEMAKER_MODEL_NAME"),
    ],
)
def test_a_bad_value_is_named(environment: dict[str, str], named: str) -> None:
    with pytest.raises(SettingError, match=named):
        Settings.read([], environment)


def test_the_workers_agree_with_the_engine() -> None:
    assert Settings.read([], {}).requests_at_once == EngineSettings.max_rows
    assert Settings.read([], {"ENGINE_MAX_ROWS": "4"}).requests_at_once == 4
    given = {"ENGINE_MAX_ROWS": "4", "WORKERS_PER_MODEL": "2"}
    assert Settings.read([], given).requests_at_once == 2


def test_the_token_for_calls_alone_closes_all() -> None:
    assert Settings.read([], {"INFERENCE_TOKEN": "a"}).management_token == "a"  # noqa: S105
    both = Settings.read([], {"INFERENCE_TOKEN": "a", "MANAGEMENT_TOKEN": "b"})
    assert (both.inference_token, both.management_token) == ("a", "b")
    assert Settings.read([], {"MANAGEMENT_TOKEN": "b"}).inference_token == ""


def test_sagemakers_variables_are_read_where_our_own_are_not_set() -> None:
    sdk = {"SAGEMAKER_MODEL_SERVER_WORKERS": "3"}  # its `model_server_workers`
    assert Settings.read([], sdk).script_workers == 3
    assert Settings.read([], {**sdk, "SCRIPT_WORKERS": "2"}).script_workers == 2
    assert Settings.read([], sdk).workers_per_model == Settings.workers_per_model
    for name in ("봄노래", "sowol-2.1+b"):
        assert Settings.read([], {"SAGEMAKER_MODEL_NAME": name}).single_model_name == name
    for handler in ("sagemaker_inference.default_handler_service", "src/service.py:handle"):
        assert Settings.read([], {"SAGEMAKER_HANDLER": handler}).handler == handler
