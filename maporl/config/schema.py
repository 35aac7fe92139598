"""The sections of a configuration: their names, types, defaults and limits, each declared once. No torch.

PPO's own options are in :mod:`trl_ext.ppo.options`. ``configs/ppo/base.yaml`` shows every key with a comment above it.
"""

import copy
import dataclasses
import difflib
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from maporl.config.algorithm import OF_TEAM
from maporl.config.algorithm import AdvantageConfig as AdvantageConfig
from maporl.config.algorithm import AdvantageTerm as AdvantageTerm
from maporl.config.algorithm import Algorithm as Algorithm
from maporl.config.call_options import CallLimits, CallTexts
from maporl.config.engines import ENGINES
from maporl.decoding import Sampling, StructuredOutput
from maporl.errors import ConfigError
from maporl.schedules import Schedule
from maporl.sections import (
    AboveZero,
    Attention,
    Finite,
    Natural,
    NotNegative,
    Positive,
    PositiveShare,
    Share,
    TinySection,
    brought,
    made,
    section,
)
from maporl.text import pattern_option, text_option
from trl_ext.ppo.options import CriticKind, Decoding, LearnerOptions, PPOOptions, option, options

TOKEN_VARIABLE = "MAPORL_SERVER_TOKEN"
"""The environment variable with the bearer token of the reward server and of its client."""


@section()
class LoraSection:
    """A policy's own LoRA adapter. Policies of the same model share its base."""

    r: Positive = option(16, "Rank of the adapter's matrices.")
    alpha: Positive = option(32, "Scale: the adapter's output is multiplied by alpha / r.")
    target_modules: str | list[str] = option(
        "all-linear",
        "The layers that are adapted: all-linear, or a list of names.",
    )


@section()
class ApiSection:
    """An agent behind an OpenAI-compatible endpoint. It speaks and is never trained.

    Raises:
        ValueError: ``temperature`` is set and left out.
    """

    model: str = option(help="Name of the model at the endpoint.")
    base_url: str | None = option(None, "Address of the endpoint, e.g. http://127.0.0.1:8000/v1. None: OpenAI's own.")
    key_variable: str = option("OPENAI_API_KEY", "Name of the environment variable with the API key.")
    max_tokens: Positive | None = option(None, "Most tokens of an answer. None: as of other agents.")
    temperature: NotNegative | None = option(
        None,
        "Sampling temperature. None: that of the run. Top-p is always that of the run, and the interface has no top-k.",
    )
    concurrency: Positive = option(16, "Most requests at a time.")
    timeout: AboveZero = option(120.0, "Seconds for a whole exchange.")
    retries: Natural = option(5, "How often a failed request is repeated.")
    cache: bool = option(
        True,
        "Keep answers on disk by model, conversation and place in the run, so that a repeated run asks and pays "
        "only once.",
    )
    length_field: Literal["auto", "max_tokens", "max_completion_tokens"] = option(
        "auto",
        "Name of the field with the most tokens, because some models refuse max_tokens. auto: found out at the "
        "first refusal (status 400 or 422), told, and kept to.",
    )
    leave_out: list[Literal["temperature", "top_p", "stop", "seed"]] = option(
        [],
        "What the model refuses: temperature, top_p, stop or seed. If they are not named, they are found out as above. "
        "Stop strings that are not sent end an answer all the same: it is cut there.",
    )

    def __post_init__(self):
        if self.temperature is not None and "temperature" in self.leave_out:
            raise ValueError("leave_out: temperature is set and left out; remove one of them")


@section()
class ToolSection:
    """A tool of the run: a name of ``TOOLS`` or ``MODULE:OBJECT``, and the options it is made with."""

    use: str = option(help="A name of TOOLS, or MODULE:OBJECT: a typed function with a docstring.")
    options: dict[str, Any] = option({}, "The options with which it is made.")
    seconds: AboveZero | None = option(None, "Most seconds of a call, besides the limit of the agent that calls.")


