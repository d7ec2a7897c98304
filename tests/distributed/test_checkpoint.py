"""Checkpoints of a policy: what goes on from one is what never stopped, on the same layout bit for bit."""

import json
import random
import sys
from contextlib import nullcontext
from pathlib import Path
from threading import Event
from unittest.mock import patch

import numpy as np
import pytest
import tiny
import torch
import torch.distributed as dist
import worker_state
from checkpoint_tensors import tensors_in
from parity import LAYOUTS
from rank_pool import RankFailedError
from refusals import refused

from nemo_rl_mcore.errors import RefusedError
from nemo_rl_mcore.losses import MseValueLossFn
from nemo_rl_mcore.rank.train_step import COMMITTED_IDS_KEPT, TrainStepError

CHAOS = Path(__file__).parent.parent / "chaos"
EXPERTS = {
    "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32, "moe_aux_loss_coeff": 0.0,
    "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
}  # fmt: skip
BF16 = {"precision": "bfloat16"}
PLAIN = {"optimizer": {"lr": 1e-2, "use_distributed_optimizer": False}}
WARMUP = {"lr_warmup_iters": 2, "lr_decay_iters": 10, "lr_decay_style": "cosine"}


def build(model, megatron, seed=42, role="policy", **policy):
    return tiny.worker(tiny.policy_config(model=model, megatron=megatron, **policy), seed=seed, role=role)


def steps(worker, seeds, role="policy"):
    """Train on the batches of these seeds; what the steps reported, without times."""
    batch, loss = tiny.grpo_batch, tiny.grpo_loss()
    if role == "value":
        batch, loss = tiny.returns_batch, MseValueLossFn({"cliprange": 0.2})
    reports = []
    for seed in seeds:
        result = worker.train(tiny.shard(batch(seed=seed)), loss)
        assert result["update_successful"]
        reports.append(
            (result["global_loss"].tolist(), result["grad_norm"].tolist(), result["all_mb_metrics"])
        )
    return reports


# The same layout


def resume_against_going_on(folder, model, megatron, policy):
    """What differs once a policy goes on from what was saved at once, and from a copy written during the next step."""
    from nemo_rl_mcore.rank.megatron.sharded_folder import PreparedState

    going_on, trained = worker_state.with_dropout(build(model, megatron, **policy)), Event()
    steps(going_on, (1, 2))
    going_on.save_checkpoint(f"{folder}/at_once")
    write = PreparedState.write

    def write_later(self, *arguments):
        trained.wait()
        write(self, *arguments)

    with patch.object(PreparedState, "write", write_later):
        going_on.save_checkpoint(f"{folder}/copied", wait=False)
        drawn = random.random(), np.random.random()
        assert going_on.checkpoint_written(wait=False) is None
        reports = steps(going_on, (3, 4, 5))
        trained.set()
        assert going_on.checkpoint_written() > 0
    wanted, different = worker_state.capture(going_on), []
    batch = tiny.shard(tiny.grpo_batch(seed=9))
    reference = going_on.get_reference_policy_logprobs(data=batch)["reference_logprobs"]
    for name in ("at_once", "copied"):
        # Another seed: other weights, reference and generators, so that all has to come from the checkpoint.
        resumed = worker_state.with_dropout(build(model, megatron, seed=7, **policy))
        steps(resumed, (6,))
        resumed.load_checkpoint(f"{folder}/{name}")
        assert (random.random(), np.random.random()) == drawn
        assert steps(resumed, (3, 4, 5)) == reports
        different += worker_state.differences(wanted, worker_state.capture(resumed))
        assert resumed.get_reference_policy_logprobs(data=batch)["reference_logprobs"].equal(reference)
    # The config's bound methods and groups are the worker's own.
    return [name for name in different if name != "config"]


