"""What a model beside the policy asks of it."""

from collections.abc import Iterator

from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.config.master import DistillationMasterConfig
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.recipe.rules.feature import Rules


def _teacher(config: RunConfig) -> Iterator[Problem]:
    if not isinstance(config, DistillationMasterConfig):
        return
    teacher, policy = config.teacher, config.policy
    if teacher.model is not None and teacher.model.vocab_size != policy.model.vocab_size:
        yield Problem(
            "contradicts",
            "teacher.model.vocab_size",
            f"{teacher.model.vocab_size} is not policy.model.vocab_size: {policy.model.vocab_size}",
            "teacher and student name the same tokens; "
            + (
                "make the two equal"
                if policy.weights is None
                else "name a teacher with the policy's vocabulary"
            ),
            ("policy.model.vocab_size",),
        )
    if policy.megatron_cfg.distributed_data_parallel_config.overlap_param_gather:
        yield Problem(
            "incompatible",
            "policy.megatron_cfg.distributed_data_parallel_config.overlap_param_gather",
            "true does not go with distillation, which reads the output weight itself",
            "set it to false",
        )


RULES = Rules(of_runs=(_teacher,))