@section()
class EnvironmentSection:
    """An environment of the run: a name of ``ENVIRONMENTS`` or ``MODULE:OBJECT``, and the options it is made with."""

    use: str = option(
        help="A name of ENVIRONMENTS, or MODULE:OBJECT: a class of your own, such as one for TRL's "
        "environment_factory.",
    )
    options: dict[str, Any] = option({}, "The options of each instance.")
    agents: list[str] | None = option(
        None,
        "The agents to which it belongs: only they get its texts and its rewards. None: "
        "those whose `tools` name it, or all that play if none names it or the protocol acts in it.",
    )
    forks: Literal["copy", "replay", "no"] | None = option(
        None,
        "How it can be forked, if its class does not say so: copy, replay or no.",
    )
    reward: str | None = option(
        None,
        "The attribute of a class written for TRL that has its reward, if the class has no get_reward.",
    )
    calls: Positive = option(64, "Most calls of a dialogue.")
    seconds: AboveZero = option(30.0, "Most seconds of a call.")
    open_seconds: AboveZero = option(60.0, "Most seconds of making and resetting it.")
    close_seconds: AboveZero = option(10.0, "Most seconds of closing it.")
    at_once: Positive = option(64, "How many instances are opened at once in a process.")
    on_lost: Literal["drop", "stop"] = option(
        "drop",
        "What happens if it does not answer in time: its dialogue is left out of the update (drop), or the run "
        "stops (stop).",
    )
    lost_at_most: Share = option(
        0.05,
        "Share of an update's dialogues that may be left out. If more are lost, the run stops.",
    )
    isolate: Literal["process"] | None = option(
        None,
        "With process, each instance lives in a process of its own, which is killed if it does not answer in time.",
    )


def _known_engine(name: str) -> str:
    if name not in ENGINES:
        near = difflib.get_close_matches(name[:80], ENGINES, 1)
        hint = f" did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown {name!r:.80};{hint} known: {', '.join(ENGINES)}")
    return name


EngineName = Annotated[str, AfterValidator(_known_engine), Field(json_schema_extra={"enum": list(ENGINES)})]


@section()
class AgentSection:
    """One agent: the weights that speak for it, and how they are trained.

    Raises:
        ValueError: two keys for one thing have different values.
    """

    model: str | None = option(None, "Hub name or folder of a causal language model. Give either this or `tiny`.")
    tiny: TinySection | None = option(None, "A small character-level model that is built when the run starts.")
    tokenizer: str | None = option(None, "Tokenizer, if it is not the model's own.")
    chat_template: str | None = option(
        None,
        'Chat template: a Jinja file, a Jinja text, or `fallback` for plain "User:" / "Assistant:" paragraphs '
        "(for base models).",
    )
    template_options: dict[str, bool | int | float | str] = option(
        {},
        "Values of variables that the chat template uses, e.g. {enable_thinking: false} for Qwen3.",
    )
    pad_token: str | None = option(None, "Padding token, if the tokenizer has none.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto",
        "Precision of the weights: auto (that of the checkpoint; float32 for tiny models), float32, bfloat16, float16.",
    )
    attn_implementation: Attention | None = option(
        None,
        "How attention is computed: sdpa, eager, flash_attention_2 (a CUDA device and the package flash-attn), or "
        "flex_attention (an accelerator). Default: what transformers chooses, which is sdpa for most models.",
    )
    lora: LoraSection | None = option(
        None,
        "A LoRA adapter for this agent. Agents that have a LoRA on the same model share its base weights.",
    )
    adapter: str | None = option(None, "Folder of an existing PEFT adapter with which training continues.")
    load_in_4bit: bool = option(
        False,
        "Quantise the base model to 4 bits (QLoRA). This needs a lora and the package bitsandbytes (pip install "
        '-e ".[quantized]").',
    )
    load_in_8bit: bool = option(False, "Quantise the base model to 8 bits, with the same needs.")
    policy: str | None = option(
        None,
        "Name of the weights. Agents that give the same name share them. Default: the agent's own name.",
    )
    policy_per: Literal["agent", "turn", "first_and_rest"] | list[str] = option(
        "agent",
        "Which parts of a dialogue have separate weights: every turn (turn), the first turn and all later turns "
        "(first_and_rest), or none, so that one policy speaks in all turns (agent). A list names the policies of "
        "the turns.",
    )
    role: str | None = option(None, "Role, which is recorded with every utterance.")
    system: str | None = option(None, "System prompt.")
    trainable: bool = option(True, "False: the agent speaks but does not learn.")
    learning_rate: NotNegative | None = option(
        None,
        "Learning rate of this agent's policy. Default: training.learning_rate.",
    )
    critic: CriticKind | None = option(
        None,
        "Critic of this agent's policy. Default: training.critic.",
    )
    algorithm: Algorithm = option(
        help="How this agent's policy learns, where this differs from advantage, ppo, training and schedule: "
        "{advantage: {baseline: mean}, ppo: {kl_coef: 0.0}, critic: none} (docs/concepts.md). In a file, extends: "
        "NAME takes it from a recipe.",
        factory=Algorithm,
    )
    engine: EngineName = option(
        "transformers",
        "What samples the answers. With vllm, the weights are trained here all the same; agents of human, random "
        "and openai are never trained. If no engine is named, vLLM is installed and there is an accelerator, the "
        "engine is vllm in this process (docs/scaling.md).",
    )
    engine_options: dict[str, Any] = option(
        {},
        "Options of an engine that has no section in this file, for example of one that you added to ENGINES.",
    )
    api: ApiSection | None = option(None, "For engine openai: an OpenAI-compatible endpoint.")
    vllm: brought("maporl.integrations.vllm.section:VLLMSection") | None = option(  # type: ignore[valid-type]
        None,
        "For engine vllm: servers of the agent's base model, or vLLM in this process.",
    )
    tinker: brought("maporl.integrations.tinker.section:AgentTinkerSection") | None = option(  # type: ignore[valid-type]
        None,
        "For cluster.backend: tinker: another service for this agent's policy, and its critic.",
    )
    tools: list[str] = option(
        [],
        "What the agent may call: names of `tools`, of `environments` (all their tools), or ENVIRONMENT.TOOL.",
    )
    call_format: Literal["auto", "native", "json", "tags"] = option(
        "auto",
        'How it writes calls: native (as its chat template teaches), json (`<call>{"name": ..., "arguments": '
        "{...}}</call>`), tags (`<search>words</search>`, for tools with one text argument), or auto (native if "
        "the template allows it, else json).",
    )
    call_texts: CallTexts | None = option(
        None,
        "Other texts for the call formats json and tags. Tiny models know few characters.",
    )
    limits: CallLimits | None = option(None, "Limits of its calls.")
    sampling: Sampling | None = option(
        None,
        "How its answers are sampled, where this differs from `ppo`. Each value may be a list by turn, the last "
        "for all later turns. Evaluations take max_tokens, stop and structured_output of it.",
    )
    structured_output: StructuredOutput | list[StructuredOutput] | None = option(
        None,
        "Short for sampling.structured_output: what its answers are held to, {json_schema: FILE or mapping}, {regex: "
        "...} or {grammar: ...}.",
    )

    def __post_init__(self):
        _ = self.learns_by
        if self.structured_output is not None:
            own = self.sampling or Sampling()
            if own.structured_output not in (None, self.structured_output):
                raise ValueError("structured_output and sampling.structured_output differ; remove one of them")
            object.__setattr__(self, "sampling", dataclasses.replace(own, structured_output=self.structured_output))

    @cached_property
    def learns_by(self) -> Algorithm:
        """The algorithm of the agent's policy, with the keys that are the agent's own.

        Raises:
            ValueError: the agent and its algorithm have different values for one of them.
        """
        return self.algorithm.with_defaults(critic=self.critic, learning_rate=self.learning_rate)

    @property
    def weights(self) -> bool:
        """Return whether the agent has weights in this process."""
        return ENGINES[self.engine].weights

    def options_of_engine(self) -> Any:
        """Return the options of the agent's engine: the section that belongs to the engine, or ``engine_options``."""
        section = ENGINES[self.engine].section
        return self.engine_options if section is None else getattr(self, section)


