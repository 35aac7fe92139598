"""The backend ``tinker``: every policy is a LoRA on a service, and this process holds no weights."""

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import RLock
from typing import Any

from transformers import AutoModelForCausalLM

from maporl.config import Config
from maporl.engines.base import Engine
from maporl.engines.text import TextEngine
from maporl.errors import ConfigError, refuse
from maporl.integrations.tinker.check import config_faults
from maporl.integrations.tinker.engine import TinkerEngine, greedy, prompt_logprobs
from maporl.integrations.tinker.learner import TinkerLearner, TinkerLearning
from maporl.integrations.tinker.probe import probe
from maporl.integrations.tinker.service import Adapter, Service, SessionLost
from maporl.rollout.player import Player
from maporl.rollout.restate import UntrainedWeights
from maporl.schedules import OpponentPool
from maporl.team.agents import Policy
from maporl.team.loading import load_agents, load_tokenizers
from maporl.team.past_policies import PastPolicies, text_side
from maporl.team.team import Team
from maporl.training.home import OWN_WEIGHTS, TeamHome
from maporl.training.parts import RunParts
from maporl.training.run_record import RunRecord
from trl_ext.models.weights import read_pretrained
from trl_ext.ppo.options import GREEDY
from trl_ext.process.messages import tell


class TinkerHome(TeamHome):
    """Trains and samples on services that speak the Tinker API.

    Args:
        cluster: the section ``cluster`` of a configuration.
        quiet: whether to say nothing of what the probe finds.

    Raises:
        ConfigError: the SDK is missing.
    """

    keeps = "service"

    def __init__(self, cluster: Any, quiet: bool = False):
        super().__init__({})
        self.cluster, self.quiet = cluster, quiet
        self.services: dict[str | None, Service] = {}
        self.adapters: dict[str, Adapter] = {}
        self._bases: dict[str, tuple[Service, str, int]] = {}
        """The service of each policy, the name of its base model, and the number of its session."""
        self._samplers: dict[str, Any] = {}
        self._snapshots: dict[str, str] = {}
        """For each policy that speaks with past weights, the address of those that it has."""
        self._lock = RLock()
        self._config: Config | None = None

    # -- the run ------------------------------------------------------------------------------------------------------

    def load_team(self, config: Config, team: Team | None, begin: Callable[[Team], None]) -> Team:
        """Return the team without weights.

        Raises:
            ConfigError: a part of the configuration does not work on a service, or ``team`` brings weights.
        """
        if team is not None:
            raise ConfigError("cluster.backend: a team with weights cannot go to a service; name models in agents")
        refuse(config_faults(config))
        self._config = config
        return Team(load_agents(config, load_tokenizers(config), only=()))

    def past_policies(self, section: OpponentPool, team: Team, seed: int) -> PastPolicies:
        """Return the past opponents of a run, which are snapshots that the service keeps."""
        return TinkerPast(section, team, seed, self)

    def untrained(self, team: Team, batch_size: int) -> UntrainedWeights:
        """Return the base models of ``team``: a new LoRA does not change its base."""
        return TinkerUntrained(team, self)

    def prepare(self, parts: RunParts, player: Player, past: PastPolicies | None, record: RunRecord) -> None:
        """Build the learners. Nothing is asked of a service yet.

        Raises:
            ConfigError: the trainer was made without a configuration.
            ValueError: no policy is trainable.
        """
        config, args, team, section = self._config, parts.args, parts.team, self.cluster.tinker
        if config is None:
            raise ConfigError("cluster.backend: tinker: its models are named by a configuration; use build_trainer")
        for number, (name, policy) in enumerate(team.policies.items()):
            agent = config.agents[policy.agents[0]]
            url = section.base_url if agent.tinker is None else agent.tinker.base_url or section.base_url
            if url not in self.services:
                self.services[url] = Service(
                    url, section.key_variable, section.sessions, self.cluster.failures.deadline
                )
            service, model = self.services[url], str(agent.model)
            self._bases[name] = service, model, number
            if policy.trainable and agent.lora is not None:
                self.adapters[name] = Adapter(
                    service, f"policy {name!r}", model, agent.lora.r, args.seed + number, number
                )
        self.learners = {}
        for name, kind in team.critics(args, parts.reads_values).items():
            own, agent = team.policies[name].algorithm.arguments(args), config.agents[team.policies[name].agents[0]]
            critic = None if kind == "none" or agent.tinker is None else agent.tinker.critic
            value = None if critic is None else read_pretrained(AutoModelForCausalLM, critic)
            outputs = parts.protocol.turns if getattr(own, "critic_per_turn", False) else 1
            more: Any = {"critic": kind, "value_model": value, "outputs": outputs}
            base = partial(self.base, name)
            self.learners[name] = TinkerLearner(self.adapters[name], base, team.policies[name], own, **more)
        if not self.learners:
            raise ValueError("no policy of the team is trainable; set trainable=True for at least one agent")

    def start(self, args: Any, accelerator: Any, updates: int) -> TinkerLearning:
        """Probe each service with each base model, and return what trains the policies.

        Raises:
            ServiceFailure: a service does not answer, or does what cannot be trained with. The message says what.
        """
        for learner in self.learners.values():
            learner.prepare(accelerator, updates)
        probed: dict[tuple[str | None, str], Adapter] = {}
        for adapter in self.adapters.values():
            probed.setdefault((adapter.service.url, adapter.base), adapter)
        clips = any(learner.args.max_grad_norm for learner in self.learners.values())
        for adapter in probed.values():
            words = probe(adapter.service, adapter.base, self.learners_tokens(adapter), clips)
            for line in () if self.quiet else words:
                tell(line)
        return TinkerLearning(dict(self.learners), args, accelerator.device, self.reopen)

    def learners_tokens(self, adapter: Adapter) -> int:
        """Return the number of tokens that the tokenizer of an adapter's policy has."""
        return next(len(one.tokenizer) for one in self.learners.values() if one.remote is adapter)

    def engines(self, parts: RunParts) -> dict[str, Engine]:
        """Return the engines of the agents. One samples on the services, in place of those that do it here."""
        tokens = TinkerEngine(self, self.cluster.on_update == "finish")
        engine = TextEngine(parts.team.policies, tokens, parts.args.response_length)
        remote = {agent.engine: engine for agent in parts.team.agents.values() if agent.engine in OWN_WEIGHTS}
        return super().engines(replace(parts, engines=remote | dict(parts.engines))) | remote

    def sampled_here(self) -> Collection[str]:
        """Return no policy: all weights are on services."""
        return ()

    def facts(self) -> dict[str, dict[str, Any]]:
        """Return what the probe has measured of each service, by base model, for the audit."""
        return {service.name: service.facts for service in self.services.values()}

    def run_ended(self) -> None:
        """Let the services forget the adapters, and end the sessions."""
        for adapter in self.adapters.values():
            adapter.unload()
        for service in self.services.values():
            service.close()
        self._samplers.clear()

    # -- sampling -----------------------------------------------------------------------------------------------------

    def base(self, policy: str) -> Any:
        """Return the SDK's client that samples from the base model of a policy."""
        service, model, number = self._bases[policy]
        with self._lock:
            key = f"{service.name} {model}"
            if key not in self._samplers:
                self._samplers[key] = service.base(model, number)
            return self._samplers[key]

    def sampler(self, policy: str) -> Any:
        """Return the SDK's client that samples from the weights that a policy had at the last update_sampler."""
        with self._lock:
            if policy not in self._samplers:
                self.update_sampler(policy)
            return self._samplers[policy]

    def update_sampler(self, policy: str) -> None:
        """Let :meth:`sampler` have the present weights of ``policy`` from now on."""
        with self._lock:
            if policy in self.adapters:
                self._samplers[policy] = self.adapters[policy].sampler()
            elif policy in self._snapshots:
                owner = self.adapters[policy.removesuffix("-past")]
                self._samplers[policy] = owner.sampler(self._snapshots[policy])
            else:
                self._samplers[policy] = self.base(policy)

    def speak_as(self, policy: str, path: str) -> None:
        """Let a policy speak with the weights of a snapshot."""
        self._snapshots[policy] = path
        self._samplers.pop(policy, None)

    def revive(self, policy: str, sampler: Any, error: BaseException) -> Exception | None:
        """Open all sessions again if ``error`` says that one is lost (:class:`Samplers`)."""
        with self._lock:
            service = self._bases.get(policy, self._bases.get(policy.removesuffix("-past")))[0]  # type: ignore[index]
            meant = service.failure(f"sample for policy {policy!r}", error)
            if not isinstance(meant, SessionLost):
                return meant
            if self._samplers.get(policy) is sampler:
                self.reopen()
            return None

    def reopen(self) -> None:
        """Open all sessions again, with the adapters as they were after the last update.

        Raises:
            SessionLost: the session was closed before the service had kept them.
        """
        with self._lock:
            for adapter in self.adapters.values():
                adapter.kept()
            for adapter in self.adapters.values():
                adapter.unload()
            for service in self.services.values():
                service.forget()
            self._samplers.clear()


