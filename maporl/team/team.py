"""A team: its agents by name, and their policies."""

import copy
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from peft import PeftConfig, PeftModel
from torch import nn
from transformers import PreTrainedModel

from maporl.config import Config
from maporl.config.algorithm import OF_CENTRAL
from maporl.config.engines import has_weights
from maporl.decoding import TeamSampling
from maporl.team.agents import Agent, Policy, Voice
from maporl.team.loading import load_agents, load_tokenizers, on_one_base
from maporl.team.saved import check_complete, read_team
from maporl.team.saving import save_team
from maporl.team.weights import load_trained_weights
from trl_ext.chat.encoding import Tokenizer, check_tokenizer
from trl_ext.errors import short_trace
from trl_ext.files.paths import fault_of_name
from trl_ext.learning.central_critic import CentralCritic
from trl_ext.learning.checks import check_apart, check_policy_model
from trl_ext.learning.config import PPOv2Config
from trl_ext.learning.learner import Learner
from trl_ext.learning.policy import starting_point
from trl_ext.models.adapters import adapter_parameters, check_company
from trl_ext.models.forward import base_of, room_of
from trl_ext.ppo.options import Grammar, PPOOptions
from trl_ext.process.random_states import forked_rng
from trl_ext.sampling.grammar import GrammarError, grammars_of


def _check_algorithm(agent: Agent, entry: Agent) -> None:
    """Check that an agent with other weights at each turn learns by the algorithm that these ``entry`` weights have.

    Raises:
        ValueError: one of them has options that nothing would read.
    """
    own, there = agent.learns_by, entry.learns_by
    if own.of_policy not in ({}, there.of_policy) or there.advantage not in ({}, own.advantage):
        raise ValueError(
            f"agent {agent.name!r}: by_turn: {entry.name!r} has another algorithm; an entry has what its policy learns "
            "by, and the agent has the advantage of what it says"
        )


