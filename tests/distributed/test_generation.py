"""The embedded engine on real ranks: it samples what get_logprobs then confirms, whatever the batch looks like."""

import pytest
import tiny
import torch
from tolerances import GENERATION

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.tokenizer import StopConditions, load_tokenizer
from nemo_rl_mcore.errors import RefusedError


def requests(prompt_lengths):
    generator = torch.Generator().manual_seed(3)
    rows, longest = len(prompt_lengths), max(prompt_lengths)
    lengths = torch.tensor(prompt_lengths)
    ids = torch.randint(0, tiny.VOCABULARY, (rows, longest), generator=generator)
    return tiny.BatchedDataDict(
        input_ids=ids * (torch.arange(longest) < lengths.unsqueeze(1)),
        input_lengths=lengths,
        prompt_index=torch.arange(rows) // 2,
        sample_index=torch.arange(rows) % 2,
    )


def generation_config(**sampling):
    return {"max_new_tokens": 6, "temperature": 0.7} | sampling


def generated_against_logprobs(megatron, prompt_lengths, filters=None, model=None):
    """Log-probabilities of six tokens a prompt, as generation and as `get_logprobs` say them; and the tokens."""
    config = tiny.policy_config(
        model={"num_layers": 4} | (model or {}),
        megatron=megatron,
        generation=generation_config(**(filters or {})),
    )
    worker = tiny.worker(config)
    asked = requests(prompt_lengths)
    found = worker.generate(data=asked, step=5, stop_ids=[])
    rows, longest = asked["input_ids"].shape
    whole = torch.zeros(rows, longest + 6, dtype=torch.long)
    in_response = torch.zeros(whole.shape, dtype=torch.bool)
    for row in range(rows):
        start, end = prompt_lengths[row], prompt_lengths[row] + 6
        whole[row, :start] = asked["input_ids"][row, :start]
        whole[row, start:end] = found["tokens"][row]
        in_response[row, start:end] = True
    assert (found["lengths"] == 6).all()
    data = tiny.BatchedDataDict(input_ids=whole, input_lengths=asked["input_lengths"] + 6)
    confirmed = worker.get_logprobs(data=data)["logprobs"]
    return found["logprobs"].flatten().numpy(), confirmed[in_response].numpy(), found["tokens"].tolist()


def assert_confirmed(ranks, world_size, megatron, lengths=(4, 4, 2, 5, 2, 1, 5, 3), filters=None, model=None):
    """A pass over its tokens says of each what generation said, and the ranks of one model copy draw the same."""
    answers = ranks(world_size).run(generated_against_logprobs, megatron, [*lengths], filters, model)
    for generated, confirmed, tokens in answers:
        assert generated == pytest.approx(confirmed, abs=GENERATION)
        assert tokens == answers[0][2]


LATENT = {
    "qk_layernorm": True, "num_query_groups": None, "q_lora_rank": 20,
    "kv_lora_rank": 12, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 6,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 0.7,
        "mscale_all_dim": 1.2,
    },
}  # fmt: skip
DENSE_FIRST = {
    "num_moe_experts": 4, "moe_layer_freq": (0, 1, 1, 1), "moe_ffn_hidden_size": 24,
    "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
}  # fmt: skip
LATENT_EXPERTS = LATENT | DENSE_FIRST
TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
TP2_SP, CP2 = TP2 | {"sequence_parallel": True}, {"context_parallel_size": 2}
# Ranks, and keys of Megatron, of the model.
CONFIRMED = {
    "one-rank": (1, {}, {}),
    "one-rank-fused": (1, {"use_fused_linear_logprobs": True}, {}),
    "tp2": (2, TP2, {}),
    "tp2-sp": (2, TP2_SP, {}),
    "pp2": (2, PP2, {}),
    "pp2-vpp2": (2, PP2 | {"virtual_pipeline_model_parallel_size": 2}, {}),
    "cp2": (2, CP2, {}),
    # Decoding keeps keys and values of every head, as upstream's does: the latents are made whole once a token.
    "shared-group-tp2": (2, TP2, {"num_query_groups": 1}),
    "shared-group-tp2-sp": (2, TP2_SP, {"num_query_groups": 1}),
    "latent-one-rank": (1, {}, LATENT),
    "latent-tp2": (2, TP2, LATENT),
    "latent-tp2-sp-experts": (2, TP2_SP, LATENT_EXPERTS),
    "latent-pp2": (2, PP2, LATENT_EXPERTS),
    "latent-cp2": (2, CP2, LATENT),
}


