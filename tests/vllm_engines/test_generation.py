"""Engines and training ranks as a run has them, in processes of Ray: equal log-probabilities, and engines that die."""

import os
import signal
import threading

import played_episodes as episodes
import pytest
import torch
from processes import ProcessWatch, within

from nemo_rl_mcore.config import ClippedPGLossConfig, ClusterConfig, PolicyConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.tokenizer import load_tokenizer
from nemo_rl_mcore.driver.actors.cluster import RayCluster
from nemo_rl_mcore.driver.actors.engine_generation import EngineGeneration
from nemo_rl_mcore.driver.actors.failures import WorkerError
from nemo_rl_mcore.driver.algorithms.engine_comparison import BOUNDS, EnginesDifferError, compare
from nemo_rl_mcore.driver.algorithms.mismatch import model_inputs
from nemo_rl_mcore.driver.policy import Policy
from nemo_rl_mcore.driver.rollouts.transcript import require_sampled_ids
from nemo_rl_mcore.engine.kinds import vllm_kind
from nemo_rl_mcore.losses import ClippedPGLossFn

LOGPROBS = 1e-4
STOP = 7


def policy_config(**generation):
    return PolicyConfig.model_validate(
        {
            "model": {
                "num_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "ffn_hidden_size": 128,
                "vocab_size": 32, "max_position_embeddings": 256, "init_method_std": 0.2, "qk_layernorm": True,
                "tie_word_embeddings": True,
            },
            "tokenizer": {"name": "char"},
            "train_global_batch_size": 8,
            "train_micro_batch_size": 8,
            "max_total_sequence_length": 256,
            "megatron_cfg": {"tensor_model_parallel_size": 2, "optimizer": {"lr": 3e-2, "weight_decay": 0.0}},
            "generation": {
                "backend": "vllm", "max_new_tokens": 12, "temperature": 0.7, **generation,
            },
        }
    )  # fmt: skip


class Run:
    """Two tensor-parallel ranks, to which engines are added."""

    def __init__(self, cluster, folder, watch):
        self.cluster, self.folder, self.watch = cluster, folder, watch
        self.policy = Policy(policy_config(), cluster, seed=3, init_reference_model=False)

    def engines(self, source=None, model=None, stop_ids=(STOP,), reads_texts=False, **generation):
        """model: what the engines make of the weights, where that is something else than in training."""
        config = policy_config(**generation)
        other = config.model_copy(update={"model": config.model.model_copy(update=model or {})})
        return EngineGeneration(
            vllm_kind(other, self.folder, os.environ, on_cpu=True, reads_texts=reads_texts),
            config,
            self.cluster,
            source or self.policy,
            stop_ids=stop_ids,
            seed=3,
        )

    def pids(self, title):
        return [pid for pid, shown in self.watch.alive().items() if title in shown]

    def largest_error(self, asked, answered):
        """Between the engines' log-probabilities and those of the training ranks."""
        starts, lengths = asked["input_lengths"].tolist(), answered["lengths"].tolist()
        rows = zip(asked["input_ids"], starts, answered["tokens"], lengths, strict=True)
        whole = [torch.cat([prompt[:start], tokens[:length]]) for prompt, start, tokens, length in rows]
        asked_for = BatchedDataDict(
            input_ids=torch.nn.utils.rnn.pad_sequence(whole, batch_first=True),
            input_lengths=asked["input_lengths"] + answered["lengths"],
        )
        found = zip(self.policy.get_logprobs(asked_for)["logprobs"], answered["logprobs"], strict=True)
        apart = [
            (own[start : start + length] - drawn[:length]).abs().max()
            for (own, drawn), start, length in zip(found, starts, lengths, strict=True)
        ]
        return float(max(apart))

    def train(self):
        generator = torch.Generator().manual_seed(1)
        uniform = torch.full((8, 10), -3.0)
        batch = BatchedDataDict(
            input_ids=torch.randint(0, 32, (8, 10), generator=generator),
            input_lengths=torch.full((8,), 10),
            token_mask=torch.ones(8, 10),
            sample_mask=torch.ones(8),
            advantages=torch.randn(8, 10, generator=generator),
            prev_logprobs=uniform,
            generation_logprobs=uniform,
        )
        config = ClippedPGLossConfig.model_validate(
            {"reference_policy_kl_penalty": 0.0, "force_on_policy_ratio": True}
        )
        self.policy.train(batch, ClippedPGLossFn(config))