@section()
class BonusSection:
    """The incentives for collaboration (``maporl.rewards.shaping.collaboration_bonus``)."""

    alpha: Annotated[list[Finite], Field(min_length=4, max_length=4)] = option(
        help="Four numbers, for an agent that a) is persuaded by a right majority, b) becomes right against a wrong "
        "majority, c) gives a wrong answer from which the others become right, d) persuades the others while it "
        "is right.",
    )
    mode: Literal["paper", "upstream"] = option(
        "paper",
        "The incentives as the paper defines them (paper), or as its published code computes them (upstream), "
        "which subtracts c) and d), and not in the first turn.",
    )
    right: Share = option(0.5, "What counts as right: a score above this.")
    wrong: Share = option(0.5, "What counts as wrong: a score below this.")


@section()
class PenaltySection:
    """Penalties for answers that are too short, repetitive or unfinished (``maporl.rewards.credit``)."""

    too_short: NotNegative = option(0.1, "What an answer costs that has fewer than min_tokens tokens.")
    min_tokens: Natural = option(0, "Number of tokens below which an answer is too short.")
    no_final_answer: NotNegative = option(0.1, "What an answer costs in which no final answer is found.")
    repetition: NotNegative = option(0.1, "What an answer costs that repeats itself.")
    no_eos: NotNegative = option(0.1, "What an answer costs that does not end by itself.")
    mode: Literal["subtract", "replace"] = option(
        "subtract",
        "subtract: the amounts are subtracted from the author's own credit. replace: the score becomes minus the "
        "largest amount before it is shared, as in the published MAPoRL code (with 10). Calls are always "
        "subtracted.",
    )
    call: NotNegative = option(0.0, "What each call of a tool costs the completion that made it.")
    call_unread: NotNegative = option(0.0, "What a completion costs with a call that cannot be read.")
    call_failed: NotNegative = option(0.0, "What a completion costs with a call that was read and failed.")


