"""The process in which chat templates are rendered: one JSON request a line, one JSON answer a line.

:mod:`trl_ext.templates` starts it by its path, so it imports nothing of this package. It has a limit of memory, and each
rendering has a limit of processor time, at which the kernel ends the process. Both also hold inside of calls that Python
cannot interrupt, such as the multiplication of a text.
"""

import contextlib
import json
import os
import resource
import signal
import sys
from typing import Any

MEMORY = 2 * 2**30
"""Bytes of address space. Before the first rendering about a tenth of it is in use."""
SECONDS = 2.0
"""Processor time of a rendering. Real templates take a thousandth of a second."""
SPARE = 2**18
"""Most characters of a rendered text, besides eight times the characters of the request."""


def main() -> None:
    """Answer requests until the other end is closed."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints must not stand among the answers
    from transformers.utils.chat_template_utils import render_jinja_template

    with contextlib.suppress(ValueError, OSError):  # a stricter limit stands already, or the system has none
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            rendered: Any = render_jinja_template(conversations=[request.pop("messages")], **request)
            text = rendered[0][0]
            most = SPARE + 8 * len(line)
            long = {"error": f"it makes {len(text)} characters of messages for which at most {most} are expected"}
            encoded = json.dumps(long if len(text) > most else {"text": text})
        except Exception as error:  # a template can raise anything
            encoded = json.dumps({"error": f"{type(error).__name__}: {' '.join(str(error)[:2000].split())[:300]}"})
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(encoded, file=answers, flush=True)


if __name__ == "__main__":
    main()
