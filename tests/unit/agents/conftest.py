import sys
from pathlib import Path

import pytest
from chat_templates import TOOLS, byte_tokenizer

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"), TOOLS)