@pytest.mark.quick_cases("dp2-bf16", "ep2")
@pytest.mark.parametrize(
    ("ranks_needed", "model", "megatron", "policy"),
    [
        (1, {}, {"scheduler": WARMUP}, {}),
        (1, {}, PLAIN, {}),
        (1, {"tie_word_embeddings": True, "mtp_num_layers": 1}, {}, {}),
        (2, {}, {"scheduler": WARMUP}, BF16),
        (2, {}, PLAIN, BF16),
        (2, {}, {"distributed_data_parallel_config": {"overlap_param_gather": True, "overlap_grad_reduce": True}}, {}),
        (2, {"tie_word_embeddings": True}, {"pipeline_model_parallel_size": 2}, {}),
        (2, {}, {"tensor_model_parallel_size": 2, "sequence_parallel": True}, BF16),
        (2, EXPERTS, {"expert_model_parallel_size": 2}, {}),
        (2, EXPERTS, {}, BF16),
    ],
    ids=["adam", "adam-plain", "tied-mtp", "dp2-bf16", "dp2-plain-bf16", "dp2-overlap", "pp2-tied", "tp2-bf16",
         "ep2", "dp2-experts-bf16"],
)  # fmt: skip
def test_a_resumed_policy_goes_on_bit_for_bit(ranks, tmp_path, ranks_needed, model, megatron, policy):
    differing = ranks(ranks_needed).run(resume_against_going_on, str(tmp_path), model, megatron, policy)
    assert differing == [[]] * ranks_needed


def fail_to_write_a_copy(folder):
    """What ranks raise when the last one cannot write, at each question; then all write one."""
    from nemo_rl_mcore.rank.megatron import checkpoint as checkpoint_files

    worker, raised = build({}, {}), []
    lost = (
        patch.object(checkpoint_files, "_GENERATORS", "missing/rank.pt")
        if dist.get_rank() == 1
        else nullcontext()
    )
    with lost:
        worker.save_checkpoint(f"{folder}/failed", wait=False)
        for _ in range(2):
            try:
                worker.checkpoint_written()
            except OSError as error:
                raised.append(str(error))
    steps(worker, (1,))
    worker.save_checkpoint(f"{folder}/next", wait=False)
    worker.save_checkpoint(f"{folder}/the one after")  # waits for it
    with refused("no-copy", by=RefusedError):
        worker.checkpoint_written()
    worker.load_checkpoint(f"{folder}/next")
    return raised


def test_a_copy_that_cannot_be_written_is_told_by_all_ranks_which_go_on(ranks, tmp_path):
    first, last = ranks(2).run(fail_to_write_a_copy, str(tmp_path))
    assert len(first) == len(last) == 2
    assert "missing/rank.pt" in last[0]
    assert first[0] == f"rank 1: {last[0]}"


def fail_to_copy(folder, part):
    """Raise on the last rank while a part is copied, then go on; returns what was raised and what differs."""
    from nemo_rl_mcore.rank.megatron import sharded_folder

    worker, raised = build({}, {}), None
    steps(worker, (1,))  # the policy is no more its reference
    before, copy, copied = worker_state.capture(worker), sharded_folder._copy, []

    def lack_memory(tensors):
        copied.append(tensors)
        if dist.get_rank() == 1 and len(copied) == part:
            raise RuntimeError("can't allocate memory")
        copy(tensors)

    with patch.object(sharded_folder, "_copy", lack_memory):
        try:
            worker.save_checkpoint(f"{folder}/failed", wait=False)
        except RuntimeError as error:
            raised = str(error)
    with refused("no-copy", by=RefusedError):
        worker.checkpoint_written()
    different = worker_state.differences(before, worker_state.capture(worker))
    worker.save_checkpoint(f"{folder}/next", wait=False)
    assert worker.checkpoint_written() > 0
    worker.load_checkpoint(f"{folder}/next")
    different += worker_state.differences(before, worker_state.capture(worker))
    return raised, [name for name in different if name != "config"]


@pytest.mark.parametrize("part", [1, 2, 3], ids=["weights", "reference", "optimizer"])
def test_a_copy_that_one_rank_has_no_memory_for_leaves_the_policy_as_it_was(ranks, tmp_path, part):
    first, last = ranks(2).run(fail_to_copy, str(tmp_path), part)
    assert last == ("can't allocate memory", [])
    assert first == (f"rank 1: {last[0]}", [])


