"""Codex as a command: a coding agent, `solver`, which asks for responses. The answer is what it says last. Its requests
need `protocol.ignore: [client_metadata]`, and tools that only OpenAI has are switched off.

npm install --global @openai/codex
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

CONFIG = """
model = "solver"
model_provider = "maporl"
model_reasoning_summary = "none"
web_search = "disabled"
agents.enabled = false
[model_providers.maporl]
name = "maporl"
base_url = "{base_url}"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""

told = json.load(sys.stdin)
with tempfile.TemporaryDirectory() as folder:
    Path(folder, "config.toml").write_text(CONFIG.format(base_url=told["base_url"]))
    answer = Path(folder, "answer.txt")
    command = ["codex", "exec", "--skip-git-repo-check", "--output-last-message", str(answer), told["question"]]
    home = {"HOME": folder, "CODEX_HOME": folder}
    subprocess.run(command, cwd=folder, env=os.environ | home, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=True)
    print(answer.read_text() or "nothing")