def prompts(lengths=(3, 5, 150, 5, 8)):
    generator = torch.Generator().manual_seed(0)
    rows = len(lengths)
    return BatchedDataDict(
        input_ids=torch.randint(0, 32, (rows, max(lengths)), generator=generator),
        input_lengths=torch.tensor(lengths),
        prompt_index=torch.arange(rows),
        sample_index=torch.zeros(rows, dtype=torch.long),
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    watch = ProcessWatch()
    os.environ.update(watch.environment)
    try:
        with RayCluster(ClusterConfig(cpu_workers_per_node=2)) as cluster:
            started = Run(cluster, tmp_path_factory.mktemp("run"), watch)
            with started.policy:
                yield started
        assert watch.all_gone(within_s=20), watch.alive()
    finally:
        for name in watch.environment:
            del os.environ[name]


@pytest.mark.parametrize(("engines", "transport"), [(2, "shared_memory"), (1, "ray")])
def test_engines_and_ranks_agree_on_the_logprobs_before_and_after_training(run, engines, transport):
    asked = prompts()
    with run.engines(refit_transport=transport, engines=engines) as generation:
        generation.update_weights(0)
        first = generation.generate(asked, step=1)
        assert first["tokens"].shape == (5, 12)
        assert run.largest_error(asked, first) < LOGPROBS
        assert generation.generate(asked, step=1)["tokens"].tolist() == first["tokens"].tolist()
        assert generation.generate(asked, step=2)["tokens"].tolist() != first["tokens"].tolist()

        run.train()
        stale = generation.generate(asked, step=1)
        assert stale["tokens"].tolist() == first["tokens"].tolist()
        assert run.largest_error(asked, stale) > 0.1, (
            "training has moved the weights, and the engines' are old"
        )
        generation.update_weights(1)
        fresh = generation.generate(asked, step=1)
        assert run.largest_error(asked, fresh) < LOGPROBS
        drawn = torch.arange(12) < fresh["lengths"].unsqueeze(1)
        assert fresh["weight_versions"].tolist() == torch.where(drawn, 1, -1).tolist()

        ended = [
            STOP in row[:length]
            for row, length in zip(fresh["tokens"].tolist(), fresh["lengths"].tolist(), strict=True)
        ]
        assert fresh["finished"].tolist() == ended

        greedy = generation.generate(asked, step=1, greedy=True)
        embedded = run.policy.generate(asked, step=1, stop_ids=[STOP], greedy=True)
        for key in ("tokens", "lengths", "finished"):
            assert greedy[key].tolist() == embedded[key].tolist()


def compared(run, **keys):
    asked = prompts()
    rows = [
        ids[:length]
        for ids, length in zip(asked["input_ids"].tolist(), asked["input_lengths"].tolist(), strict=True)
    ]
    with run.engines(**keys) as generation:
        generation.update_weights(0)
        return compare(run.policy, generation, rows, vocabulary=32, temperature=0.7)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["batches", "requests"])
def test_engines_and_ranks_agree_over_the_whole_vocabulary(run, asynchronous):
    found = compared(run, vllm_cfg={"async_engine": asynchronous}, engines=2 - asynchronous)
    assert (found.rows, found.vocabulary) == (5, 32)
    assert found.largest < LOGPROBS
    found.require(BOUNDS["float32"])


@pytest.mark.parametrize(
    "keys",
    [{"model": {"rotary_base": 500000.0}}, {"vllm_cfg": {"precision": "bfloat16"}}],
    ids=["rotary base", "number format"],
)
def test_what_an_engine_makes_of_equal_weights_is_found(run, keys):
    found = compared(run, **keys)
    with pytest.raises(EnginesDifferError, match=rf"row {found.row} .*token {found.token} has the log-prob"):
        found.require(BOUNDS["float32"])
    if "vllm_cfg" in keys:
        found.require(BOUNDS["bfloat16"])


