"""NeMo Gym's servers around a command, in one process of Gym's Python, without Ray.

    PYTHON nemo_gym_servers.py --policy URL --config FILE [--config FILE ...] COMMAND [ARGUMENT ...]

The command finds where Gym's agent listens in NEMO_GYM_AGENT_URL; when it ends, so do the servers. FILE: as Gym's own
command line takes them, of resources, agent and model. Servers that make Ray's tasks need that command line.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import socket
import sys
from collections.abc import Iterator

os.environ.setdefault("WANDB_MODE", "disabled")

import uvicorn
from nemo_gym import global_config, server_utils
from omegaconf import DictConfig, OmegaConf

_HOST = "127.0.0.1"
_AGENTS, _MOST_STEPS = "responses_api_agents", 4


def _free_port() -> int:
    with socket.socket() as one:
        one.bind((_HOST, 0))
        return one.getsockname()[1]


def read_config(policy: str, paths: list[str]) -> DictConfig:
    """Return Gym's configuration, with a port for each server."""
    own = {
        "config_paths": paths,
        "policy_base_url": policy,
        "policy_api_key": "none",  # the session is in the body, see nemo_gym_agent.py
        "policy_model_name": "policy",
        "default_host": _HOST,
        "head_server": {"host": _HOST, "port": _free_port()},
    }
    return global_config.get_global_config_dict(
        global_config.GlobalConfigDictParserConfig(
            skip_load_from_cli=True,
            skip_load_from_dotenv=True,
            initial_global_config_dict=OmegaConf.create(own),
        )
    )


def servers_of(config: DictConfig) -> Iterator[tuple[str, uvicorn.Server]]:
    """Yield each server's kind, and what serves it."""
    head = server_utils.ServerClient.load_head_server_config()
    client = server_utils.ServerClient(head_server_config=head, global_config_dict=config)
    yield "head", _serving(server_utils.HeadServer(config=head).setup_webserver(), head.host, head.port)
    for name, node in config.items():
        if not isinstance(node, DictConfig) or name in global_config.NEMO_GYM_RESERVED_TOP_LEVEL_KEYS:
            continue
        [(kind, kinds)] = node.items()
        [(package, settings)] = kinds.items()
        if kind == _AGENTS:
            settings.max_steps = _MOST_STEPS  # calls of the model: what grpo.max_rollout_turns allows
        os.environ[global_config.NEMO_GYM_CONFIG_PATH_ENV_VAR_NAME] = str(name)
        module = importlib.import_module(f"{kind}.{package}.app")
        [made] = [
            one
            for one in vars(module).values()
            if isinstance(one, type)
            and issubclass(one, server_utils.SimpleServer)
            and one.__module__ == module.__name__
        ]
        server = made(config=made.load_config_from_global_config(), server_client=client)
        app = server.setup_webserver()
        server.setup_exception_middleware(app)
        yield kind, _serving(app, settings.host, settings.port)


def _serving(app: object, host: str, port: int) -> uvicorn.Server:
    return uvicorn.Server(
        uvicorn.Config(app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=5)
    )  # type: ignore[arg-type]


async def run(config: DictConfig, command: list[str]) -> int:
    """Serve until the command ends; return its exit status."""
    servers = [*servers_of(config)]
    serving = [asyncio.ensure_future(server.serve()) for _, server in servers]
    while not all(server.started for _, server in servers):
        if any(one.done() for one in serving):
            raise SystemExit("a server of NeMo Gym did not start")
        await asyncio.sleep(0.1)
    [agent] = [server.config for kind, server in servers if kind == _AGENTS]
    variables = {**os.environ, "NEMO_GYM_AGENT_URL": f"http://{agent.host}:{agent.port}"}
    process = await asyncio.create_subprocess_exec(*command, env=variables)
    try:
        return await process.wait()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
        for _, server in servers:
            server.should_exit = True
        await asyncio.gather(*serving)


def main() -> int:
    """Read the command line, and run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--policy", required=True)
    parser.add_argument("--config", action="append", required=True)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    server_utils.initialize_ray = lambda: None  # none of these servers makes a task of Ray's
    return asyncio.run(run(read_config(given.policy, given.config), given.command))


if __name__ == "__main__":
    sys.exit(main())
