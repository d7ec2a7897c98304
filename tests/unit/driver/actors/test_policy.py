"""The driver's handle of a model: what each rank is sent, and what becomes of the answers. The ranks are a fake."""

from collections import Counter
from typing import Any

import pytest
import torch
from refusals import refused

from nemo_rl_mcore.config import ClippedPGLossConfig, ConfigError, PolicyConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.driver.actors.actor import Actor
from nemo_rl_mcore.driver.actors.failures import WorkerCall, WorkerError
from nemo_rl_mcore.driver.actors.gang import RayWorkerGroup
from nemo_rl_mcore.driver.actors.places import RankSlot
from nemo_rl_mcore.driver.algorithms.mismatch import with_row_numbers
from nemo_rl_mcore.driver.policy import Policy
from nemo_rl_mcore.losses import ClippedPGLossFn, DPOLossFn, NLLLossFn
from nemo_rl_mcore.rank.train_step import TrainStepError
from nemo_rl_mcore.rank.worker import MegatronPolicyWorker
from nemo_rl_mcore.recipe.load import load_config

BUDGET = ("policy.dynamic_batching.enabled=true",)


class Ranks:
    """Writes down each rank's calls; `shards` is the data-parallel rank of each."""

    placement = None

    def __init__(self, shards):
        self.shards = shards
        self.shared = 0
        self.calls: list[tuple[str, list[dict[str, Any]]]] = []

    def __call__(self, *_args, **_options):
        return self

    def share(self, value):
        self.shared += 1
        return value

    def run_all(self, method, *, per_rank_kwargs=(), answering=None, context="", **kwargs):
        if method == "data_parallel_rank":
            return self.shards
        own = per_rank_kwargs or [{}] * len(self.shards)
        self.calls.append((method, [kwargs | of_rank for of_rank in own]))
        answers = [self.answer(method, rank, of_rank) for rank, of_rank in enumerate(own)]
        return [
            answer if answering is None or rank in answering else None for rank, answer in enumerate(answers)
        ]

    def answer(self, method, rank, own):
        if method == "train":
            return {"skip_reasons": [None], "rank": rank, "row_table": torch.tensor([[rank]])}
        if method == "finish_train_step":
            return {"rank": rank, "row_table": torch.tensor([[rank]])}
        if method != "get_logprobs":
            return f"{method} of rank {rank}"
        return BatchedDataDict(logprobs=own["data"]["row"].float())

    def shutdown(self): ...


def policy_over(shards, *overrides):
    ranks = Ranks(shards)
    config = load_config("examples/configs/dpo_cpu.yaml", overrides).policy
    return Policy(config, None, seed=0, group=ranks), ranks  # type: ignore[arg-type]


def numbered(rows, lengths=None):
    return BatchedDataDict(
        row=torch.arange(rows),
        input_ids=torch.ones(rows, 9).long(),
        input_lengths=torch.tensor(lengths or [4] * rows, dtype=torch.long),
        token_mask=torch.zeros(rows, 9),
        sample_mask=torch.ones(rows),
        reference_policy_logprobs=torch.zeros(rows, 9),
    )


def rows_of(call):
    return [own["data"]["row"].tolist() for own in call[1]]


def test_ranks_of_one_shard_get_the_same_rows_once_and_one_of_them_answers():
    policy, ranks = policy_over([0, 0, 1, 1])
    said = policy.get_logprobs(numbered(6))
    assert rows_of(ranks.calls[0]) == [[0, 1, 2], [0, 1, 2], [3, 4, 5], [3, 4, 5]]
    assert ranks.shared == 2
    assert said["logprobs"].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("rows", [1, 4, 5, 7])
def test_rows_that_do_not_divide_are_made_up_and_the_answers_cut(rows):
    policy, ranks = policy_over([0, 1, 2])
    assert policy.get_logprobs(numbered(rows))["logprobs"].tolist() == list(range(rows))
    sent = rows_of(ranks.calls[0])
    assert len({len(shard) for shard in sent}) == 1
    assert [row for shard in sent for row in shard] == [*range(rows), *[rows - 1] * (-rows % 3)]


