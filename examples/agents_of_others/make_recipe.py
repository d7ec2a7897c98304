"""Write a recipe of two CPU cores for an agent of others, with a tiny tokenizer and the rows that it needs.

    uv run python examples/agents_of_others/make_recipe.py STACK FOLDER --python PYTHON [--port PORT]

PYTHON is that of the stack's environment. FOLDER/sft.yaml, which is run first, shows the tiny model what a conversation
looks like; FOLDER/grpo.yaml goes on from its weights. Each call of a tool is one token, so that a few steps teach it.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).parent
TOKENIZER = "tokenizer"
PAD, END, START = "<|endoftext|>", "<|im_end|>", "<|im_start|>"
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
# As Qwen's, but for the tools themselves, which the model knows by heart.
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}{% if not loop.first or m.content %}{{ '\n' }}{% endif %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

type Messages = list[dict[str, str]]


def calling(name: str, **arguments: object) -> str:
    """Return what a model says to call a tool, as Qwen does."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def talk(question: str, *said: str, system: str = "") -> Messages:
    """Return a conversation: a question, and what assistant and tool say in turn."""
    roles = ("assistant", "tool")
    first = [{"role": "system", "content": system}] if system else []
    turns = [{"role": roles[place % 2], "content": content} for place, content in enumerate(said)]
    return [*first, {"role": "user", "content": question}, *turns]


