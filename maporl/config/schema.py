"""The sections of a configuration: their names, types, defaults and limits, each declared once. No torch.

PPO's own options are in :mod:`trl_ext.ppo.options`. ``configs/ppo/base.yaml`` shows every key with a comment above it.
"""

import dataclasses
import difflib
from collections.abc import Iterable
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic.dataclasses import dataclass

from maporl.config.call_options import CallLimits, CallTexts
from maporl.config.cluster import ClusterSection
from maporl.config.engines import ENGINES
from maporl.config.loops import LoopSection
from maporl.config.numbers import STRICT, AboveZero, Finite, Natural, NotNegative, Positive, PositiveShare, Share
from maporl.decoding import Sampling
from maporl.schedules import Freeze, Growth, OpponentPool, RoundRobin, Schedule, Span, Stage, Swap
from maporl.text import check_pattern, check_placeholders
from trl_ext.models.attention import ATTENTIONS, check_name
from trl_ext.ppo.options import Decoding, LearnerOptions, PPOOptions, option

TOKEN_VARIABLE = "MAPORL_SERVER_TOKEN"
"""The environment variable with the bearer token of the reward server and of its client."""

Attention = Annotated[str, AfterValidator(check_name), Field(json_schema_extra={"enum": list(ATTENTIONS)})]


@dataclass(frozen=True, config=STRICT)
class LoraSection:
    """A policy's own LoRA adapter. Policies of the same model share its base."""

    r: Positive = 16
    alpha: Positive = 32
    target_modules: str | list[str] = "all-linear"


@dataclass(frozen=True, config=STRICT)
class TinySection:
    """A small character-level model that is built without any download, for experiments.

    Raises:
        ValueError: a character stands twice in the alphabet, or the heads do not divide the hidden size.
    """

    architecture: Literal["llama", "gpt_neox", "qwen3"] = "llama"
    alphabet: str = "0123456789+*= :;?ab"
    hidden_size: Positive = 128
    layers: Positive = 3
    heads: Positive = 4
    context: Positive = 128

    def __post_init__(self):
        if len(set(self.alphabet)) != len(self.alphabet):
            raise ValueError(f"alphabet: expected every character once, got {self.alphabet!r:.200}")
        if self.hidden_size % self.heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not divisible by heads={self.heads}; change one of them"
            )
        if self.architecture != "gpt_neox" and self.hidden_size // self.heads % 2:
            raise ValueError(
                f"hidden_size={self.hidden_size} with heads={self.heads}: {self.architecture} needs an even share of the "
                "width for each head; change one of them"
            )


@dataclass(frozen=True, config=STRICT)
class ApiSection:
    """An agent behind an OpenAI-compatible endpoint. It speaks and is never trained.

    ``key_variable`` is the environment variable with the API key. ``temperature`` is by default that of the run, and so
    is top-p. The interface has no top-k. With ``cache``, answers are kept on disk by model, conversation and place in
    the run. A repeated run then asks and pays only once. ``timeout`` is the seconds for a whole exchange.

    Some models take ``max_completion_tokens`` in place of ``max_tokens``, and refuse a temperature, top-p or stop strings.
    ``length_field`` and ``leave_out`` say so. If they do not, it is found out at the first refusal (status 400 or 422),
    told, and kept to. Stop strings that are not sent end an answer all the same: it is cut there.

    Raises:
        ValueError: ``temperature`` is set and left out.
    """

    model: str
    base_url: str | None = None
    key_variable: str = "OPENAI_API_KEY"
    max_tokens: Positive | None = None
    temperature: NotNegative | None = None
    concurrency: Positive = 16
    timeout: AboveZero = 120.0
    retries: Natural = 5
    cache: bool = True
    length_field: Literal["auto", "max_tokens", "max_completion_tokens"] = "auto"
    leave_out: list[Literal["temperature", "top_p", "stop"]] = dataclasses.field(default_factory=list)

    def __post_init__(self):
        if self.temperature is not None and "temperature" in self.leave_out:
            raise ValueError("leave_out: temperature is set and left out; remove one of them")


def check_urls(urls: Iterable[str]) -> None:
    """Check that all ``urls`` are addresses of servers.

    Raises:
        ValueError: one of them is not ``http://HOST:PORT``.
    """
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"urls: expected http://HOST:PORT, got {url!r}")


@dataclass(frozen=True, config=STRICT)
class ColocateSection:
    """vLLM in the trainer's process, or in the processes that sample for a group (``cluster.backend: ray``).

    ``gpu_memory_utilization`` is its share of the GPU's memory: by default 0.3 beside weights that are trained, and 0.85 on a
    device of its own. Agents whose policies have different bases share it in equal parts. ``max_model_len`` is the longest
    conversation. With ``sleep``, vLLM gives its memory back between rollouts where the device allows this and others use
    it. ``options`` are keyword arguments of ``vllm.LLM``.
    """

    gpu_memory_utilization: Annotated[float, Field(gt=0, lt=1)] | None = None
    max_model_len: Positive | None = None
    sleep: bool = True
    options: dict[str, Any] = dataclasses.field(default_factory=dict, hash=False)