@section()
class ChargeSection:
    """A charge for a named reward, subtracted after credit assignment (``reward.charges``)."""

    weight: AboveZero = option(help="What one unit of the reward costs: a weight of 0.01 takes 0.01 a word from words.")
    roles: tuple[str, ...] = option((), "The roles, or the agents by name, that are charged. Default: all.")


@section()
class BrevitySection:
    """The options of the reward source ``brevity``, which pays for short answers."""

    tokens: Positive = option(help="Length in tokens from which an answer earns 0.")


@section()
class JudgeSection:
    """The options of the reward source ``judge``: an agent of the team scores every answer.

    Raises:
        ValueError: ``prompt`` has another placeholder, or ``pattern`` is not a regular expression.
    """

    agent: str = option(help="The agent that scores.")
    prompt: str = text_option(
        "{question}\n\nAn answer to this:\n{answer}\n\nHow good is it? End with a line 'Score: N', N from 0 to 10.",
        "What it is asked, with {question}, {answer} (what was said), {reference}, {agent}, {role}, {input} (what "
        "the agent was shown) and {tools} (what its calls returned).",
    )
    pattern: str = pattern_option(
        r"[Ss]core:\s*(\d+(?:\.\d+)?)", "A regular expression whose last match holds the score.", one_group=True
    )
    largest: Annotated[float, Field(gt=0)] = option(10.0, "The largest score, by which the score is divided.")
    unreadable: Finite | None = option(None, "What a verdict without a number gives. None: the run stops.")
    scores: Literal["answers", "everything"] = option(
        "answers",
        "What it scores: answers, or everything that is said, as a coach does.",
    )


@section()
class DistillSection:
    """On-policy distillation: each token of a first answer earns its teacher's log-probability minus the agent's."""

    teacher: str = option(
        "dialogue",
        "Who teaches: dialogue (the agent's own policy in its last turn of the other dialogues on the question, so "
        "branching.group must be 2 or more), or an agent of the same tokenizer (where it first speaks).",
    )
    weight: Finite = option(1.0, "Weight of these rewards of tokens, beside the credit of the answer.")


@section()
class RewardSection:
    """Where scores come from, and how utterances are credited with them.

    Without ``rules``, MAPoRL's ``horizon``, ``share`` and ``discount`` assign the credit (``maporl.rewards.shaping``).
    With ``rules``, each rule transforms the credit in turn, from left to right (``maporl.rewards.rules``). The first
    one begins with every utterance's own score.
    """

    sources: Annotated[dict[str, Finite], Field(min_length=1)] = option(
        {"label": 1.0},
        "Each source with its weight: label is 1 for a right answer and 0 for a wrong one. A protocol may pay "
        "rewards itself (game: env, legal; forum: peer), which are named here too.",
    )
    horizon: Literal["current", "last", "discounted_sum"] = option(
        "discounted_sum",
        "Which scores count for an answer: current (of this turn), last (of the last turn), discounted_sum (of "
        "this turn and of later turns, discounted).",
    )
    share: Literal["individual", "all"] = option(
        "all",
        "Whose later scores count: the agent's own (individual), or the mean over those of the team that speak then "
        "(all), also where the agent itself is silent.",
    )
    discount: NotNegative = option(0.3, "Discount per turn.")
    rules: tuple[str | dict[str, dict[str, Any]], ...] = option(
        (),
        "Rules that replace horizon, share and discount. They are applied from left to right. Each is a name or "
        "{name: options}.",
    )
    brevity: BrevitySection | None = option(None, "For the source brevity.")
    verifier: brought("maporl.verifier.section:VerifierSection") | None = option(  # type: ignore[valid-type]
        None,
        "For the source verifier, and for feedback: verifier of a protocol: a learned model that scores answers.",
    )
    judge: JudgeSection | None = option(None, "For the source judge: an agent that scores answers.")
    arena: brought("maporl.methods.sections:ArenaSection") | None = option(  # type: ignore[valid-type]
        None,
        "For the source arena: an agent that compares the answers to a question in pairs.",
    )
    bonus: BonusSection | None = option(None, "Incentives to collaborate.")
    penalties: PenaltySection | None = option(
        None,
        "What a bad answer costs its author. {} takes the values below; 0 switches one penalty off.",
    )
    charges: dict[str, ChargeSection] = option(
        {},
        "What comes off the credit of one role, after sharing: each source, or reward of the protocol, with its weight "
        "and its roles. It pays nobody else for what one role does, and takes the place of no credit. The source "
        "tokens counts what was sampled.",
    )
    distill: DistillSection | None = option(
        None,
        "On-policy distillation inside the team: first answers learn what other dialogues taught, or what another "
        "agent knows.",
    )
    judgement: brought("maporl.methods.sections:JudgementSection") | None = option(  # type: ignore[valid-type]
        None,
        "For the source judgement: what judgements of results earn. None takes the values below.",
    )
    annotator: brought("maporl.methods.sections:AnnotatorSection") | None = option(  # type: ignore[valid-type]
        None,
        "For the source annotator: an agent that labels observations. Utterances that later lead to one earn it.",
    )

    @property
    def asked(self) -> dict[str, None]:
        """The names of all rewards that are asked for: those that make the score, and those that are charged."""
        return dict.fromkeys([*self.sources, *self.charges])


