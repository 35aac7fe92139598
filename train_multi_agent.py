"""The documented entry: ``accelerate launch train_multi_agent.py --config configs/ppo/quickstart.yaml [--set a.b=c
...]``."""

import sys

from maporl.cli.main import app
from maporl.config.command_line import run_program

if __name__ == "__main__":
    run_program(app, args=["train", *sys.argv[1:]], prog_name="train_multi_agent.py")