@dataclass(frozen=True, config=STRICT)
class VLLMSection:
    """vLLM that answers for an agent whose weights are trained here (``maporl.engines.vllm``).

    ``urls`` are servers of the agent's base model. ``colocate`` runs vLLM in this process instead. ``base`` is the
    servers' name of the model, by default the one that they list. ``folder`` is where adapters are written for the
    servers to read, by default in the run's folder. ``timeout`` is the seconds for a whole exchange. With ``seeds``, every request has a
    seed, so that a run repeats as far as the server does. vLLM 0.32 crashes on CPUs if requests have seeds.

    Raises:
        ValueError: not exactly one of ``urls`` and ``colocate`` is given, or a URL is not valid.
    """

    urls: list[str] = dataclasses.field(default_factory=list)
    colocate: ColocateSection | None = None
    base: str | None = None
    folder: str | None = None
    seeds: bool = True
    key_variable: str = "VLLM_API_KEY"
    concurrency: Positive = 64
    timeout: AboveZero = 120.0
    retries: Natural = 3

    def __post_init__(self):
        if bool(self.urls) == (self.colocate is not None):
            raise ValueError(f"expected either urls or colocate, got urls {self.urls} and colocate {self.colocate}")
        check_urls(self.urls)


@dataclass(frozen=True, config=STRICT)
class ToolSection:
    """A tool of the run: a name of ``TOOLS`` or ``MODULE:OBJECT``, and the options it is made with.

    ``seconds`` is the most time of a call, besides the limit of the agent that calls.
    """

    use: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    seconds: AboveZero | None = None


@dataclass(frozen=True, config=STRICT)
class EnvironmentSection:
    """An environment of the run: a name of ``ENVIRONMENTS`` or ``MODULE:OBJECT``, and the options it is made with.

    Args:
        use: the name.
        options: the options of each instance.
        agents: the agents to which it belongs. They are told how it begins and what is new in it, and paid by it. By default
            those whose ``tools`` name it, or all that play if nobody names it or the protocol acts in it.
        forks: how it can be forked, if its class does not say so: "copy", "replay" or "no".
        reward: the attribute of a class written for TRL that has its reward, if the class has no ``get_reward``.
        calls: the most calls of a dialogue.
        seconds: the most seconds of a call.
        open_seconds: the most seconds of making and resetting it.
        close_seconds: the most seconds of closing it.
        at_once: how many instances are opened at once in a process.
        on_lost: what happens if it does not answer in time: its dialogue is left out of the update (``drop``), or the run
            stops (``stop``).
        lost_at_most: the share of an update's dialogues that may be left out. If more are lost, the run stops.
        isolate: with "process" each instance lives in a process of its own, which is killed if it does not answer in time.
    """

    use: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    agents: list[str] | None = None
    forks: Literal["copy", "replay", "no"] | None = None
    reward: str | None = None
    calls: Positive = 64
    seconds: AboveZero = 30.0
    open_seconds: AboveZero = 60.0
    close_seconds: AboveZero = 10.0
    at_once: Positive = 64
    on_lost: Literal["drop", "stop"] = "drop"
    lost_at_most: Share = 0.05
    isolate: Literal["process"] | None = None


def _known_engine(name: str) -> str:
    if name not in ENGINES:
        near = difflib.get_close_matches(name[:80], ENGINES, 1)
        hint = f" did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown {name!r:.80};{hint} known: {', '.join(ENGINES)}")
    return name


EngineName = Annotated[str, AfterValidator(_known_engine), Field(json_schema_extra={"enum": list(ENGINES)})]


@dataclass(frozen=True, config=STRICT)
class AgentSection:
    """One agent: the weights that speak for it, and how they are trained."""

    model: str | None = None
    tiny: TinySection | None = None
    tokenizer: str | None = None
    chat_template: str | None = None
    template_options: dict[str, bool | int | float | str] = dataclasses.field(default_factory=dict)
    pad_token: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    attn_implementation: Attention | None = None
    lora: LoraSection | None = None
    adapter: str | None = None
    load_in_4bit: bool = False
    load_in_8bit: bool = False
    policy: str | None = None
    policy_per: Literal["agent", "turn", "first_and_rest"] | list[str] = "agent"
    role: str | None = None
    system: str | None = None
    trainable: bool = True
    learning_rate: NotNegative | None = None
    critic: Literal["head", "adapter", "model", "central", "none"] | None = None
    engine: EngineName = "transformers"
    engine_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    api: ApiSection | None = None
    vllm: VLLMSection | None = None
    tools: list[str] = dataclasses.field(default_factory=list)
    call_format: Literal["auto", "native", "json", "tags"] = "auto"
    call_texts: CallTexts | None = None
    limits: CallLimits | None = None
    sampling: Sampling | None = None

    @property
    def weights(self) -> bool:
        """Return whether the agent has weights in this process."""
        return ENGINES[self.engine].weights

    def options_of_engine(self) -> Any:
        """Return the options of the agent's engine: the section that belongs to the engine, or ``engine_options``."""
        section = ENGINES[self.engine].section
        return self.engine_options if section is None else getattr(self, section)