@section()
class AblateSection:
    """Dialogues that are played again without an agent, to see what it contributed (``maporl.rollout.ablation``).

    Raises:
        ValueError: ``who`` names an agent twice, or more than four agents whose groups are left out.
    """

    who: Annotated[tuple[str, ...], Field(min_length=1)] = option(help="The agents that are left out.")
    how: Literal["each", "coalitions"] = option(
        "each",
        "Leave out each agent alone, for marginal credit (each), or every group of them, for Shapley values "
        "(coalitions).",
    )
    placeholder: str | None = option(
        None,
        "What is shown in place of an agent's words. None: the agent declines, and nothing of it is shown.",
    )
    samples: Positive = option(1, "How often each of these dialogues is played. Outcomes are means over them.")

    def __post_init__(self):
        if len(set(self.who)) < len(self.who):
            raise ValueError(f"who: names an agent twice: {list(self.who)}; remove one")
        if self.how == "coalitions" and len(self.who) > 4:
            raise ValueError(f"who: {len(self.who)} agents make too many coalitions; name at most 4, or set how: each")


@section()
class BranchingSection:
    """The number of training dialogues for each question, and where they fork (``maporl.rollout.branching``).

    Raises:
        ValueError: ``group`` is too small, or two options exclude each other.
    """

    how: Literal[
        "independent", "fork_first", "fork_random", "fork_every", "tree", "best_of", "stages", "tree_search"
    ] = option(
        "independent",
        "independent: separate dialogues. fork_first, fork_random: one dialogue that forks before its first or "
        "before a random step. fork_every: fork before every step. tree: sample candidates at every step and "
        "continue with one of them; a candidate keeps what it earned then, so rewards and returns must not look "
        "at later turns. best_of: fork after the best of several first steps. stages: keep some outputs of each "
        "step, and continue each with a group. tree_search: each utterance answers the question or an earlier "
        "one, as Thompson sampling decides (MARS², arXiv 2604.14564).",
    )
    group: Positive | Annotated[tuple[Positive, ...], Field(min_length=1)] = option(
        1,
        "Number of dialogues of a question, of candidates of a step, or of utterances of a search. `maporl check` "
        "says how many dialogues that makes. For fork_every and stages it may be a list: [2, 4] makes 2 branches "
        "before the first step and 4 before every later one (C3).",
    )
    joint: Literal["aligned", "cross"] = option(
        "aligned",
        "For fork_every, if several agents speak in one step: aligned (combine the k-th answers of all agents) or "
        "cross (combine all answers with each other).",
    )
    pick: Literal["best", "sample"] = option(
        "best",
        "For tree: continue with the best candidate (best) or with a random one (sample).",
    )
    drafts: Annotated[int, Field(ge=2)] = option(4, "For best_of: the number of first steps to choose from.")
    common_seed: bool = option(
        True,
        "True: what a protocol draws at random is the same in all dialogues of a question.",
    )
    resample: Natural = option(
        0,
        "Dynamic sampling (DAPO): if all dialogues of a question earned the same, replace the question by another "
        "one. This is repeated at most this many times.",
    )
    ablate: AblateSection | None = option(
        None,
        "Play every dialogue again without single agents, to see what they contribute (rewards marginal and "
        "shapley, and the rule counterfactual). Each of them is a dialogue more, which nobody is trained on. "
        "None: off.",
    )
    keep: Positive = option(2, "For stages: how many outputs of a step go on.")
    choose: Literal["random", "balanced", "adaptive", "frequent"] = option(
        "random",
        "For stages: which outputs go on: random ones, good and bad ones in turn (balanced), wrong answers and "
        "true verdicts (adaptive), or one of each of the commonest answers (frequent). If agents speak at once, "
        "it is random or frequent.",
    )
    posterior: Literal["gaussian", "beta"] = option(
        "gaussian",
        "For tree_search: the distribution from which an option's worth is drawn: gaussian with unknown variance, "
        "or beta for scores from 0 to 1.",
    )

    def __post_init__(self):
        if isinstance(self.group, tuple) and self.how not in ("fork_every", "stages"):
            raise ValueError(
                "group: a list says how many branches each step has, which needs how: fork_every or stages; with "
                f"{self.how} give one number, got {list(self.group)}"
            )
        if self.how not in ("independent", "best_of") and self.most < 2:
            group = self.group if isinstance(self.group, int) else list(self.group)
            raise ValueError(f"group: {self.how} needs at least 2 dialogues per question, got {group}")
        if self.posterior != "gaussian" and self.how != "tree_search":
            raise ValueError(f"posterior: {self.posterior!r} is for how: tree_search, got how: {self.how}; set that")
        if self.joint == "cross" and self.how != "fork_every":
            raise ValueError(f"joint: cross combines answers of forked steps; set how: fork_every, got {self.how}")

    def at(self, step: int) -> int:
        """Return ``group`` for a step of a dialogue, counted from 0."""
        return self.group if isinstance(self.group, int) else self.group[min(step, len(self.group) - 1)]

    @property
    def most(self) -> int:
        """The largest number in ``group``."""
        return self.group if isinstance(self.group, int) else max(self.group)


