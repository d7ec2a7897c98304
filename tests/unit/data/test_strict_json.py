import os

import pytest

from nemo_rl_mcore.data.strict_json import parse_json, read_json, read_regular
from nemo_rl_mcore.errors import shortened


def test_json_is_read_as_it_stands(tmp_path):
    (tmp_path / "a.json").write_text('{"a": [1, -2.5e3, "x", null, true]}')
    assert read_json(tmp_path / "a.json") == {"a": [1, -2500.0, "x", None, True]}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' is there twice"),
        ('{"a": NaN}', "NaN is not a number"),
        ('{"a": -Infinity}', "-Infinity is not a number"),
        ("[1e999]", "1e999 is too large"),
        ("", "Expecting value"),
        (b"\xe9", "can't decode"),
    ],
)
def test_what_json_loads_lets_pass_or_dies_of_is_refused(text, complaint):
    with pytest.raises(ValueError, match=complaint):
        parse_json(text)


def test_messages_stay_short():
    key = "k" * 5_000_000
    with pytest.raises(ValueError, match="is there twice") as error:
        parse_json(f'{{"{key}": 1, "{key}": 2}}')
    assert len(str(error.value)) < 200
    assert shortened("a" * 60) == "a" * 60
    assert shortened("a" * 61) == "a" * 57 + "..."


def test_files_that_others_write_may_hold_infinity():
    assert parse_json("[Infinity, 1e999]", finite=False) == [float("inf")] * 2


def test_a_pipe_or_a_folder_is_no_file_and_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(OSError, match="no regular file"):
            read_regular(path)
