"""Rows of prompts with given answers, token by token."""

from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_mcore.data.answers import given_answers
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer("char")
EOS, PAD = TOKENIZER.eos_token_id, TOKENIZER.pad_token_id


def test_rows_by_hand():
    rows = given_answers([Prompt(7, "12>", "21"), Prompt(9, "3>", "3")], TOKENIZER)
    assert rows["input_ids"].tolist() == [[1, 2, 12, 2, 1, EOS], [3, 12, 3, EOS, PAD, PAD]]
    assert rows["input_lengths"].tolist() == [6, 4]
    assert rows["token_mask"].tolist() == [[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 0, 0]]
    assert rows["sample_mask"].tolist() == [1, 1]
    assert (rows["prompt_index"].tolist(), rows["sample_index"].tolist()) == ([7, 9], [0, 0])


TEXTS = st.text("0123456789+=>", min_size=1, max_size=8)


@given(texts=st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=6))
def test_what_is_trained_on_decodes_to_the_answer_and_the_rest_to_the_prompt(texts):
    rows = given_answers([Prompt(i, *text) for i, text in enumerate(texts)], TOKENIZER)
    for row, (prompt, answer) in enumerate(texts):
        ids, length = rows["input_ids"][row], int(rows["input_lengths"][row])
        trained = rows["token_mask"][row] != 0
        assert ids[trained].tolist() == [*TOKENIZER.encode(answer), EOS]
        assert TOKENIZER.decode(ids[:length][~trained[:length]].tolist()) == prompt
        assert (ids[length:] == PAD).all()
        assert not trained[length:].any()
