"""A Hugging Face tokenizer folder made on the spot: a token a character, and one for each mark of a turn."""

from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nemo_rl_mcore.data.tokenizer import HuggingFaceTokenizer

EOS, PAD, START = "<end>", "<pad>", "<turn>"
MARKS = [PAD, EOS, START]
CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]
VOCABULARY = len(MARKS) + len(CHARACTERS)

# As Qwen's: every turn ends with the end of sequence, and a line feed.
TEMPLATE = (
    "{% for m in messages %}<turn>{{ m.role }}\n{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)
# As those of reasoning models: an earlier answer is shown without what stands before the line.
FORGETFUL = (
    "{% for m in messages %}<turn>{{ m.role }}\n"
    "{{ m.content if loop.last else m.content.split('|')[-1] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)


def save_chat_tokenizer(folder: Path, template: str | None = TEMPLATE) -> str:
    vocabulary = {text: index for index, text in enumerate([*MARKS, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    saved = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[START],
        clean_up_tokenization_spaces=False,
    )
    saved.chat_template = template
    saved.save_pretrained(folder)
    return str(folder)


def chat_tokenizer(folder: Path, template: str | None = TEMPLATE) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(save_chat_tokenizer(folder, template))
