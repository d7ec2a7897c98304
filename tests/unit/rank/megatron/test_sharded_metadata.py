import io
import pickle
from pathlib import PosixPath

import pytest

from nemo_rl_mcore.rank.megatron.sharded_metadata import _Unpickler


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_a_path_is_read_whichever_python_wrote_it(module):
    """Python 3.13 calls its module otherwise; a checkpoint moves from one Python to another."""
    written = pickle.dumps(PosixPath("a/b"), protocol=2)
    found = pickle.dumps(PosixPath("a"), protocol=2).split(b"\n")[0].removeprefix(b"\x80\x02c")
    text = written.replace(b"c" + found + b"\n", b"c" + module.encode() + b"\n")
    assert _Unpickler(io.BytesIO(text)).load() == PosixPath("a/b")


def test_what_is_no_part_of_a_description_is_not_made():
    with pytest.raises(pickle.UnpicklingError):
        _Unpickler(io.BytesIO(b"\x80\x02cpathlib._local\nPath\n.")).load()
