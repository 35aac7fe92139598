"""From a configuration to the groups that a cluster would hold: their models, and their work in an update."""

from transformers import AutoConfig

from maporl.config.schema import AgentSection, Config
from maporl.errors import ConfigError
from maporl.planning.estimates import Model, Work
from maporl.planning.placements import Group
from maporl.protocols import speakers, turns_of
from maporl.rollout.branching import BRANCHINGS
from maporl.team.loading import policy_names
from maporl.validation.memory import shape_of
from trl_ext.weights import read_pretrained

BETWEEN = 100
"""Tokens around the answers that an agent hears, which nothing else says."""


def groups_of(
    config: Config,
    dialogues: int | None = None,
    question: int = 200,
    answer: int | None = None,
    heard: int | None = None,
) -> list[Group]:
    """Return a group for each policy that is trained.

    Args:
        config: the configuration.
        dialogues: those of an update. By default what the batch and the branching of one process make.
        question: the tokens of a first prompt.
        answer: the tokens of a mean answer. By default half of ``ppo.response_length``, which is the longest.
        heard: the tokens that are new to an agent before a later answer. By default the answers of the other agents, and 100.

    Raises:
        ConfigError: a policy is an adapter or a tiny model.
    """
    players = speakers(config.protocol, tuple(config.agents))
    turns, longest = turns_of(config), config.ppo.response_length
    mean = min(longest, answer or max(1, longest // 2))
    steps = [len(players)] * turns
    played = dialogues or config.questions_per_update() * BRANCHINGS[config.branching.how].dialogues(
        config.branching, steps
    )
    listens = heard if heard is not None else (len(players) - 1) * mean + BETWEEN
    speaks: dict[str, int] = {}
    owners: dict[str, AgentSection] = {}
    for name in players:
        section = config.agents[name]
        if not section.trainable or not section.weights:
            continue
        if section.lora is not None or section.adapter is not None:
            raise ConfigError(
                f"plan: agents.{name} trains an adapter, and adapters are not planned for yet; adapters of one base share one forward "
                "on one device, so few of them need a cluster (docs/scaling.md)"
            )
        for policy in policy_names(name, section, config):
            owners.setdefault(policy, section)
            speaks[policy] = speaks.get(policy, 0) + 1
    work = {
        policy: Work(
            played * number,
            turns,
            question,
            listens,
            mean,
            longest,
            config.ppo.num_ppo_epochs,
            bool(config.ppo.kl_coef),
        )
        for policy, number in speaks.items()
    }
    return [Group(policy, model_of(section), work[policy]) for policy, section in owners.items()]


def model_of(section: AgentSection) -> Model:
    """Return the sizes of an agent's model. Its parameters are counted, without weights; the rest is in its configuration.

    Raises:
        ConfigError: the agent's model is a tiny one.
    """
    if section.tiny is not None or section.model is None:
        raise ConfigError("plan: tiny models need no cluster; give the agents models by agents.NAME.model")
    shape, whole = shape_of(section), read_pretrained(AutoConfig, section.model)
    text = whole.get_text_config()
    heads = text.num_attention_heads
    head = getattr(text, "head_dim", None) or text.hidden_size // heads
    return Model(
        parameters=shape.parameters,
        layers=shape.layers,
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        queries=head * heads,
        keys=shape.keys,
        vocabulary=shape.vocabulary,
        tied=bool(whole.tie_word_embeddings),
    )
