"""Evaluates weights on a recipe's sets, with the engine of its runs."""

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
from nemo_rl_mcore.driver.actors.one_process import OneProcess
from nemo_rl_mcore.driver.algorithms.run_checkpoints import require_whole
from nemo_rl_mcore.driver.checkpoints import CheckpointStore
from nemo_rl_mcore.driver.observability.recorder import Startup
from nemo_rl_mcore.driver.output import count_of, open_console, write_line
from nemo_rl_mcore.driver.parts import stop_ids_of, tokenizer_of
from nemo_rl_mcore.driver.policy import EmbeddedGeneration, open_place, start_frozen
from nemo_rl_mcore.driver.rollouts.player import Responder
from nemo_rl_mcore.driver.run_folder import held_folders
from nemo_rl_mcore.driver.signals import exit_status
from nemo_rl_mcore.environment.functions import RewardFunctions, require_columns
from nemo_rl_mcore.environment.interface import LocalEnvironments, votes_of
from nemo_rl_mcore.environment.registry import make_environment, math_environment
from nemo_rl_mcore.environment.turns import first_turn
from nemo_rl_mcore.errors import RunStoppedError, code_of
from nemo_rl_mcore.tools.evaluate.samples import (
    RESULTS_FILE,
    Estimate,
    SampleFile,
    SampleRow,
    enter,
    identity_of,
    set_metrics,
    write_json,
    writing_to,
)


@dataclass(frozen=True)
class SetResult:
    prompts: int
    samples: int
    metrics: Mapping[str, Estimate]


@dataclass(frozen=True)
class Evaluator:
    """Answers sets of prompts, and saves the answers in a folder.

    environments: by the prompts' `env_name`, of which a set has one. start: opens the engine; called only if a prompt
    is left to answer. samples: answers per prompt. batch_size: prompts that the engine answers together. notify: prints
    a line; called after each batch.
    """

    folder: Path
    environments: Mapping[str, LocalEnvironments]
    start: Callable[[], Responder]
    samples: int
    batch_size: int
    greedy: bool
    notify: Callable[[str], None]

    def evaluate(self, sets: Mapping[str, Sequence[Prompt]]) -> dict[str, SetResult]:
        """Answer the prompts whose answers are not on disk yet, and write the results.

        Raises FolderError if the folder cannot be written; errors of engine and environment pass through.
        """
        results: dict[str, SetResult] = {}
        k_values = [k for power in range(self.samples.bit_length()) if (k := 2**power) < self.samples]
        k_values.append(self.samples)
        for name, prompts in sets.items():
            scoring = self.environments[prompts[0].env_name]
            batches = [*batched(prompts, self.batch_size)]
            keys = [(prompt.index, sample) for prompt in prompts for sample in range(self.samples)]
            sizes = [len(batch) * self.samples for batch in batches]
            file = SampleFile(self.folder / f"{name}.jsonl", keys, sizes)
            with writing_to(self.folder):
                rows = file.go_on()
            if rows:
                self.notify(f"{name}: {len(rows)} of {len(keys)} samples are on disk")
            for batch in batches[math.ceil(len(rows) / (self.batch_size * self.samples)) :]:
                # Sampling noise depends only on prompt and sample, so all batches are step 0.
                rollout = self.start().respond(batch, self.samples, step=0, greedy=self.greedy)
                drawn, finished = rollout.batch, rollout.batch["finished"].tolist()
                turns = [
                    first_turn(prompt, response, finished=ended)
                    for prompt, response, ended in zip(
                        rollout.prompts, rollout.responses, finished, strict=True
                    )
                ]
                replies = scoring.replies(turns)
                of_prompts = batched(rollout.responses, self.samples)
                votes = [vote for answers in of_prompts for vote in votes_of(scoring.environment, answers)]
                new = [
                    SampleRow(
                        index=turn.prompt.index,
                        sample=int(drawn["sample_index"][place]),
                        prompt=turn.prompt.text,
                        response=turn.answer,
                        reward=reply.reward,
                        answer=vote.answer,
                        gold=turn.prompt.answer,
                        tokens=int(drawn["token_mask"][place].sum()),
                        finished=bool(turn.finished),
                        vote=vote.first,
                    )
                    for place, (turn, reply, vote) in enumerate(zip(turns, replies, votes, strict=True))
                ]
                with writing_to(self.folder):
                    file.append(new)
                rows += new
                reward = math.fsum(row.reward for row in rows) / len(rows)
                self.notify(f"{name}: {len(rows)} of {len(keys)} samples, mean reward {reward:.4g}")
            metrics = set_metrics([*batched(rows, self.samples)], k_values)
            results[name] = SetResult(len(prompts), self.samples, metrics)
        with writing_to(self.folder):
            write_json(self.folder / RESULTS_FILE, {name: asdict(result) for name, result in results.items()})
        return results