class Team:
    """The agents by name, in speaking order, and the policies that speak for them.

    Raises:
        ValueError: the agents' names, models, tokenizers or adapters do not fit each other. The message says what to
            do.
    """

    def __init__(self, agents: list[Agent]):
        names = [a.name for a in agents]
        if not agents or len(set(names)) != len(names):
            raise ValueError(f"a team needs agents with different names, got {names}")
        self.agents = {a.name: a for a in agents}
        self.policies: dict[str, Policy] = {}
        self.policies_of: dict[str, tuple[Policy, ...]] = {}
        for agent in agents:
            if has_weights(agent.engine):
                speaking = [self._policy(entry) for entry in agent.by_turn or (agent,)]
                for entry in agent.by_turn:
                    _check_algorithm(agent, entry)
                if any(p.tokenizer is not speaking[0].tokenizer for p in speaking):
                    raise ValueError(f"agent {agent.name!r}: by_turn: its turns continue one conversation; give every "
                                     "entry the very same tokenizer object")  # fmt: skip
                for name in dict.fromkeys(p.name for p in speaking):
                    self.policies[name].agents.append(agent.name)
                self.policies_of[agent.name] = tuple(speaking)

    @classmethod
    @short_trace
    def on_one_base(
        cls,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        agents: Sequence[str | Agent],
        lora: PeftConfig | None = None,
    ) -> "Team":
        """Return a team whose agents have an adapter each, all on one ``model`` in memory.

        The base does not change. Before training all agents answer alike, because a new LoRA begins as the identity.

        Args:
            model: the base model.
            tokenizer: its tokenizer, which all agents use.
            agents: their names in speaking order, or :class:`maporl.Agent` without a model, for a role or a system
                prompt. Those that name one ``policy`` share an adapter.
            lora: what each adapter is. By default the LoRA of a configuration: rank 16, alpha 32, all linear layers.

        Raises:
            ValueError: an agent brings a model or an adapter of its own, or its name is that of a part of the model.
            WeightsError: the adapters' initialisation would change the base that they share.
        """
        return cls(on_one_base(model, tokenizer, agents, lora))

    def _policy(self, agent: Agent) -> Policy:
        """Return the policy of an agent, or of one of its turns. The first call builds it."""
        name = agent.policy or agent.name
        if name in self.policies:
            policy = self.policies[name]
            if agent.learns_by.of_policy not in ({}, policy.algorithm.of_policy):
                raise ValueError(
                    f"agent {agent.name!r}: speaks with the weights of {', '.join(policy.agents)} (policy {name!r}) "
                    f"and learns by {agent.learns_by.of_policy}, and they by {policy.algorithm.of_policy}; give them "
                    "one algorithm, or a policy each (each may have its own advantage)"
                )
            return policy
        if fault := fault_of_name(name):  # its weights are saved in a folder of this name
            raise ValueError(f"policy {name!r:.80}: its name {fault}; use letters, digits, '-' and '_'")
        if agent.model is None or agent.tokenizer is None:
            raise ValueError(f"agent {agent.name!r}: pass a model and its tokenizer, or engine='human'")
        check_tokenizer(agent.tokenizer, f"agent {agent.name!r}")
        adapter = agent.adapter
        if isinstance(agent.model, PeftModel):
            adapter = adapter or agent.model.active_adapter
            if adapter not in agent.model.peft_config:
                raise ValueError(f"agent {agent.name!r}: no adapter {adapter!r}, but {list(agent.model.peft_config)}")
        elif adapter is not None:
            raise ValueError(f"agent {agent.name!r}: no adapter {adapter!r}; the model has none: pass a PeftModel")
        check_policy_model(agent.model, agent.tokenizer, f"agent {agent.name!r}: model")
        for other in self.policies.values():
            if other.model is not agent.model:
                check_apart(
                    {f"policy {other.name!r}": other.model, f"policy {name!r}": agent.model},
                    "load the model once for each, or give each an adapter of one PeftModel (add_adapter)",
                )
            elif other.adapter != adapter:
                check_company(agent.model, [str(other.adapter), str(adapter)])
            else:
                raise ValueError(
                    f"policies {other.name!r} and {name!r} bring the same weights; give their agents one policy name "
                    "to share them, or a model (or adapter) each. An agent without an adapter needs a model of its "
                    "own, loaded a second time"
                )
        voice = Voice(name, agent.tokenizer, room_of(base_of(agent.model)))
        policy = Policy(voice, agent.model, adapter, agent.trainable, agent.learns_by)
        self.policies[name] = policy
        return policy

    def names(self) -> tuple[str, ...]:
        """Return the agents' names in speaking order."""
        return tuple(self.agents)

    def voice_of(self, agent: str) -> Voice | None:
        """Return the text side of an agent's first policy, or None if no weights here speak for it."""
        speaking = self.policies_of.get(agent, ())
        return speaking[0].voice if speaking else None

    def sampling(self, given: TeamSampling | None = None) -> TeamSampling:
        """Return ``given`` with the agents' own sampling, which they have in training. That in ``given`` wins."""
        given = given or TeamSampling()
        by_agent = {name: agent.sampling for name, agent in self.agents.items() if agent.sampling is not None}
        return replace(given, agents=by_agent | dict(given.agents))

    def check_structured_outputs(self, sampling: TeamSampling) -> None:
        """Check that the policies' tokenizers can follow what ``sampling`` holds their answers to.

        Raises:
            GrammarError: a grammar is wrong, or a tokenizer cannot follow any.
        """
        for name, policies in self.policies_of.items():
            for form in sampling.every(name, "structured_output"):
                for policy in policies:
                    grammar = Grammar(form.text, tuple(sorted(policy.stop_ids)))
                    try:
                        grammars_of(policy.tokenizer, len(policy.tokenizer)).matcher(grammar)
                    except GrammarError as error:
                        raise GrammarError(f"agent {name!r}: structured_output: {error}") from None

    def find_stop_ids(self, options: PPOOptions) -> None:
        """Fill in the token ids and the strings that end completions, for every policy.

        Raises:
            ValueError: a policy has no known end-of-sequence id.
        """
        for policy in self.policies.values():
            policy.find_stop_ids(options)

    def _outputs(self, args: PPOv2Config, turns: int) -> int:
        """Return the number of outputs of a critic: one for each turn, or one."""
        return turns if getattr(args, "critic_per_turn", False) else 1

    def critics(self, args: PPOv2Config, reading: Collection[str] | None = None) -> dict[str, str]:
        """Return the kind of critic of each policy that is trained. Those that are not ``reading`` values have none."""
        return {
            policy.name: policy.algorithm.arguments(args).critic
            if reading is None or policy.name in reading
            else "none"
            for policy in self.policies.values()
            if policy.trainable
        }

    def build_central_critic(
        self, args: PPOv2Config, turns: int = 1, reading: Collection[str] | None = None
    ) -> CentralCritic | None:
        """Build the critic that policies share, as a copy of the first one's model. None if no policy has one.

        The arguments are those of :meth:`build_learners`.

        Raises:
            ValueError: the policies that share it have different vocabularies, or options of it that differ.
        """
        sharing = [self.policies[name] for name, kind in self.critics(args, reading).items() if kind == "central"]
        shared = [policy.algorithm.arguments(args) for policy in sharing]
        for policy, own in zip(sharing[1:], shared[1:], strict=True):
            for option in OF_CENTRAL:
                mine, first = getattr(own, option, None), getattr(shared[0], option, None)
                if mine != first:
                    raise ValueError(
                        f"critic: central is one critic of policies {sharing[0].name!r} and {policy.name!r}, whose "
                        f"{option} differ: {first!r} and {mine!r}; give them the same, or a critic each"
                    )
            if policy.tokenizer.get_vocab() != sharing[0].tokenizer.get_vocab():
                raise ValueError(
                    f"critic: central reads the tokens of all policies, but {sharing[0].name!r} and {policy.name!r} "
                    "have different vocabularies; give them one tokenizer, or use critic: head"
                )
        if not sharing:
            return None
        own = copy.copy(shared[0])
        own.learning_rate = args.learning_rate  # whatever the rates of the policies
        with sharing[0].active():
            return CentralCritic(sharing[0].model, own, self._outputs(own, turns))

    def build_learners(
        self,
        args: PPOv2Config,
        turns: int = 1,
        reading: Collection[str] | None = None,
        central: CentralCritic | None = None,
    ) -> dict[str, Learner]:
        """Build one learner for each trainable policy, each with its own algorithm over the trainer's arguments.

        Args:
            args: the trainer's arguments.
            turns: the turns of the protocol, for each of which a critic has an output if ``critic_per_turn`` says so.
            reading: the policies whose advantages read a critic's values, by default all. The others have no critic.
            central: the critic that policies share, if there is one.

        Raises:
            ValueError: no policy is trainable.
        """
        learners = {}
        for name, kind in self.critics(args, reading).items():
            policy = self.policies[name]
            own = policy.algorithm.arguments(args)
            learners[name] = Learner(
                policy,
                own,
                critic=kind,
                central_values=central.values if central is not None and kind == "central" else None,
                ref_adapter=starting_point(policy.model, policy.adapter) if policy.adapter and own.kl_coef else None,
                outputs=self._outputs(own, turns),
            )
        if not learners:
            raise ValueError("no policy of the team is trainable; set trainable=True for at least one agent")
        return learners

    def drop_weights(self) -> None:
        """Move the parameters of all policies to the meta device, because other processes hold their weights.

        The models stay usable for what needs no weights, such as their configurations. Buffers stay.
        """
        empty: dict[int, nn.Parameter] = {}  # tied parameters stay tied
        for module in (module for policy in self.policies.values() for module in policy.model.modules()):
            for name, weight in module._parameters.items():
                if weight is not None and not weight.is_meta:
                    value = empty.setdefault(
                        id(weight), nn.Parameter(torch.empty_like(weight.data, device="meta"), weight.requires_grad)
                    )
                    module._parameters[name] = value

    def count_parameters(self) -> dict[str, tuple[int, int]]:
        """Return the number of all parameters and of trained parameters, by policy."""
        counts = {}
        for policy in self.policies.values():
            if policy.adapter is None:
                trained = list(policy.model.parameters())
            else:
                trained = list(adapter_parameters(policy.model, policy.adapter).values())
            everything = sum(p.numel() for p in base_of(policy.model).parameters())
            counts[policy.name] = (everything, sum(p.numel() for p in trained) if policy.trainable else 0)
        return counts

    @short_trace
    def save(self, folder: str | Path) -> None:
        """Save the team in a new folder: all policies, their tokenizers, and a ``config.yaml`` with the agents.

        Each policy has a folder of its own, whether it is trained or not: a model, or an adapter. The model below
        adapters is saved too, unless a folder or the hub has it. :meth:`from_pretrained` loads the team. ``maporl
        eval`` and ``maporl play`` need a task and a protocol besides, as in ``maporl play FOLDER task.name=gsm8k
        protocol.name=debate``.

        Raises:
            RunExists: the folder is not empty.
            ConfigError: an agent cannot be described, because its turns have different kinds of models or options.
        """
        save_team(self.agents, self.policies_of, Path(folder))

    @classmethod
    @short_trace
    def from_config(cls, config: Config, weights: bool = True) -> "Team":
        """Load or build the agents of a configuration. All tokenizers are checked before any model is loaded.

        Adapters of the same model share one base. ``weights=False`` builds the models on the meta device without
        reading weights, for counting parameters.

        Raises:
            ConfigError: a model or tokenizer cannot be loaded, or they do not fit each other.
        """
        tokenizers = load_tokenizers(config)
        with nullcontext() if weights else torch.device("meta"):
            return cls(load_agents(config, tokenizers, weights))

    @classmethod
    @short_trace
    def from_pretrained(cls, name: str | Path, overrides: Sequence[str] = ()) -> "Team":
        """Load the trained team of a run's folder, or of a hub repository that ``maporl push`` made.

        ``overrides`` are ``KEY=VALUE`` as on the command line. For example, ``["agents.ann.model=org/base"]`` helps if
        an adapter's base has moved.

        Raises:
            RunError: no such team exists, or its configuration refers to something outside its folder.
            ConfigError: this version cannot read its configuration, or a model cannot be loaded.
        """
        config, folder = read_team(name, overrides)
        check_complete(config, folder)
        with forked_rng():
            torch.manual_seed(config.seed)  # tiny models are random, and the run built them with this seed
            team = cls.from_config(config)
        load_trained_weights(team.policies, folder)
        return team
