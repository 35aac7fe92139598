"""A call of a tool as a template of TRL writes it."""

import json

from tool_models import trl_template

TEMPLATE = trl_template("qwen3")


def tool_call(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call><|im_end|>'