def run_eval(config: RunConfig) -> int:
    """Evaluate the policy of a configuration from `as_evaluated`, and print a table; see `exit_status`."""

    def evaluated() -> None:
        from rich.table import Table

        results = evaluate(config)
        table = Table("metric", *results)
        table.add_row("prompts x samples", *(f"{one.prompts} x {one.samples}" for one in results.values()))
        for metric in next(iter(results.values())).metrics:
            estimates = [one.metrics[metric] for one in results.values()]
            errors = ["" if one.stderr is None else f" ± {one.stderr:.2g}" for one in estimates]
            cells = (f"{one.mean:.4g}{error}" for one, error in zip(estimates, errors, strict=True))
            table.add_row(metric, *cells)
        open_console(highlight=False).print(table)

    return exit_status(evaluated)


def evaluate(config: RunConfig) -> Mapping[str, SetResult]:
    """Evaluate, and return the metrics by set; raises ConfigError and RunStoppedError."""
    section, weights = config.eval, config.policy.init_checkpoint
    assert section is not None
    if weights is not None:
        require_whole(weights, "--checkpoint")
    tokenizer = tokenizer_of(config.policy, config.data)
    environments, sets = _open(config, tokenizer)
    folder = Path(config.logger.log_dir)
    weights = weights or config.policy.model_name
    if weights is None:
        weights = "random, from the recipe's seed"
        store = CheckpointStore(Path(config.checkpointing.checkpoint_dir))
        saved = next(store.newest_first(), None)
        if saved is not None:
            weights += f"; --checkpoint {saved.folder} uses those of the recipe's last run"
    _say(f"weights: {weights}")
    with held_folders({"logger.log_dir": folder}), ExitStack() as started:
        enter(folder, identity_of(config, sets), _say)

        @cache
        def start() -> Responder:
            """Start the ranks and open the engine with their weights."""
            startup = Startup(open_console(highlight=False)).part
            place = open_place(config, engines=not config.policy.generation.decodes_on_ranks)
            with nullcontext() if isinstance(place, OneProcess) else startup("ray", "starting Ray"):
                cluster = started.enter_context(place)
            ranks = count_of(config.cluster.world_size, "rank")
            with startup("policy", f"starting {ranks} of the policy"):
                policy = started.enter_context(start_frozen(config, cluster))
            if isinstance(cluster, OneProcess):
                generation = EmbeddedGeneration(policy, stop_ids_of(config, tokenizer))
                return Responder(generation, tokenizer, config.max_prompt_length)
            from nemo_rl_mcore.driver.run import open_generation  # brings in Ray

            first_set = next(iter(sets.values()))
            opening = open_generation(config, tokenizer, policy, cluster, lambda: first_set, startup)
            generation = started.enter_context(opening)
            generation.update_weights(1)
            return Responder(generation, tokenizer, config.max_prompt_length)

        evaluator = Evaluator(
            folder=folder,
            environments=environments,
            start=start,
            samples=section.num_tests_per_prompt,
            batch_size=config.loop.val_batch_size,
            greedy=section.temperature == 0,
            notify=_say,
        )
        try:
            results = evaluator.evaluate(sets)
        except BaseException as error:
            error.add_note(f"run the same command to continue after the samples in {folder}")
            raise
    _say(f"the samples and results.json are in {folder}")
    return results


def _open(
    config: RunConfig, tokenizer: Tokenizer
) -> tuple[dict[str, LocalEnvironments], dict[str, list[Prompt]]]:
    environments, of_eval = dict[str, LocalEnvironments](), config.eval.sets if config.eval else {}
    try:
        for name, section in config.env.by_name.items():
            sources = {key: one for key, one in of_eval.items() if name in ("", one.env_name)}
            if name and not sources:
                continue
            # Accuracy needs a score for every answer.
            environment = make_environment(section.model_copy(update={"unscored": "refuse"}))
            if not (hasattr(environment, "score") or isinstance(environment, RewardFunctions)):
                raise ValueError(
                    "env: eval generates one answer per prompt, but this environment plays episodes of several turns; "
                    "use the run's validation"
                )
            if isinstance(environment, RewardFunctions):
                columns = {f"eval.sets.{key}": source.columns for key, source in sources.items()}
                require_columns(environment, columns)
            environments[name] = LocalEnvironments(environment, section.reward_weights)
        sets = open_sets(config, tokenizer)
        if config.env.math is not None and config.env.math.unparsable == "refuse":
            asked = [prompt for prompts in sets.values() for prompt in prompts]
            asked = [prompt for prompt in asked if prompt.env_name in ("", "math")]
            math_environment(config.env.math).require_answers(asked)
    except ValueError as error:
        raise RunStoppedError(str(error), code=code_of(error)) from error
    return environments, sets


def _say(line: str) -> None:
    write_line(sys.stdout, line)