@dataclass(frozen=True, config=STRICT)
class BonusSection:
    """The incentives for collaboration (``maporl.rewards.shaping.collaboration_bonus``)."""

    alpha: Annotated[list[Finite], Field(min_length=4, max_length=4)]
    mode: Literal["paper", "upstream"] = "paper"
    right: Share = 0.5
    wrong: Share = 0.5


@dataclass(frozen=True, config=STRICT)
class PenaltySection:
    """Penalties for answers that are too short, repetitive or unfinished (``maporl.rewards.penalties``). 0 turns one
    off.

    Args:
        too_short: what an answer costs that has fewer than ``min_tokens`` tokens.
        min_tokens: the number of tokens below which an answer is too short.
        no_final_answer: what an answer costs in which no final answer is found.
        repetition: what an answer costs that repeats itself.
        no_eos: what an answer costs that does not end by itself.
        call: what each call of a tool costs the completion that made it.
        call_unread: what a completion costs with a call that cannot be read.
        call_failed: what a completion costs with a call that was read and failed.
        mode: ``subtract`` subtracts the amounts from the author's own credit. ``replace`` replaces the score by minus
            the largest amount before it is shared, as the published MAPoRL code did (with 10). Calls are always subtracted.
    """

    too_short: NotNegative = 0.1
    min_tokens: Natural = 0
    no_final_answer: NotNegative = 0.1
    repetition: NotNegative = 0.1
    no_eos: NotNegative = 0.1
    mode: Literal["subtract", "replace"] = "subtract"
    call: NotNegative = 0.0
    call_unread: NotNegative = 0.0
    call_failed: NotNegative = 0.0


@dataclass(frozen=True, config=STRICT)
class BrevitySection:
    """The options of the reward source ``brevity``: an answer of ``tokens`` tokens or more earns 0."""

    tokens: Positive


@dataclass(frozen=True, config=STRICT)
class JudgementSection:
    """The options of the reward source ``judgement``: what an agent earns that judges the results which it called for.

    ``right`` is for a right judgement, ``wrong_yes`` for a useless result that is called useful, and ``wrong_no`` for a useful one
    that is called useless. A result is useful if it has more than the share ``similar`` of the right answer's words.
    """

    right: Finite = 0.3
    wrong_yes: Finite = -0.6
    wrong_no: Finite = -0.3
    similar: Annotated[float, Field(ge=0, lt=1)] = 0.7


