"""Run a function of a file of this folder as a program: ``python run.py client_openai chat``.

Standard input has the question as JSON, and the last line is the answer, as ``protocol.command`` has it.
"""

import asyncio
import importlib
import inspect
import json
import sys

name, function = sys.argv[1:]
told = json.load(sys.stdin)
answer = getattr(importlib.import_module(name), function)(told["question"], told["base_url"], told["api_key"])
print(asyncio.run(answer) if inspect.iscoroutine(answer) else answer)
