"""Open what a run consists of besides its recipe and data: models on their ranks, engines, environments."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

from nemo_rl_mcore.algorithms.engine_comparison import compare_at_start
from nemo_rl_mcore.config import ModelPlan, RunConfig
from nemo_rl_mcore.config.data import RowKind
from nemo_rl_mcore.data.tokenizer import Tokenizer
from nemo_rl_mcore.endpoint.endpoint import Endpoint
from nemo_rl_mcore.endpoint.player import AgentCollector
from nemo_rl_mcore.environments.replies import LocalEnvironments
from nemo_rl_mcore.generation.embedded.policy import EmbeddedGeneration
from nemo_rl_mcore.generation.kinds import engine_kind
from nemo_rl_mcore.interfaces import Environment, Environments, GenerationInterface
from nemo_rl_mcore.output import count_of, write_line
from nemo_rl_mcore.parts import Parts, stop_ids_of
from nemo_rl_mcore.rollouts.player import RolloutCollector
from nemo_rl_mcore.workers.cluster import RayCluster
from nemo_rl_mcore.workers.engine_generation import EngineGeneration
from nemo_rl_mcore.workers.environment import agent_environment
from nemo_rl_mcore.workers.environment_actor import given_variables
from nemo_rl_mcore.workers.environment_pool import EnvironmentPool
from nemo_rl_mcore.workers.policy import Policy


def start_model(
    plan: ModelPlan, config: RunConfig, cluster: RayCluster, colocated_with: Policy | None = None
) -> Policy:
    """Return the ranks of a model of the run."""
    return Policy(
        plan.policy,
        cluster,
        name=plan.name,
        seed=config.seed,
        # One for all models of the run: their log-probabilities are compared with each other.
        temperature=config.logprob_temperature,
        init_reference_model=plan.reference,
        role=plan.role,
        trained=plan.trained,
        colocated_with=colocated_with,
        verify_checksums=config.checkpointing.verify_checksums,
    )


@contextmanager
def open_generation(
    config: RunConfig,
    tokenizer: Tokenizer,
    policy: Policy,
    cluster: RayCluster,
    to_compare: Callable[[], Sequence[Sequence[int]]],
    startup: Callable[[str, str], AbstractContextManager[object]],
) -> Iterator[GenerationInterface]:
    """Open the engine that the recipe asks for; one of its own ends with the block.

    to_compare: gives the token ids after which engines apart from the ranks are compared with them at first.
    startup: entered around a part of the start, with its name and what a person is told.
    """
    stop_ids = stop_ids_of(config, tokenizer)
    if config.policy.generation.decodes_on_ranks:
        yield EmbeddedGeneration(policy, stop_ids)
        return

    kind = engine_kind(config)

    def compare(engines: EngineGeneration) -> None:
        with startup("comparison", f"comparing the {kind.noun}s with the ranks"):
            found = compare_at_start(config, policy, engines, to_compare())
        write_line(sys.stdout, found.agreement)

    with EngineGeneration(
        kind,
        config.policy,
        cluster,
        policy,
        stop_ids=stop_ids,
        seed=config.seed,
        starting=partial(startup, "engines", f"starting {count_of(kind.engines, kind.noun)}"),
        check=compare if config.policy.generation.compare_at_start else None,
    ) as engines:
        yield engines


@contextmanager
def open_collector(
    parts: Parts, generation: GenerationInterface, environments: Environments
) -> Generator[RolloutCollector]:
    """Return the player of episodes: the loop of turns or, behind an endpoint open as long as the block, agents."""
    config = parts.config
    collector = RolloutCollector(
        generation,
        parts.tokenizer,
        config.max_prompt_length,
        environments,
        form=parts.form,
        max_drop_rate=config.env.pool.max_drop_rate,
    )
    if config.env.endpoint is None:
        yield collector
        return
    variables = agent_environment(os.environ) | given_variables(config.env.pool)
    stop_ids = stop_ids_of(config, parts.tokenizer)
    with Endpoint(config, parts.tokenizer, stop_ids, variables) as endpoint:
        yield AgentCollector(**vars(collector), endpoint=endpoint, judges=bool(config.env.given))


@contextmanager
def open_environments(
    config: RunConfig, cluster: RayCluster, environment: Environment
) -> Iterator[Environments]:
    """Where the environment of the recipe answers: in actors, which end with the block, or in this process.

    Actors of a run that samples start at once, and nobody waits for them; those of others when they are first asked.
    """
    if not config.env.pool_size:
        yield LocalEnvironments(environment, config.env.reward_weights, config.env.max_observation_chars)
        return
    with EnvironmentPool(config.env, cluster) as pool:
        if config.row_kind is RowKind.PROMPTS:
            pool.start()
        yield pool
