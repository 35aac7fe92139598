"""Claude Code as a command: a coding agent, `solver`, with a sub-agent, `checker`, whom it asks with its tool `Agent`.
The answer is what the solver says last. Its requests need
`protocol.ignore: [thinking, context_management, output_config]`.

npm install --global @anthropic-ai/claude-code
"""

import json
import os
import subprocess
import sys
import tempfile

told = json.load(sys.stdin)
CHECKER = {"description": "Checks an answer.", "prompt": "Say whether the answer is right.", "model": "checker"}

with tempfile.TemporaryDirectory() as folder:
    command = ["claude", "--print", "--model", "solver", "--tools", "Agent,Bash,Read,Edit,Write"]
    command += ["--agents", json.dumps({"checker": CHECKER}), told["question"]]
    home = {"HOME": folder, "CLAUDE_CONFIG_DIR": folder, "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    home |= {"ENABLE_TOOL_SEARCH": "false", "CLAUDE_CODE_DISABLE_BACKGROUND_TASKS": "1"}
    done = subprocess.run(
        command, cwd=folder, env=os.environ | home, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True
    )
print(done.stdout.decode().strip() or "nothing")