@pytest.mark.parametrize("asynchronous", [False, True], ids=["batches", "requests"])
def test_over_several_turns_what_is_trained_on_was_drawn_and_as_likely_as_training_says(run, asynchronous):
    tokenizer = load_tokenizer("char")
    cfg = {"async_engine": asynchronous}
    stops, drawn = episodes.stop_ids(tokenizer), episodes.Drawn()
    with run.engines(stop_ids=stops, reads_texts=True, vllm_cfg=cfg, engines=1, max_new_tokens=6) as engines:
        engines.update_weights(0)
        rollout = episodes.play(
            drawn.noting(lambda data, step: engines.generate(data, step=step), seed=3),
            tokenizer,
            tokens=64,
            prompts=10,
            samples=4,
        )
    batch = rollout.batch
    require_sampled_ids(batch)
    assert drawn == episodes.trained_by_key(batch, seed=3)
    assert {1, 2, 3} <= {*batch["turn_of_token"].amax(1).tolist()}
    logprobs = run.policy.get_logprobs(model_inputs(batch))["logprobs"]
    apart = (logprobs - batch["generation_logprobs"]).abs() * batch["token_mask"]
    assert apart.max() < LOGPROBS


class BreaksOff:
    def __init__(self, policy):
        self._policy, self.before_sending = policy, None

    def __getattr__(self, name):
        return getattr(self._policy, name)

    def prepare_for_lp_inference(self): ...

    def send_weights(self):
        if self.before_sending is not None:
            break_off, self.before_sending = self.before_sending, None
            break_off()
        return self._policy.send_weights()


def kill_soon(pid):
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(1.0, os.kill, (pid, signal.SIGKILL)).start()


def test_a_lost_engine_is_replaced_as_often_as_allowed_then_ends_the_run(run, capsys):
    source, asked = BreaksOff(run.policy), prompts()
    with run.engines(source, max_restarts=2) as generation:
        generation.update_weights(0)
        expected = generation.generate(asked, step=4)["tokens"].tolist()

        # A refit that fails while the engine lives: what it left is not used, the weights are sent again.
        def fail():
            raise RuntimeError("broke off")

        source.before_sending = fail
        with pytest.raises(RuntimeError, match="broke off"):
            generation.update_weights(1)
        assert run.largest_error(asked, generation.generate(asked, step=4)) < LOGPROBS

        [pid] = run.pids("VllmEngine")
        source.before_sending = lambda: kill_soon(pid)
        generation.update_weights(2)
        assert generation.generate(asked, step=4)["tokens"].tolist() == expected
        assert "vLLM engine 0 restarts in 1 s, 1 restarts left" in capsys.readouterr().err

        kill_soon(*run.pids("VllmEngine"))
        assert generation.generate(asked, step=4)["tokens"].tolist() == expected
        assert "vLLM engine 0 restarts in 2 s, 0 restarts left" in capsys.readouterr().err

        [pid] = run.pids("VllmEngine")
        kill_soon(pid)
        with pytest.raises(WorkerError, match=rf"^vLLM engine 0 .*pid {pid}\) died in generate \(step 4\)"):
            generation.generate(asked, step=4)
    assert within(20, lambda: not run.pids("VllmEngine"))
    # The ranks are well.
    run.train()


def test_an_asynchronous_engine_ends_with_its_actor_and_its_death_is_noticed(run, capsys):
    asked = prompts()
    with run.engines(vllm_cfg={"async_engine": True}, max_restarts=1) as generation:
        generation.update_weights(0)
        answered = generation.generate(asked, step=4)
        assert run.largest_error(asked, answered) < LOGPROBS

        [core] = run.pids("EngineCore")
        os.kill(core, signal.SIGKILL)
        assert generation.generate(asked, step=4)["tokens"].tolist() == answered["tokens"].tolist()
        assert "vLLM engine 0 restarts in 1 s, 0 restarts left" in capsys.readouterr().err

        kill_soon(*run.pids("VllmEngine"))
        with pytest.raises(WorkerError, match=r"^vLLM engine 0 .* died in generate \(step 5\)"):
            generation.generate(asked, step=5)
        assert within(20, lambda: not run.pids("EngineCore")), "vLLM's own process went with the actor"
