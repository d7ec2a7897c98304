"""The list of NeMo RL's keys, and that each of them has been judged."""

from itertools import accumulate
from pathlib import Path

import pytest
from known_keys import known_keys_text

from nemo_rl_mcore.config.base import join_path
from nemo_rl_mcore.config.master import RUN_CONFIGS
from nemo_rl_mcore.recipe.of_nemo_rl import LIST, is_foreign, listed_keys, listed_origin, twin_in_policy
from nemo_rl_mcore.recipe.schema import is_known
from nemo_rl_mcore.tools.migrate.judgements import BUFFER, JUDGEMENTS, RENAMED

RECIPES = sorted((Path(__file__).parents[3] / "fixtures/nemo_rl").glob("*.yaml"))


def test_the_list_is_that_of_the_recipes():
    assert known_keys_text(RECIPES) == LIST.read_text()
    assert listed_origin() == "7ea279abf (2026-08-22)"
    assert len(listed_keys()) > 450


@pytest.mark.parametrize("key", sorted(listed_keys()))
def test_every_key_is_judged(key):
    """A key that fails here needs a field, another name in judgements.py, or a row in judgements.yaml."""
    section = key.rpartition(".")[0]
    if section == "policy.generation.vllm_kwargs":
        return  # whatever vLLM takes, see config/generation.py
    judged = {*JUDGEMENTS, *RENAMED, BUFFER}
    around = (one for path in (key, twin_in_policy(key)) for one in accumulate(path.split("."), join_path))
    assert any(is_known(key, kind) for kind in RUN_CONFIGS.values()) or judged.intersection(around)


@pytest.mark.parametrize(
    "key", ["policy.megatron_cfg.cuda_graph_impll", "grpo.new_key", "value.new", "teacher.x.y"]
)
def test_a_new_key_would_be_seen(key):
    assert not any(is_known(key, kind) for kind in RUN_CONFIGS.values())
    assert not is_foreign(key)
