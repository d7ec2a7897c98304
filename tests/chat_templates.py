"""Chat templates as models come with them, and a tokenizer whose rare characters are several tokens."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from nemo_rl_mcore.data.tokenizer import HuggingFaceTokenizer

EOS, PAD, START = "<|im_end|>", "<|pad|>", "<|im_start|>"
CORPUS = [
    "guess the number, higher or lower",
    "the answer is 42",
    "user assistant tool environment think",
] * 4

_BEGIN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
# As Qwen2.5's, without its system message: other roles than these are left out.
APPENDING = (
    "{% for m in messages %}"
    "{% if m.role in ['user', 'assistant', 'system'] %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% endif %}{% endfor %}"
) + _BEGIN
# As Qwen3's: the thoughts of an answer are shown until a user says more.
REWRITING = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' and loop.index0 < ns.last %}"
    "<|im_start|>assistant\n{{ m.content.split('</think>')[-1].lstrip('\n') }}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
) + _BEGIN
# As some of Llama 2's: a blank stands before the end of sequence, and what is no user or assistant is refused.
STRICT = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }} <|im_end|>"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
# As Qwen2.5's with tools; an answer is shown as it is, calls behind what it says.
TOOLS = (
    "{% if tools %}<|im_start|>system\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ THOUGHTS }}"
    "{% for call in m.tool_calls or [] %}{% if not loop.first or m.content %}{{ '\n' }}{% endif %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
) + _BEGIN
# As Qwen3's: thoughts are shown until a user says more, also between calls of tools.
FORGETFUL_TOOLS = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
) + TOOLS.replace(
    "{{ THOUGHTS }}",
    "{% if m.role == 'assistant' and loop.index0 < ns.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}",
)
TOOLS = TOOLS.replace("{{ THOUGHTS }}", "{{ m.content }}")


def byte_tokenizer(
    folder: Path, template: str | None = None, vocabulary: int = 320, marks: tuple[str, ...] = ()
) -> HuggingFaceTokenizer:
    """BPE over bytes: what it has not learnt to merge falls back to them.

    vocabulary: ids, marks included. marks: more special tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD, EOS, START, *marks],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    saved = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[START, *marks],
        clean_up_tokenization_spaces=False,
    )
    saved.chat_template = template
    saved.save_pretrained(folder)
    return HuggingFaceTokenizer(str(folder))