@options()
class TrainingOptions(LearnerOptions):
    """The options of training: the YAML section ``training:``, and a base of :class:`maporl.MultiAgentPPOConfig`.

    An option that ``transformers.TrainingArguments`` has too has the same name and the same default. Steps are updates.
    """

    per_device_train_batch_size: Positive = option(8, "Rows per forward and backward pass.")
    gradient_accumulation_steps: Positive = option(
        1,
        "Questions of an update = per_device_train_batch_size x gradient_accumulation_steps, on each process.",
    )
    lr_scheduler_kwargs: dict[str, Any] | None = option(
        None,
        "Further options of the schedule: {min_lr_rate: 0.1} for cosine_with_min_lr falls to a tenth of the "
        "learning rate.",
    )
    warmup_steps: NotNegative = option(0.0, "Number of updates in which the learning rate rises.")
    max_grad_norm: NotNegative = option(1.0, "Norm to which the gradient of each policy is clipped; 0: no clipping.")
    weight_decay: NotNegative = option(
        0.0, "Weight decay of AdamW, also in the stages of a loop. Norms and biases have none."
    )
    adam_beta2: Share = option(0.999, "Second beta of AdamW.")
    optim: Literal["adamw_torch_fused", "adamw_torch", "adamw_bnb_8bit", "paged_adamw_8bit"] = option(
        "adamw_torch_fused",
        "Optimizer: adamw_torch_fused, adamw_torch; or adamw_bnb_8bit, paged_adamw_8bit, which keep two bytes of "
        'state for every trained number instead of eight (pip install -e ".[quantized]"). Weights of fewer than '
        "4,096 numbers keep eight.",
    )
    gradient_checkpointing: bool = option(False, "Recompute activations in the backward pass to save memory.")
    use_liger_kernel: bool = option(
        False,
        "Compute norms, activations and rotations of learners by Liger's kernels, on an accelerator (pip install "
        "liger-kernel). An update is faster; results differ by rounding.",
    )
    bf16: bool = option(False, "Mixed precision: float32 weights, bfloat16 arithmetic.")
    use_cpu: bool = option(False, "Train on the CPU even if there is a GPU.")
    save_steps: Natural = option(
        500,
        "Save a checkpoint every so many updates, and after the last one; 0: save only the final weights.",
    )
    save_total_limit: Positive | None = option(None, "How many checkpoints are kept; the oldest go first.")
    eval_steps: Natural | None = option(
        None,
        "Evaluate every so many updates; None or 0: only before and after training.",
    )
    metric_for_best_model: str | None = option(
        None,
        "The metric that decides which evaluation is the best, such as accuracy/turn_2, or accuracy/turn_2/ann.",
    )
    load_best_model_at_end: bool = option(
        False,
        "End with the weights of the best of the evaluations that eval_steps makes, which are saved as a checkpoint.",
    )
    report_to: list[str] = option([], "Where else to log: tensorboard, wandb, trackio, mlflow.")
    critic_per_turn: bool = option(True, "Give the critic's head one output for each turn.")
    critic_context: Literal["dialogue", "answer", "joint"] = option(
        "dialogue",
        "What the critic reads before an answer: dialogue (all that its agent saw), answer (the question only), "
        "or joint (the question and everything that all agents have said so far).",
    )
    role_gradients: Natural = option(
        0,
        "Measure, every so many updates, how much of what moves a policy comes from each role that it speaks in "
        "(POLICY/role/ROLE/grad_share): one more backward pass over a minibatch. 0: never.",
    )
    balance: Literal["none", "role"] = option(
        "none",
        "role: weigh the losses of the roles that one policy speaks in, so that their gradients have one norm.",
    )
    async_depth: Natural = option(
        0,
        "Play dialogues while earlier ones are trained on; they are at most so many updates older than the "
        "weights that they train. It needs ppo.engine_tis_cap or ppo.ratio_to: sampler, and engines with copies of the "
        "weights: vllm (then at most 1), or cluster.backend: ray.",
    )
    placement: Literal["shared", "split"] = option(
        "shared",
        "Device of the learners: shared (all on the device of this process), or split (each base model, with its "
        "adapters, on a separate device).",
    )