@pytest.mark.parametrize("overrides", [(), BUDGET], ids=["fixed", "dynamic"])
def test_training_sends_whole_pairs_step_by_step_and_sizes_in_rows(overrides):
    policy, ranks = policy_over([0, 1], *overrides)
    lengths = [9, 4, 8, 5, 9, 3, 7, 6, 2, 2, 3, 3, 4, 4, 5, 5]
    said = policy.train(numbered(16, lengths), DPOLossFn({}), gbs=8, mbs=2)
    assert (said["skip_reasons"], said["rank"]) == ([None], 0)
    for shard in rows_of(ranks.calls[0]):
        assert [row // 8 for row in shard] == [0, 0, 0, 0, 1, 1, 1, 1]
        assert all(chosen % 2 == 0 and rejected == chosen + 1 for chosen, rejected in _pairs(shard))
    assert {(own["gbs"], own["mbs"]) for own in ranks.calls[0][1]} == {(8, 2)}


@pytest.mark.parametrize("overrides", [(), BUDGET], ids=["fixed", "dynamic"])
@pytest.mark.parametrize("rows", [2, 10])
def test_an_evaluation_takes_any_number_of_whole_pairs(overrides, rows):
    policy, ranks = policy_over([0, 1], *overrides)
    policy.train(numbered(rows), DPOLossFn({}), eval_mode=True, mbs=2)
    shards = rows_of(ranks.calls[0])
    assert sorted(row for shard in shards for row in shard) == [*range(rows)]
    assert all(len(shard) % 2 == 0 for shard in shards)
    assert policy.updates == 0


@pytest.mark.parametrize("overrides", [(), BUDGET], ids=["fixed", "dynamic"])
def test_training_sends_as_many_whole_episodes_a_step_to_each_shard(overrides):
    policy, ranks = policy_over([0, 1], *overrides)
    batch = numbered(12, [9, 4, 8, 5, 9, 3, 7, 6, 2, 2, 3, 3])
    batch["episode_index"] = torch.tensor([0, 0, 0, 1, 2, 2, 3, 4, 5, 5, 6, 7])
    policy.train(batch, NLLLossFn(), gbs=4, mbs=1)
    sent = [own["data"] for own in ranks.calls[0][1]]
    for shard in sent:
        numbers = [int(batch["episode_index"][shard["row"][at.start]]) for at in shard.samples()]
        assert [number // 4 for number in numbers] == [0, 0, 1, 1]
    rows = [[shard["row"][at.start : at.stop].tolist() for at in shard.samples()] for shard in sent]
    whole = [[*sample] for sample in batch.samples()]
    assert sorted(sample for shard in rows for sample in shard) == whole


def test_what_is_asked_of_each_row_does_not_ask_for_its_episode():
    policy, ranks = policy_over([0, 1, 2])
    batch = numbered(4)
    batch["episode_index"] = torch.zeros(4, dtype=torch.int64)
    assert policy.get_logprobs(batch)["logprobs"].tolist() == [0, 1, 2, 3]
    assert rows_of(ranks.calls[0]) == [[0, 1], [2, 3], [3, 3]]


def test_sizes_left_out_are_the_configs_in_rows_of_the_loss():
    policy, ranks = policy_over([0, 1], "policy.train_global_batch_size=8", "policy.train_micro_batch_size=2")
    policy.train(numbered(16), DPOLossFn({}))
    policy.begin_train_step(DPOLossFn({}))
    policy.begin_train_step(NLLLossFn(), gbs=10, mbs=5, step_id="a")
    sizes = [{(own["gbs"], own["mbs"]) for own in call[1]} for call in ranks.calls]
    assert sizes == [{(16, 4)}, {(16, 4)}, {(10, 5)}]
    assert ranks.calls[2][1][0]["step_id"] == "a"


@pytest.mark.parametrize(
    ("rows", "sizes", "code", "of"),
    [
        (8, {"gbs": 6, "mbs": 2}, "data-parallel-split", ["gbs 6", 2]),
        (6, {"gbs": 4, "mbs": 2}, "rows-per-step", [6, 4]),
        (8, {"gbs": 4, "mbs": 1}, "rows-per-sample", ["mbs 1", 2]),
    ],
)
def test_what_would_part_a_pair_or_drop_a_row_is_refused_before_it_is_sent(rows, sizes, code, of):
    policy, ranks = policy_over([0, 1])
    with refused(code, *of):
        policy.train(numbered(rows), DPOLossFn({}), **sizes)
    assert not ranks.calls


@pytest.mark.parametrize("overrides", [(), BUDGET], ids=["fixed", "dynamic"])
@pytest.mark.parametrize("rows", [0, 2, 6, 10])
def test_chunks_are_dealt_as_whole_pairs_however_few(overrides, rows):
    policy, ranks = policy_over([0, 1], *overrides)
    policy.begin_train_step(DPOLossFn({}))
    policy.train_microbatch(numbered(rows, [9, 4, 8, 5, 9, 3, 7, 6, 2, 2][:rows]), chunk_id="a")
    sent = rows_of(ranks.calls[1])
    assert Counter(row for shard in sent for row in shard) == Counter(range(rows))
    assert abs(len(sent[0]) - len(sent[1])) <= 2
    for shard in sent:
        assert all(chosen % 2 == 0 and rejected == chosen + 1 for chosen, rejected in _pairs(shard))


def test_half_a_pair_in_a_chunk_is_refused_before_it_is_sent():
    policy, ranks = policy_over([0, 1])
    policy.begin_train_step(DPOLossFn({}))
    with refused("batch", "3 rows", 2):
        policy.train_microbatch(numbered(3))
    assert [method for method, _ in ranks.calls] == ["begin_train_step"]


def test_train_and_chunks_balance_tokens_alike():
    policy, ranks = policy_over([0, 1], *BUDGET)
    lengths = [9, 9, 9, 9, 1, 1, 1, 1]
    policy.train(numbered(8, lengths), NLLLossFn(), gbs=8, mbs=2)
    policy.begin_train_step(NLLLossFn())
    policy.train_microbatch(numbered(8, lengths))
    whole, chunk = rows_of(ranks.calls[0]), rows_of(ranks.calls[2])
    assert whole == chunk
    assert [sum(lengths[row] for row in shard) for shard in whole] == [20, 20]


@pytest.mark.parametrize("whole", [True, False])
def test_the_rows_of_a_loss_that_tells_them_are_those_of_every_shard(whole):
    policy, _ = policy_over([0, 0, 1, 1])
    loss_fn = ClippedPGLossFn({"reference_policy_kl_penalty": 0.0}, own_previous=True)
    batch = with_row_numbers(numbered(4))
    batch["generation_logprobs"] = batch["advantages"] = torch.zeros(4, 9)
    if whole:
        result = policy.train(batch, loss_fn, gbs=4, mbs=2)
    else:
        policy.begin_train_step(loss_fn)
        policy.train_microbatch(batch)
        result = policy.finish_train_step()
    assert result["rank"] == 0
    assert result["row_table"].tolist() == [[0], [2]]


class Places:
    """Whether the resources of a placement are still there."""

    def __init__(self):
        self.slots, self.released = (RankSlot(0, {}, {}),), False

    def release(self):
        self.released = True


class Machines:
    """A cluster whose machines are all there; `tried_in` says of each start whether its places were given back."""

    def __init__(self):
        self.places, self.tried_in = [Places()], list[bool]()

    def place_ranks(self):
        return self.places[-1]

    def lost(self): ...

    def lost_nodes(self, _ids):
        return {}


def test_new_ranks_that_do_not_start_leave_their_places_to_the_next(monkeypatch):
    machines, broken = Machines(), [False, True, False]

    def start(_class, slot, *_):
        machines.tried_in.append(machines.places[-1].released)
        if broken.pop(0):
            raise WorkerError("memory", WorkerCall("start"))
        return Actor(slot.rank, "rank", None, machines, machines.lost)  # type: ignore[arg-type]

    monkeypatch.setattr(Actor, "begin", start)
    monkeypatch.setattr(RayWorkerGroup, "_build", lambda *_: None)
    monkeypatch.setattr(RayWorkerGroup, "run_all", lambda *_, **__: [0])
    monkeypatch.setattr(Actor, "end", lambda *_: None)
    policy = Policy(load_config("examples/configs/dpo_cpu.yaml").policy, machines, seed=0)  # type: ignore[arg-type]
    with pytest.raises(WorkerError, match="memory"):
        policy.restart()
    policy.restart()
    assert machines.tried_in == [False] * 3
    policy.shutdown()
    assert machines.places[-1].released


def _pairs(shard):
    return list(zip(shard[::2], shard[1::2], strict=True))


# A batch that no rank could take is refused by Policy itself: nothing of it is sent


LOSS = ClippedPGLossFn(ClippedPGLossConfig(reference_policy_kl_penalty=0.0))


class SentNoRows:
    """A group of two data-parallel ranks that must be sent no rows."""

    placement = None

    def __init__(self, *_args, **_options):
        self.calls = []

    def share(self, value):
        return value

    def run_all(self, method, *, per_rank_kwargs=(), **_options):
        assert not per_rank_kwargs, f"sent: {method}"
        self.calls.append(method)
        return [0, 1]


@pytest.fixture
def policy():
    return Policy(load_config("examples/configs/grpo_copy_cpu.yaml").policy, None, seed=0, group=SentNoRows)


def batch(**replaced):
    whole = {
        "input_ids": torch.randint(0, 32, (4, 6)),
        "input_lengths": torch.full((4,), 3),
        "prompt_index": torch.arange(4),
        "sample_index": torch.zeros(4).long(),
        "token_mask": torch.ones(4, 6),
        "sample_mask": torch.ones(4),
        "advantages": torch.zeros(4, 6),
        "prev_logprobs": torch.zeros(4, 6),
        "generation_logprobs": torch.zeros(4, 6),
    } | replaced
    return BatchedDataDict({key: value for key, value in whole.items() if value is not None})


def train_microbatch(policy, data):
    policy.begin_train_step(LOSS)
    policy.train_microbatch(data)


def test_a_chunk_without_an_open_step_is_refused_before_it_is_sent(policy):
    with refused("step-is-idle", "begin_train_step", by=TrainStepError):
        policy.train_microbatch(batch())


LONG = {"input_lengths": torch.tensor([6, 6, 6, 7])}
READS = {
    "get_logprobs": lambda policy, data: policy.get_logprobs(data),
    "get_reference_policy_logprobs": lambda policy, data: policy.get_reference_policy_logprobs(data),
    "get_topk_logits": lambda policy, data: policy.get_topk_logits(data, 2),
    "get_values": lambda policy, data: policy.get_values(data),
    "generate": lambda policy, data: policy.generate(data, step=1, stop_ids=[1], greedy=True),
    "train": lambda policy, data: policy.train(data, LOSS, gbs=4),
    "train_microbatch": lambda policy, data: train_microbatch(policy, data),
}


@pytest.mark.parametrize("method", READS)
def test_every_method_that_takes_rows_refuses_before_it_sends(policy, method):
    with refused("batch", "input_lengths: 7", 3):
        READS[method](policy, batch(**LONG))
    with pytest.raises(AssertionError, match=f"^sent: {method}"):
        READS[method](policy, batch())


def test_more_choices_than_tokens_are_refused(policy):
    with refused("batch", "k: 33", 32):
        policy.get_topk_logits(batch(), 33)


def test_a_chunk_is_judged_by_the_loss_of_the_open_step(policy):
    lacking = batch(advantages=None)
    for call in (lambda: policy.train(lacking, LOSS), lambda: policy.train(lacking, LOSS, eval_mode=True)):
        with refused("batch", "advantages: missing"):
            call()
    policy.begin_train_step(LOSS)
    with refused("batch", "advantages: missing"):
        policy.train_microbatch(lacking)


def test_prompts_that_leave_no_room_for_a_response_are_refused_before_they_are_sent(policy):
    longest = policy._config.max_total_sequence_length
    data = batch(input_ids=torch.ones(4, longest).long(), input_lengths=torch.tensor([1, 1, longest, 1]))
    with refused("prompt-length", "row 2", longest):
        policy.generate(data, step=1, stop_ids=[1], greedy=True)


FUSED = "megatron_cfg.use_fused_linear_logprobs"
OVERLAP = "megatron_cfg.distributed_data_parallel_config.overlap_param_gather"


@pytest.mark.parametrize(
    "make",
    [MegatronPolicyWorker, lambda policy: Policy(policy, None, seed=0, group=SentNoRows)],
    ids=["worker", "policy"],
)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("megatron_cfg.context_parallel_size", 2),
        ("sequence_packing.enabled", True),
        ("generation.top_k", 5),
        ("generation.top_p", 0.9),
        (OVERLAP, True),
    ],
)
def test_the_guardrails_of_fused_logprobs_hold_without_a_recipe(make, key, value):
    tree = load_config("examples/configs/grpo_copy_cpu.yaml").policy.model_dump()
    section = tree
    *sections, last = key.split(".")
    for name in sections:
        section = section[name]
    section[last] = value
    with pytest.raises(ConfigError) as caught:
        make(PolicyConfig(**tree))
    (problem,) = [problem for problem in caught.value.problems if problem.path == FUSED]
    assert key in problem.related