@dataclass(frozen=True, config=STRICT)
class VerifierSection:
    """A learned verifier: a sequence classifier with one output, whose sigmoid is the score.

    It runs in this process if only ``model`` is given. Servers run it if ``urls`` are given. Without both, the URLs
    come from the environment variable ``MAPORL_VERIFIER_URLS``. ``batch_size`` is the number of chats in a forward, or
    in a request. ``attn_implementation`` is as for agents. ``timeout`` is the seconds for a whole exchange. ``on_failure`` says what happens after ``retries``: the run stops, waits
    for the servers, or uses the task's grades. ``on_change`` says what happens if the scores come from another verifier than
    the run has had so far, because a server was replaced or the run is resumed with another model: it stops, or warns and goes on. A verifier in this process is trained on graded answers every
    ``learn_every`` updates, and never if that is 0. ``model`` may then be a causal language model too, which gets an output of 0 for
    every answer to begin with, and ``tiny`` describes a random one that is built without a download. Both learn after the first
    update too.

    ``pairs`` are those that it learns from: the ``first`` right and the first wrong answer of each question of an update,
    or ``all`` pairs of a right and a wrong one. ``learn_from`` says whether it learns from ``new`` pairs alone or from ``all``
    since the run began, and ``restart`` whether it learns from its first weights each time. ``output_penalty`` is the
    weight of its mean squared output in the loss (all three as in prover-verifier games, arXiv 2407.13692). With ``loss: answers`` it learns
    from single answers, by the cross-entropy of its score and whether they are right; ``score_penalty`` is the weight of its mean squared
    score, ``epochs`` the number of passes, and ``authors`` are the agents whose answers it learns from, by default all. With a
    ``growth`` above 1, each pass draws as many examples as there are, with replacement, from a mixture of all rounds so far, in which a
    round weighs ``growth`` times the one before (all five as in decoupled games, arXiv 2602.23248). ``reads`` says
    what one score is for: an ``answer``, or a whole ``dialogue``, whose answers all get it (MARLHF). ``pays`` says
    whether the score is the ``probability``, which is the sigmoid, or the ``output`` itself, which only a verifier in this process
    that does not learn gives.

    Raises:
        ValueError: a URL is not valid, or two options exclude each other.
    """

    model: str | None = None
    batch_size: Positive = 16
    urls: tuple[str, ...] = ()
    api: Literal["maporl", "vllm"] = "maporl"
    timeout: AboveZero = 60.0
    retries: Natural = 5
    concurrency: Positive = 32
    on_failure: Literal["stop", "wait", "label"] = "stop"
    on_change: Literal["stop", "warn"] = "stop"
    learn_every: Natural = 0
    learning_rate: AboveZero = 1e-5
    attn_implementation: Attention | None = None
    tiny: TinySection | None = None
    pairs: Literal["first", "all"] = "first"
    learn_from: Literal["new", "all"] = "new"
    restart: bool = False
    output_penalty: NotNegative = 0.0
    loss: Literal["pairs", "answers"] = "pairs"
    score_penalty: NotNegative = 0.0
    epochs: Positive = 1
    authors: tuple[str, ...] = ()
    growth: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    reads: Literal["answer", "dialogue"] = "answer"
    pays: Literal["probability", "output"] = "probability"

    def __post_init__(self):
        check_urls(self.urls)
        if self.tiny is not None and (self.model is not None or self.urls):
            raise ValueError(
                "tiny: it describes a verifier in this process, in place of another one; remove 'model' and 'urls'"
            )
        if self.reads == "dialogue" and (self.urls or self.learn_every):
            raise ValueError(
                "reads: a verifier of whole dialogues is one in this process, and does not learn from single answers; remove "
                f"{'urls' if self.urls else 'learn_every'}, or set reads: answer"
            )
        if self.pays == "output" and (self.urls or self.learn_every):
            raise ValueError(
                "pays: only a verifier in this process that does not learn from answers pays its output; remove "
                f"{'urls' if self.urls else 'learn_every'}, or set pays: probability"
            )
        learning = (
            "pairs", "learn_from", "restart", "output_penalty", "loss", "score_penalty", "epochs", "authors", "growth",
        )  # fmt: skip
        changed = {
            f.name for f in dataclasses.fields(self) if f.name in learning and getattr(self, f.name) != f.default
        }
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


def _check_judging(prompt: str, allowed: set[str], pattern: str) -> None:
    try:
        check_placeholders(prompt, allowed)
    except ValueError as error:
        raise ValueError(f"prompt: it may use {sorted(allowed)} in braces, but has {error}") from None
    if check_pattern("pattern", pattern) > 1:
        raise ValueError(f"pattern: expected at most one group, around what is read; got {pattern!r:.80}")


@dataclass(frozen=True, config=STRICT)
class JudgeSection:
    """The options of the reward source ``judge``: an agent of the team scores every answer.

    With ``scores: everything`` it scores everything that is said, as a coach does. ``prompt`` may use ``{question}``, ``{answer}``, which is
    what was said, ``{reference}``, ``{agent}``, ``{role}``, ``{input}``, which is what the agent was shown, and ``{tools}``, which is what
    its calls returned. The reward is the last number that ``pattern`` finds, divided by ``largest``. A verdict without a number
    gives ``unreadable``, or stops the run if that is None.

    Raises:
        ValueError: ``prompt`` has another placeholder, or ``pattern`` is not a regular expression.
    """

    agent: str
    prompt: str = (
        "{question}\n\nAn answer to this:\n{answer}\n\nHow good is it? End with a line 'Score: N', N from 0 to 10."
    )
    pattern: str = r"[Ss]core:\s*(\d+(?:\.\d+)?)"
    largest: Annotated[float, Field(gt=0)] = 10.0
    unreadable: Finite | None = None
    scores: Literal["answers", "everything"] = "answers"

    def __post_init__(self):
        allowed = {"question", "answer", "reference", "agent", "role", "input", "tools"}
        _check_judging(self.prompt, allowed, self.pattern)


@dataclass(frozen=True, config=STRICT)
class ArenaSection:
    """The options of the reward source ``arena``: an agent of the team says which of two final answers is better.

    ``prompt`` may use ``{question}``, ``{first}`` and ``{second}``. The last A or B that ``pattern`` finds is
    preferred.

    Raises:
        ValueError: ``prompt`` has another placeholder, or ``pattern`` is not a regular expression.
    """

    agent: str
    prompt: str = (
        "{question}\n\nAnswer A:\n{first}\n\nAnswer B:\n{second}\n\nWhich answer is better? End with a line 'Better: A' or "
        "'Better: B'."
    )
    pattern: str = r"[Bb]etter:\s*([AB])"

    def __post_init__(self):
        _check_judging(self.prompt, {"question", "first", "second"}, self.pattern)