@section()
class PupilSection:
    """The lessons of one student in the warm start, if they differ between agents."""

    skill: str | None = option(
        None,
        "The one skill of the task that the agent knows (toy_skills, toy_parts; digitwise of toy_sum). It takes "
        "every question for one that asks for it. None: all questions.",
    )
    wrong: Share = option(0.0, "Probability of a wrong answer.")
    gives_in: Share = option(
        0.0,
        "Probability that the agent repeats another agent's completion, if its prompt shows one. A solver of "
        "protocol `code` writes a program that passes the tests that it is shown (Lessons.write_agreeing).",
    )
    calls: Share = option(
        0.5,
        "Probability that an agent with tools calls one before it answers, where the task writes calls.",
    )
    together: Share = option(
        1.0,
        "Probability that an agent with limits.parallel makes all calls of a turn at once, and not one after the "
        "other.",
    )


@section()
class WarmStartSection:
    """Brief supervised training before PPO, on dialogues that an imperfect oracle plays. It is for tiny models."""

    steps: Natural = option(0, "Number of steps; 0: no warm start.")
    batch_size: Positive = option(64, "Dialogues per step.")
    learning_rate: NotNegative = option(1e-3, "Learning rate, which falls linearly to 0.")
    wrong: Share = option(
        0.3,
        "Probability that an agent is taught something wrong. What it is taught depends on its role "
        "(Lessons.write_reply).",
    )
    agents: dict[str, PupilSection] = option(
        {},
        "What single agents are taught instead, by name: {ann: {skill: next, wrong: 0.0, gives_in: 0.3}}.",
    )
    calls: Share = option(
        0.5,
        "Probability that an agent with tools calls one before it answers, where the task writes calls "
        "(Lessons.write_calls). After a call it answers rightly.",
    )

    def pupil(self, agent: str) -> PupilSection:
        """Return what ``agent`` learns."""
        return self.agents.get(agent) or PupilSection(wrong=self.wrong, calls=self.calls)


@section()
class EvaluationSection:
    """Evaluation before, after, and every ``training.eval_steps`` updates."""

    questions: Natural = option(256, "Number of questions; 0: no evaluation.")
    temperature: NotNegative = option(0.0, "Sampling temperature; 0: greedy.")
    top_p: PositiveShare = option(1.0, "The same as ppo.top_p, in evaluations.")
    top_k: Natural = option(0, "The same as ppo.top_k, in evaluations.")
    sampling: dict[str, Sampling] = option(
        {},
        "How single agents are sampled in evaluations, by their names: {ann: {temperature: 0.7}}. The values are "
        "those of agents.NAME.sampling.",
    )

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


@options(kw_only=True)
class RunOptions:
    """The options that are at the top level of a YAML file, and arguments of a trainer in Python."""

    restate: Annotated[Literal["off", "base_model"], BeforeValidator(_off)] = option(
        "off",
        "base_model: if grading finds no final answer of the required form, the untrained model restates the "
        "answer, and only graders and other agents read that.",
    )
    dialogues_logged: Natural = option(4, "Number of dialogues of each update that are written to dialogues.jsonl.")


