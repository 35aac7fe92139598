"""Playing without a trainer: who speaks, who referees, and what a team says to questions, to judges and to people.

Data flow: examples -> :class:`maporl.rollout.driver.RolloutDriver`, which asks engines -> dialogues; between turns a
:class:`ScoringReferee` grades and scores what the protocol must know, and restates what cannot be read.
"""

from collections.abc import Mapping, Sequence

import torch

from maporl.config.schema import RewardSection
from maporl.engines.base import Engine, Request
from maporl.engines.transcript import Transcript
from maporl.evaluation.metrics import Evaluation, evaluate_dialogues, merge, turns_played
from maporl.protocols.base import Protocol, must_be_protocol
from maporl.rewards.base import RewardSource, as_source
from maporl.rewards.build import build_sources
from maporl.rewards.scorer import Scorer
from maporl.rollout.driver import RolloutDriver, SpeakerSpec
from maporl.rollout.referee import Referee
from maporl.rollout.restate import UntrainedWeights, restate
from maporl.tasks.base import Task
from maporl.team.team import Team
from maporl.types import Ask, Dialogue, Example, Message
from trl_ext import distributed
from trl_ext.ppo_options import PPOOptions


class ScoringReferee(Referee):
    """Restates what cannot be read, and grades and scores what the protocol must know before it goes on; all that it has seen in one
    batch."""

    def __init__(
        self,
        task: Task,
        scorer: Scorer,
        sources: frozenset[str],
        score: bool,
        untrained: UntrainedWeights | None,
    ):
        self.task, self.scorer, self.sources, self.score, self.untrained = task, scorer, sources, score, untrained
        self._seen: list[Dialogue] = []

    def see(self, dialogue: Dialogue) -> None:
        """Keep it for :meth:`settle`."""
        self._seen.append(dialogue)

    def settle(self) -> None:
        """Restate, grade and score everything seen since the last call."""
        seen, self._seen = self._seen, []
        if self.untrained is not None:
            restate(seen, self.task, self.untrained.say)
        if self.sources or self.score:
            self.scorer.grade(seen, self.task)
        self.scorer.fill_in(seen, self.task, self.sources)
        if self.score:
            self.scorer.score(seen, self.task)