def save_between_steps(folder):
    decaying = {"lr": 1e-2, "weight_decay": 0.1}
    config = {}, {"scheduler": {"lr_decay_style": "constant"}, "optimizer": decaying}
    undisturbed = build(*config)
    steps(undisturbed, (1, 2))
    wanted = worker_state.capture(undisturbed)
    saving = build(*config)
    saving.save_checkpoint(f"{folder}/0")  # before the optimizer has any state
    steps(saving, (1,))
    saving.save_checkpoint(f"{folder}/1")
    steps(saving, (2,))
    saving.save_checkpoint(f"{folder}/2")
    left = worker_state.differences(wanted, worker_state.capture(saving))
    restarted = build(*config, seed=7)
    restarted.load_checkpoint(f"{folder}/0")
    steps(restarted, (1, 2))
    again = worker_state.differences(wanted, worker_state.capture(restarted))
    return [name for name in (*left, *again) if name != "config"]


def test_saving_leaves_no_trace_also_before_the_first_step(ranks, tmp_path):
    assert ranks(1).run(save_between_steps, str(tmp_path)) == [[]]


# Buckets of gradients: between them a distributed optimizer's buffer is padded


FOUR_LAYERS = {"num_layers": 4}
TIED = {"tie_word_embeddings": True}
VPP = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
BUCKETED = {
    "one": (1, {}, {}),
    "dp2": (2, {}, {}),
    "tp2": (2, {}, {"tensor_model_parallel_size": 2}),
    "tp2sp": (2, {}, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    # The bias makes the weights before the embedding no multiple of what buckets are padded to.
    "pp2-tied": (2, TIED | {"add_qkv_bias": True}, {"pipeline_model_parallel_size": 2}),
    "vpp2-tied": (2, TIED | FOUR_LAYERS, VPP),
    "ep2": (2, EXPERTS, {"expert_model_parallel_size": 2}),
    "dp2-experts": (2, EXPERTS, {}),
    "dp4-ep2": (4, EXPERTS, EP2),
    "tp2sp-ep2": (4, EXPERTS, {"tensor_model_parallel_size": 2, "sequence_parallel": True, **EP2}),
    "cp2": (2, {}, {"context_parallel_size": 2}),
}


def in_buckets(size):
    """Without a size: Megatron's own, in which all weights are in one bucket, shared embeddings apart."""
    overlapped = {"overlap_grad_reduce": True, "bucket_size": size}
    return {"distributed_data_parallel_config": overlapped} if size else {}


def kept_states(state):
    """Weights, their main copies, moments and their steps."""
    return {
        name: value for name, value in state.items() if name.startswith(("param", "main", "exp_avg", "step"))
    }


def resume_twice(folder, model, megatron, policy, role):
    """Resume from what was saved at once and from a copy; the states that differ after loading and two steps later."""
    worker = build(model, megatron, role=role, **policy)
    steps(worker, (1, 2), role)
    worker.save_checkpoint(f"{folder}/at_once")
    worker.save_checkpoint(f"{folder}/copied", wait=False)
    saved = kept_states(worker_state.capture(worker))
    reports = steps(worker, (3, 4), role)
    assert worker.checkpoint_written() > 0
    wanted, differing = kept_states(worker_state.capture(worker)), []
    for name in ("at_once", "copied"):
        resumed = build(model, megatron, seed=7, role=role, **policy)
        resumed.load_checkpoint(f"{folder}/{name}")
        differing += worker_state.differences(saved, kept_states(worker_state.capture(resumed)))
        differing += ["reports"] * (steps(resumed, (3, 4), role) != reports)
        differing += worker_state.differences(wanted, kept_states(worker_state.capture(resumed)))
    return differing


@pytest.mark.quick_cases(
    "policy-bfloat16-700-dp2", "value-bfloat16-None-one", "policy-float32-None-pp2-tied", "policy-bfloat16-3000-ep2",
    "value-bfloat16-700-vpp2-tied",
)  # fmt: skip
@pytest.mark.parametrize("layout", BUCKETED)
@pytest.mark.parametrize("bucket_size", [None, 700, 3000])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("role", ["policy", "value"])
def test_states_in_buckets_are_resumed_bit_for_bit(ranks, tmp_path, role, precision, bucket_size, layout):
    ranks_needed, model, megatron = BUCKETED[layout]
    megatron, policy = megatron | in_buckets(bucket_size), {"precision": precision}
    differing = ranks(ranks_needed).run(resume_twice, str(tmp_path), model, megatron, policy, role)
    assert differing == [[]] * ranks_needed


def saved_by_megatron(folder, megatron):
    """Save the optimizer's state as Megatron itself gathers it, and load it; what differs."""
    from nemo_rl_mcore.rank.megatron import checkpoint
    from nemo_rl_mcore.rank.megatron.checkpoint import LAYOUT_INDEPENDENT
    from nemo_rl_mcore.rank.megatron.optimizer_state import parts_of

    def gathered(optimizer, weights, *, loading):
        gather = [part.sharded_param_state_fully_reshardable for part in parts_of(optimizer)]
        return {
            str(number): of_part(weights, loading, dict(LAYOUT_INDEPENDENT))
            for number, of_part in enumerate(gather)
        }

    worker = build({}, megatron, precision="bfloat16")
    steps(worker, (1, 2))
    with patch.object(checkpoint, "sharded_optimizer_state", gathered):
        worker.save_checkpoint(folder)
    saved = kept_states(worker_state.capture(worker))
    worker = build({}, megatron, seed=7, precision="bfloat16")
    worker.load_checkpoint(folder)
    return worker_state.differences(saved, kept_states(worker_state.capture(worker)))


def test_a_state_that_megatron_gathered_is_loaded_of_one_bucket_and_refused_of_several(ranks, tmp_path):
    assert ranks(2).run(saved_by_megatron, str(tmp_path / "one"), {}) == [[], []]
    with refused("optimizer-of-other-weights", str(tmp_path / "several" / "optimizer"), by=RankFailedError):
        ranks(2).run(saved_by_megatron, str(tmp_path / "several"), in_buckets(700))


# Another layout


def build_changed(layout, changed, **options):
    _, model, megatron = layout
    role = changed.get("role", "policy")
    return build(
        {**model, **changed.get("model", {})}, megatron, role=role, **options, **changed.get("policy", {})
    )


def save_and_go_on(folder, layout, changed):
    worker, role = build_changed(layout, changed), changed.get("role", "policy")
    steps(worker, (1, 2), role)
    worker.save_checkpoint(f"{folder}/saved")
    torch.save(kept_states(worker_state.capture(worker)), f"{folder}/rank_{dist.get_rank()}.pt")
    reports = steps(worker, (3, 4), role)
    worker.save_checkpoint(f"{folder}/went on")
    return reports


def load_and_go_on(folder, layout, changed, same_ranks):
    worker, role = build_changed(layout, changed, seed=7), changed.get("role", "policy")
    steps(worker, (6,), role)
    generator = torch.get_rng_state()
    worker.load_checkpoint(f"{folder}/saved")
    assert torch.get_rng_state().equal(generator) is not same_ranks  # random state belongs to the layout
    worker.save_checkpoint(f"{folder}/loaded")
    reports = steps(worker, (3, 4), role)
    worker.save_checkpoint(f"{folder}/resumed")
    return reports


def load_back(folder, layout, changed):
    """The states that are others than those saved, once another layout has loaded and saved them."""
    worker = build_changed(layout, changed, seed=7)
    worker.load_checkpoint(f"{folder}/loaded")
    wanted = torch.load(f"{folder}/rank_{dist.get_rank()}.pt")
    return worker_state.differences(wanted, kept_states(worker_state.capture(worker)))


def compare(folder, left, right):
    """The largest difference of the tensors of two checkpoints, relative to the tensor's largest entry or to 1."""
    one, other = tensors_in(Path(folder, left)), tensors_in(Path(folder, right))
    assert one.keys() == other.keys()
    assert any("exp_avg_sq" in name for name in one)
    return max(
        float((value.double() - other[name].double()).abs().max() / value.double().abs().max().clamp(min=1.0))
        for name, value in one.items()
    )


def distributed(on):
    return {"optimizer": {"lr": 1e-2, "weight_decay": 0.0, "use_distributed_optimizer": on}}


DP2, TP2_SP, PP2 = LAYOUTS["dp2"], LAYOUTS["tp2-sp"], LAYOUTS["pp2"]
UNEVEN = (2, {}, {**PP2[2], "num_layers_in_first_pipeline_stage": 1})
ONE = (1, {}, {})


def bucketed(layout, size, **more):
    ranks_needed, model, megatron = layout
    own = in_buckets(size)["distributed_data_parallel_config"] | more
    return ranks_needed, model, megatron | {"distributed_data_parallel_config": own}


@pytest.mark.quick_cases("dp2-tp2", "ep2-dp2", "dp2of700-tp2sp-bf16", "1-pp2-tied-critic")
@pytest.mark.parametrize(
    ("saved", "loaded", "changed"),
    [
        (ONE, DP2, {}),
        (DP2, ONE, {"policy": BF16}),
        (DP2, LAYOUTS["tp2"], {}),
        (TP2_SP, PP2, {"model": {"tie_word_embeddings": True}}),
        (PP2, LAYOUTS["pp2-vpp2"], {"model": FOUR_LAYERS}),
        (LAYOUTS["pp2-vpp2"], DP2, {"model": FOUR_LAYERS}),
        (UNEVEN, DP2, {"model": {**FOUR_LAYERS, "tie_word_embeddings": True}}),
        (LAYOUTS["tp2-pp2"], DP2, {"policy": BF16}),
        (LAYOUTS["ep2"], DP2, {"model": EXPERTS}),
        (ONE, LAYOUTS["ep2"], {"model": EXPERTS}),
        (LAYOUTS["cp2"], DP2, {"policy": BF16}),
        (TP2_SP, LAYOUTS["cp2"], {}),
        (LAYOUTS["cp2"], (4, {}, {"context_parallel_size": 4}), {"model": {"tie_word_embeddings": True}}),
        (bucketed(DP2, 700), bucketed(TP2_SP, 3000), {"policy": BF16}),
        (bucketed(LAYOUTS["ep2"], 3000), bucketed(DP2, 700), {"model": EXPERTS}),
        (bucketed(LAYOUTS["pp2-vpp2"], 700), DP2, {"model": TIED | FOUR_LAYERS, "policy": BF16}),
        (DP2, bucketed(LAYOUTS["cp2"], 3000), {"role": "value", "policy": BF16}),
        (ONE, bucketed(PP2, 3000, overlap_param_gather=True), {"model": TIED, "role": "value"}),
        (
            bucketed(DP2, 700, overlap_param_gather=True),
            bucketed(LAYOUTS["pp2-vpp2"], 3000, overlap_param_gather=True),
            {"model": TIED | FOUR_LAYERS, "role": "value"},
        ),
        (PP2, ONE, {"model": TIED, "role": "value"}),
        ((2, {}, distributed(True)), (2, {}, distributed(False)), {}),
        ((2, {}, distributed(False)), (2, {}, distributed(True)), {"policy": BF16}),
    ],
    ids=["1-dp2", "dp2-1-bf16", "dp2-tp2", "tp2sp-pp2-tied", "pp2-vpp2", "vpp2-dp2", "uneven-dp2-tied",
         "tp2pp2-dp2-bf16", "ep2-dp2", "1-ep2", "cp2-dp2-bf16", "tp2sp-cp2", "cp2-cp4-tied", "dp2of700-tp2sp-bf16",
         "ep2of3000-dp2", "vpp2of700-dp2-tied-bf16", "dp2-cp2-critic-bf16", "1-pp2-tied-critic", "dp2-vpp2-tied-critic",
         "pp2-1-tied-critic", "sharded-plain",
         "plain-sharded-bf16"],
)  # fmt: skip
def test_another_layout_goes_on_from_the_same_state(ranks, tmp_path, saved, loaded, changed):
    reports = ranks(saved[0]).run(save_and_go_on, str(tmp_path), saved, changed)[0]
    same_ranks = saved[0] == loaded[0] and "optimizer" in saved[2]
    found = ranks(loaded[0]).run(load_and_go_on, str(tmp_path), loaded, changed, same_ranks)[0]
    in_bf16 = "policy" in changed
    assert ranks(1).run(compare, str(tmp_path), "saved", "loaded") == [0.0]
    assert ranks(saved[0]).run(load_back, str(tmp_path), saved, changed) == [[]] * saved[0]
    # The activations of bf16 round differently in every layout.
    tolerance = 2e-2 if in_bf16 else 1e-5
    assert ranks(1).run(compare, str(tmp_path), "went on", "resumed")[0] <= tolerance
    for (loss, norm, _), (other_loss, other_norm, _) in zip(reports, found, strict=True):
        assert other_loss == pytest.approx(loss, rel=tolerance, abs=tolerance)
        assert other_norm == pytest.approx(norm, rel=tolerance * 10, abs=tolerance)


# Weights alone


def start_from_weights(folder, precision):
    source = build({}, {}, seed=7, precision=precision)
    steps(source, (1, 2))
    source.save_checkpoint(f"{folder}/policy")
    started = build({}, {}, precision=precision, init_checkpoint=folder)
    batch = tiny.grpo_batch(seed=9)
    reference = started.get_reference_policy_logprobs(data=batch)["reference_logprobs"]
    assert reference.equal(source.get_logprobs(data=batch)["logprobs"])
    lent = build({}, {}, precision=precision)
    lent.load_checkpoint(f"{folder}/policy", weights_only=True)
    steps(started, (3,))
    steps(lent, (3,))
    states = worker_state.capture(started), worker_state.capture(lent)
    exp_avg = next(value for name, value in states[0].items() if name.startswith("step "))
    return float(exp_avg), [name for name in worker_state.differences(*states) if name != "config"]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_run_starts_from_another_ones_weights_with_a_fresh_optimizer(ranks, tmp_path, precision):
    updates, differing = ranks(1).run(start_from_weights, str(tmp_path), precision)[0]
    assert updates == 1
    assert differing == []


# What is refused


def load_into(folder, model, policy):
    worker = build(model, {}, **policy)
    worker.load_checkpoint(folder)


def save_new(folder):
    worker = build({}, {})
    steps(worker, (1,))
    worker.save_checkpoint(folder)


def test_a_checkpoint_of_another_model_and_an_empty_folder_are_refused(ranks, tmp_path):
    with refused("no-checkpoint", tmp_path, by=RankFailedError):
        ranks(1).run(load_into, str(tmp_path), {}, {})
    ranks(1).run(save_new, str(tmp_path))
    for model, policy, part in (
        ({"ffn_hidden_size": 96}, {}, "Global shape mismatch"),
        ({"qk_layernorm": True}, {}, "k_layernorm"),
        ({"num_layers": 3}, {}, str(tmp_path)),
        ({}, {"precision": "bfloat16"}, str(tmp_path)),
    ):
        with refused("other-model", part, by=RankFailedError):
            ranks(1).run(load_into, str(tmp_path), model, policy)


# Checksums


def load_unverified(folder):
    worker = tiny.worker(tiny.policy_config(), verify_checksums=False)
    worker.load_checkpoint(folder)
    worker.load_checkpoint(folder, weights_only=True)


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_flipped_byte_is_refused_by_all_ranks_which_go_on(ranks, tmp_path, weights_only):
    ranks(2).run(save_new, str(tmp_path))
    file = tmp_path / "weights" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    told = ranks(2).run(load_refused_then_train, str(tmp_path), weights_only)
    assert str(file) in told[0]
    assert told[1] in (told[0], f"rank 0: {told[0]}")
    ranks(2).run(load_unverified, str(tmp_path))


def load_refused_then_train(folder, weights_only):
    worker = build({}, {}, seed=7)
    with refused("checksum-differs", by=RefusedError) as caught:
        worker.load_checkpoint(folder, weights_only=weights_only)
    steps(worker, (1,))
    return str(caught.value)


# A folder that holds something


def save_refused_then_elsewhere(full, empty):
    worker = build({}, {}, seed=7)
    with refused("folder-not-empty", full) as caught:
        worker.save_checkpoint(full)
    steps(worker, (1,))
    worker.save_checkpoint(empty)
    worker.load_checkpoint(empty)
    return str(caught.value)


def test_saving_into_a_folder_that_holds_something_is_refused_by_all_ranks_which_go_on(ranks, tmp_path):
    full, empty = tmp_path / "full", tmp_path / "empty"
    ranks(2).run(save_new, str(full))
    before = {path: path.read_bytes() for path in full.rglob("*") if path.is_file()}
    empty.mkdir()
    told = ranks(2).run(save_refused_then_elsewhere, str(full), str(empty))
    assert str(full) in told[0]
    assert told[1] == f"rank 0: {told[0]}"
    assert {path: path.read_bytes() for path in full.rglob("*") if path.is_file()} == before


def save_where_rank_0_cannot(folder):
    worker = build({}, {}, seed=7)
    with pytest.raises(OSError, match=r"not_a_folder") as refused:
        worker.save_checkpoint(f"{folder}/not_a_folder/policy")
    steps(worker, (1,))
    return type(refused.value).__name__


def test_a_first_rank_that_cannot_write_leaves_no_other_waiting(ranks, tmp_path):
    (tmp_path / "not_a_folder").write_text("a file")
    assert ranks(2).run(save_where_rank_0_cannot, str(tmp_path), timeout_s=60.0) == ["NotADirectoryError"] * 2


# Committed steps


def commit_and_reload(folder):
    def commit(worker, name):
        worker.begin_train_step(tiny.grpo_loss(), step_id=name)
        worker.train_microbatch(tiny.shard(tiny.grpo_batch(seed=1)))
        worker.finish_train_step()

    worker = build({}, {})
    for number in range(COMMITTED_IDS_KEPT + 2):
        commit(worker, str(number))
    worker.save_checkpoint(folder)
    commit(worker, "later")
    fresh = build({}, {}, seed=7)
    fresh.load_checkpoint(folder, weights_only=True)
    commit(fresh, "65")  # the weights alone are no step of this run
    fresh.load_checkpoint(folder)
    for name in ("2", "65"):
        with refused("step-committed", name, by=TrainStepError):
            fresh.begin_train_step(tiny.grpo_loss(), step_id=name)
    for name in ("0", "1", "later"):  # too long ago, and undone by loading
        commit(fresh, name)


def test_a_committed_step_id_stays_so_after_load_and_restart(ranks, tmp_path):
    ranks(1).run(commit_and_reload, str(tmp_path / "saved"))
    state = json.loads((tmp_path / "saved" / "state.json").read_text())
    assert state["committed_step_ids"] == [str(number) for number in range(2, 66)]


# A step that failed inside the optimizer


def reload_after_failure(folder):
    worker = build({}, {})
    steps(worker, (1,))
    worker.save_checkpoint(folder)
    steps(worker, (2, 3))
    wanted = worker_state.capture(worker)
    plain = worker.backend.scheduler.step
    worker.backend.scheduler.step = lambda increment: 1 / 0
    with pytest.raises(ZeroDivisionError):
        worker.train(tiny.grpo_batch(seed=4), tiny.grpo_loss())
    with refused("weights-unknown"):
        worker.abort_train_step()
    worker.backend.scheduler.step = plain
    worker.load_checkpoint(folder)
    steps(worker, (2, 3))
    return worker_state.differences(wanted, worker_state.capture(worker))


def test_a_step_that_failed_inside_the_optimizer_is_undone_by_the_checkpoint(ranks, tmp_path):
    assert ranks(1).run(reload_after_failure, str(tmp_path)) == [[]]


# Damaged files: a share of the cases of tests/chaos/checkpoint_files.py, which shows them all


def damaged_and_attacked(folder, every):
    for place in (CHAOS, CHAOS.parent):
        sys.path.insert(0, str(place))
    import checkpoint_files

    return [
        [(one.case, one.way, one.verdict, one.why) for one in findings]
        for findings in checkpoint_files.run(Path(folder), every)
    ]


@pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.nightly)])
def test_no_damage_goes_unnoticed_and_no_payload_runs(ranks, tmp_path, every):
    damaged, attacked = ranks(1).run(damaged_and_attacked, str(tmp_path), every, timeout_s=600.0)[0]
    assert [one for one in (*damaged, *attacked) if one[2] == "wrong"] == []
    # All that is loaded as it was is loaded without a look at checksums.
    assert {one[1] for one in damaged if one[2] != "refused"} <= {"unverified"}
    cases = {one[0] for one in damaged}, {one[0] for one in attacked}
    assert len(cases[0]) >= 138 // every
    assert len(cases[1]) >= 40 // every
    assert {one[1] for one in damaged} == {"whole", "by hand", "unverified"}
