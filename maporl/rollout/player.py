"""Play dialogues without a trainer: for training, for evaluation, with people, and for judges.

Data flow: examples -> :class:`maporl.rollout.driver.RolloutDriver`, which asks engines -> dialogues. Between turns a
:class:`ScoringReferee` grades and scores what the protocol must know, and restates final answers that grading cannot
find.
"""

from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from maporl.config.call_options import CallTexts
from maporl.config.schema import RewardSection
from maporl.decoding import TeamSampling
from maporl.engines.base import Engine, Request
from maporl.engines.transcript import Transcript
from maporl.environments.base import tool_of
from maporl.environments.build import TeamTools
from maporl.environments.calls import TypedFormat
from maporl.errors import ConfigError, refuse
from maporl.evaluation.metrics import Evaluation, evaluate_dialogues, merge, turns_played
from maporl.protocols.base import Protocol, must_be_protocol
from maporl.protocols.growth import grown
from maporl.rewards.base import RewardSource, as_source, check_environments
from maporl.rewards.build import build_sources
from maporl.rewards.rules import weighed
from maporl.rewards.scoring import Scorer, mean_rewards, reward_sums
from maporl.rollout.agent_tools import formats_of_schemas, tools_of_team, typed
from maporl.rollout.driver import RolloutDriver
from maporl.rollout.episode import Referee, SpeakerSpec
from maporl.rollout.interleaving import Interleaving
from maporl.rollout.restate import UntrainedWeights, restate
from maporl.schedules import Growth
from maporl.tasks.base import Task
from maporl.team.team import Team
from maporl.types import Ask, Dialogue, Example, Message, Utterance
from trl_ext.ppo.options import GREEDY, Decoding, PPOOptions
from trl_ext.process import distributed
from trl_ext.process.random_states import forked_generators, forked_rng


class ScoringReferee(Referee):
    """Grades and scores utterances between turns, because the protocol shows the results to agents or decides by them.

    It also restates final answers that grading cannot find. It works on all utterances of a step in one batch.

    Args:
        task: grades the answers.
        scorer: scores them.
        sources: the reward sources that the protocol needs between turns.
        score: whether the protocol needs the total score between turns.
        grade: whether it needs the grades between turns.
        untrained: the untrained weights, which restate answers. None means that answers are not restated.
    """

    def __init__(
        self,
        task: Task,
        scorer: Scorer,
        sources: frozenset[str],
        score: bool,
        untrained: UntrainedWeights | None,
        grade: bool = False,
    ):
        self.task, self.scorer, self.sources, self.score, self.untrained = task, scorer, sources, score, untrained
        self.grade = grade or score or bool(sources)
        self.batches = bool(sources) or score or untrained is not None
        self._seen: list[Dialogue] = []

    def see(self, dialogue: Dialogue) -> None:
        """Keep the dialogue for :meth:`settle`."""
        self._seen.append(dialogue)

    def settle(self) -> None:
        """Restate, grade and score all utterances that were seen since the last call."""
        seen, self._seen = self._seen, []
        if self.untrained is not None:
            restate(seen, self.task, self.untrained.generate)
        if self.grade:
            self.scorer.grade(seen, self.task)
        self.scorer.fill_in(seen, self.task, self.sources)
        if self.score:
            self.scorer.score(seen, self.task)


