"""Over episodes of several turns the ids that are trained on are those that were drawn, and so are the numbers."""

from pathlib import Path
from unittest.mock import patch

import played_episodes as episodes
import pytest
import tiny
import torch
from chat_templates import APPENDING, byte_tokenizer
from played_episodes import NEW_TOKENS, SEED, TEMPERATURE
from tolerances import GENERATION

from nemo_rl_mcore.data.tokenizer import load_tokenizer
from nemo_rl_mcore.driver.rollouts.transcript import require_sampled_ids


def tokenizer_of(kind, folder):
    """The name of a tokenizer, by which it is loaded, and whether its chat template is used."""
    if kind == "characters":
        return "char", False
    byte_tokenizer(folder, APPENDING if kind == "template" else None)
    return str(folder), kind == "template"


def config_of(name, tokens):
    tokenizer = load_tokenizer(name)
    model = {"vocab_size": -(-tokenizer.vocab_size // 32) * 32, "max_position_embeddings": tokens}
    return tokenizer, tiny.policy_config(
        model=model,
        tokenizer={"name": name},
        max_total_sequence_length=tokens,
        generation={"max_new_tokens": NEW_TOKENS, "temperature": TEMPERATURE},
    )


def of_ranks(policy, stop_ids, drawn):
    """What answers a batch, of a worker, and notes what was drawn; and the worker."""
    worker = tiny.worker(policy, seed=SEED)
    ask = drawn.noting(lambda data, step: worker.generate(data=data, step=step, stop_ids=list(stop_ids)))
    return ask, worker


def played(kind, folder, samples):
    """The facts of episodes: what was drawn and is trained on, and how they went."""
    name, chat = tokenizer_of(kind, Path(folder) / "tokenizer")
    tokenizer, policy = config_of(name, 128)
    drawn = episodes.Drawn()
    ask, worker = of_ranks(policy, episodes.stop_ids(tokenizer), drawn)
    rollout = episodes.play(ask, tokenizer, chat=chat, tokens=128, samples=samples)
    batch = rollout.batch
    require_sampled_ids(batch)
    found = worker.get_logprobs(data=batch)["logprobs"]
    difference = float(((found - batch["generation_logprobs"]).abs() * batch["token_mask"]).max())
    trained = episodes.trained_by_key(batch)
    return {
        "rows": batch.size,
        "drawn": {**drawn},
        "trained": trained,
        "turns": batch["turn_of_token"].amax(1).tolist(),
        "endings": sorted(set(batch["ending"].tolist())),
        "difference": difference,
        "encoded_anew": sum(encoded(tokenizer, ids) != ids for ids in trained.values()),
    }


def encoded(tokenizer, ids):
    try:
        return tokenizer.encode(tokenizer.text_of(ids))
    except ValueError:
        return None


@pytest.mark.parametrize("kind", ["characters", "bytes", "template"])
def test_what_is_trained_on_is_what_was_drawn(ranks, tmp_path, kind):
    [found] = ranks(1).run(played, kind, str(tmp_path), 8)
    assert found["rows"] == 200
    assert found["trained"] == found["drawn"]
    assert {*found["turns"]} == {1, 2, 3, 4}
    if kind != "characters":
        assert found["encoded_anew"] > 50, "the ids that their texts are encoded to would be other ones"
    assert found["difference"] < GENERATION


def gradients_of_observations(fused):
    """Gradients of a step over episodes, of the same with other numbers at what was observed, and at what was drawn."""
    from nemo_rl_mcore.rank.megatron import passes

    tokenizer, policy = config_of("char", 96)
    megatron = policy.megatron_cfg.model_copy(update={"use_fused_linear_logprobs": fused})
    policy = policy.model_copy(update={"megatron_cfg": megatron})
    ask, worker = of_ranks(policy, episodes.stop_ids(tokenizer), episodes.Drawn())
    batch = episodes.play(ask, tokenizer, prompts=4, samples=4).batch
    batch = episodes.with_what_a_loss_reads(batch)
    del batch["replies"]

    def step(data):
        worker.begin_train_step(tiny.grpo_loss(fused=fused), gbs=16, mbs=4)
        worker.train_microbatch(data)
        found = tiny.gradients(worker)
        worker.abort_train_step()
        return found

    def other_targets(rows):
        """The ids that the loss is to find probable are other ones where no token was sampled."""
        sampled, ids = rows["token_mask"] != 0, rows["input_ids"]
        return torch.where(sampled, ids, (ids + 5) % 32).roll(-1, dims=1)

    first = step(batch)
    with patch.object(passes, "next_tokens", other_targets):
        other = step(episodes.observed_otherwise(batch))
    moved = step(episodes.replace_columns(batch, {"advantages": -batch["advantages"]}))
    return (
        all(first[name].equal(other[name]) for name in first),
        any(not first[name].equal(moved[name]) for name in first),
        max(float(gradient.abs().max()) for gradient in first.values()),
        int((batch["token_mask"][:, :-1] == 0).sum()),
    )


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_what_was_observed_has_no_part_in_the_gradient(ranks, fused):
    [(equal, moved, largest, observed)] = ranks(1).run(gradients_of_observations, fused)
    assert equal
    assert moved
    assert largest > 0
    assert observed > 100
