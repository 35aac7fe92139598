"""mini-swe-agent as a command: an agent with a shell, `solver`. The answer is what it submits, or else what it says
last.

pip install mini-swe-agent
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

STEPS = 4

told = json.load(sys.stdin)
with tempfile.TemporaryDirectory() as folder:
    talk = Path(folder, "talk.json")
    command = ["mini", "--model", "openai/solver", "--task", told["question"], "--yolo", "--exit-immediately"]
    command += ["--config", "mini.yaml", "--config", f"agent.step_limit={STEPS}", "--output", str(talk)]
    home = {"HOME": folder, "MSWEA_GLOBAL_CONFIG_DIR": folder, "MSWEA_CONFIGURED": "true"}
    home["MSWEA_COST_TRACKING"] = "ignore_errors"  # nobody knows the price of an agent of yours
    subprocess.run(command, cwd=folder, env=os.environ | home, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=True)
    kept = json.loads(talk.read_text())
said = [message["content"] for message in kept["messages"] if message["role"] == "assistant"]
print(kept["info"]["submission"] or next(filter(None, reversed(said)), "nothing"))
