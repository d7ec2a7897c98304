"""One real rank: log-probabilities, the split step, abort, the reference policy, skipped steps."""

import pytest
import tiny
from refusals import refused

from nemo_rl_mcore.driver.policy import Policy
from nemo_rl_mcore.errors import RefusedError


def run(ranks, function, *args):
    return ranks(1).run(function, *args)[0]


class ThisRank:
    """A worker group of one rank, in this process."""

    placement = None

    def __init__(self, worker):
        self.worker = worker

    def __call__(self, *_args, **_options):
        return self

    def run_all(self, method, *, per_rank_kwargs=(), answering=None, context="", **kwargs):
        return [getattr(self.worker, method)(**kwargs, **(per_rank_kwargs[0] if per_rank_kwargs else {}))]


def loops_of_nemo_rl(offload, precision):
    """A step of its synchronous loop and one of its single controller, which asks for log-probs between chunks."""
    config = tiny.policy_config(offload=offload, precision=precision)
    batch, loss_fn = tiny.grpo_batch(), tiny.grpo_loss()
    ranks = ThisRank(tiny.worker(config))
    policy = Policy(config, None, seed=42, group=ranks)
    policy.prepare_for_lp_inference()
    policy.get_logprobs(batch)
    policy.prepare_for_training()
    whole = policy.train(batch, loss_fn, False, 8, 2)
    policy.finish_training()
    weights = tiny.parameters(ranks.worker)
    policy = Policy(config, None, seed=42, group=ThisRank(tiny.worker(config)))
    policy.begin_train_step(loss_fn, 8, 2)
    for chunk in (batch.slice(0, 4), batch.slice(4, 8)):
        policy.prepare_for_lp_inference(keep_train_buffers=True)
        policy.get_logprobs(chunk)
        policy.prepare_for_training()
        policy.train_microbatch(chunk)
    split = policy.finish_train_step()
    evaluated = policy.train(batch, loss_fn, eval_mode=True)
    difference = tiny.largest_difference(weights, tiny.parameters(policy.workers.worker))
    return [
        {**found, "model_dtype": str(found["model_dtype"])} for found in (whole, split, evaluated)
    ], difference


@pytest.mark.parametrize(
    ("offload", "precision"), [("none", "float32"), ("grads_optimizer", "float32"), ("all", "bfloat16")]
)
def test_loops_of_nemo_rl_run_and_read_their_results(ranks, offload, precision):
    results, difference = run(ranks, loops_of_nemo_rl, offload, precision)
    for found in results:
        assert found["loss"].tolist() == found["global_loss"].tolist()
        assert (found["rank"], found["model_dtype"]) == (0, f"torch.{precision}")
        assert found["train_elapsed_seconds"] == found["elapsed"] > 0
        assert not {"moe_metrics", "mtp_metrics", "gpu_name"} & found.keys()
    assert results[0]["loss"].tolist() == results[1]["loss"].tolist()
    assert difference == 0.0


def logprobs_by_router_replay():
    worker, batch = tiny.worker(tiny.policy_config()), tiny.grpo_batch()
    with refused("no-router-replay", "get_logprobs", "require_router_replay", by=RefusedError):
        worker.get_logprobs(data=batch, require_router_replay=True)
    plain = worker.get_logprobs(data=batch)["logprobs"]
    return (plain == worker.get_logprobs(data=batch, require_router_replay=False)["logprobs"]).all().item()


def test_router_replay_is_refused_where_it_is_required(ranks):
    assert run(ranks, logprobs_by_router_replay)
