"""opencode as a command: a coding agent, `solver`, with a sub-agent, `checker`, whom it asks with its tool `task`. The
answer is what the solver says last.

npm install --global opencode-ai
"""

import json
import os
import subprocess
import sys
import tempfile

told = json.load(sys.stdin)
CHECKER = {
    "mode": "subagent",
    "model": "maporl/checker",
    "description": "Checks an answer.",
    "prompt": "Say whether the answer is right.",
}
CONFIG = {
    "model": "maporl/solver",
    "small_model": "maporl/solver",
    "agent": {"checker": CHECKER},
    "provider": {
        "maporl": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": told["base_url"], "apiKey": told["api_key"]},
            "models": {"solver": {}, "checker": {}},
        }
    },
}

with tempfile.TemporaryDirectory() as folder:
    command = ["opencode", "run", "--dir", folder, "--format", "json", "--title", "question", told["question"]]
    home = {"HOME": folder, "OPENCODE_CONFIG_CONTENT": json.dumps(CONFIG), "OPENCODE_DISABLE_AUTOUPDATE": "true"}
    done = subprocess.run(
        command, cwd=folder, env=os.environ | home, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True
    )
events = [json.loads(line) for line in done.stdout.splitlines()]
print(next((event["part"]["text"] for event in reversed(events) if event["type"] == "text"), "nothing"))
