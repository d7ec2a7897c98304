"""Keeps the protocol of `gym_servers` without NeMo Gym: what a row's `does` says comes of it."""

import json
import os
import subprocess
import sys
import time
from urllib.request import Request, urlopen


def tell(answer):
    sys.stdout.write(f"{json.dumps(answer)}\n")
    sys.stdout.flush()


BEGINS = os.environ.get("BEGINS", "")
settings = json.loads(sys.stdin.readline())
if BEGINS == "slowly":
    time.sleep(600)
if BEGINS == "never":
    sys.exit("no such server")
child = subprocess.Popen([sys.executable, "-ISc", "import time; time.sleep(600)"], start_new_session=True)
tell({"ready": True, "child": child.pid})


def played(row):
    asked = row["responses_create_params"]
    call = {
        "model": settings["policy_model_name"],
        "messages": asked["input"],
        "max_tokens": asked["max_output_tokens"],
        "temperature": asked["temperature"],
        "top_p": asked["top_p"],
        **json.loads(asked["metadata"]["extra_body"]),
    }
    request = Request(
        f"{settings['policy_base_url']}/chat/completions",
        json.dumps(call).encode(),
        {"content-type": "application/json"},
    )
    with urlopen(request, timeout=60) as answer:
        ids = json.load(answer)["choices"][0]["message"]["generation_token_ids"]
    counted = {"calls": 1, "tokens": len(ids), "tool_calls": 0, "rewards": {"right": 0.5}}
    return {"reward": 0.25, "masked": row["does"] == "is masked", **counted}


for line in sys.stdin:
    asked = json.loads(line)
    sys.stderr.write(line)
    sys.stderr.flush()
    if "row" not in asked:
        continue
    match asked["row"]["does"]:
        case "dies":
            os._exit(1)
        case "stays":
            continue
        case "fails":
            answer = {"error": "ClientResponseError", "said": "no such tool"}
        case _:
            answer = played(asked["row"])
    tell({"number": asked["number"], **answer})