class Player:
    """Plays the dialogues of a team. It needs no trainer: it builds no optimizer and no reference copy.

    Args:
        team: who speaks, with whose weights.
        protocol: who speaks when and sees what.
        engines: by the names that the team's agents use.
        options: sampling temperature and longest answers.
        scorer: grades and scores; by default it knows the task's labels.
        speakers: the agents that play, in order; by default all of the team.
        common_seed: whether what a protocol draws at random is the same in all dialogues of a question.
        untrained: who restates an answer that cannot be read; None: nobody.

    Raises:
        ValueError: a speaker is not in the team.
        ConfigError: ``protocol`` does not derive from :class:`maporl.Protocol`.
    """

    def __init__(
        self,
        team: Team,
        protocol: Protocol,
        engines: Mapping[str, Engine],
        options: PPOOptions,
        scorer: Scorer,
        speakers: Sequence[str] | None = None,
        common_seed: bool = True,
        untrained: UntrainedWeights | None = None,
    ):
        self.team, self.protocol = team, must_be_protocol(protocol, "protocol")
        self.engines, self.options, self.scorer = dict(engines), options, scorer
        self.speakers = tuple(speakers or team.names())
        self.common_seed, self.untrained = common_seed, untrained
        if unknown := [name for name in self.speakers if name not in team.agents]:
            raise ValueError(f"speakers: no agent {unknown[0]!r}; the team has {list(team.agents)}")

    @classmethod
    def build(
        cls,
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
    ) -> "Player":
        """A player with a scorer for ``reward``; ``sources`` replace or add to those of ``maporl.rewards.SOURCES``.

        Raises:
            ConfigError: a reward source lacks what it needs, or ``protocol`` is none.
            ValueError: a speaker is not in the team.
        """
        team.find_stop_ids(options)
        given = {name: as_source(source) for name, source in (sources or {}).items()}
        exempt = reward.penalties is not None and reward.penalties.repetition
        digits = {p.name: p.voice.digits for p in team.policies.values()} if exempt else {}
        scorer = Scorer(reward, given, speakers or team.names(), digits, options.missing_eos_penalty)
        player = cls(team, protocol, engines or {}, options, scorer, speakers, common_seed, untrained)
        needed = {*reward.sources, *protocol.between_turns()} - given.keys() - protocol.pays
        scorer.sources |= build_sources(reward, needed, player.speak)
        return player

    # -- who speaks ---------------------------------------------------------------------------------------------------

    def specs(
        self,
        weights_from: Mapping[str, str] | None = None,
        instead: Mapping[str, str] | None = None,
        learning: frozenset[str] = frozenset(),
    ) -> dict[str, SpeakerSpec]:
        """The speakers as the driver sees them.

        Args:
            weights_from: for an agent, the one whose weights it speaks with, where not its own.
            instead: for an agent, a policy that speaks for it in the place of its own.
            learning: the policies whose words are trained on.
        """
        specs = {}
        for name in self.speakers:
            agent = self.team.agents[name]
            own = self.team.policies_of.get((weights_from or {}).get(name, name), ())
            policies = tuple(policy.name for policy in own) or (name,)
            if instead and name in instead:
                policies = (instead[name],)
            specs[name] = SpeakerSpec(agent.engine, policies, learning, agent.system, agent.role)
        return specs

    def sit_down(self, agent: str, engine: Engine) -> None:
        """Let ``engine`` answer for ``agent`` from now on, such as a person who takes its seat."""
        self.engines[f"seat of {agent}"] = engine

    # -- playing ------------------------------------------------------------------------------------------------------

    def driver(
        self,
        task: Task,
        temperature: float,
        *,
        protocol: Protocol | None = None,
        specs: Mapping[str, SpeakerSpec] | None = None,
        batch: int = 1,
        rng_key: tuple | None = None,
        first: int = 0,
        scores: bool = True,
    ) -> RolloutDriver:
        """Where dialogues are played.

        Args:
            task: puts the questions and grades.
            temperature: of sampling; 0 is greedy.
            protocol: default, the player's own as it is at update ``batch``.
            specs: who speaks; default, everybody with their own weights.
            rng_key, first: see :class:`maporl.rollout.driver.RolloutDriver`.
            scores: whether what the protocol must know between turns is scored.
        """
        own = self.protocol.at_update(batch)
        sources = own.between_turns() - own.pays if scores else frozenset()
        referee = ScoringReferee(task, self.scorer, sources, scores and own.score_between_turns, self.untrained)
        return RolloutDriver(
            task,
            protocol or own,
            self._seated(specs or self.specs()),
            self.engines,
            temperature,
            referee,
            self.common_seed,
            rng_key,
            first,
        )

    def play(self, examples: list[Example], task: Task, temperature: float, samples: int = 1) -> list[Dialogue]:
        """``samples`` independent dialogues on each of ``examples``, those of one example together."""
        return self.driver(task, temperature).play(examples, samples)

    def play_evaluation(
        self, task: Task, questions: int, temperature: float, seed: int, batch: int = 1
    ) -> list[Dialogue]:
        """Graded dialogues on this process's share of the first ``questions`` of ``task``; random states are left as they were.

        Raises:
            ValueError: ``questions`` is below 1.
        """
        if questions < 1:
            raise ValueError("evaluate: eval_questions is 0; set it to the number of questions to evaluate on")
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            number = min(len(task), questions)
            rank, size = distributed.rank(), distributed.size()
            mine = range(number * rank // size, number * (rank + 1) // size)
            driver = self.driver(task, temperature, batch=batch, rng_key=(seed, "eval"), first=mine.start)
            dialogues = driver.play([task[i] for i in mine])
        self.scorer.grade(dialogues, task)
        return dialogues

    def evaluate(self, task: Task, questions: int, temperature: float, seed: int) -> Evaluation:
        """What the team's answers to the first ``questions`` of ``task`` are worth; all processes call this together.

        Raises:
            ValueError: ``questions`` is below 1.
        """
        return evaluate_everywhere(self.play_evaluation(task, questions, temperature, seed))

    def speak(self, agent: str, conversations: list[list[Message]]) -> list[str]:
        """What ``agent`` answers to each conversation, greedily, remembering nothing: for judges."""
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
        return [reply.text for reply in self.engines[speaker.engine].generate(requests, 0.0)]

    def _seated(self, specs: Mapping[str, SpeakerSpec]) -> dict[str, SpeakerSpec]:
        """``specs`` with those who sit in somebody's seat; their words are nobody's to learn from."""
        seated = {name: f"seat of {name}" for name in specs}
        return {
            name: SpeakerSpec(seated[name], (name,), frozenset(), spec.system, spec.role)
            if seated[name] in self.engines
            else spec
            for name, spec in specs.items()
        }


def evaluate_everywhere(dialogues: list[Dialogue]) -> Evaluation:
    """The :class:`Evaluation` of the graded dialogues of all processes; counts travel, dialogues do not."""
    turns = max(distributed.all_gather(turns_played(dialogues)))
    return merge(distributed.all_gather(evaluate_dialogues(dialogues, turns)))
