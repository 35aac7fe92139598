"""The options of the verifier's three commands, each declared once: the command line is made from these fields.

Imports no torch.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

from yaml import YAMLError

from maporl.config.engines import has_weights
from maporl.config.imports import unknown
from maporl.config.parse import validated
from maporl.config.safe_yaml import parse_yaml
from maporl.config.schema import Config, TinySection
from maporl.errors import ConfigError, one_line
from trl_ext.ppo.options import AboveZero, Natural, Positive, PositiveShare, ProperShare, check_options, option


@dataclass(frozen=True)
class SamplingOptions:
    """How answers are sampled and labelled. Each batch draws its temperature uniformly between the two bounds.

    Raises:
        ConfigError: a value is outside its range; so do the classes below.
    """

    temperature_low: AboveZero = option(1.3, "Each batch draws its temperature from this ...")
    temperature_high: AboveZero = option(1.5, "... to this.")
    top_p: PositiveShare = option(0.9, "Sample from the most likely tokens of this much probability.")
    batch_size: Positive = option(64, "Answers sampled at a time.")
    judge: str | None = option(None, "This agent labels by yes or no, in place of the grader.")

    def __post_init__(self):
        _check_numbers(self)
        if self.temperature_high < self.temperature_low:
            raise ConfigError(
                f"--temperature-high: expected at least {self.temperature_low}, got {self.temperature_high}"
            )


@dataclass(frozen=True)
class GenerateOptions(SamplingOptions):
    """Which questions are answered, how often and by whom."""

    per_question: Positive = option(100, "Samples of each question by each agent.")
    limit: Positive | None = option(None, "The first questions only.")
    agents: tuple[str, ...] = option((), "Who answers; default: all but the judge.", name="--agent")


@dataclass(frozen=True)
class BalanceOptions(SamplingOptions):
    """How many answers of a question are kept, and how a question that lacks right or wrong ones gets more of them."""

    per_question: Positive = option(10, "At most so many right, and as many wrong, answers of a question.")
    rounds: Natural = option(4, "Most rounds of hints; 0 needs no model.")
    per_round: Positive = option(8, "Samples of a short side in a round.")
    short: Literal["cut", "drop"] = option("cut", "What becomes of questions that stay short.")
    """``cut``: to as many right as wrong answers; ``drop``: the question goes."""
    free_form: bool = option(False, "Answers have no final-answer line (open-ended tasks).")
    repeats: bool = option(False, "Count equal answers separately (short answers have one right text).")
    agent: str | None = option(None, "Who is given hints; default: the first.")
    seed: int = 0


def read_tiny(given: str | None) -> TinySection | None:
    """Return the tiny model that the text of ``--tiny`` describes, by the keys of an agent's ``tiny``.

    Raises:
        ConfigError: it is something else than a mapping, or a key or a value is wrong.
    """
    if given is None:
        return None
    try:
        values = parse_yaml(given, "--tiny")
    except YAMLError as error:
        raise ConfigError(f"--tiny: {one_line(error)}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"--tiny: expected a mapping such as '{{hidden_size: 64}}', got {given!r:.80}")
    section: TinySection = validated(TinySection, values, "--tiny")
    return section


@dataclass(frozen=True)
class TrainOptions:
    """How a verifier is trained. What is trained is kept in float32 even where the weights are in bfloat16.

    Its model is ``model``, ``tiny``, or that of an agent (:meth:`of_agent`).

    Raises:
        ConfigError: a value is outside its range, or there are two models.
    """

    model: str | None = option(
        None, "In place of CONFIG, a causal language model: folder or hub name.", show_default=False
    )
    tiny: TinySection | None = option(
        None,
        "In place of both, a tiny random model that is built without a download: '{hidden_size: 64, layers: 2}'.",
        show_default=False,
        read=read_tiny,
    )
    agent: str | None = option(None, "With CONFIG, whose model the verifier begins with; default: the first agent's.")
    tokenizer: str | None = option(None, "Tokenizer, if it is not the model's own.", show_default=False)
    loss: Literal["every", "last"] = option("every", "At every answer token, or at the last.")
    lora_r: Positive = 16
    lora_alpha: Positive = 32
    learning_rate: AboveZero = 2e-4
    batch_size: Positive = option(8, "Rows trained on at a time.")
    epochs: AboveZero = 1.0
    longest: Positive = option(550, "Longer rows, in tokens, are dropped.")
    held_out: ProperShare = option(0.1, "Share of the questions to evaluate on.")
    bf16: bool = option(False, "Weights in bfloat16.")
    use_cpu: bool = option(False, "Use the CPU even where there is an accelerator.")
    save_anyway: bool = option(False, "Save a verifier that is not better than chance, or cannot be measured.")
    chat_template: str | None = option(None, "For base models: 'fallback', or a Jinja file.")
    seed: int = 0

    def __post_init__(self):
        if self.model is not None and self.tiny is not None:
            raise ConfigError("--model, --tiny: expected one of the two, got both")
        if self.tiny is not None and self.tokenizer is not None:
            raise ConfigError("--tokenizer: a tiny model has a tokenizer of its own; remove it, or give --model")
        _check_numbers(self)

    def of_agent(self, config: Config) -> "TrainOptions":
        """Return these options with the model, tokenizer and chat template of an agent of ``config``.

        A tokenizer or template of these options stays. An adapter of the agent is not part of its model here.

        Raises:
            ConfigError: the options have a model already, the configuration has no such agent, or no model speaks
                for it.
        """
        if self.model is not None or self.tiny is not None:
            raise ConfigError("--model, --tiny: CONFIG says which model the verifier begins with; give one of them")
        speaking = {name: agent for name, agent in config.agents.items() if has_weights(agent.engine)}
        name = self.agent or next(iter(speaking), "")
        if name not in speaking:
            what = "no model speaks for this agent" if name in config.agents else unknown(name, speaking)
            raise ConfigError(f"--agent {name}: {what}; name an agent of CONFIG that has a model, or give --model")
        agent = speaking[name]
        template = self.chat_template or agent.chat_template
        tokenizer = self.tokenizer or agent.tokenizer
        return replace(self, model=agent.model, tiny=agent.tiny, tokenizer=tokenizer, chat_template=template)


def _check_numbers(options: Any) -> None:
    try:
        check_options(options)
    except ValueError as error:
        name, colon, told = str(error).partition(":")
        raise ConfigError(f"--{name.replace('_', '-')}{colon}{told}") from None
