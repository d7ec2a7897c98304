"""The API key that Weights & Biases wants, found out without importing it."""

import netrc
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.config.run_config import RunConfig

_SERVICE = "https://api.wandb.ai"
_KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")


def wandb_key_problems(config: RunConfig, environ: Mapping[str, str]) -> Iterator[Problem]:
    """Yield a run that is to be sent without a key: the service would refuse it once the ranks have started."""
    section = config.logger.wandb
    mode = section.mode or environ.get("WANDB_MODE", "online")
    if not config.logger.wandb_enabled or mode != "online" or any(environ.get(name) for name in _KEYS):
        return
    host = urlsplit(environ.get("WANDB_BASE_URL", _SERVICE)).netloc
    if not _in_netrc(host, environ):
        yield Problem(
            "missing",
            "logger.wandb.mode",
            f"{mode}, and there is no API key for {host}",
            "run `wandb login`, set WANDB_API_KEY, or write offline",
            ("logger.wandb_enabled",),
        )


def _in_netrc(host: str, environ: Mapping[str, str]) -> bool:
    given = environ.get("NETRC")
    files = [Path(given)] if given else [Path.home() / name for name in (".netrc", "_netrc")]
    for file in files:
        try:
            if netrc.netrc(os.fspath(file.expanduser())).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False
