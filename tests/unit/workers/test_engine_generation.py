"""The driver's handle over a fake engine in real Ray actors: what it asks, when it refits, whom it starts again."""

import os
import signal
import sys
from itertools import pairwise

import pytest
import ray
import torch
from fake_engine import VOCABULARY, FakeEngine, next_logprobs
from fake_generation import STOP, Weights, generation, prompts

from nemo_rl_mcore.generation.engine import WrongWeightsError
from nemo_rl_mcore.workers.failures import WorkerError

# pytest's module names mean nothing to a worker.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_a_prompt_that_leaves_no_room_for_a_response_is_refused_as_by_the_training_model(cluster):
    """An engine alone would cut the response short at the longest sequence, and say that it did not finish."""
    with pytest.raises(
        ValueError, match=r"row 1 has a prompt of 11 tokens.* 6 takes to 17, past .*_length: 16"
    ):
        generation(cluster, Weights()).generate(prompts(10, 11), step=1)
    with pytest.raises(WrongWeightsError, match="call update_weights first"):
        generation(cluster, Weights()).generate(prompts(10, 10), step=1)


@pytest.mark.parametrize("transport", ["shared_memory", "ray"])
def test_rows_keep_their_order_and_their_noise_and_tell_the_weights_of_each_token(cluster, transport):
    source, asked = Weights(), prompts(3, 5, 1, 4, 2)
    with generation(cluster, source, transport) as engines:
        engines.update_weights(0)
        first = engines.generate(asked, step=1)
        for row, length in enumerate(first["lengths"].tolist()):
            tokens = first["tokens"][row, :length].tolist()
            assert first["finished"][row] == (tokens[-1] in STOP)
            assert {(b - a) % VOCABULARY for a, b in pairwise(tokens)} <= {7}, "of one seed and one prompt"
            assert first["weight_versions"][row].tolist() == [0] * length + [-1] * (6 - length)
        again = engines.generate(asked, step=1)
        assert again["tokens"].tolist() == first["tokens"].tolist()
        assert engines.generate(asked, step=2)["tokens"].tolist() != first["tokens"].tolist()

        source.scale = 2.0
        assert engines.generate(asked, step=1)["logprobs"].tolist() == first["logprobs"].tolist()
        engines.update_weights(1)
        fresh = engines.generate(asked, step=1)
        assert fresh["tokens"].tolist() == first["tokens"].tolist()
        drawn = torch.arange(6) < first["lengths"].unsqueeze(1)
        assert torch.equal(fresh["logprobs"] != first["logprobs"], drawn)
        assert fresh["weight_versions"].tolist() == [
            [1 if version == 0 else -1 for version in row] for row in first["weight_versions"].tolist()
        ]
        assert source.sent == 2
    with generation(cluster, source, transport, engines=1) as one:
        one.update_weights(7)
        assert one.generate(asked, step=1)["tokens"].tolist() == first["tokens"].tolist()


def test_a_refit_that_broke_off_is_done_again_before_the_next_answer(cluster):
    source, asked = Weights(), prompts(3, 2)
    with generation(cluster, source) as engines:
        engines.update_weights(0)
        source.fail = True
        with pytest.raises(RuntimeError, match="broke off"):
            engines.update_weights(1)
        assert engines.generate(asked, step=1)["weight_versions"].max() == 1


def test_engines_that_share_the_ranks_memory_sleep_and_are_refitted_when_they_wake(cluster):
    source, asked = Weights(), prompts(3, 2)
    with generation(cluster, source, sleeps=True) as engines:
        engines.update_weights(0)
        expected = engines.generate(asked, step=1)["logprobs"].tolist()
        engines.offload()
        engines.offload()
        engines.update_weights(1)
        assert engines.generate(asked, step=1)["logprobs"].tolist() == expected
        assert source.sent == 2
        engines.offload()
        engines.update_weights(1)  # a validation came between: nothing was trained
        assert engines.generate(asked, step=1)["weight_versions"].max() == 1
        assert source.sent == 3


def test_the_check_is_called_once_when_all_engines_have_weights_and_what_it_raises_ends_the_update(cluster):
    source, found = Weights(), []

    def check(engines):
        found.append([[*rows] for rows in engines.next_logprobs([[3, 4], [5]], 2.0)])
        if len(found) == 1:
            raise ValueError("they differ")

    with generation(cluster, source, check=check) as engines:
        with pytest.raises(ValueError, match="they differ"):
            engines.update_weights(0)
        engines.update_weights(0)
        engines.update_weights(1)
    expected = [next_logprobs(10 * 50 * 1.0, prompt, 2.0).tolist() for prompt in ([3, 4], [5])]
    told = [[[row.tolist() for row in engine] for engine in engines] for engines in found]
    assert told == [[expected, expected]] * 2


class ForgetsToSleep(FakeEngine):
    async def sleep(self):
        raise RuntimeError("no room")


def test_an_engine_that_fails_but_lives_is_not_started_again(cluster):
    with generation(cluster, Weights(), engine=ForgetsToSleep, sleeps=True, max_restarts=1) as engines:
        engines.update_weights(0)
        with pytest.raises(WorkerError, match=r"^fake engine \d .* failed in sleep: .*no room") as caught:
            engines.offload()
        assert (caught.value.group, caught.value.usable) == ("fake", True)
        engines.generate(prompts(3), step=1)


def test_lost_engines_start_anew_as_often_as_the_kind_allows_then_end_the_run(cluster, capsys):
    source, asked = Weights(), prompts(3, 5, 1)

    def kill():
        os.kill(engines._group.identities[1].pid, signal.SIGKILL)

    with generation(cluster, source, max_restarts=1) as engines:
        engines.update_weights(4)
        expected = engines.generate(asked, step=4)
        kill()
        again = engines.generate(asked, step=4)
        assert {key: again[key].tolist() for key in again} == {
            key: expected[key].tolist() for key in expected
        }
        said = capsys.readouterr().err
        assert (
            "fake engines start anew, 0 restarts left (policy.generation.fake.max_restarts): fake eng" in said
        )
        kill()
        with pytest.raises(WorkerError, match=r"^fake engine 1 .* died in generate \(step 4\)") as caught:
            engines.generate(asked, step=4)
        assert (caught.value.group, caught.value.usable) == ("fake", False)
