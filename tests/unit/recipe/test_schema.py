import pytest

from nemo_rl_mcore.config.master import RUN_CONFIGS
from nemo_rl_mcore.recipe.of_nemo_rl import twin_in_policy
from nemo_rl_mcore.recipe.schema import allowed, fields, is_known, nearest_path
from nemo_rl_mcore.tools.migrate.judgements import JUDGEMENTS, RENAMED


@pytest.mark.parametrize("path", sorted(fields()))
def test_every_field_has_a_description(path):
    description = fields()[path].description
    assert description
    assert description.endswith(".")


@pytest.mark.parametrize("path", sorted(fields()))
def test_what_a_field_allows_can_be_said(path):
    assert "typing" not in allowed(fields()[path])
    assert "<" not in allowed(fields()[path])


def test_the_table_of_unsupported_keys_repeats_no_field():
    assert not fields().keys() & JUDGEMENTS.keys()


@pytest.mark.parametrize("path", sorted(JUDGEMENTS))
def test_unsupported_keys_stand_in_known_sections(path):
    parent = twin_in_policy(path).rpartition(".")[0]
    of_all = (path for kind in RUN_CONFIGS.values() for path in fields(kind))
    known = {*RUN_CONFIGS, *of_all, *(key.rpartition(".")[0] for key in RENAMED), *JUDGEMENTS}
    assert not parent or parent in known


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("policy.generation.top_kk", "policy.generation.top_k"),
        ("grpo.lr", "policy.megatron_cfg.optimizer.lr"),
        ("policy.generaton.top_k", "policy.generation.top_k"),
        ("megatron_cfg.sequence_parallel", "policy.megatron_cfg.sequence_parallel"),
        ("zzz", None),
    ],
)
def test_nearest_path(path, nearest):
    assert not is_known(path)
    assert nearest is None or is_known(nearest)
    assert nearest_path(path) == nearest
