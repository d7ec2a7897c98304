import pytest
from refusals import wrong_key

from nemo_rl_mcore.config import LoggerConfig, MLflowConfig, checked
from nemo_rl_mcore.config.base import collect_problems


@pytest.mark.parametrize(
    "uri", [None, "http://localhost:5000", "https://host/mlflow", "sqlite:////runs/all.db"]
)
def test_addresses_of_stores(uri) -> None:
    assert MLflowConfig(tracking_uri=uri).tracking_uri == uri


@pytest.mark.parametrize("uri", ["mlruns", "file:///runs", "postgresql://host/db", "sqlite:///", "http://"])
def test_what_is_no_store_is_refused_with_what_is(uri) -> None:
    with wrong_key("tracking_uri: not-allowed"):
        checked(MLflowConfig, MLflowConfig(tracking_uri=uri))


def test_a_password_in_an_address_is_refused_and_not_repeated() -> None:
    (problem,) = collect_problems(MLflowConfig.model_construct(tracking_uri="https://me:secret@host"))
    assert "MLFLOW_TRACKING_PASSWORD" in str(problem)
    assert "secret" not in str(problem)


def test_the_loggers_section_of_nemo_rl_carries_over() -> None:
    LoggerConfig.model_validate(
        {
            "tensorboard_enabled": True,
            "tensorboard": {"log_dir": "tb_logs-x"},
            "wandb_enabled": True,
            "wandb": {"project": "grpo-dev", "name": "grpo-dev-logger"},
            "mlflow_enabled": True,
            "mlflow": {"experiment_name": "e", "run_name": "n", "tracking_uri": "http://localhost:5000"},
        }
    )
