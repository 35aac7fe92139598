"""What is wrong with the verifier of a run, before a model loads: its options, its servers, and what it can read."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from transformers import AutoConfig, AutoTokenizer

from maporl.config.schema import TOKEN_VARIABLE
from maporl.errors import Fault
from maporl.run import ResolvedRun
from maporl.tiny import build_tiny_tokenizer
from maporl.validation.servers import Server
from maporl.verifier.client import server_urls
from maporl.verifier.encoding import chat_of, encode
from maporl.verifier.model import VerifierError, read_record
from maporl.verifier.section import VerifierSection
from trl_ext.chat.encoding import ChatError, Tokenizer, check_tokenizer, context_of
from trl_ext.models.weights import WeightsError, read_pretrained

LOOKED_AT = 16
"""The questions of each split that are measured: those with the most characters."""


def check(run: ResolvedRun) -> Iterator[Fault]:
    """Yield what the verifier lacks where it scores or gives feedback."""
    verifier, used = run.config.reward.verifier, {*run.config.reward.asked, *run.protocol.between_turns()}
    if verifier is None:
        if "verifier" in used:
            what = "a verifier scores or gives feedback here, so its model is needed"
            remedy = "for example reward.verifier: {model: FOLDER}, or {urls: [http://127.0.0.1:8501]} of a server"
            yield Fault("reward.verifier", what, remedy)
        return
    if "verifier" in used and verifier.tiny is not None and not verifier.learn_every:
        what = "a random verifier knows nothing, so it must learn before it scores"
        yield Fault("reward.verifier.tiny", what, "set reward.verifier.learn_every")
    strangers = [name for name in verifier.authors if name not in run.agents]
    if strangers:
        what = f"the team has no agent {strangers[0]!r}"
        yield Fault("reward.verifier.authors", what, f"expected some of {list(run.agents)}")


def lengths(run: ResolvedRun) -> Iterator[Fault]:
    """Yield that the verifier cannot be read, or that questions and answers of this run are longer than it reads.

    A verifier behind a server says itself how much it reads (:func:`_of_served`).
    """
    section = run.config.reward.verifier
    if section is None or "verifier" not in run.config.reward.sources or server_urls(section):
        return
    key = f"reward.verifier.{'tiny' if section.tiny is not None else 'model'}"
    if section.tiny is None and section.model is None:
        return  # building the source says so
    try:
        tokenizer, longest = _reads(section)
    except (WeightsError, ChatError, VerifierError) as error:
        yield Fault(key, str(error), "give the folder or hub name of what `maporl verifier train` made")
        return
    if longest is None:
        return
    answer = _longest_answer(run)
    answers = run.protocol.turns * len(run.speakers) if section.reads == "dialogue" else 1
    question = max((_tokens(tokenizer, task, example) for task, example in _longest(run)), default=0)
    if question >= longest:
        what = f"it reads at most {longest} tokens, and the longest question has {question} without an answer"
        yield Fault(key, what, "leave long questions out, or train a verifier on a model with a longer context")
    elif question + answers * answer > longest:
        said = "an answer" if answers == 1 else f"{answers} answers"
        yield Fault(
            key,
            f"it reads at most {longest} tokens, and the longest question with {said} of ppo.response_length may have "
            f"{question + answers * answer}; the run stops at a chat that is longer",
            f"set ppo.response_length to at most {(longest - question) // answers}, or train a verifier on a model "
            "with a longer context",
            "warning",
        )


def servers(run: ResolvedRun) -> Iterator[Server]:
    """Yield the servers of the verifier that the run has. It may go on without them, if it shall."""
    verifier: Any = run.config.reward.verifier
    own = verifier.api == "maporl"
    start = f"start it: {'maporl serve --model' if own else 'vllm serve'} {verifier.model or 'FOLDER'}"
    stops = verifier.on_failure == "stop"
    for url in server_urls(verifier):
        path = "/v1/model" if own else "/health"
        reads = partial(_of_served, run)
        yield Server("reward.verifier", url, TOKEN_VARIABLE, path, start, "error" if stops else "warning", reads)


def _of_served(run: ResolvedRun, told: Any) -> Fault | None:
    """Return a warning if an answer alone may be longer than what a server says that its verifier reads, or None.

    Its tokenizer is not known here, so questions are not counted. ``told`` is the server's answer to ``/v1/model``.
    """
    longest, answer = told.get("longest_chat_tokens") if isinstance(told, dict) else None, _longest_answer(run)
    if not isinstance(longest, int) or answer < longest:
        return None
    return Fault(
        "reward.verifier",
        f"its server reads chats of at most {longest} tokens, and an answer of ppo.response_length may have {answer} "
        "without the question; the run stops at a chat that is longer",
        f"set ppo.response_length to less than {longest}, or serve a verifier of a model with a longer context",
        "warning",
    )


def _longest_answer(run: ResolvedRun) -> int:
    return max(run.sampling.longest(name, run.config.ppo.response_length) for name in run.speakers)


def _reads(section: VerifierSection) -> tuple[Tokenizer, int | None]:
    """Return a verifier's tokenizer, and the most tokens that it reads. No weights are read."""
    if section.tiny is not None:
        return build_tiny_tokenizer(section.tiny), section.tiny.context
    tokenizer = read_pretrained(AutoTokenizer, str(section.model))
    check_tokenizer(tokenizer, repr(section.model))
    read_record(str(section.model))
    return tokenizer, context_of(read_pretrained(AutoConfig, str(section.model)))


def _longest(run: ResolvedRun) -> list[tuple[Any, Any]]:
    return [
        (task, example)
        for task in run.splits
        for example in sorted(task, key=lambda example: len(task.question(example)))[-LOOKED_AT:]
    ]


def _tokens(tokenizer: Tokenizer, task: Any, example: Any) -> int:
    return len(encode(tokenizer, chat_of(task.question(example), "")))
