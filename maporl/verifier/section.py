"""The section ``reward.verifier``: a learned model that scores answers. Imports no torch."""

import dataclasses
from typing import Annotated, Literal

from pydantic import Field

from maporl.hosts import check_urls
from maporl.sections import AboveZero, Attention, Natural, NotNegative, Positive, TinySection, section
from trl_ext.ppo.options import option


@section()
class VerifierSection:
    """A learned verifier: a sequence classifier with one output, whose sigmoid is the score.

    It runs in this process if only ``model`` or ``tiny`` is given. Servers run it if ``urls`` are given, or without all
    three.

    Raises:
        ValueError: a URL is not valid, or two options exclude each other.
    """

    model: str | None = option(
        None,
        "Folder or hub name of a sequence classifier with one output. With learn_every it may be a causal "
        "language model too, which gets an output of 0 for every answer to begin with.",
    )
    batch_size: Positive = option(16, "Number of chats in a forward, or in a request.")
    urls: tuple[str, ...] = option(
        (),
        "Servers that run it, e.g. [http://127.0.0.1:8501] (docs/reward_server.md). Without them and without "
        "`model` and `tiny`, the environment variable MAPORL_VERIFIER_URLS names them.",
    )
    api: Literal["maporl", "vllm"] = option("maporl", "The servers' interface: maporl or vllm.")
    timeout: AboveZero = option(60.0, "Seconds for a whole exchange with a server.")
    retries: Natural = option(5, "How often a failed request is repeated.")
    concurrency: Positive = option(32, "Most requests at a time.")
    on_failure: Literal["stop", "wait", "label"] = option(
        "stop",
        "What happens after `retries`: the run stops, waits for the servers, or uses the task's grades (label).",
    )
    on_change: Literal["stop", "warn"] = option(
        "stop",
        "What happens if the scores come from another verifier than the run has had so far, because a server was "
        "replaced or the run is resumed with another model: it stops, or warns and goes on.",
    )
    learn_every: Natural = option(
        0,
        "Train the verifier, in this process, on graded answers every so many updates; 0: never. One that has "
        "learned nothing yet also learns after the first update.",
    )
    learning_rate: AboveZero = option(1e-5, "Learning rate of the verifier.")
    attn_implementation: Attention | None = option(None, "As for agents.")
    tiny: TinySection | None = option(
        None,
        "A random verifier that is built without a download, in place of `model`; the keys are those of an "
        "agent's `tiny`.",
    )
    pairs: Literal["first", "all"] = option(
        "first",
        "What it learns from: the first right and the first wrong answer of each question of an update (first), "
        "or all pairs of a right and a wrong one (all).",
        learning=True,
    )
    learn_from: Literal["new", "all"] = option(
        "new",
        "Learn from new pairs alone (new), or from all since the run began (all).",
        learning=True,
    )
    restart: bool = option(False, "Learn from its first weights each time.", learning=True)
    output_penalty: NotNegative = option(
        0.0,
        "Weight of its mean squared output in the loss (prover-verifier games, arXiv 2407.13692).",
        learning=True,
    )
    loss: Literal["pairs", "answers"] = option(
        "pairs",
        "answers: learn from single answers, by the cross-entropy of the score and whether they are right "
        "(decoupled games, arXiv 2602.23248). pairs: learn from pairs.",
        learning=True,
    )
    score_penalty: NotNegative = option(0.0, "With loss: answers, the weight of its mean squared score.", learning=True)
    epochs: Positive = option(1, "With loss: answers, the number of passes.", learning=True)
    authors: tuple[str, ...] = option(
        (), "With loss: answers, the agents whose answers it learns from; empty: all.", learning=True
    )
    growth: Annotated[float, Field(ge=1, allow_inf_nan=False)] = option(
        1.0,
        "With loss: answers and above 1, each pass draws as many examples as there are, with replacement, from a "
        "mixture of all rounds so far, in which a round weighs `growth` times the one before.",
        learning=True,
    )
    reads: Literal["answer", "dialogue"] = option(
        "answer",
        "What one score is for: an answer, or a whole dialogue, whose answers all get it (MARLHF).",
    )
    pays: Literal["probability", "output"] = option(
        "probability",
        "The probability, which is the sigmoid of the output, or the output itself, which only a verifier in this "
        "process that does not learn gives.",
    )

    def __post_init__(self):
        check_urls(self.urls)
        if self.tiny is not None and (self.model is not None or self.urls):
            raise ValueError(
                "tiny: it describes a verifier in this process, in place of another one; remove 'model' and 'urls'"
            )
        if self.reads == "dialogue" and (self.urls or self.learn_every):
            raise ValueError(
                "reads: a verifier of whole dialogues is one in this process, and does not learn from single answers; "
                f"remove {'urls' if self.urls else 'learn_every'}, or set reads: answer"
            )
        if self.pays == "output" and (self.urls or self.learn_every):
            raise ValueError(
                "pays: only a verifier in this process that does not learn from answers pays its output; remove "
                f"{'urls' if self.urls else 'learn_every'}, or set pays: probability"
            )
        learning = [f for f in dataclasses.fields(self) if f.metadata.get("learning")]
        changed = {f.name for f in learning if getattr(self, f.name) != f.default}
        if changed and not self.learn_every:
            raise ValueError(f"{min(changed)}: it says how a verifier learns, and this one does not; set learn_every")
        if self.loss == "answers" and self.pairs != "first":
            raise ValueError(
                "pairs: with loss: answers it learns from every answer alone, and not from pairs; remove it"
            )
        if self.growth > 1 and self.learn_from != "all":
            raise ValueError("growth: it weighs rounds against each other; set learn_from: all")
        if self.api == "vllm" and self.model is None:
            raise ValueError("api: vllm needs 'model' too, whose tokenizer encodes the chats")
        if self.learn_every and (self.urls or (self.model is None and self.tiny is None)):
            raise ValueError("learn_every: only a verifier in this process can learn; give 'model' and no 'urls'")
        if self.on_change != "stop" and (self.learn_every or self.api == "vllm"):
            why = (
                "a verifier that learns changes all the time"
                if self.learn_every
                else "vLLM does not say which verifier it has"
            )
            raise ValueError(f"on_change: {why}, so nothing is compared; leave it out")
        if self.attn_implementation is not None and (self.urls or self.model is None):
            raise ValueError(
                "attn_implementation: servers choose their own; give 'model' and no 'urls', or leave it out"
            )
