"""An agent that has the model complete its prompt, once, and leaves the judgement to the environment."""

import json
import os
import sys
from http.client import HTTPConnection
from urllib.parse import urlsplit

place = urlsplit(f"{os.environ['OPENAI_BASE_URL']}/completions")
connection = HTTPConnection(place.netloc)
connection.request("POST", place.path, json.dumps({"prompt": json.loads(sys.stdin.readline())["prompt"]}))
sys.exit(connection.getresponse().status != 200)
