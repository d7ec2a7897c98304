"""Environments in real Ray actors: what becomes of one changes no reply, or costs the turns that it was shown."""

import asyncio
import os
import signal
import threading
import time
from contextlib import contextmanager

import pytest
from processes import left_after, within
from refusals import assert_holds, refused

from nemo_rl_mcore.config import EnvConfig
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.driver.actors import environment_pool
from nemo_rl_mcore.driver.actors.environment_pool import EnvironmentPool
from nemo_rl_mcore.driver.signals import exit_status_of, stop_signals
from nemo_rl_mcore.environment.interface import LocalEnvironments
from nemo_rl_mcore.environment.registry import make_environment
from nemo_rl_mcore.environment.turns import first_turn
from nemo_rl_mcore.errors import RunStoppedError

pytestmark = pytest.mark.stage("processes")


def config(type="fragile_parts:Length", args=None, **pool):
    pool = {"size": 1, "timeout_s": 20.0, **pool}
    return EnvConfig.model_validate({"custom": {"type": type, "args": args}, "pool": pool})


@contextmanager
def pool_of(cluster, *given, **settings):
    with EnvironmentPool(config(*given, **settings), cluster) as pool:
        yield pool


def turns(count, first=0):
    return [first_turn(Prompt(n, f"{n}>", str(n)), "x" * (n % 7)) for n in range(first, first + count)]


def rewards(replies):
    return [reply.reward for reply in replies]


@pytest.fixture(scope="module")
def pool(cluster):
    """Two actors for the tests that leave them alive."""
    with pool_of(cluster, "fragile_parts:Slow", size=2) as pool:
        yield pool


def test_replies_are_in_the_order_of_the_turns_whoever_gives_them_when(pool):
    assert pool.replies(turns(40)) == LocalEnvironments(make_environment(config())).replies(turns(40))
    assert pool.replies([]) == []
    assert pool.take_counts() == {"env/dropped": 0, "env/retried": 0, "env/restarts": 0}


def test_a_process_says_what_it_waits_for(cluster, monkeypatch):
    monkeypatch.setattr(f"{EnvironmentPool.__module__}.PROCESS_START_S", 0.5)
    monkeypatch.setattr(environment_pool, "RETRIES", 0)
    with pool_of(cluster, num_gpus=1000) as pool:
        with pytest.raises(RunStoppedError) as caught:
            pool.replies(turns(1))
        assert_holds(str(caught.value), "did not start within 0.5 s", "env.pool.num_gpus: 1000")


def test_calls_from_a_loop_and_from_the_thread_that_trains_go_on_beside_each_other(pool):
    longest = 0.0

    async def from_a_loop(pool):
        nonlocal longest

        async def beat():
            nonlocal longest
            while True:
                began = time.monotonic()
                await asyncio.sleep(0.01)
                longest = max(longest, time.monotonic() - began)

        beating = asyncio.create_task(beat())
        given = await asyncio.gather(*(pool.replies_soon(turns(8, first)) for first in (0, 100)))
        beating.cancel()
        return given

    pool.replies(turns(2))  # the actors are there
    found = []
    asking = threading.Thread(target=lambda: found.append(asyncio.run(from_a_loop(pool))))
    asking.start()
    assert rewards(pool.replies(turns(8, 50))) == [float(n % 7) for n in range(50, 58)]
    asking.join()
    assert [rewards(one) for one in found[0]] == [[float(n % 7) for n in range(f, f + 8)] for f in (0, 100)]
    assert longest < 0.5, "the loop goes on"


def played(pool, steps, a_step=8):
    return [pool.replies(turns(a_step, step * a_step)) for step in range(steps)]


@pytest.mark.smoke("8")
@pytest.mark.parametrize("steps", [8, pytest.param(50, marks=pytest.mark.nightly)])
def test_actors_that_raise_die_or_hang_at_random_change_no_reply(cluster, steps, monkeypatch):
    monkeypatch.setattr(environment_pool, "RETRIES", 6)  # so that no answer is dropped
    undisturbed = played(LocalEnvironments(make_environment(config())), steps)
    with pool_of(cluster, "fragile_parts:Fragile", {"share": 0.05}, size=3, timeout_s=5.0) as pool:
        assert played(pool, steps) == undisturbed
        counts = pool.take_counts()
        assert counts["env/dropped"] == 0
        assert counts["env/retried"] > 0 or steps < 50


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("how", "reason", "restarts"),
    [
        ("raise", "env.custom.type: fragile_parts:Bad.score raised KeyError: 'no such row' (", 0),
        ("exit", "its process died", 3),
        ("hang", "no reply within 3 s (env.pool.timeout_s)", 3),
    ],
    ids=["raise", "exit", "hang"],
)
def test_a_bad_turn_costs_itself_alone_and_its_reason_is_told_once(cluster, how, reason, restarts, capfd):
    asked = turns(32)
    with pool_of(cluster, "fragile_parts:Bad", {"how": how, "index": 5}, size=2, timeout_s=3.0) as pool:
        replies = pool.replies(asked)
        counts = pool.take_counts()
        assert pool.take_counts()["env/dropped"] == 0, "they are taken once"
    [dropped] = [place for place, reply in enumerate(replies) if reply.dropped is not None]
    assert dropped == 5
    assert reason in replies[5].dropped
    assert rewards(replies)[:5] + rewards(replies)[6:] == [float(n % 7) for n in range(32) if n != 5]
    # The whole piece of four, then the turn twice more; the process is restarted beside the last reply.
    assert counts["env/dropped"] == 1
    assert counts["env/retried"] == 4 + 1
    assert restarts - 1 <= counts["env/restarts"] <= restarts
    told = capfd.readouterr().err
    assert told.count(replies[5].dropped) == 1
    assert "environment actor " in told
    if how == "hang":
        assert "fragile_parts.py" in told, "where it stood"