@dataclass(frozen=True, config=STRICT)
class AnnotatorSection:
    """The options of the reward source ``annotator``: an agent labels what others observe, and the labels are paid later.

    ``prompt`` may use ``{question}``, that of the utterance that is paid, and ``{observation}``. The label is the last number that
    ``pattern`` finds, divided by ``largest``. ``read`` is a regular expression whose last match, or its group, is taken as the
    observation, so that what differs without meaning does not count as new. Labels are asked for after every ``every`` updates, for
    at most ``per_update`` new observations, the latest first.

    Raises:
        ValueError: ``prompt`` has another placeholder or lacks ``{observation}``, or a pattern is not a regular expression.
    """

    agent: str
    prompt: str = (
        "{question}\n\nSomeone at work on this now sees:\n{observation}\n\nDoes it show that this was a step forward? End with "
        "a line 'Label: 1' for yes, or 'Label: 0' for no."
    )
    pattern: str = r"[Ll]abel:\s*(\d+(?:\.\d+)?)"
    largest: Annotated[float, Field(gt=0)] = 1.0
    read: str | None = None
    every: Positive = 1
    per_update: Positive = 64

    def __post_init__(self):
        _check_judging(self.prompt, {"question", "observation"}, self.pattern)
        if "{observation}" not in self.prompt:
            raise ValueError(f"prompt: it must contain {{observation}}, got {self.prompt!r:.80}")
        if self.read is not None:
            check_pattern("read", self.read)


@dataclass(frozen=True, config=STRICT)
class RewardSection:
    """Where scores come from, and how utterances are credited with them.

    Without ``rules``, MAPoRL's ``horizon``, ``share`` and ``discount`` assign the credit (``maporl.rewards.shaping``).
    With ``rules``, each rule transforms the credit in turn, from left to right (``maporl.rewards.rules``). The first
    one begins with every utterance's own score.
    """

    sources: Annotated[dict[str, Finite], Field(min_length=1)] = dataclasses.field(
        default_factory=lambda: {"label": 1.0}
    )
    horizon: Literal["current", "last", "discounted_sum"] = "discounted_sum"
    share: Literal["individual", "all"] = "all"
    discount: NotNegative = 0.3
    rules: tuple[str | dict[str, dict[str, Any]], ...] = ()
    brevity: BrevitySection | None = None
    verifier: VerifierSection | None = None
    judge: JudgeSection | None = None
    arena: ArenaSection | None = None
    bonus: BonusSection | None = None
    penalties: PenaltySection | None = None
    judgement: JudgementSection | None = None
    annotator: AnnotatorSection | None = None


@dataclass(frozen=True, config=STRICT)
class AblateSection:
    """Dialogues that are played again without an agent, to see what it contributed (``maporl.rollout.ablation``).

    Args:
        who: the agents that are left out.
        how: leave out ``each`` agent alone, for marginal credit, or every group of them (``coalitions``), for Shapley values.
        placeholder: what is shown in place of an agent's words. None: the agent declines, and nothing of it is shown.
        samples: how many times each of these dialogues is played. Outcomes are means over them.

    Raises:
        ValueError: ``who`` names an agent twice, or more than four agents whose groups are left out.
    """

    who: Annotated[tuple[str, ...], Field(min_length=1)]
    how: Literal["each", "coalitions"] = "each"
    placeholder: str | None = None
    samples: Positive = 1

    def __post_init__(self):
        if len(set(self.who)) < len(self.who):
            raise ValueError(f"who: names an agent twice: {list(self.who)}; remove one")
        if self.how == "coalitions" and len(self.who) > 4:
            raise ValueError(
                f"who: {len(self.who)} agents have {2 ** len(self.who) - 1} groups to be left out in each dialogue; name at most 4, "
                "or set how: each"
            )