@pytest.mark.quick_cases(
    *(case for case in CONFIRMED if "latent" not in case), "latent-one-rank", "latent-tp2-sp-experts"
)
@pytest.mark.parametrize("case", CONFIRMED)
def test_own_logprobs_are_those_of_get_logprobs(ranks, case):
    world_size, megatron, model = CONFIRMED[case]
    assert_confirmed(ranks, world_size, megatron, model=model)


def several_answers_to_a_prompt():
    asked = requests([5] * 4).repeat_interleave(4)
    asked["sample_index"] = torch.arange(4).repeat(4)
    answered = []
    for size in (None, 4, 3):  # of a single prompt there are too few tokens to be read apart
        worker = tiny.worker(tiny.policy_config(generation=generation_config(), generation_batch_size=size))
        read = []
        worker.backend.chunks[0].register_forward_pre_hook(
            lambda _chunk, given, read=read: read.append(tuple(given[0].shape))
        )
        found = worker.generate(data=asked, step=5, stop_ids=[])
        answered.append((found["tokens"].tolist(), found["logprobs"].tolist(), read))
    return answered


def test_a_prompt_is_read_once_for_all_its_answers(ranks):
    once, each, uneven = ranks(1).run(several_answers_to_a_prompt)[0]
    assert once[2] == [(4, 5)] + [(16, 1)] * 5
    assert each[2] == ([(4, 5)] + [(4, 1)] * 5) * 4
    assert once[:2] == each[:2]  # to the bit
    assert once[0] == uneven[0]
    assert len({tuple(row) for row in once[0]}) > 4  # they are answers of their own


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.6}, {"top_k": 9, "top_p": 0.8}], ids=str)
@pytest.mark.parametrize("megatron", [{}, TP2_SP], ids=["one", "tp2-sp"])
def test_logprobs_agree_with_get_logprobs_under_filters(ranks, megatron, filters):
    assert_confirmed(ranks, 2 if megatron else 1, megatron, filters=filters)


def prompts_up_to(length):
    worker = tiny.worker(tiny.policy_config(generation=generation_config(), max_total_sequence_length=16))
    try:
        answered = worker.generate(data=requests([3, length, 2]), step=5, stop_ids=[])
    except RefusedError as error:
        return error.code
    return answered["lengths"].tolist()


def test_a_prompt_that_leaves_no_room_for_a_response_is_refused(ranks):
    assert ranks(1).run(prompts_up_to, 10)[0] == [6, 6, 6]
    assert ranks(1).run(prompts_up_to, 11)[0] == "prompt-length"


def stopped_by_texts(megatron, of_rows):
    """What stop strings, one of two tokens, make of responses, and what they are without."""
    tokenizer = load_tokenizer("char")
    asked = requests([3] * 8 + [5] * 8)

    def answers(data=asked, **stops):
        generation = generation_config(max_new_tokens=8, **stops)
        worker = tiny.worker(tiny.policy_config(megatron=megatron, generation=generation))
        return worker.generate(data=data, step=5, stop_ids=[tokenizer.eos_token_id])

    plain = answers()
    strings = (tokenizer.decode(plain["tokens"][0, 2:4].tolist()), "a", "##")
    of_row = [strings, () if of_rows else strings] * 8
    told = tiny.BatchedDataDict(asked, stop_strings=of_row)
    stopped = answers(told) if of_rows else answers(stop_strings=strings)
    texts = [
        tokenizer.decode(row[:length])
        for row, length in zip(stopped["tokens"].tolist(), stopped["lengths"].tolist(), strict=True)
    ]
    as_lists = [{name: value.tolist() for name, value in answered.items()} for answered in (plain, stopped)]
    return of_row, texts, *as_lists