class Player:
    """Plays the dialogues of a team. It needs no trainer: it builds neither an optimizer nor a reference copy.

    Args:
        team: the agents and the policies that speak for them.
        protocol: who speaks when, and what each agent sees.
        options: how training samples, and the longest completion.
        reward: how dialogues are scored.
        engines: the engines by the names that the team's agents use.
        sources: reward sources that replace or extend ``maporl.rewards.SOURCES``.
        speakers: the agents that play, in order. By default the whole team plays.
        common_seed: whether a protocol has the same random numbers in all dialogues of a question.
        untrained: the untrained weights, or None. They restate answers that grading cannot read, and give the reward
            ``nll``.
        tools: the tools and environments, and what agents are given of them.
        sampling: how answers are sampled, where this differs from the run. An agent that is not named there has its own
            ``sampling``.
        restates: whether the untrained weights restate answers.
        growth: how options of the protocol change with the updates of a training. Evaluations do not follow it.

    Raises:
        ConfigError: a reward source lacks what it needs, an environment with a weight pays nothing, ``protocol`` is
            not a :class:`maporl.Protocol`, or an agent's tools or call format cannot be used.
        ValueError: a speaker is not in the team.
    """

    def __init__(
        self,
        team: Team,
        protocol: Protocol,
        options: PPOOptions,
        reward: RewardSection,
        *,
        engines: Mapping[str, Engine] | None = None,
        sources: Mapping[str, RewardSource] | None = None,
        speakers: Sequence[str] | None = None,
        common_seed: bool = True,
        untrained: UntrainedWeights | None = None,
        tools: TeamTools | None = None,
        sampling: TeamSampling | None = None,
        restates: bool = True,
        growth: Growth | None = None,
    ):
        team.find_stop_ids(options)
        self.team, self.options, self.engines = team, options, dict(engines or {})
        self.speakers = tuple(speakers or team.names())
        passed = {name: as_source(source) for name, source in (sources or {}).items()}
        exempt = reward.penalties is not None and reward.penalties.repetition
        digits = {p.name: p.voice.digits for p in team.policies.values()} if exempt else {}
        self.scorer = Scorer(reward, passed, self.speakers, digits, options.missing_eos_penalty)
        tools = tools or TeamTools()
        self.world, self.sampling = tools.world, team.sampling(sampling)
        team.check_structured_outputs(self.sampling)
        refuse(self.world.offers.unpaid(weighed(reward)))
        self.tools = tools_of_team(tools, team, options.response_length, protocol, self.speakers, self.sampling)
        self.protocol = must_be_protocol(protocol, "protocol")
        self._formats = {name: formats_of_schemas(name, team.voice_of(name), tools.grants) for name in team.names()}
        self.common_seed, self.untrained, self.restates = common_seed, untrained, restates
        self.interleaving = Interleaving()
        """Lets several threads play dialogues of this player."""
        self.growth = growth
        self._versions: dict[str, int] = {}
        """How many updates the weights that the engines have of each policy have had."""
        self._exchanged: dict[str, str] = {}
        if unknown := [name for name in self.speakers if name not in team.agents]:
            raise ValueError(f"speakers: no agent {unknown[0]!r}; the team has {list(team.agents)}")
        others = {*passed, *protocol.pays, *self.world.offers.rewards()}
        needed = {*reward.asked, *protocol.between_turns()} - others
        self.scorer.sources |= build_sources(reward, needed, self, others)
        readers = [name for name, source in self.scorer.sources.items() if source.reads_environments]
        isolated = {name: section.options.isolate == "process" for name, section in self.world.environments.items()}
        check_environments(readers, isolated)
        self.world.keeps_until_scored = bool(readers)

    @classmethod
    def build(cls, *parts: Any, **options: Any) -> "Player":
        """Return the player of ``parts`` and ``options``, which are those of the class."""
        return cls(*parts, **options)

    # -- who speaks ---------------------------------------------------------------------------------------------------

    def specs(
        self,
        weights_from: Mapping[str, str] | None = None,
        instead: Mapping[str, str] | None = None,
        learning: frozenset[str] = frozenset(),
        training: bool = False,
    ) -> dict[str, SpeakerSpec]:
        """Return the speakers as the driver sees them.

        Args:
            weights_from: for an agent, another agent whose weights it speaks with. By default those of
                :meth:`exchange`.
            instead: for an agent, a policy that speaks for it instead of its own.
            learning: the policies that are trained.
            training: whether answers are sampled as in training, and not as in evaluations.
        """
        specs = {}
        weights_from = self._exchanged if weights_from is None else weights_from
        for name in self.speakers:
            agent = self.team.agents[name]
            speaking = self.team.policies_of.get(weights_from.get(name, name), ())
            policies = tuple(policy.name for policy in speaking) or (name,)
            if instead and name in instead:
                policies = (instead[name],)
            tools, sampling = self.tools.get(name), self.sampling.of(name, training)
            longest = self.sampling.longest(name, self.options.response_length)
            engine = self.engines.get(agent.engine)  # a person may have taken its place
            specs[name] = SpeakerSpec(
                agent.engine,
                policies,
                learning,
                agent.system,
                agent.role,
                tools,
                sampling,
                self._formats[name],
                longest,
                engine is not None and engine.tells_tokens,
            )
        return specs

    def use_engine(self, agent: str, engine: Engine) -> None:
        """Let ``engine`` answer for ``agent`` from now on, for example when a person takes the agent's place."""
        self.engines[f"in place of {agent}"] = engine

    def exchange(self, agents: Sequence[str]) -> None:
        """Let each of ``agents`` speak with the weights of the next one from now on, and the last with the first one's.

        It shows whether agents have learned their own roles. System prompts, roles and engines stay with the agents.
        """
        self._exchanged = dict(zip(agents, [*agents[1:], *agents[:1]], strict=True))

    def inform_engines(
        self, opened: Callable[[str], AbstractContextManager] = lambda policy: nullcontext(), version: int | None = None
    ) -> None:
        """Let the engines take over the weights of all policies, unless they have. All processes call this together.

        Engines may not wait for other processes while dialogues are played, because a process plays its own dialogues.
        ``opened`` gives this process the whole weights of a policy, if they are distributed over processes. The weights
        have had ``version`` updates. None: engines may have those of any update.
        """
        lacking = [name for name in self.team.policies if name not in self._versions]
        if version is not None:
            lacking = [name for name in self.team.policies if self._versions.get(name) != self._version(name, version)]
        if lacking:
            self.sync_engines(lacking, opened, version or 0)

    def sync_engines(
        self,
        policies: Iterable[str],
        opened: Callable[[str], AbstractContextManager] = lambda policy: nullcontext(),
        version: int = 0,
    ) -> None:
        """Let the engines take over the weights of ``policies``, one policy at a time (:meth:`inform_engines`)."""
        for engine in self.engines.values():
            engine.version = version
        for policy in policies:
            with opened(policy):
                for engine in {id(e): e for e in self.engines.values()}.values():  # one may have several names
                    engine.sync(policy)
            self._versions[policy] = self._version(policy, version)

    def forget_versions(self) -> None:
        """Let the engines take over all weights the next time, because others were loaded."""
        self._versions.clear()

    def _version(self, policy: str, updates: int) -> int:
        """Return how many updates the weights of ``policy`` have had after ``updates`` of the training."""
        return updates if self.team.policies[policy].trainable else 0

    # -- playing ------------------------------------------------------------------------------------------------------

    def driver(
        self,
        task: Task,
        decoding: Decoding,
        *,
        protocol: Protocol | None = None,
        specs: Mapping[str, SpeakerSpec] | None = None,
        batch: int = 1,
        rng_key: tuple | None = None,
        numbers: Sequence[int] | None = None,
        scores: bool = True,
    ) -> RolloutDriver:
        """Return a driver that plays this player's dialogues.

        Args:
            task: has the questions and grades the answers.
            decoding: how answers are sampled.
            protocol: the protocol to play. By default it is the player's own, as it is at update ``batch``.
            specs: the speakers. By default every agent speaks with its own weights.
            batch: the number of the update.
            rng_key: see :class:`maporl.rollout.driver.RolloutDriver`.
            numbers: see :class:`maporl.rollout.driver.RolloutDriver`.
            scores: whether the referee scores what the protocol must know between turns.
        """
        stage = self.protocol if self.growth is None else grown(self.protocol, self.growth, batch)
        current = stage.at_update(batch)
        sources = current.between_turns() - current.pays if scores else frozenset()
        score, grade = scores and current.score_between_turns, current.grade_between_turns
        referee = ScoringReferee(task, self.scorer, sources, score, self.untrained if self.restates else None, grade)
        return RolloutDriver(
            task,
            protocol or current,
            self._with_people(specs or self.specs()),
            self.engines,
            decoding,
            referee=referee,
            common_seed=self.common_seed,
            rng_key=rng_key,
            numbers=numbers,
            world=self.world,
            interleaving=self.interleaving,
        )

    def play(self, examples: list[Example], task: Task, decoding: Decoding, samples: int = 1) -> list[Dialogue]:
        """Play ``samples`` independent dialogues on each example. Dialogues of one example stand together.

        If rewards read environments, call ``player.world.drop_scored(dialogues)`` after scoring.
        """
        self.inform_engines()
        return self.driver(task, decoding).play(examples, samples)

    def play_evaluation(
        self, task: Task, questions: int | Sequence[int], decoding: Decoding, seed: int, batch: int = 1
    ) -> list[Dialogue]:
        """Play, grade and score this process's share of some questions of ``task``. Random states do not change.

        Scores are those of training, without the sources that :meth:`maporl.rewards.scoring.Scorer.measure` leaves out.

        ``questions`` is how many of the first questions are played, or it has the numbers of those that are.

        Raises:
            ValueError: no question is given.
        """
        numbers = range(min(len(task), questions)) if isinstance(questions, int) else questions
        if not numbers:
            raise ValueError("evaluate: eval_questions is 0; set it to the number of questions to evaluate on")
        self.inform_engines()
        with forked_rng(), forked_generators(), self.world.uncounted():
            torch.manual_seed(seed)
            rank, size = distributed.rank(), distributed.size()
            first, end = len(numbers) * rank // size, len(numbers) * (rank + 1) // size
            protocol = self.protocol.at_update(batch).in_evaluation()
            key, places = (seed, "eval"), range(first, end)
            driver = self.driver(task, decoding, protocol=protocol, batch=batch, rng_key=key, numbers=places)
            dialogues = driver.play([task[numbers[i]] for i in places])
            try:
                self.scorer.measure(dialogues, task)
            finally:
                self.world.drop_scored(dialogues)
        return dialogues

    def evaluate(self, task: Task, questions: int, decoding: Decoding, seed: int) -> Evaluation:
        """Evaluate the team on the first ``questions`` of ``task``. All processes call this together.

        Raises:
            ValueError: ``questions`` is below 1.
        """
        return evaluate_everywhere(self.play_evaluation(task, questions, decoding, seed))

    def speak(self, agent: str, conversations: list[list[Message]]) -> list[str]:
        """Return the greedy answer of ``agent`` to each conversation, without any memory of others. Judges use this."""
        speaker = self.team.agents[agent]
        policies = self.team.policies_of.get(agent, ())
        requests = []
        for number, messages in enumerate(conversations):
            system = [{"role": "system", "content": speaker.system}] if speaker.system else []
            ask = Ask(agent, [*system, *messages], fresh=True)
            transcript = Transcript(messages=list(ask.messages))
            example = Example(f"judged {number}", "", "")
            policy = policies[0].name if policies else agent
            requests.append(Request(ask, example, 0, 0, transcript, f"judge {agent!r}, {example.id}", policy))
        return [reply.text for reply in self.engines[speaker.engine].generate(requests, GREEDY)]

    def nll(self, utterances: list[Utterance]) -> list[float]:
        """Return the mean negative log-probability of each utterance's tokens under the weights before training.

        Raises:
            ConfigError: the player was built without these weights.
        """
        if self.untrained is None:
            raise ConfigError("reward.sources: nll asks the weights before training, and this player has no untrained")
        return self.untrained.nll(utterances)

    def _with_people(self, specs: Mapping[str, SpeakerSpec]) -> dict[str, SpeakerSpec]:
        """Return ``specs`` with the engines of :meth:`use_engine`. No policy is trained on their answers."""
        instead = {name: f"in place of {name}" for name in specs}
        return {
            name: SpeakerSpec(
                instead[name],
                (name,),
                frozenset(),
                spec.system,
                spec.role,
                spec.tools and typed(spec.tools),
                formats=lambda schemas: TypedFormat([tool_of(schema) for schema in schemas], CallTexts()),
            )
            if instead[name] in self.engines
            else spec
            for name, spec in specs.items()
        }


def evaluate_everywhere(dialogues: list[Dialogue]) -> Evaluation:
    """Return the :class:`Evaluation` of all processes' graded dialogues. Processes exchange counts, not dialogues."""
    turns = max(distributed.all_gather(turns_played(dialogues)))
    unscored = {name: why for d in dialogues for name, why in d.unscored.items()}
    parts = distributed.all_gather((evaluate_dialogues(dialogues, turns), reward_sums(dialogues), unscored))
    evaluations, rewards, left_out = zip(*parts, strict=True)
    return replace(merge(evaluations), rewards=mean_rewards(rewards), unmeasured=dict(ChainMap(*left_out)))