@dataclass(frozen=True, config=STRICT)
class BranchingSection:
    """The number of training dialogues for each question, and where they fork (``maporl.rollout.branching``).

    Args:
        how: ``independent`` dialogues. Or one dialogue that forks before its first step (``fork_first``), before a
            random step (``fork_random``) or before every step (``fork_every``). Or a ``tree`` with ``group`` candidates
            at every step, of which one continues. Or ``best_of``: the best of ``drafts`` first steps forks. Or ``stages``: ``keep``
            of a step's outputs continue, each with a group of its own. Or ``tree_search``: ``group`` utterances, each to the
            question or after an earlier one, as Thompson sampling decides (MARS², arXiv 2604.14564).
        group: the number of dialogues for each question, of candidates at each step, or of the utterances of a search. ``fork_every`` and ``stages`` take a
            list too: the number of branches before each step, of which the last one holds for all later steps (C3).
        joint: what happens if several agents speak at once. The k-th answers of all make a dialogue (aligned), or every
            combination of answers does (cross).
        pick: which candidate of a tree continues.
        drafts: the number of first steps of ``best_of``.
        common_seed: whether a protocol has the same random numbers in all dialogues of a question.
        resample: how many times questions without reward variance are replaced by others (DAPO's dynamic sampling).
        ablate: the agents without which every dialogue is played again. None: none.
        keep: how many outputs of a step continue in ``stages``.
        choose: which outputs these are: ``random`` ones; good and bad ones in turn (``balanced``); bad answers, and good
            verdicts (``adaptive``); or one of each of the commonest answers (``frequent``).
        posterior: the distribution from which ``tree_search`` draws the worth of an option: ``gaussian`` with unknown variance, or
            ``beta`` for scores from 0 to 1. Other branchings take no ``posterior``.

    Raises:
        ValueError: ``group`` is too small, or two options exclude each other.
    """

    how: Literal[
        "independent", "fork_first", "fork_random", "fork_every", "tree", "best_of", "stages", "tree_search"
    ] = "independent"
    group: Positive | Annotated[tuple[Positive, ...], Field(min_length=1)] = 1
    joint: Literal["aligned", "cross"] = "aligned"
    pick: Literal["best", "sample"] = "best"
    drafts: Annotated[int, Field(ge=2)] = 4
    common_seed: bool = True
    resample: Natural = 0
    ablate: AblateSection | None = None
    keep: Positive = 2
    choose: Literal["random", "balanced", "adaptive", "frequent"] = "random"
    posterior: Literal["gaussian", "beta"] = "gaussian"

    def __post_init__(self):
        if isinstance(self.group, tuple) and self.how not in ("fork_every", "stages"):
            raise ValueError(
                f"group: a list says how many branches each step has, which needs how: fork_every or stages; with {self.how} give one "
                f"number, got {list(self.group)}"
            )
        if self.how not in ("independent", "best_of") and self.most < 2:
            given = self.group if isinstance(self.group, int) else list(self.group)
            raise ValueError(f"group: {self.how} needs at least 2 dialogues per question, got {given}")
        if self.posterior != "gaussian" and self.how != "tree_search":
            raise ValueError(
                f"posterior: only tree_search draws from it; set how: tree_search, or remove it, got {self.posterior!r} with how: {self.how}"
            )
        if self.joint == "cross" and self.how != "fork_every":
            raise ValueError(
                f"joint: cross combines answers where every step forks; set how: fork_every, got {self.how}"
            )

    def at(self, step: int) -> int:
        """Return ``group`` for a step of a dialogue, counted from 0."""
        return self.group if isinstance(self.group, int) else self.group[min(step, len(self.group) - 1)]

    @property
    def most(self) -> int:
        """The largest number in ``group``."""
        return self.group if isinstance(self.group, int) else max(self.group)


@dataclass(frozen=True, config=STRICT)
class AdvantageConfig:
    """How credits become advantages: a return, a baseline, a scale and transforms, over rows grouped by ``key``.

    The slots are in ``maporl.advantages``: RETURNS, BASELINES, SCALES and TRANSFORMS.

    Attributes:
        returns: the return of a row.
        baseline: what is subtracted from the return.
        scale: what the difference is divided by.
        key: rows with equal values of these columns form a group.
        post: the transforms that follow, in order.
        gamma: the discount for each utterance. ``ppo.gamma`` is the discount for each token.
        lam: lambda of GAE over utterances. ``ppo.lam`` is that over tokens.
        ddof: 1 for the unbiased standard deviation, 0 for the population's.
        eps: what is added to the standard deviation.
        ema: the share of the running mean that is kept in each update.
        unit: whether a statistic counts each row once, or each rollout or each turn once, with the mean of its rows. A
            turn in which an agent called tools has several rows.
        singleton: whether a group of one is an error, has advantage zero, or keeps its raw return as GiGPO's outcomes and
            RLAnything's last steps do.
        multi_objective_aggregation: whether the reward sources are summed and then compared, or each is compared alone and
            the weighted results are summed (GDPO, arXiv 2601.05242). The names are TRL's.
        plus: further advantages that are added, each as ``{weight: 1.0, key: [...], ...}``. What an entry does not name
            is that of this section. They are added before the transforms (GiGPO, arXiv 2505.10978).
        alpha: the weight of what a critic expects in ``baseline: assisted``, beside the returns themselves.
    """

    returns: str = "token_gae"
    baseline: str = "critic"
    scale: str = "std"
    key: tuple[str, ...] = ("agent", "turn")
    post: tuple[str | dict[str, dict[str, Any]], ...] = ()
    gamma: Share = 1.0
    lam: Share = 0.95
    ddof: Literal[0, 1] = 1
    eps: NotNegative = 1e-6
    ema: Share = 0.95
    unit: Literal["row", "rollout", "turn"] = "row"
    singleton: Literal["error", "zero", "raw"] = "error"
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    plus: tuple["AdvantageTerm", ...] = ()
    alpha: Share = 1.0


