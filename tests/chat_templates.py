"""Chat templates as models come with them, and a tokenizer whose rare characters are several tokens."""

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
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
    folder: Path,
    template: str | None = None,
    vocabulary: int = 320,
    marks: tuple[str, ...] = (),
    *,
    pieces: str | None = None,
    ends: str = EOS,
    corpus: list[str] = CORPUS,
) -> HuggingFaceTokenizer:
    """BPE over bytes: what it has not learnt to merge falls back to them.

    vocabulary: ids, marks included. marks: more special tokens. pieces: of a text, in which alone tokens are merged, in
    place of GPT-2's. ends: the end of sequence.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pieces is not None:
        split = pre_tokenizers.Split(Regex(pieces), "isolated")
        alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, alone])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(dict.fromkeys([PAD, EOS, START, ends, *marks])),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    saved = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=ends,
        pad_token=PAD,
        additional_special_tokens=[START, *marks],
        clean_up_tokenization_spaces=False,
    )
    saved.chat_template = template
    saved.save_pretrained(folder)
    return HuggingFaceTokenizer(str(folder))


@dataclass(frozen=True)
class Family:
    """How a family of models shows conversations: its template, its special tokens, and what its tokens are made in."""

    template: str
    pieces: str | None
    ends: str
    marks: tuple[str, ...]
    marked: bool = False
    """The template marks what an assistant says, as transformers reads it."""

    def load(self, folder: Path) -> HuggingFaceTokenizer:
        corpus = [*CORPUS, *["the\n\nanswer\n\n\nis\n"] * 8]
        return byte_tokenizer(
            folder, self.template, 360, self.marks, pieces=self.pieces, ends=self.ends, corpus=corpus
        )


_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN = (
    "{% if tools %}<|im_start|>system\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant\n{% generation %}"
    "{% if m.reasoning_content is string %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{% if m.content %}{{ m.content }}{% endif %}{% if m.tool_calls %}{% for call in m.tool_calls %}"
    "{% if not loop.first or m.content %}{{ '\n' }}{% endif %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}{% endif %}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% elif m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user"
    "{% endif %}\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}{% endif %}{% endfor %}"
) + _BEGIN
_QWEN3 = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
) + _QWEN.replace(
    "{% if m.reasoning_content is string %}<think>\n{{ m.reasoning_content }}",
    "{% if loop.index0 > ns.last and (loop.last or m.reasoning_content) %}<think>\n{{ m.reasoning_content or '' }}",
)
_HEAD = "<|start_header_id|>{{ role }}<|end_header_id|>\n\n"
_LLAMA = (
    "<|begin_of_text|>{% for m in messages %}"
    "{% set role = 'ipython' if m.role == 'tool' else m.role %}"
    "{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n{% generation %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", '
    '"parameters": {{ m.tool_calls[0].function.arguments | tojson }}}<|eot_id|>{% endgeneration %}'
    "{% elif m.role == 'assistant' %}"
    + _HEAD
    + "{% generation %}{{ m.content }}<|eot_id|>{% endgeneration %}"
    "{% else %}" + _HEAD + "{% if tools and m.role == 'user' and loop.first %}{% for tool in tools %}"
    "{{ tool | tojson }}\n\n{% endfor %}{% endif %}{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
_MISTRAL = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and loop.first %}[AVAILABLE_TOOLS]{{ tools | list | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'assistant' and m.tool_calls %}[TOOL_CALLS]["
    "{% for call in m.tool_calls %}{{ call.function | tojson }}{{ ', ' if not loop.last }}{% endfor %}]</s>"
    "{% elif m.role == 'assistant' %}{{ m.content }}</s>"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
    "{% else %}{{ raise_exception('only user, assistant and tool') }}{% endif %}{% endfor %}"
)
_GEMMA = (
    "<bos>{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "<start_of_turn>{{ role }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
_GPT_OSS = (
    "<|start|>system<|message|>You are a model.<|end|>"
    "{% if tools %}<|start|>developer<|message|>"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|end|>{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}"
    "{% set call = m.tool_calls[0].function %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>"
    "{{ call.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' and loop.last and not add_generation_prompt %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|return|>"
    "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{% elif m.role == 'tool' %}<|start|>functions to=assistant<|channel|>commentary"
    "<|message|>{{ m.content | tojson }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
FAMILIES = {
    "qwen": Family(_QWEN, _WORDS % "", EOS, (), marked=True),
    "qwen3": Family(_QWEN3, _WORDS % "", EOS, (), marked=True),
    "llama3": Family(
        _LLAMA,
        _WORDS % "{1,3}",
        "<|eot_id|>",
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
        marked=True,
    ),
    "mistral": Family(
        _MISTRAL,
        None,
        "</s>",
        ("<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    ),
    # Tokens are merged over all of a text, line feeds to line feeds.
    "gemma": Family(_GEMMA, r"[\s\S]+", "<end_of_turn>", ("<bos>", "<start_of_turn>")),
    "gpt_oss": Family(
        _GPT_OSS,
        _WORDS % "{1,3}",
        "<|return|>",
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>"),
    ),
}
"""As the templates of Qwen2.5, Qwen3, Llama 3, Mistral 7B v0.3, Gemma 3 and gpt-oss show turns, tools and thoughts."""
