"""Files in formats that are read by the library `datasets`."""

from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)