@dataclass(frozen=True, config=STRICT)
class AdvantageTerm:
    """An advantage that is added to that of the section ``advantage``. What is None is that of the section.

    Its return may need no critic, and its baseline may remember nothing.
    """

    weight: Finite = 1.0
    returns: str | None = None
    baseline: str | None = None
    scale: str | None = None
    key: tuple[str, ...] | None = None
    gamma: Share | None = None
    lam: Share | None = None
    unit: Literal["row", "rollout", "turn"] | None = None
    singleton: Literal["error", "zero", "raw"] | None = None

    def within(self, section: "AdvantageConfig") -> "AdvantageConfig":
        """Return the configuration of this advantage alone."""
        named = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "weight"}
        own = {name: value for name, value in named.items() if value is not None}
        return dataclasses.replace(section, post=(), plus=(), **own)


@dataclasses.dataclass
class TrainingOptions(LearnerOptions):
    """The options of training: the YAML section ``training:``, and a base of :class:`maporl.MultiAgentPPOConfig`.

    An option that ``transformers.TrainingArguments`` has too has the same name and the same default. Steps are updates.
    """

    per_device_train_batch_size: Positive = option(8, "Rows per forward and backward pass.")
    gradient_accumulation_steps: Positive = option(
        1, "Questions of an update = per_device_train_batch_size x gradient_accumulation_steps, on each process."
    )
    lr_scheduler_kwargs: dict[str, Any] | None = option(
        None, "Further options of the schedule, e.g. {min_lr_rate: 0.1} for lr_scheduler_type: cosine_with_min_lr."
    )
    warmup_steps: NotNegative = option(0.0, "Number of updates in which the learning rate rises.")
    max_grad_norm: NotNegative = option(1.0, "Norm to which the gradient of a policy is clipped; 0: no clipping.")
    weight_decay: NotNegative = option(0.0, "Weight decay of AdamW.")
    adam_beta2: Share = option(0.999, "Second beta of AdamW.")
    optim: Literal["adamw_torch_fused", "adamw_torch", "adamw_bnb_8bit", "paged_adamw_8bit"] = option(
        "adamw_torch_fused",
        "Optimizer; the last two keep two bytes of state per trained number instead of eight, for weights of 4,096 numbers or more.",
    )
    gradient_checkpointing: bool = option(False, "Recompute activations in the backward pass to save memory.")
    bf16: bool = option(False, "Mixed precision: float32 weights, bfloat16 arithmetic.")
    use_cpu: bool = option(False, "Train on the CPU even if there is a GPU.")
    save_steps: Natural = option(500, "Save a checkpoint every so many updates, and after the last one; 0: never.")
    save_total_limit: Positive | None = option(None, "How many checkpoints are kept; the oldest go first.")
    eval_steps: Natural | None = option(None, "Evaluate every so many updates; None: only before and after training.")
    report_to: list[str] = dataclasses.field(
        default_factory=list, metadata={"help": "Where else to log: tensorboard, wandb, trackio."}
    )
    critic_per_turn: bool = option(True, "Give the critic's head one output for each turn.")
    critic_context: Literal["dialogue", "answer", "joint"] = option(
        "dialogue",
        "What the critic reads before an answer: all that its agent saw, the question alone, or the question and all "
        "agents' utterances so far.",
    )
    async_depth: Natural = option(
        0,
        "Play dialogues while earlier ones are trained on; they are at most so many updates older than the weights that they "
        "train. It needs engines with copies of the weights: vllm, or cluster.backend: ray.",
    )
    placement: Literal["shared", "split"] = option(
        "shared",
        "All learners on this process's device, or each base model, with its adapters, on a separate device.",
    )


@dataclass(frozen=True, config=STRICT)
class PupilSection:
    """What one agent learns in the warm start, where agents are to differ.

    Args:
        skill: one of the task's ``skills``. The agent takes every question for one that asks for it.
        wrong: the probability of a wrong answer.
        gives_in: the probability that the agent says what another agent said, where it is shown words of others. A solver of
            protocol ``code`` writes a program that passes the tests that it is shown (:meth:`maporl.Task.write_agreeing`).
        calls: the probability that an agent with tools calls one before it answers, where the task writes calls.
        together: the probability that an agent with ``limits.parallel`` makes all calls of a turn at once, and not one
            after the other.
    """

    skill: str | None = None
    wrong: Share = 0.0
    gives_in: Share = 0.0
    calls: Share = 0.5
    together: Share = 1.0


