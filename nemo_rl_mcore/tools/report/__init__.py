"""A self-contained HTML page of a run, or of several side by side."""

from nemo_rl_mcore.tools.report.page import write_page
from nemo_rl_mcore.tools.report.run_data import read_run

__all__ = ["read_run", "write_page"]