class TinkerPast(PastPolicies):
    """Past opponents. A snapshot is an address at the service, and no weights come to this process."""

    def __init__(self, section: OpponentPool, team: Team, seed: int, home: TinkerHome):
        self.home = home
        super().__init__(section, team, seed)

    def _frozen(self) -> Policy:
        """Return the frozen policy with the text side alone."""
        return text_side(self.policy, self.section.agent)

    def take_snapshot(self) -> None:
        """Let the service keep the present weights."""
        adapter = self.home.adapters[self.policy.name]
        path = adapter.snapshot(f"{self.policy.name}-past-{len(self.snapshots)}-{id(adapter) % 10**6}")
        snapshots: list[Any] = [*self.snapshots, path]  # addresses in place of weights
        self.snapshots = snapshots[-self.section.keep :]

    def save(self, folder: Path) -> None:
        """Write the addresses of the snapshots into ``folder``, for a checkpoint."""
        (folder / "snapshots.json").write_text(json.dumps(self.snapshots))

    def load(self, folder: Path) -> None:
        """Read what :meth:`save` wrote."""
        self.snapshots = json.loads((folder / "snapshots.json").read_text())

    def _load(self, weights: Any) -> None:
        self.home.speak_as(self.past.name, weights)


class TinkerUntrained(UntrainedWeights):
    """The weights before training, which are those of the base models."""

    def __init__(self, team: Team, home: TinkerHome):
        self.team, self.home = team, home

    def logprobs(self, policy: str, rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[float]:
        """Return the log-probability of each completion after its prompt (:meth:`UntrainedWeights.logprobs`)."""
        sampler = self.home.base(policy)
        asked = [prompt_logprobs(sampler, [*prompt, *answer]) for prompt, answer in rows]
        told = [self._wait(policy, one) for one in asked]
        return [sum(one[-len(answer) :]) for one, (_, answer) in zip(told, rows, strict=True)]

    def complete(self, policy: str, prompts: list[list[int]], most: int) -> list[list[int]]:
        """Return the ids of the greedy completion of each prompt (:meth:`UntrainedWeights.complete`)."""
        sampler, draw = self.home.base(policy), self.team.policies[policy].voice.draw(None, GREEDY, most)
        asked = [greedy(prompt, sampler, draw) for prompt in prompts]
        return [list(map(int, self._wait(policy, one).sequences[0].tokens)) for one in asked]

    def _wait(self, policy: str, future: Any) -> Any:
        return self.home._bases[policy][0].answer(f"read with the base of policy {policy!r}", future)