@dataclass(frozen=True, config=STRICT)
class WarmStartSection:
    """Brief supervised training before PPO, on dialogues that an imperfect oracle plays. It is for tiny models.

    ``wrong`` is the probability of a wrong answer, and ``calls`` that of calling a tool before answering, for agents with
    tools, where the task writes calls (:meth:`maporl.Task.write_calls`). ``agents`` says what single agents learn instead.
    """

    steps: Natural = 0
    batch_size: Positive = 64
    learning_rate: NotNegative = 1e-3
    wrong: Share = 0.3
    agents: dict[str, PupilSection] = dataclasses.field(default_factory=dict, hash=False)
    calls: Share = 0.5

    def pupil(self, agent: str) -> PupilSection:
        """Return what ``agent`` learns."""
        return self.agents.get(agent) or PupilSection(wrong=self.wrong, calls=self.calls)


@dataclass(frozen=True, config=STRICT)
class EvaluationSection:
    """Evaluation before, after, and every ``training.eval_steps`` updates.

    ``sampling`` has the sampling of agents in evaluations, by their names.
    """

    questions: Natural = 256
    temperature: NotNegative = 0.0
    top_p: PositiveShare = 1.0
    top_k: Natural = 0
    sampling: dict[str, Sampling] = dataclasses.field(default_factory=dict, hash=False)

    @property
    def decoding(self) -> Decoding:
        """How answers are sampled in evaluations."""
        return Decoding(self.temperature, self.top_p, self.top_k)


def _listed(value: Any) -> Any:
    """Return one text as a list of it."""
    return [value] if isinstance(value, str) else value


def _off(value: Any) -> Any:
    """Return "off" for false, because YAML reads a bare ``off`` as false."""
    return "off" if value is False else value


@dataclasses.dataclass(kw_only=True)
class RunOptions:
    """The options that are at the top level of a YAML file, and arguments of a trainer in Python."""

    restate: Annotated[Literal["off", "base_model"], BeforeValidator(_off)] = option(
        "off",
        "Ask the untrained model for the final answer if grading cannot find it; only graders and others read it.",
    )
    dialogues_logged: Natural = option(4, "Dialogues of each update that are written to dialogues.jsonl.")


for _plain in (
    PPOOptions,
    LearnerOptions,
    Sampling,
    TrainingOptions,
    RunOptions,
    Schedule,
    Span,
    Freeze,
    Swap,
    RoundRobin,
    Growth,
    OpponentPool,
    Stage,
):
    setattr(_plain, "__pydantic_config__", STRICT)  # noqa: B010  # plain dataclasses, declared where they are used


@dataclass(config=STRICT)
class Config(RunOptions):
    """The configuration of a run.

    ``only_in_python`` has the parts of a run made in Python that no configuration can build, by key. They have no name
    with which another process could import them.
    ``pythonpath`` has the folders in which modules that the configuration names are looked for
    (:mod:`maporl.config.imports`).
    """

    output_dir: str
    task: dict[str, Any]
    agents: Annotated[dict[str, AgentSection], Field(min_length=1)]
    protocol: dict[str, Any] = dataclasses.field(default_factory=lambda: {"name": "debate"})
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    updates: Positive = 100
    branching: BranchingSection = dataclasses.field(default_factory=BranchingSection)
    reward: RewardSection = dataclasses.field(default_factory=RewardSection)
    advantage: AdvantageConfig = dataclasses.field(default_factory=AdvantageConfig)
    schedule: Schedule = dataclasses.field(default_factory=Schedule)
    ppo: PPOOptions = dataclasses.field(default_factory=PPOOptions)
    training: TrainingOptions = dataclasses.field(default_factory=TrainingOptions)
    warm_start: WarmStartSection = dataclasses.field(default_factory=WarmStartSection)
    evaluation: EvaluationSection = dataclasses.field(default_factory=EvaluationSection)
    only_in_python: dict[str, str] = dataclasses.field(default_factory=dict)
    pythonpath: Annotated[list[str], BeforeValidator(_listed)] = dataclasses.field(default_factory=list)
    tools: dict[str, ToolSection] = dataclasses.field(default_factory=dict)
    environments: dict[str, EnvironmentSection] = dataclasses.field(default_factory=dict)
    loop: LoopSection = dataclasses.field(default_factory=LoopSection)
    cluster: ClusterSection = dataclasses.field(default_factory=ClusterSection)

    def questions_per_update(self) -> int:
        """Return the number of questions that a process plays in an update."""
        return self.training.per_device_train_batch_size * self.training.gradient_accumulation_steps