@pytest.mark.parametrize("of_rows", [False, True], ids=["recipe", "rows"])
@pytest.mark.parametrize(
    ("world_size", "megatron"), [(1, {}), (2, {"pipeline_model_parallel_size": 2})], ids=["one-rank", "pp2"]
)
def test_a_stop_string_ends_a_response_and_belongs_to_it(ranks, world_size, megatron, of_rows):
    for of_row, texts, plain, stopped in ranks(world_size).run(stopped_by_texts, megatron, of_rows):
        assert len(of_row[0][0]) == 2
        assert texts[0].endswith(of_row[0][0])
        assert stopped["lengths"][0] == 4
        assert set(stopped["finished"]) == {True, False}
        assert of_rows == any("a" in text[:-1] for text in texts), "of a row without stop strings"
        for row, (strings, text) in enumerate(zip(of_row, texts, strict=True)):
            length = stopped["lengths"][row]
            assert stopped["tokens"][row][:length] == plain["tokens"][row][:length]
            assert stopped["logprobs"][row][:length] == plain["logprobs"][row][:length]
            assert not any(string in text[:-1] for string in strings)
            ends = any(string in text for string in strings) or len(text) < length  # by the end of sequence
            assert stopped["finished"][row] == ends
            assert ends or length == 8


def answers_with_and_without_room():
    total = 20
    policy = tiny.policy_config(max_total_sequence_length=total, generation=generation_config())
    fitting = policy.model_copy(
        update={"generation": policy.generation.model_copy(update={"fit_to_sequence": True})}
    )
    asked = requests([2, 19, 14, 17, 17])
    whole = tiny.worker(policy.model_copy(update={"max_total_sequence_length": 40}))
    found = whole.generate(data=asked, step=1, stop_ids=[])
    fitted = tiny.worker(fitting).generate(data=asked, step=1, stop_ids=[])
    return [[rows[key].tolist() for key in ("tokens", "lengths", "finished")] for rows in (found, fitted)]


def test_an_answer_ends_where_its_prompt_leaves_no_more(ranks):
    (((tokens, lengths, _), (fitted, found, finished)),) = ranks(1).run(answers_with_and_without_room)
    assert lengths == [6] * 5
    assert found == [6, 1, 6, 3, 3]
    assert [row[:n] for row, n in zip(fitted, found, strict=True)] == [
        row[:n] for row, n in zip(tokens, found, strict=True)
    ]
    assert not any(finished)


def logprobs_across_new_weights(reread):
    from nemo_rl_mcore.rank.megatron.generation import DecodingSession, GenerationRequest

    model = tiny.worker(tiny.policy_config(generation=generation_config())).backend.forward
    session, params = DecodingSession(model, tiny.VOCABULARY), model.passes.sampling
    session.add(GenerationRequest([[1, 2, 3]], torch.ones(1).long(), 4, [StopConditions()], params))
    tokens = [1, 2, 3, int(session.step().tokens_N)]
    with torch.no_grad():
        for parameter in model.chunks[0].parameters():
            parameter.mul_(1.5)
    if reread:
        session.reread()
    drawn, found, whole = [session.step() for _ in range(3)], [], []
    for sampled in drawn:
        found.append(float(sampled.logprobs_N))
        tokens.append(int(sampled.tokens_N))
        row = BatchedDataDict(input_ids=torch.tensor([tokens]), input_lengths=torch.tensor([len(tokens)]))
        (read,) = model.read(row, 1, model.passes.logprobs())
        whole.append(float(read[0, len(tokens) - 1]))
    return found, whole


def test_the_next_token_is_drawn_with_the_weights_of_its_time(ranks):
    """As a whole pass over the tokens says, once all is read again; else after what the former weights cached."""
    ((found, whole),) = ranks(1).run(logprobs_across_new_weights, True)
    assert found == pytest.approx(whole, abs=1e-5)
    ((found, whole),) = ranks(1).run(logprobs_across_new_weights, False)
    assert found != pytest.approx(whole, abs=1e-3)
