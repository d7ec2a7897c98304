"""Evaluation of given weights on the sets of a recipe, by the engine that its runs use."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from functools import cache
from itertools import batched
from pathlib import Path

from nemo_rl_mcore.config import RunConfig
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.sources import open_sets
from nemo_rl_mcore.data.tokenizer import Tokenizer
from nemo_rl_mcore.data.turns import first_turn
from nemo_rl_mcore.driver.actors.one_process import OneProcess
from nemo_rl_mcore.driver.algorithms.engine_comparison import rows_to_compare
from nemo_rl_mcore.driver.algorithms.run_checkpoints import require_whole
from nemo_rl_mcore.driver.golds import require_answers
from nemo_rl_mcore.driver.interfaces import GenerationInterface
from nemo_rl_mcore.driver.observability.ending import exit_status
from nemo_rl_mcore.driver.observability.recorder import Startup
from nemo_rl_mcore.driver.output import count_of, open_console, say_aside, write_line
from nemo_rl_mcore.driver.parts import stop_ids_of, tokenizer_of
from nemo_rl_mcore.driver.policy import EmbeddedGeneration, open_place, start_frozen
from nemo_rl_mcore.driver.rollouts.player import Responder, Rollout
from nemo_rl_mcore.driver.run_folder import held_folders
from nemo_rl_mcore.environment.functions import RewardFunctions, require_columns
from nemo_rl_mcore.environment.interface import Environment, votes_of
from nemo_rl_mcore.environment.registry import make_environment
from nemo_rl_mcore.environment.replies import replies_of
from nemo_rl_mcore.errors import RunStoppedError, code_of
from nemo_rl_mcore.rank.checkpoints import CheckpointStore
from nemo_rl_mcore.tools.evaluate.metrics import Estimate, set_metrics
from nemo_rl_mcore.tools.evaluate.samples import (
    RESULTS_FILE,
    SampleFile,
    SampleRow,
    enter,
    identity_of,
    write_json,
    writing_to,
)

_NOISE_STEP = 0
"""The step in the key of the sampling noise, which then is one of prompt and sample alone."""


@dataclass(frozen=True)
class SetResult:
    """What a set amounts to."""

    prompts: int
    samples: int
    metrics: Mapping[str, Estimate]


@dataclass(frozen=True)
class Evaluator:
    """Answers sets of prompts into a folder.

    samples: answers to each prompt. batch_size: prompts that the engine is asked together. k_values: of pass@k, maj@k.
    start: gives what answers; it is called once a prompt is left to be asked. notify: told of each batch.
    """

    folder: Path
    environment: Environment
    start: Callable[[], Responder]
    samples: int
    batch_size: int
    k_values: Sequence[int]
    greedy: bool
    notify: Callable[[str], None]

    def evaluate(self, sets: Mapping[str, Sequence[Prompt]]) -> dict[str, SetResult]:
        """Ask what is not on disk yet, and write the results.

        Raises FolderError where the folder cannot be written to, and what engine and environment raise.
        """
        results = {name: self._result(self._rows(name, prompts)) for name, prompts in sets.items()}
        told = {name: asdict(result) for name, result in results.items()}
        with writing_to(self.folder):
            write_json(self.folder / RESULTS_FILE, told)
        return results

    def _rows(self, name: str, prompts: Sequence[Prompt]) -> list[SampleRow]:
        """Return the rows of a set: those on disk, then those that are asked now."""
        batches = [*batched(prompts, self.batch_size)]
        keys = [(prompt.index, sample) for prompt in prompts for sample in range(self.samples)]
        file = SampleFile(
            self.folder / f"{name}.jsonl", keys, [len(batch) * self.samples for batch in batches]
        )
        with writing_to(self.folder):
            rows = file.go_on()
        if rows:
            self.notify(f"{name}: {len(rows)} of {len(keys)} samples are there")
        for batch in batches[math.ceil(len(rows) / (self.batch_size * self.samples)) :]:
            new = self._ask(batch)
            with writing_to(self.folder):
                file.append(new)
            rows += new
            self.notify(f"{name}: {len(rows)} of {len(keys)} samples, mean reward {_mean_reward(rows):.4g}")
        return rows

    def _ask(self, prompts: Sequence[Prompt]) -> list[SampleRow]:
        rollout = self.start().respond(prompts, self.samples, step=_NOISE_STEP, greedy=self.greedy)
        finished = rollout.batch["finished"].tolist()
        answers = zip(rollout.prompts, rollout.responses, finished, strict=True)
        turns = [first_turn(prompt, response, finished=ended) for prompt, response, ended in answers]
        replies = replies_of(self.environment, turns, {})
        votes = [
            vote
            for responses in batched(rollout.responses, self.samples)
            for vote in votes_of(self.environment, responses)
        ]
        return [
            _row(rollout, place, reply.reward, vote.answer, vote.first)
            for place, (reply, vote) in enumerate(zip(replies, votes, strict=True))
        ]

    def _result(self, rows: Sequence[SampleRow]) -> SetResult:
        scored = [[row.scored for row in samples] for samples in batched(rows, self.samples)]
        return SetResult(len(scored), self.samples, set_metrics(scored, self.k_values))


def _row(rollout: Rollout, place: int, reward: float, answer: str | None, vote: int | None) -> SampleRow:
    prompt = rollout.prompts[place]
    return SampleRow(
        index=prompt.index,
        sample=int(rollout.batch["sample_index"][place]),
        prompt=prompt.text,
        response=rollout.responses[place],
        reward=reward,
        answer=answer,
        gold=prompt.answer,
        tokens=int(rollout.batch["token_mask"][place].sum()),
        finished=bool(rollout.batch["finished"][place]),
        vote=vote,
    )


def _mean_reward(rows: Sequence[SampleRow]) -> float:
    return math.fsum(row.reward for row in rows) / len(rows)


_VERSION = 1
"""Of the weights, which engines apart from the ranks are sent once."""


def run_eval(config: RunConfig) -> int:
    """Evaluate the policy of a configuration that `as_evaluated` has made; see `exit_status`."""
    return exit_status(lambda: _print_table(evaluate(config)))


def evaluate(config: RunConfig) -> Mapping[str, SetResult]:
    """Evaluate, and return the metrics of each set by its name; raises ConfigError and RunStoppedError."""
    if config.policy.init_checkpoint is not None:
        require_whole(config.policy.init_checkpoint, "--checkpoint", config.checkpointing, say_aside)
    tokenizer = tokenizer_of(config.policy, config.data)
    environment, sets = _open(config, tokenizer)
    folder = Path(config.logger.log_dir)
    _say(f"weights: {_weights(config)}")
    with held_folders({"eval.save_path": folder}), ExitStack() as started:
        enter(folder, identity_of(config, sets), _say)
        evaluator = _evaluator(config, tokenizer, environment, sets, started)
        try:
            results = evaluator.evaluate(sets)
        except BaseException as error:
            error.add_note(f"the same command goes on after the samples in {folder}")
            raise
    _say(f"the samples and results.json are in {folder}")
    return results


def _weights(config: RunConfig) -> str:
    """Return which weights are evaluated; where the recipe names none, also how to take those that its run saved."""
    given = config.policy.init_checkpoint or config.policy.model_name
    if given is not None:
        return given
    saved = CheckpointStore(Path(config.checkpointing.checkpoint_dir)).latest()
    hint = "" if saved is None else f"; --checkpoint {saved.folder} takes those of the recipe's last run"
    return f"drawn at random by the seed, as the recipe says{hint}"


def _open(config: RunConfig, tokenizer: Tokenizer) -> tuple[Environment, dict[str, list[Prompt]]]:
    try:
        # The share of correct answers needs a score of each.
        environment = make_environment(config.env.model_copy(update={"unscored": "refuse"}))
        if not hasattr(environment, "score"):
            raise ValueError(
                "env: eval asks for one answer to each prompt, and this environment takes part in episodes of several; "
                "a validation of the run plays them"
            )
        if isinstance(environment, RewardFunctions) and config.eval is not None:
            sources = config.eval.sets.items()
            require_columns(environment, {f"eval.sets.{name}": source.columns for name, source in sources})
        sets = open_sets(config, tokenizer)
        require_answers(config, [prompt for prompts in sets.values() for prompt in prompts])
    except ValueError as error:
        raise RunStoppedError(str(error), code=code_of(error)) from error
    return environment, sets


def _evaluator(
    config: RunConfig,
    tokenizer: Tokenizer,
    environment: Environment,
    sets: Mapping[str, Sequence[Prompt]],
    started: ExitStack,
) -> Evaluator:
    """Return an evaluator that starts ranks and engine when there is something left to ask; they end with the stack."""
    section = config.eval
    assert section is not None

    @cache
    def start() -> Responder:
        first = next(iter(sets.values()))
        generation = _generation(config, tokenizer, first, started)
        return Responder(generation, tokenizer, config.max_prompt_length)

    return Evaluator(
        folder=Path(config.logger.log_dir),
        environment=environment,
        start=start,
        samples=section.num_tests_per_prompt,
        batch_size=config.loop.val_batch_size,
        k_values=section.k_values,
        greedy=section.temperature == 0,
        notify=_say,
    )


def _generation(
    config: RunConfig, tokenizer: Tokenizer, first: Sequence[Prompt], started: ExitStack
) -> GenerationInterface:
    """Open the engine over started ranks, with their weights; first: the set whose prompts engines are compared on."""
    startup = Startup(open_console(highlight=False)).part
    place = open_place(config, engines=not config.policy.generation.decodes_on_ranks)
    alone = isinstance(place, OneProcess)
    with nullcontext() if alone else startup("ray", "starting Ray"):
        cluster = started.enter_context(place)
    with startup("policy", f"starting {count_of(config.cluster.world_size, 'rank')} of the policy"):
        policy = started.enter_context(start_frozen(config, cluster))
    if isinstance(cluster, OneProcess):
        return EmbeddedGeneration(policy, stop_ids_of(config, tokenizer))
    from nemo_rl_mcore.driver.run import open_generation  # brings in Ray

    generation = started.enter_context(
        open_generation(
            config, tokenizer, policy, cluster, lambda: rows_to_compare(config, first, tokenizer), startup
        )
    )
    generation.update_weights(_VERSION)
    return generation


def _say(line: str) -> None:
    write_line(sys.stdout, line)


def _print_table(results: Mapping[str, SetResult]) -> None:
    """Each metric of each set, with its standard error."""
    from rich.table import Table

    table = Table("metric", *results)
    table.add_row("prompts x samples", *(f"{one.prompts} x {one.samples}" for one in results.values()))
    for metric in next(iter(results.values())).metrics:
        table.add_row(metric, *(_shown(one.metrics[metric]) for one in results.values()))
    open_console(highlight=False).print(table)


def _shown(estimate: Estimate) -> str:
    return f"{estimate.mean:.4g}" + ("" if estimate.stderr is None else f" ± {estimate.stderr:.2g}")