@pytest.mark.parametrize("given", [("OneScore", None), ("Bad", {"how": "unfit", "index": 5})])
def test_what_code_gives_amiss_ends_the_run_and_no_answer_is_tried_alone(cluster, given):
    name, args = given
    with pool_of(cluster, f"fragile_parts:{name}", args) as pool:
        for _ in range(2):
            with refused("reward-count", "env.custom.type", name, 8, by=RunStoppedError):
                pool.replies(turns(32))
        assert pool.take_counts()["env/retried"] == 0


def test_answers_whose_call_raised_once_have_the_replies_of_a_call_with_all_of_them(cluster):
    with pool_of(cluster, "fragile_parts:RaisesOnce") as pool:
        assert rewards(pool.replies(turns(32))) == [8.0] * 32


@pytest.mark.needs("math")
def test_what_a_user_cannot_get_over_ends_the_run_at_once(cluster):
    wrong = EnvConfig.model_validate({"math": {}, "pool": {"size": 1}})
    bad = first_turn(Prompt(3, "?", "no number and $\\frac{$"), "\\boxed{1}")
    good = first_turn(Prompt(4, "?", "12"), "It is \\boxed{12.0}")
    with EnvironmentPool(wrong, cluster) as pool:
        assert rewards(pool.replies([good, good])) == [1.0, 1.0]
        for _ in range(2):
            with pytest.raises(RunStoppedError, match=r"env\.math\.gold: .*prompt 3"):
                pool.replies([good, bad])


@pytest.mark.needs("math")
@pytest.mark.exhaustive
def test_math_verify_keeps_its_own_limit_there(cluster):
    slow = EnvConfig.model_validate({"math": {}, "pool": {"size": 1}})
    tower = first_turn(Prompt(4, "?", "12"), "\\boxed{" + "9^{" * 6 + "9" + "}" * 6 + "}")
    with EnvironmentPool(slow, cluster) as pool:
        assert rewards(pool.replies([tower])) == [0.0]
        assert pool.take_counts()["env/retried"] == 0


@pytest.mark.exhaustive
def test_weights_of_rewards_by_name_are_applied_and_unknown_ones_end_the_run(cluster):
    own = config("fragile_parts:TwoRewards")
    weighted = own.model_copy(update={"reward_weights": {"form": 0.5}})
    with EnvironmentPool(weighted, cluster) as pool:
        [reply] = pool.replies(turns(1, 3))
        assert reply.rewards == {"value": 3.0, "form": 1.0}
        assert reply.reward == 3.5
    misspelt = own.model_copy(update={"reward_weights": {"from": 0.5}})
    with (
        EnvironmentPool(misspelt, cluster) as pool,
        refused("unknown-reward", "env.reward_weights.from", "value, form", by=RunStoppedError),
    ):
        pool.replies(turns(1))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("variables", "length"), [((), 0), (("WORKERS_TEST_TOKEN",), 7)], ids=["none", "key"]
)
def test_the_driver_s_secrets_are_seen_where_the_recipe_hands_them_on(cluster, variables, length):
    with pool_of(cluster, "fragile_parts:NeedsKey", variables=variables) as pool:
        assert rewards(pool.replies(turns(1))) == [float(length)]


def test_a_variable_that_is_not_there_is_named_at_once(cluster):
    with refused("missing-variable", "env.pool.variables: NO_SUCH_KEY"):
        EnvironmentPool(config(variables=("NO_SUCH_KEY",)), cluster)


def test_the_end_of_the_pool_leaves_no_process_also_of_hung_ones(cluster):
    with pool_of(cluster, "fragile_parts:Bad", {"how": "hang", "index": 0}, size=2, timeout_s=60.0) as pool:
        pool.replies(turns(4, 1))
        assert within(60, lambda: len(pool._pool.live) == 2)
        pids = [member.identity.pid for member in pool._pool.live]

        async def gives_up():
            async with asyncio.timeout(0.5):
                await pool.replies_soon(turns(1))

        with pytest.raises(TimeoutError):
            asyncio.run(gives_up())
    assert not left_after(5, pids)


def test_who_gives_up_leaves_no_turns_behind(pool):
    pool.replies(turns(1))

    async def gives_up():
        async with asyncio.timeout(0.1):
            await pool.replies_soon(turns(4000))  # 20 s of scoring

    with pytest.raises(TimeoutError):
        asyncio.run(gives_up())
    began = time.monotonic()
    pool.replies(turns(1))
    assert time.monotonic() - began < 5, "only the pieces that were under way are waited for"


def test_a_stop_signal_is_heard_while_replies_are_waited_for(cluster):
    with pool_of(cluster, "fragile_parts:Bad", {"how": "hang", "index": 0}, timeout_s=60.0) as pool:
        pool.replies(turns(1, 1))
        began = time.monotonic()
        with stop_signals() as signals:
            threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
            with pytest.raises(KeyboardInterrupt):
                pool.replies(turns(1))
        assert exit_status_of(KeyboardInterrupt(), signals) == 143
        assert time.monotonic() - began < 3


@pytest.mark.exhaustive
def test_reasons_that_are_never_equal_are_not_told_without_end(cluster, capfd, monkeypatch):
    monkeypatch.setattr(environment_pool, "_MOST_REASONS", 3)
    monkeypatch.setattr(environment_pool, "RETRIES", 0)
    with pool_of(cluster, "fragile_parts:AlwaysNew") as pool:
        assert len({reply.dropped for reply in pool.replies(turns(8))}) == 8
    assert capfd.readouterr().err.count("dropped after 1 tries") == 3
