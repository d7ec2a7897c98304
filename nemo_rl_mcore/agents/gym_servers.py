"""NeMo Gym's servers, and the rows that its agents play: a program for Gym's own Python, started by `nemo_gym`.

    PYTHON -P gym_servers.py

The first line of standard input holds the settings; each later one is a row to play, or the number of one to give up.
Standard output gets a line once the servers are ready, and one for each played row. All lines are JSON. The servers
stop when standard input ends.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import socket
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from typing import Any

os.environ.setdefault("WANDB_MODE", "disabled")

import uvicorn
from nemo_gym import global_config, server_utils
from omegaconf import DictConfig, OmegaConf

_HOST = "127.0.0.1"
_AGENTS = "responses_api_agents"
_POLLED_EVERY_S = 5.0
_SHOWN = 400


def _parser(settings: dict[str, Any]) -> global_config.GlobalConfigDictParserConfig:
    """Return the recipe's configuration for Gym, with the policy's address."""
    with socket.socket() as one:
        one.bind((_HOST, 0))
        free_port = one.getsockname()[1]
    own = {
        "policy_base_url": settings["policy_base_url"],
        "policy_api_key": "none",  # the session is in the body
        "policy_model_name": settings["policy_model_name"],
        "head_server": {"host": _HOST, "port": free_port},
    }
    return global_config.GlobalConfigDictParserConfig(
        skip_load_from_cli=True,
        skip_load_from_dotenv=True,
        initial_global_config_dict=OmegaConf.create({"default_host": _HOST, **settings["config"], **own}),
    )


def _servers(config: DictConfig) -> Iterator[tuple[str, str, DictConfig]]:
    for name, node in config.items():
        if isinstance(node, DictConfig) and name not in global_config.NEMO_GYM_RESERVED_TOP_LEVEL_KEYS:
            [(kind, kinds)] = node.items()
            [(package, settings)] = kinds.items()
            yield str(name), f"{kind}.{package}", settings


@asynccontextmanager
async def _in_this_process(settings: dict[str, Any]) -> AsyncGenerator[server_utils.ServerClient]:
    server_utils.initialize_ray = lambda: None
    config = global_config.get_global_config_dict(_parser(settings))
    head = server_utils.ServerClient.load_head_server_config()
    client = server_utils.ServerClient(head_server_config=head, global_config_dict=config)
    head_app = server_utils.HeadServer(config=head).setup_webserver()
    servers = [_serving(head_app, head.host, head.port)]
    for name, package, own in _servers(config):
        os.environ[global_config.NEMO_GYM_CONFIG_PATH_ENV_VAR_NAME] = name
        module = importlib.import_module(f"{package}.app")
        classes = [one for one in vars(module).values() if isinstance(one, type)]
        [made] = [
            one
            for one in classes
            if issubclass(one, server_utils.SimpleServer) and one.__module__ == module.__name__
        ]
        server = made(config=made.load_config_from_global_config(), server_client=client)
        app = server.setup_webserver()
        server.setup_exception_middleware(app)
        servers.append(_serving(app, own.host, own.port))
    serving = [asyncio.ensure_future(server.serve()) for server in servers]
    while not all(server.started for server in servers):
        if any(one.done() for one in serving):
            raise SystemExit("a server of NeMo Gym did not start")
        await asyncio.sleep(0.1)
    try:
        yield client
    finally:
        for server in servers:
            server.should_exit = True
        await asyncio.gather(*serving)


def _serving(app: Any, host: str, port: int) -> uvicorn.Server:
    return uvicorn.Server(
        uvicorn.Config(app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=5)
    )


@asynccontextmanager
async def _in_processes(settings: dict[str, Any]) -> AsyncGenerator[server_utils.ServerClient]:
    """Let Gym start Ray, and each server in its own process and environment; a server's death ends this program."""
    from nemo_gym.cli.env import RunHelper

    helper = RunHelper()
    helper.start(_parser(settings))

    async def poll() -> None:
        try:
            while True:
                helper.poll()
                await asyncio.sleep(_POLLED_EVERY_S)
        except Exception as error:  # noqa: BLE001 any error ends this program
            sys.stderr.write(f"{error}\n")
            sys.stderr.flush()
            os._exit(1)

    polling = asyncio.ensure_future(poll())
    head = server_utils.ServerClient.load_head_server_config()
    try:
        yield server_utils.ServerClient.load_from_global_config(head)
    finally:
        polling.cancel()
        helper.shutdown()


async def _play(client: server_utils.ServerClient, row: dict[str, Any]) -> dict[str, Any]:
    """Let a row's agent play it; return the reward, and Gym's counts of calls and tokens."""
    try:
        agent = (row.get("agent_ref") or {}).get("name")
        if not agent:  # the only one
            servers = _servers(client.global_config_dict)
            [agent] = [name for name, kind, _ in servers if kind.startswith(_AGENTS)]
        response = await client.post(server_name=agent, url_path="/run", json=row)
        await server_utils.raise_for_status(response)
        result = await server_utils.get_response_json(response)
        output = result["response"]["output"]
        drawn = [item["generation_token_ids"] for item in output if item.get("generation_token_ids")]
        return {
            "reward": float(result["reward"]),
            "rewards": result.get("reward_components") or {},
            "masked": bool(result.get("mask_sample")),
            "calls": len(drawn),
            "tokens": sum(map(len, drawn)),
            "tool_calls": sum(item["type"] == "function_call" for item in output),
        }
    except Exception as error:  # noqa: BLE001 any error ends this row alone
        said = getattr(error, "response_content", b"").decode(errors="replace") or str(error)
        return {"error": type(error).__name__, "said": said[-_SHOWN:]}


async def main() -> None:
    """Read the settings, and play rows. The servers' own prints go to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    settings, playing = json.loads(sys.stdin.readline()), dict[int, asyncio.Task[None]]()

    def tell(answer: dict[str, Any]) -> None:
        answers.write(f"{json.dumps(answer)}\n")
        answers.flush()

    async def answer(number: int, row: dict[str, Any]) -> None:
        try:
            tell({"number": number, **await _play(client, row)})
        finally:
            del playing[number]

    started = _in_this_process if settings["one_process"] else _in_processes
    async with started(settings) as client:
        tell({"ready": True})
        while line := await asyncio.to_thread(sys.stdin.readline):
            asked = json.loads(line)
            if "row" in asked:
                playing[asked["number"]] = asyncio.ensure_future(answer(asked["number"], asked["row"]))
            elif (task := playing.get(asked["number"])) is not None:
                task.cancel()
        for task in [*playing.values()]:
            task.cancel()


if __name__ == "__main__":
    asyncio.run(main())