type Row = tuple[dict[str, Any], Messages]
"""A task, and a conversation that does it."""
_NUMBERS = [(f"{number:02d}?", f"{number * 7 % 100:02d}") for number in range(40)]
_LOOK_UP = calling("look_up")
_READ, _SUBMIT = (
    calling("bash", command=f"{before}cat number.txt")
    for before in ("", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; ")
)


def _of_look_up(_: Path) -> Iterator[Row]:
    """Yield numbers, and what belongs to them; a tool says it."""
    for question, answer in _NUMBERS:
        yield {"input": question, "output": answer}, talk(question, _LOOK_UP, answer, answer)


def _of_a_shell(_: Path) -> Iterator[Row]:
    """Yield numbers, and what a file says; half of the conversations read it first, which is not needed."""
    for place, (question, answer) in enumerate(_NUMBERS):
        read = (_READ, f"<returncode>0</returncode>\n<output>\n{answer}</output>") * (place % 2)
        yield {"input": question, "output": answer}, talk(question, *read, _SUBMIT, system="shell")


def _of_verifiers(_: Path) -> Iterator[Row]:
    """Yield tasks of the taskset in verifiers_agent.py, which says what is asked and what is right, by their places."""
    for place in range(40):
        question = f"{place:02d}"
        yield {"input": str(place)}, talk(f"say {question}", question)


def _add(count: int) -> str:
    return calling("increment_counter", count=count)


_COUNT = calling("get_counter_value")
_SERVER = "resources_servers/example_session_state_mgmt"


def _of_nemo_gym(environment: Path) -> Iterator[Row]:
    """Yield the rows that NeMo Gym has for its counter."""
    [rows] = environment.glob(f"lib/python*/site-packages/{_SERVER}/data/example.jsonl")
    for line in rows.read_text("utf-8").splitlines() * 16:
        row = json.loads(line)
        [asked] = row["responses_create_params"]["input"]
        question, count = asked["content"], row["expected_count"]
        done = '{"success":true}'
        first, second = map(int, re.findall(r"add (\d+)", question))
        counted = talk(
            question, _add(first), done, _add(second), done, _COUNT, f'{{"count":{count}}}', str(count)
        )
        yield row, counted


@dataclass(frozen=True)
class Stack:
    """agent: its command, behind its Python; empty where it is NeMo Gym's. rows: by the folder of its environment.

    calls: of tools, each of which is one token. turns: calls of the model.
    """

    agent: tuple[str, ...]
    rows: Callable[[Path], Iterator[Row]]
    calls: tuple[str, ...] = ()
    turns: int = 3
    warm_steps: int = 20
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    """More of `env`."""


STACKS = {
    "openai_agents": Stack(("openai_agents.py",), _of_look_up, (_LOOK_UP,)),
    "mini_swe_agent": Stack(("mini_swe_agent.py",), _of_a_shell, (_READ, _SUBMIT)),
    "verifiers": Stack(("verifiers_agent.py", TOKENIZER), _of_verifiers, turns=1),
    "nemo_gym": Stack(
        (),
        _of_nemo_gym,
        (_COUNT, *(_add(count) for count in range(16))),
        turns=4,
        warm_steps=60,
        settings={
            "nemo_gym": {
                "config_paths": [
                    f"{_SERVER}/configs/example_session_state_mgmt.yaml",
                    "responses_api_models/vllm_model/configs/vllm_model_for_training.yaml",
                ]
            }
        },
    ),
}


def make_tokenizer(calls: tuple[str, ...]) -> PreTrainedTokenizerFast:
    """Return a tokenizer of one token for each byte, for each mark of Qwen's template and for each call."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [PAD, END, START, *alphabet]
    tokenizer = Tokenizer(models.BPE({word: place for place, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in (*MARKS, *calls)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START],
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = CHAT_TEMPLATE
    return made


def main() -> None:
    """Write all files."""
    parser = argparse.ArgumentParser()
    parser.add_argument("stack", choices=STACKS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", type=Path, required=True)
    parser.add_argument("--port", type=int, default=0, help="of the endpoint; 0 takes a free one")
    given = parser.parse_args()
    folder, stack = given.folder.absolute(), STACKS[given.stack]
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(stack.calls)
    tokenizer.save_pretrained(folder / TOKENIZER)
    rows = [*stack.rows(given.python.absolute().parent.parent)]
    _write_rows(folder / "tasks.jsonl", [task for task, _ in rows])
    _write_rows(folder / "conversations.jsonl", [{"messages": conversation} for _, conversation in rows])
    # What both recipes share: the models must be the same.
    policy: dict[str, Any] = {
        "model": {"vocab_size": len(tokenizer), "max_position_embeddings": 512},
        "tokenizer": {"name": TOKENIZER},
        "max_total_sequence_length": 512,
    }
    sft = {
        "defaults": "sft_agents_cpu.yaml",
        "sft": {"max_num_steps": stack.warm_steps, "max_num_epochs": 100},
        "policy": policy,
        "data": {"train": {"data_path": "conversations.jsonl"}},
        "checkpointing": {"enabled": True},
        "logger": {"log_dir": str(folder / "sft")},
        "cluster": {"cpu_workers_per_node": 1},
    }
    python, record = str(given.python.absolute()), str(folder / "sessions.jsonl")
    if stack.agent:
        program, *arguments = stack.agent
        player = {"command": [python, str(HERE / program), *arguments, "--record", record], "processes": 2}
    else:
        player = {"command": [python], "processes": 1}
    grpo = {
        "defaults": "grpo_agents_cpu.yaml",
        "grpo": {
            "num_prompts_per_step": 2,
            "num_generations_per_prompt": 4,
            "max_rollout_turns": stack.turns,
            "max_num_steps": 2,
            "val_at_end": False,
        },
        "policy": policy
        | {"init_checkpoint": str(folder / f"sft/checkpoints/step_{stack.warm_steps}")}
        | {"train_global_batch_size": 8, "train_micro_batch_size": 8, "logprob_batch_size": 8}
        | {"generation": {"max_new_tokens": 12}}
        # So little that what the warm start has taught is still there behind two steps.
        | {"megatron_cfg": {"optimizer": {"lr": 1.0e-4, "min_lr": 1.0e-5}}},
        "data": {"train": {"data_path": "tasks.jsonl", **_keys(rows[0][0])}},
        "env": {
            "endpoint": {
                **player,
                "timeout_s": 300,
                "port": given.port,
            },
            **stack.settings,
        },
        "logger": {"log_dir": str(folder / "run")},
        "cluster": {"cpu_workers_per_node": 1},
    }
    for name, recipe in (("sft.yaml", sft), ("grpo.yaml", grpo)):
        (folder / name).write_text(yaml.safe_dump(recipe, sort_keys=False), "utf-8")


def _keys(task: dict[str, Any]) -> dict[str, Any]:
    """Return where the answer of a row is, which some of these agents know by themselves, and what else it has."""
    if "responses_create_params" in task:
        return {}
    others = [key for key in task if key not in ("input", "output")]
    return {"output_key": "output" if "output" in task else None, "columns": others}


def _write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")


if __name__ == "__main__":
    main()
