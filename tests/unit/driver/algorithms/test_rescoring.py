"""Kept tokens are rescored by the version that they name, once; one with another log-probability is named."""

import pytest
import torch
from refusals import refused

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.tools.replay import Rescoring, unmixed

PROMPT = 2


class Weights:
    """A policy whose log-probabilities are a formula of token and version."""

    def __init__(self):
        self.version, self.asked = 0, 0

    def get_logprobs(self, data, *, trained_only=False):
        assert trained_only
        self.asked += int(data["token_mask"].sum())
        return {"logprobs": by(self.version, data["input_ids"]) * data["token_mask"]}


def by(version, ids):
    return -0.1 * ids - 0.25 * version


def group(*versions_of_rows):
    """A group whose rows have a prompt of two tokens, and answers by these versions."""
    longest = PROMPT + max(map(len, versions_of_rows))
    versions = torch.full((len(versions_of_rows), longest), -1)
    for row, drawn in enumerate(versions_of_rows):
        versions[row, PROMPT : PROMPT + len(drawn)] = torch.tensor(drawn)
    ids = torch.arange(versions.numel()).view_as(versions)
    return BatchedDataDict(
        input_ids=ids,
        input_lengths=torch.tensor([PROMPT + len(drawn) for drawn in versions_of_rows]),
        weight_versions=versions,
        token_mask=(versions >= 0).float(),
        generation_logprobs=by(versions, ids) * (versions >= 0),
    )


def rescored(steps, *, rereads=True, first_version=0, last_version=2):
    policy = Weights()
    rescoring = Rescoring(policy, 1e-4, rereads, pad_token_id=0, first_version=first_version)
    for policy.version in range(first_version, last_version + 1):
        rescoring.rescore(
            policy.version, {step: groups for step, groups in steps.items() if step > policy.version}
        )
    found = [rescoring.take(step) for step in steps]
    assert policy.asked == sum(one.tokens for one in found)
    return found


def test_each_token_is_rescored_by_its_version():
    first, second = rescored(
        {2: {4: group([0, 0], [0, 1, 1])}, 3: {6: group([1, 2], [2]), 7: group([1, 1, 1])}}, last_version=2
    )
    assert (first.tokens, first.older, first.cached) == (5, 0, 0)
    assert (second.tokens, second.older, second.cached) == (6, 0, 0)
    assert max(first.largest, second.largest) < 1e-5


def test_tokens_of_weights_that_are_not_passed_and_behind_other_ones_in_a_cache_are_counted():
    [found] = rescored({3: {6: group([0, 1, 2], [1, 1, 2], [2])}}, rereads=False, first_version=1)
    assert (found.tokens, found.older, found.cached) == (3, 1, 3)
    assert all(str(number) in str(found) for number in (3, 1))
    [found] = rescored({3: {6: group([0, 1, 2], [1, 1, 2], [2])}}, first_version=1)
    assert (found.tokens, found.older, found.cached) == (6, 1, 0)


def test_a_turn_reads_what_came_before_it_anew():
    episode = group([0, 0, 1, 1, 2], [0, 1, 1, 1, 1])
    episode["turn_of_token"] = torch.tensor([[0, 0, 1, 1, 2, 2, 2], [0, 0, 1, 1, 2, 2, 2]])
    assert unmixed(episode)[:, PROMPT:].tolist() == [
        [True, True, True, True, False],
        [True, False, True, True, True],
    ]


@pytest.mark.parametrize("rereads", [True, False])
def test_a_log_probability_that_was_changed_is_named(rereads):
    broken = group([0, 0], [0, 0, 0])
    broken["generation_logprobs"][1, PROMPT + 1] += 0.01
    kept, now = float(broken["generation_logprobs"][1, 3]), float(by(0, broken["input_ids"][1, 3]))
    with refused("rescored-differs", "step 2", "group 5", "row 1", "token 3", f"{kept:.6g}", f"{now:.6g}"):
        rescored({2: {4: group([0, 1]), 5: broken}}, rereads=rereads)


@pytest.mark.parametrize("wrong", [0, 2])
def test_a_version_that_did_not_draw_a_token_is_named(wrong):
    broken = group([1, 1], [1, 1])
    broken["weight_versions"][0, PROMPT] = wrong
    with refused("rescored-differs", "step 3", "group 6", "row 0", f"token {PROMPT}", f"version {wrong}"):
        rescored({3: {6: broken}})


def test_a_log_probability_that_is_not_a_number_differs():
    broken = group([0, 0])
    broken["generation_logprobs"][0, PROMPT] = torch.nan
    with refused("rescored-differs", "group 4"):
        rescored({2: {4: broken}})