@section(frozen=False)
class Config(RunOptions):
    """The configuration of a run."""

    output_dir: str = option(
        help="The folder to which the run writes config.yaml, metrics.jsonl, dialogues.jsonl, checkpoints and "
        "final/. A run never overwrites an existing run.",
    )
    task: dict[str, Any] = option(
        help="What is asked, and how answers are graded: the name of a task and its options. Every task also has "
        "`seed`, which draws the questions that are held out. Its default is the run's `seed`. Runs with one "
        "task.seed hold out the same questions, whatever their own seeds are.",
    )
    agents: Annotated[dict[str, AgentSection], Field(min_length=1)] = option(
        help="Who speaks, by name and in speaking order.",
    )
    protocol: dict[str, Any] = option(
        {"name": "debate"},
        "Who speaks when, and what each speaker sees: the name of a protocol and its options. A list `agents` in "
        "it restricts who plays. A mapping `sampling` in it has the sampling of roles, as {solver: {temperature: "
        "0.7}}; it wins over that of agents. With step_judge: {agent: judge, samples: 3}, an agent says "
        "afterwards of each utterance whether it was a good step; the rule consistency pays it.",
    )
    seed: Annotated[int, Field(ge=0, lt=2**32)] = option(0, "Seed of everything random.")
    updates: Positive = option(100, "Number of updates.")
    branching: BranchingSection = option(
        help="How many dialogues are played for each question while training, and where they fork.",
        factory=BranchingSection,
    )
    reward: RewardSection = option(
        help="Where scores come from, and how turns and agents share them.",
        factory=RewardSection,
    )
    advantage: AdvantageConfig = option(
        help="How credits become advantages: a return, minus a baseline, divided by a scale, over rows with the same "
        "key; then transforms.",
        factory=AdvantageConfig,
    )
    schedule: Schedule = option(help="Who learns what, and when.", factory=Schedule)
    ppo: PPOOptions = option(help="Proximal policy optimisation.", factory=PPOOptions)
    training: TrainingOptions = option(
        help="How the training runs. The names are those of transformers.TrainingArguments, counted in updates.",
        factory=TrainingOptions,
    )
    warm_start: WarmStartSection = option(
        help="Brief supervised training before PPO, for tiny models that know nothing yet. It trains on dialogues that "
        "an oracle plays, and the oracle is sometimes wrong.",
        factory=WarmStartSection,
    )
    evaluation: EvaluationSection = option(
        help="Evaluation on held-out questions, before and after training.",
        factory=EvaluationSection,
    )
    only_in_python: dict[str, str] = option(
        {},
        "Parts of a run made in Python that no configuration can build, by key. A run writes this itself; leave "
        "it empty.",
    )
    pythonpath: Annotated[list[str], BeforeValidator(_listed)] = option(
        [],
        "Folders in which modules of your own are looked for, beside this file's folder and the installed "
        "environment. Wherever a name stands for a task, a protocol, a game, a reward source, a reward rule, a "
        "part of the advantage or an objective, a class or function of your own can stand as MODULE:OBJECT. For "
        'example, `name: "reversal:Reversal"` is the class Reversal in reversal.py. Folders are relative to this '
        "file.",
    )
    tools: dict[str, ToolSection] = option(
        {},
        'Tools that agents may call, by name: {add: {use: "mycode:add"}} (docs/howto/tools.md).',
    )
    environments: dict[str, EnvironmentSection] = option(
        {},
        'Environments in which agents act, by name: {shop: {use: "mycode:Shop"}} (docs/howto/environments.md).',
    )
    loop: brought("maporl.loops.section:LoopSection") = option(  # type: ignore[valid-type]
        help="An outer loop. With stages, `maporl train` does not run PPO: it samples with the team, makes data sets "
        "of what was said, trains on them by TRL, evaluates, and repeats (docs/howto/loops.md).",
        factory=made("maporl.loops.section:LoopSection"),
    )
    cluster: brought("maporl.integrations.ray.section:ClusterSection") = option(  # type: ignore[valid-type]
        help="Where the run trains and samples. docs/cluster.md says when another place than this process is worth it.",
        factory=made("maporl.integrations.ray.section:ClusterSection"),
    )

    @property
    def stages(self) -> list[Any]:
        """What an outer loop trains in a round (:mod:`maporl.loops`); empty: PPO alone trains the team."""
        return [] if self.loop is None else self.loop.stages

    @property
    def grouped(self) -> bool:
        """Whether the policies sample and learn elsewhere (:data:`maporl.config.backends.BACKENDS`), and not in the
        processes of the launcher."""
        return self.cluster is not None and self.cluster.backend != "local"

    @property
    def tiny(self) -> bool:
        """Whether all weights of the team are of tiny models, whose operations are too short for several threads."""
        return all(agent.tiny is not None for agent in self.agents.values() if agent.weights)

    def of(self, agent: str) -> "Config":
        """Return the configuration as an agent's policy learns by it: its algorithm over the sections of the team.

        Raises:
            ConfigError: its options exclude each other, or exclude some of the team's.
        """
        own = copy.copy(self)
        try:
            algorithm = self.agents[agent].learns_by
            if algorithm == OF_TEAM:
                return self
            own.advantage = algorithm.advantages(self.advantage)
            own.ppo = dataclasses.replace(self.ppo, **algorithm.ppo)
            own.training = dataclasses.replace(self.training, **algorithm.of_learner)
        except ValueError as error:
            raise ConfigError(f"agents.{agent}.algorithm: {error}") from None
        if algorithm.critic_warmup is not None:
            own.schedule = dataclasses.replace(self.schedule, critic_warmup=algorithm.critic_warmup)
        return own

    def questions_per_update(self) -> int:
        """Return the number of questions that a process plays in an update."""
        return self.training.per_device_train_batch_size * self.training.gradient_accumulation_steps
