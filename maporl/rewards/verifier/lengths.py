"""Whether the verifier of a run can read the chats that it will be asked to score, before a model loads."""

from collections.abc import Iterator
from typing import Any

from transformers import AutoConfig, AutoTokenizer

from maporl.config.schema import VerifierSection
from maporl.errors import Fault
from maporl.rewards.verifier.client import server_urls
from maporl.rewards.verifier.encoding import chat_of, encode
from maporl.rewards.verifier.model import VerifierError, read_record
from maporl.run import ResolvedRun
from maporl.tiny import build_tiny_tokenizer
from trl_ext.chat.encoding import ChatError, Tokenizer, check_tokenizer, context_of
from trl_ext.models.weights import WeightsError, read_pretrained

LOOKED_AT = 16
"""The questions of each split that are measured: those with the most characters."""


def check(run: ResolvedRun) -> Iterator[Fault]:
    """Yield that the verifier cannot be read, or that questions and answers of this run are longer than it reads.

    A verifier behind a server is not looked at: it has its own tokenizer, and answers with an error for each chat.
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
    answer = max(run.sampling.longest(name, run.config.ppo.response_length) for name in run.speakers)
    answers = run.protocol.turns * len(run.speakers) if section.reads == "dialogue" else 1
    question = max((_tokens(tokenizer, task, example) for task, example in _longest(run)), default=0)
    if question >= longest:
        yield Fault(
            key,
            f"it reads at most {longest} tokens, and the longest question has {question} without an answer",
            "leave long questions out, or train a verifier on a model with a longer context",
        )
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
