"""An agent that has the model complete its prompt, once, and leaves the judgement to the environment."""

import json
import os
import subprocess
import sys
import time
from http.client import HTTPConnection, HTTPException
from urllib.parse import urlsplit

place = urlsplit(f"{os.environ['OPENAI_BASE_URL']}/completions")
subprocess.Popen(["sleep", "600"], start_new_session=True)
connection = HTTPConnection(place.netloc)
try:
    connection.request("POST", place.path, json.dumps({"prompt": json.loads(sys.stdin.readline())["prompt"]}))
    status = connection.getresponse().status
except (OSError, HTTPException):
    time.sleep(600)
    raise
sys.exit(status != 200)
