"""What stands between two answers: never the sampled ids encoded again, and all else as the chat template writes it."""

import random

import pytest
from chat_templates import APPENDING, EOS, REWRITING, STRICT, byte_tokenizer
from chat_tokenizer import FORGETFUL, chat_tokenizer
from refusals import refused

from nemo_rl_mcore.data.chat import make_observer, require_append_only
from nemo_rl_mcore.data.messages import Message
from nemo_rl_mcore.data.tokenizer import CharTokenizer, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"), APPENDING)


def observed(tokenizer, *, role="user", content="42 é 東", answer=None):
    """The ids and the text behind an answer."""
    observer = make_observer(tokenizer, chat=True)
    ids = observer.ids_of([7, tokenizer.eos_token_id] if answer is None else answer, [Message(role, content)])
    return ids, tokenizer.text_of(ids)


@pytest.mark.parametrize("chat", [False, True], ids=["characters", "template"])
def test_without_a_template_the_contents_stand_as_they_are_one_after_the_other(tokenizer, chat):
    plain = tokenizer if chat else CharTokenizer()
    observation = [Message("environment", "12"), Message("tool", "+3")]
    ids = make_observer(plain, chat=False).ids_of([5, 6], observation)
    assert ids == plain.encode("12") + plain.encode("+3")


def test_behind_an_ended_answer_stand_the_rest_of_its_turn_the_observation_and_the_next_beginning(tokenizer):
    _, text = observed(tokenizer)
    assert text == "\n<|im_start|>user\n42 é 東<|im_end|>\n<|im_start|>assistant\n"


def test_the_end_of_a_turn_that_was_not_sampled_is_written(tokenizer):
    stopped = tokenizer.encode("call(2)")
    _, text = observed(tokenizer, answer=stopped)
    assert text == "<|im_end|>\n<|im_start|>user\n42 é 東<|im_end|>\n<|im_start|>assistant\n"
    whole = tokenizer.encode("call(2)<|im_end|>\n")
    assert (
        observed(tokenizer, answer=whole)[1] == "<|im_start|>user\n42 é 東<|im_end|>\n<|im_start|>assistant\n"
    )
    assert observed(tokenizer, answer=[])[1] == text


def test_no_observation_is_the_beginning_of_the_next_answer(tokenizer):
    ids = make_observer(tokenizer, chat=True).ids_of([7, tokenizer.eos_token_id], [])
    assert tokenizer.text_of(ids) == "\n<|im_start|>assistant\n"


def test_a_blank_before_the_end_of_sequence_is_not_written_behind_it(tmp_path):
    strict = byte_tokenizer(tmp_path, STRICT)
    require_append_only(strict, "strict")
    assert observed(strict)[1] == "[INST] 42 é 東 [/INST]"
    assert observed(strict, answer=[7])[1] == " <|im_end|>[INST] 42 é 東 [/INST]"


def test_the_environments_role_is_the_users_where_the_template_does_not_know_it(tokenizer, tmp_path):
    assert observed(tokenizer, role="environment") == observed(tokenizer, role="user")
    strict = byte_tokenizer(tmp_path / "strict", STRICT)
    assert observed(strict, role="environment") == observed(strict, role="user")
    knowing = chat_tokenizer(tmp_path / "knowing")
    assert observed(knowing, role="environment", content="4")[1].startswith("\n<turn>environment\n4")


def test_tools_that_answer_together_share_a_turn(tokenizer):
    ids = make_observer(tokenizer, chat=True).ids_of(
        [7, tokenizer.eos_token_id], [Message("tool", "1"), Message("tool", "2")]
    )
    assert tokenizer.text_of(ids) == (
        "\n<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("template", [APPENDING, STRICT], ids=["left out", "refused"])
def test_another_role_that_the_template_does_not_show_is_refused(tmp_path, template):
    known = byte_tokenizer(tmp_path, template)
    with refused("unknown-role", "data.apply_chat_template", "'judge'", "'user'", "'environment'"):
        observed(known, role="judge")


def test_an_episode_is_to_the_id_what_the_template_writes_of_the_conversation(tokenizer):
    """Where the ids of an answer are those that its text is encoded to, which sampled ones need not be."""
    draws = random.Random(0)
    observer = make_observer(tokenizer, chat=True)
    for _ in range(50):
        messages = [Message("user", "guess")]
        ids = tokenizer.encode(tokenizer.render_chat(messages, add_generation_prompt=True))
        for _ in range(draws.randint(1, 5)):
            answer = "".join(draws.choices("higher 42 é東", k=draws.randint(0, 9)))
            observation = [Message(draws.choice(["user", "tool"]), "".join(draws.choices("low 7ß", k=5)))]
            sampled = tokenizer.encode(answer + EOS)
            ids += sampled + observer.ids_of(sampled, observation)
            messages += [Message("assistant", answer), *observation]
        assert ids == tokenizer.encode(tokenizer.render_chat(messages, add_generation_prompt=True))


def test_a_template_that_appends_passes(tokenizer, tmp_path):
    require_append_only(tokenizer, "qwen")
    require_append_only(chat_tokenizer(tmp_path), "characters")


def test_a_template_that_rewrites_earlier_turns_is_refused_with_the_first_text_that_differs(tmp_path):
    rewriting = byte_tokenizer(tmp_path, REWRITING)
    texts = ["<|im_start|>assistant\\n'", "'<think>\\nthe thought", "'the answer<|im_end|>"]
    with refused("rewritten-turns", "data.apply_chat_template", "models/qwen3", *texts, 3, "(user)"):
        require_append_only(rewriting, "models/qwen3")


def test_a_template_whose_generation_prompt_is_not_how_an_answer_begins_is_refused(tmp_path):
    template = APPENDING.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    with refused("rewritten-turns", "'<think>", 2, "(assistant)"):
        require_append_only(byte_tokenizer(tmp_path, template), "thinker")


def test_a_template_that_shows_no_conversation_is_refused(tmp_path):
    with refused("no-chat-template"):
        require_append_only(byte_tokenizer(tmp_path), "none")


def test_a_forgetful_template_writes_what_it_would_forget_only_behind_the_answer(tmp_path):
    """It is not among the probes, and still no sampled id changes."""
    _, text = observed(chat_tokenizer(tmp_path, FORGETFUL), content="4")
    assert text == "\n<turn>user\n4<end>\n<turn>assistant\n"


def test_an_answer_may_end_with_any_of_several_ends(tmp_path):
    """The template's end of turn is none of the tokenizer's own, as in base models that learn conversations."""
    folder = tmp_path / "base"
    byte_tokenizer(folder, APPENDING.replace("<|im_end|>", "<|eot|>"), marks=("<|eot|>",))
    own = load_tokenizer(str(folder))
    [turn_end] = own.encode("<|eot|>")
    tokenizer = load_tokenizer(str(folder), ends=[turn_end])
    rest = "\n<|im_start|>user\n42 é 東<|eot|>\n<|im_start|>assistant\n"
    assert observed(tokenizer, answer=[7, turn_end])[1] == rest
    assert observed(tokenizer, answer=[7, own.eos_token_id])[1] == f"<|eot|>{rest}"
