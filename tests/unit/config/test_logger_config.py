from nemo_rl_mcore.config import LoggerConfig


def test_the_loggers_section_of_nemo_rl_carries_over() -> None:
    LoggerConfig.model_validate(
        {
            "tensorboard_enabled": True,
            "wandb_enabled": True,
            "wandb": {"project": "grpo-dev", "name": "grpo-dev-logger"},
            "mlflow_enabled": True,
            "mlflow": {"experiment_name": "e", "run_name": "n"},
        }
    )
