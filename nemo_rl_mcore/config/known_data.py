"""Data sets that a source can name: where they lie, their columns, and where their rows state the answer.

The second table has NeMo RL's spelling of them, and the formats of rows that it names where it loads a file.
"""

import difflib
from collections.abc import Mapping

Keys = Mapping[str, object]

KNOWN: dict[str, Keys] = {
    "gsm8k": {
        "data_path": "openai/gsm8k",
        "subset": "main",
        "input_key": "question",
        "output_key": "answer",
        "answer": {"after": "####"},
    },
    "math": {
        "data_path": "DigitalLearningGmbH/MATH-lighteval",
        "input_key": "problem",
        "output_key": "solution",
        "answer": {"boxed": True},
    },
    "math500": {
        "data_path": "HuggingFaceH4/MATH-500",
        "split": "test",
        "input_key": "problem",
        "output_key": "solution",
        "answer": {"key": "answer"},
    },
    "dapo_math_17k": {
        "data_path": "BytedTsinghua-SIA/DAPO-Math-17k",
        "input_key": "prompt",
        "output_key": "reward_model.ground_truth",
    },
    "dapo_aime_2024": {
        "data_path": "BytedTsinghua-SIA/AIME-2024",
        "input_key": "prompt",
        "output_key": "reward_model.ground_truth",
    },
    "aime_2024": {
        "data_path": "HuggingFaceH4/aime_2024",
        "input_key": "problem",
        "output_key": "answer",
    },
    "aime_2026": {
        "data_path": "MathArena/aime_2026",
        "input_key": "problem",
        "output_key": "answer",
    },
    "deepscaler": {
        "data_path": "agentica-org/DeepScaleR-Preview-Dataset",
        "input_key": "problem",
        "output_key": "answer",
    },
    "openr1_math_220k": {
        "data_path": "open-r1/OpenR1-Math-220k",
        "subset": "default",
        "input_key": "problem",
        "output_key": "answer",
    },
    "openmathinstruct2": {
        "data_path": "nvidia/OpenMathInstruct-2",
        "split": "train_1M",
        "input_key": "problem",
        "output_key": "expected_answer",
        "answer": {"key": "expected_answer"},
        "split_validation_size": 0.05,
    },
    "helpsteer3": {
        "data_path": "nvidia/HelpSteer3",
        "subset": "preference",
    },
    "tulu3_sft": {
        "data_path": "allenai/tulu-3-sft-mixture",
        "split_validation_size": 0.05,
    },
    "nemotron_cascade_2_sft_math": {
        "data_path": "nvidia/Nemotron-Cascade-2-SFT-Data",
        "subset": "math",
        "split_validation_size": 0.05,
    },
    "tulu3_preference": {
        "data_path": "allenai/llama-3.1-tulu-3-8b-preference-mixture",
    },
}
"""The keys of a source that each name stands for."""

OTHER_NAMES: dict[str, str] = {
    "GSM8K": "gsm8k",
    "MATH": "math",
    "MATH-500": "math500",
    "DAPOMath17K": "dapo_math_17k",
    "DAPOMathAIME2024": "dapo_aime_2024",
    "AIME2024": "aime_2024",
    "AIME2026": "aime_2026",
    "DeepScaler": "deepscaler",
    "OpenR1-Math-220k": "openr1_math_220k",
    "OpenMathInstruct-2": "openmathinstruct2",
    "HelpSteer3": "helpsteer3",
    "tulu3_sft_mixture": "tulu3_sft",
    "Nemotron-Cascade-2-SFT-Math": "nemotron_cascade_2_sft_math",
    "Tulu3Preference": "tulu3_preference",
}
"""NeMo RL's names of them."""

ROW_FORMATS = (
    *("ResponseDataset", "PreferenceDataset", "BinaryPreferenceDataset", "openai_format"),
    "NemoGymDataset",
)
"""NeMo RL's names of formats whose keys are those of a source; which one a row has is seen from the row."""

PROCESSORS = (
    "default",
    "math_hf_data_processor",
    "math_data_processor",
    "sft_processor",
    "preference_preprocessor",
    "helpsteer3_data_processor",
    "nemo_gym_data_processor",
)
"""NeMo RL's names of what is read here of a row, as its columns and the algorithm say."""

REFUSED_PROCESSORS: dict[str, str] = {
    "multichoice_qa_processor": "rows of several choices are not made into prompts; write the choices into the prompt",
    "vlm_hf_data_processor": "models see text alone",
    "kd_data_processor": "a teacher has the policy's tokenizer, and reads the rows that the policy reads",
}


def known_name(name: str) -> str | None:
    """Return the entry of the table that a name stands for; None where it is none."""
    name = OTHER_NAMES.get(name, name)
    return name if name in KNOWN else None


def nearest_name(name: str) -> str | None:
    """Return the known name that an unknown one was most likely meant to be."""
    by_case = {known.lower(): known for known in (*ROW_FORMATS, *OTHER_NAMES, *KNOWN)}
    near = difflib.get_close_matches(name.lower(), by_case, n=1, cutoff=0.6)
    return by_case[near[0]] if near else None
