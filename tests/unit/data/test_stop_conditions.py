import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from nemo_rl_mcore.config import PolicyConfig
from nemo_rl_mcore.data.tokenizer import CharTokenizer, StopConditions


class ByteTokenizer:
    """One token a byte, as a byte-level tokenizer falls back to: a character may be several tokens."""

    def __init__(self):
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        self._tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
        self._tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._tokenizer.decoder = decoders.ByteLevel()

    def encode(self, text):
        return self._tokenizer.encode(text).ids

    def text_of(self, ids):
        return self._tokenizer.decode(ids)


def end_of(tokens, stops):
    """How many tokens a response has; None if nothing ends it."""
    return next((end for end in range(1, len(tokens) + 1) if stops.met_by(tokens[:end])), None)


@pytest.mark.parametrize("tokenizer", [CharTokenizer(), ByteTokenizer()], ids=["characters", "bytes"])
@pytest.mark.parametrize(
    ("text", "strings", "end"),
    [
        ("12+3=a", ("3=",), 5),
        ("12+3=a", ("=a", "2"), 2),
        ("12+3=a", ("=3", "aa"), None),
        ("abcdefgh" * 3, ("hab",), 10),
        ("abc", ("abcd", "c"), 3),
    ],
)
def test_a_text_ends_a_response_at_the_token_that_completes_it(tokenizer, text, strings, end):
    assert end_of(tokenizer.encode(text), StopConditions(frozenset(), strings, tokenizer)) == end


def test_a_character_of_several_tokens_is_found_when_its_last_one_comes():
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode("naïve 東京 x")
    assert len(tokens) > 11
    end = end_of(tokens, StopConditions(frozenset(), ("東京",), tokenizer))
    assert tokenizer.text_of(tokens[:end]) == "naïve 東京"


def test_an_id_ends_a_response_without_a_tokenizer():
    assert end_of([3, 5, 4, 5], StopConditions(frozenset({4, 9}))) == 3


def test_the_tokenizer_is_loaded_for_texts_alone(tmp_path):
    def policy(name, strings):
        return PolicyConfig.model_validate(
            {
                "tokenizer": {"name": name},
                "train_global_batch_size": 2,
                "train_micro_batch_size": 2,
                "max_total_sequence_length": 8,
                "model": {
                    "num_layers": 1,
                    "hidden_size": 8,
                    "num_attention_heads": 2,
                    "ffn_hidden_size": 8,
                    "vocab_size": 32,
                    "max_position_embeddings": 8,
                },
                "megatron_cfg": {"optimizer": {"lr": 1e-2}},
                "generation": {"max_new_tokens": 4, "stop_strings": strings},
            }
        )

    missing = str(tmp_path / "nowhere")
    assert StopConditions.of(policy(missing, None), [1]) == StopConditions(frozenset({1}))
    with pytest.raises(ValueError, match=r"policy\.tokenizer\.name"):
        StopConditions.of(policy(missing, ["a"]), [1])
    assert end_of([1, 2, 3], StopConditions.of(policy("char", ["2"]), [])) == 2


def test_a_string_may_end_in_the_text_of_padding_or_hold_that_of_the_end():
    tokenizer = CharTokenizer()
    padded = [*tokenizer.encode("12"), tokenizer.pad_token_id, *tokenizer.encode("3")]
    text = tokenizer.text_of([tokenizer.pad_token_id])
    assert end_of(padded, StopConditions(strings=(f"2{text}",), tokenizer=tokenizer)) == 3
    ended = [*tokenizer.encode("1"), tokenizer.eos_token_id, *tokenizer.encode("2")]
    text = tokenizer.text_of([tokenizer.eos_token_id])
    assert end_of(ended, StopConditions(strings=(f"{text}2",), tokenizer=tokenizer)) == 3
