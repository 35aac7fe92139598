"""Whether the hub of models and data sets answers: asked once, in seconds, before a library asks it. Imports no torch.

The libraries try each file six times, with pauses. Without a network, that takes half a minute for each model and data
set before anything is said. So the first that needs the hub asks it whether it is there. If not, the libraries read
their cache alone, and what is not in it is refused at once.
"""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from trl_ext.process.waits import until

SECONDS = 3.0
"""How long the hub may take for its first answer."""
AGAIN_SECONDS = 60.0
"""How long the answer to the question whether it is there is believed."""
_LOCK = threading.Lock()
_asked: tuple[float, str] | None = None
"""When the hub was asked last, and why it did not answer, or an empty text."""
_cache_only = 0
"""The number of blocks in progress whose libraries read their cache alone."""


def silence() -> str:
    """Return why the hub does not answer, in one line, or an empty text if it does.

    It is asked for at most :data:`SECONDS`, and not again for :data:`AGAIN_SECONDS`. Any answer counts, also a refusal.
    With ``HF_HUB_OFFLINE`` it is not asked.
    """
    global _asked
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE and not _cache_only:
        return "HF_HUB_OFFLINE is set, so nothing is downloaded"
    with _LOCK:
        if _asked is None or time.monotonic() - _asked[0] > AGAIN_SECONDS:
            _asked = time.monotonic(), _probe(constants.ENDPOINT)
        return _asked[1]


def _probe(address: str) -> str:
    """Return why ``address`` does not answer, or an empty text."""
    from huggingface_hub import get_session

    said: list[str] = []
    answered = threading.Event()

    def ask() -> None:
        try:
            get_session().head(address, timeout=SECONDS)
            said.append("")
        except Exception as error:  # the network may fail in any way, and so may a proxy or a certificate
            said.append(" ".join(str(error).split())[:200] or type(error).__name__)
        answered.set()

    # a name server that does not answer has no time limit of its own
    thread = threading.Thread(target=ask, name="asks the hub", daemon=True)
    thread.start()
    until(answered.wait, SECONDS)
    why = said[0] if said else f"nothing within {SECONDS:g} s"
    return why and f"{address} does not answer ({why})"


@contextmanager
def asking(source: object) -> Iterator[None]:
    """Let the libraries ask the hub for ``source`` in this block, if it answers, or else read their cache alone.

    Args:
        source: a name on the hub, or the path of something on this machine, for which nobody is asked.
    """
    global _cache_only
    from huggingface_hub import constants

    if os.path.exists(str(source)) or (constants.HF_HUB_OFFLINE and not _cache_only) or not silence():
        yield
        return
    with _LOCK:
        _cache_only += 1
        _set_offline(True)
    try:
        yield
    finally:
        with _LOCK:
            _cache_only -= 1
            if not _cache_only:
                _set_offline(False)


def _set_offline(offline: bool) -> None:
    """Set what the libraries read before each request. Those for data sets have a copy of their own."""
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE = offline
    if (datasets := sys.modules.get("datasets.config")) is not None:
        setattr(datasets, "HF_HUB_OFFLINE", offline)  # noqa: B010  # a module of sys.modules has no known attributes


def not_cached(source: object, error: BaseException) -> str:
    """Return why ``source`` cannot be read, if ``error`` says that it is not here and the hub does not answer.

    Otherwise the text is empty.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError

    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__  # type: ignore[assignment]  # it may be None, which ends the loop
    missing = (LocalEntryNotFoundError, ConnectionError)  # that of the library for data sets has no class of the hub's
    if not any(isinstance(one, missing) for one in chain) or not (why := silence()):
        return ""
    remedy = "unset it" if constants.HF_HUB_OFFLINE else "look at the network, or name a mirror in HF_ENDPOINT"
    return f"{str(source)!r} is not in the cache {constants.HF_HUB_CACHE}, and {why}; {remedy}"
