"""aider as a command: an architect, `solver`, says how a file is to be changed, and an editor, `checker`, changes it.
The answer is what the file holds in the end. Its requests need `protocol.ignore: [temperature]`.

pip install aider-chat
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

told = json.load(sys.stdin)
with tempfile.TemporaryDirectory() as folder:
    answer = Path(folder, "answer.txt")
    answer.write_text("")
    command = ["aider", "--architect", "--model", "openai/solver", "--editor-model", "openai/checker"]
    command += ["--weak-model", "openai/checker", "--editor-edit-format", "editor-whole", "--yes-always", "--no-git"]
    command += ["--no-check-update", "--analytics-disable", "--no-show-model-warnings", "--no-show-release-notes"]
    command += ["--no-detect-urls", "--message", f"Write the answer into answer.txt: {told['question']}", str(answer)]
    home = {"HOME": folder}
    subprocess.run(command, cwd=folder, env=os.environ | home, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=True)
    print(answer.read_text().strip() or "nothing")
