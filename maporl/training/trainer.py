"""Multi-agent PPO: teams that talk, one policy and one critic per agent, trained together.

``MultiAgentPPOTrainer`` is the PPOv2 trainer with three of its seams replaced: collect plays dialogues, score grades
them and shares out credit, advantage makes token rows for each policy. It wires the parts and decides nothing.
"""

import dataclasses
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from maporl.advantages import BaselineState
from maporl.config.schema import AdvantageConfig, BranchingSection, RewardSection
from maporl.engines.base import Engine, Request
from maporl.engines.human import HumanEngine
from maporl.engines.transcript import Transcript
from maporl.engines.transformers import TransformersEngine
from maporl.evaluation.metrics import Evaluation, evaluate_dialogues
from maporl.protocols.base import Protocol
from maporl.protocols.debate import Debate
from maporl.rewards import RewardSource, assign_credit, build_sources, fill_in, grade_answers, score_dialogues
from maporl.rewards.metrics import mean_rewards, telling
from maporl.rollout.branching import play_branched
from maporl.rollout.driver import Episode, Referee, RolloutDriver, SpeakerSpec, play_dialogues
from maporl.rollout.restate import restate
from maporl.schedules import Schedule
from maporl.storage.run_folder import RunFolder
from maporl.tasks.base import Task
from maporl.team.devices import split
from maporl.team.past_policies import PastPolicies
from maporl.team.team import Team
from maporl.training.args import MultiAgentPPOConfig
from maporl.training.assign import assign
from maporl.training.model_card import write_model_card
from maporl.training.progress import TeamProgress
from maporl.training.samples import samples_by_policy
from maporl.training.token_traces import trace
from maporl.types import Ask, Dialogue, Example, Message, Utterance
from trl_ext import distributed
from trl_ext.chat import encode_prompt
from trl_ext.checkpoint import save_policy
from trl_ext.forward import base_of
from trl_ext.metrics import Clock, Metrics
from trl_ext.ppov2_trainer import PPOv2Trainer
from trl_ext.sampling import Sampling, generate
from trl_ext.token_batch import GlobalBatch, TokenBatch


class MultiAgentPPOTrainer(PPOv2Trainer):
    """Trains a team by PPO on dialogues scored against a task's labels.

    Args:
        args: a :class:`MultiAgentPPOConfig`.
        team: who speaks, with whose weights.
        task: questions to train on.
        protocol: who speaks when and sees what; by default a two-turn debate.
        eval_task: held-out questions for ``evaluate()``.
        reward: sources and the rule that shares them out over turns and agents.
        speakers: the agents that play, in order; by default all of the team.
        curriculum: (update, task) in rising order: from that update on, questions come from that task.
        sources: reward sources by name, to replace or add to those of ``maporl.rewards.SOURCES``.
        schedule: what learns when; by default everything, always.
        advantage: how credits become advantages; by default PPO's, whitened per agent and turn.
        branching: in how many dialogues a question is played while training, and from where they part; by default in one.
        engines: engines by name, to replace or add to "transformers" and "human"; ``maporl.engines.openai`` has one for agents behind an
            API.
        callbacks: further ``TrainerCallback`` objects.
    """

    def __init__(
        self,
        args: MultiAgentPPOConfig,
        team: Team,
        task: Task,
        protocol: Protocol | None = None,
        eval_task: Task | None = None,
        reward: RewardSection | None = None,
        speakers: Sequence[str] | None = None,
        schedule: Schedule | None = None,
        advantage: AdvantageConfig | None = None,
        branching: BranchingSection | None = None,
        curriculum: Sequence[tuple[int, Task]] = (),
        sources: Mapping[str, RewardSource] | None = None,
        engines: Mapping[str, Engine] | None = None,
        callbacks: list[TrainerCallback] | None = None,
    ):
        if len(task) == 0:
            raise ValueError("task: expected at least one example, got an empty task")
        self.team, self.task, self.eval_task = team, task, eval_task
        self._first_task = task
        self.protocol = protocol or Debate()
        self.reward = reward or RewardSection()
        self.speakers = tuple(speakers or team.names())
        if unknown := [name for name in self.speakers if name not in team.agents]:
            raise ValueError(f"speakers: no agent {unknown[0]!r}; the team has {list(team.agents)}")
        self.advantage_config = advantage or AdvantageConfig()
        self.branching = branching or BranchingSection()
        self.baselines = BaselineState()
        turns = getattr(self.protocol, "turns", 1)
        self.schedule = (schedule or Schedule()).resolved(turns, team.names())
        self.run = RunFolder(str(args.output_dir))
        self._between_turns: frozenset[str] = getattr(self.protocol, "between_turns", frozenset)()
        given = dict(sources or {})
        paid: frozenset[str] = getattr(self.protocol, "pays", frozenset())
        needed = {*self.reward.sources, *(self._between_turns - {"score"})} - given.keys() - paid
        self.sources = {**given, **build_sources(self.reward, needed, self.speak)}
        team.find_stop_ids(args)
        pool = self.schedule.opponent_pool
        self.opponents = None if pool is None else PastPolicies(pool, team, args.seed)
        self.curriculum = list(curriculum)
        self._critic_outputs = turns if args.critic_per_turn else 1
        learners = team.build_learners(args, self._critic_outputs, self.advantage_config.baseline == "critic")
        self._begin(learners, args, task, eval_task or task, (None, None), callbacks)
        for policy in team.policies.values():
            if not getattr(policy.model, "is_quantized", False):
                policy.model.to(self._places.get(id(base_of(policy.model)), self.accelerator.device))
        self.engines: dict[str, Engine] = {
            "transformers": TransformersEngine(
                team.policies,
                args.response_length,
                args.local_rollout_forward_batch_size,
                args.max_tokens_per_generate,
                args.keep_states,
            ),
            "human": HumanEngine(),
            **(engines or {}),
        }
        self._player = ThreadPoolExecutor(1, thread_name_prefix="rollouts")
        self._pending: Future[list[Dialogue]] | None = None
        if args.async_depth:
            self._check_async()
        for callback in (ProgressCallback, PrinterCallback):
            self.remove_callback(callback)
        if not args.disable_tqdm:
            self.add_callback(TeamProgress())

    def place(self) -> dict[int, torch.device]:
        """With ``placement: split``, a device for every base model of the team, in the order of its policies."""
        self._places: dict[int, torch.device] = {}
        if self.args.placement == "split":
            bases = {id(base_of(policy.model)): name for name, policy in reversed(self.team.policies.items())}
            self._places = dict(zip(reversed(bases), split(list(reversed(bases.values()))), strict=True))
        return self._places

    def _check_async(self) -> None:
        """Raise where playing ahead would need weights that are being updated."""
        engines = {agent.engine for agent in self.team.agents.values()}
        here = sorted(name for name in engines if not getattr(self.engines[name], "remote", False))
        if here or self.args.restate != "off":
            what = f"engine {here[0]!r} answers" if here else "restate: base_model speaks"
            raise ValueError(
                f"async_depth: 1 plays while weights change, and {what} with those weights; use engine: vllm, or async_depth: 0"
            )
        if self.args.engine_tis_cap is None:
            raise ValueError(
                "async_depth: 1 learns from dialogues of older weights; set engine_tis_cap, e.g. 2.0, which corrects for it"
            )
        if distributed.size() > 1:
            raise ValueError("async_depth: 1 needs a single process; this run has several")

    # -- the seams ------------------------------------------------------------------------------------------------

    def next_batch(self) -> list[Example]:
        """This process's questions of this update, of the task that the curriculum has come to."""
        update = self._played_update()
        self.task = next((task for first, task in reversed(self.curriculum) if update >= first), self._first_task)
        return [self.task[i] for i in self._indices(len(self.task))]

    def _played_update(self) -> int:
        return self.state.global_step + 1 + self.ahead

    def collected(self) -> list[Dialogue]:
        """The dialogues of this update, which with ``async_depth`` 1 were played while the last one was learned from."""
        if self._pending is None:
            return super().collected()
        pending, self._pending = self._pending, None
        return pending.result()

    def collect_ahead(self) -> None:
        """With ``async_depth`` 1, play the dialogues of the next update meanwhile, with the weights that engines have now."""
        if self.args.async_depth and self.state.global_step + 1 < self.state.max_steps:
            self.ahead = 1
            self._pending = self._player.submit(lambda: self.collect(self.next_batch()))

    def collect(self, batch: list[Example]) -> list[Dialogue]:
        """Play the dialogues of every question, as ``branching`` says, until enough of them differ in what they earn."""
        dialogues = self._play_branched(batch)
        for number in range(self.branching.resample):
            self.score(dialogues)
            worth_training = telling(dialogues)
            kept = [d for d in dialogues if d.prompt in worth_training]
            missing = len(batch) - len({d.prompt for d in kept})
            if not missing:
                break
            rng = random.Random(f"{self.args.seed}/{self._played_update()}/resample/{number}/{distributed.rank()}")
            others = [self.task[rng.randrange(len(self.task))] for _ in range(missing)]
            more = self._play_branched(others, (number + 1) * self.args.batch_size)
            dialogues = kept + more
        return dialogues

    def _play_branched(self, batch: list[Example], first: int = 0) -> list[Dialogue]:
        update = self._played_update()
        past = None if self.opponents is None else self.opponents.speaking(update)
        if past is not None:
            for engine in self.engines.values():
                engine.sync(past)  # it has other weights than the last time
        first += distributed.rank() * self.args.local_batch_size
        table = self._table(self.task, self.args.temperature, past, (self.args.seed, update), first)

        def judge(live: list[Episode], news: list[list[Utterance]]) -> list[float]:
            said = [dataclasses.replace(one.dialogue, utterances=new) for one, new in zip(live, news, strict=True)]
            grade_answers(said, self.task)
            score_dialogues(said, self.task, self.sources, self.reward.sources)
            return [sum(u.rewards["score"] for u in dialogue.answers()) for dialogue in said]

        rng = random.Random(f"{self.args.seed}/{update}")
        return play_branched(table, batch, self.branching, judge, rng)

    def score(self, answers: list[Dialogue]) -> list[Dialogue]:
        """Grade and score every answer, take penalties off its author's own term, share out credit."""
        grade_answers(answers, self.task)
        score_dialogues(answers, self.task, self.sources, self.reward.sources)
        assign_credit(answers, self.speakers, self.reward, self._digits())
        penalty = self.args.missing_eos_penalty
        if penalty is not None:
            for utterance in (u for d in answers for u in d.utterances if u.stop.value != "eos"):
                utterance.rewards["missing_eos"] = -penalty
                utterance.rewards["credit"] -= penalty
        return answers

    def advantage(
        self, answers: list[Dialogue], everybody: list[Dialogue] | None = None
    ) -> tuple[dict[str, TokenBatch], Metrics]:
        """Token rows for each policy, with advantages as ``advantage_config`` says, over the dialogues of all processes."""
        update = self.state.global_step + 1
        tokenizers = {name: learner.tokenizer for name, learner in self.learners.items()}
        plan = self.schedule.plan(update)
        for learner in self.learners.values():
            learner.critic_only = plan.critic_only
        everybody = answers if everybody is None else everybody
        options = (tokenizers, plan, update, self._critic_outputs, self.args.critic_context)
        said = samples_by_policy(everybody, *options)
        own = samples_by_policy(answers, *options) if distributed.size() > 1 else said
        rows, annotated = self._annotated({name: own.get(name, []) for name in said})
        critics = {name for name, learner in self.learners.items() if learner.critic != "none"}
        together = torch.device("cpu") if self.args.placement == "split" else None
        everyones = {name: GlobalBatch.of(r, together) for name, r in rows.items()}
        assigned, left = assign(
            {name: e.rows for name, e in everyones.items()},
            said,
            self.advantage_config,
            self.args,
            self.baselines,
            critics,
            everybody,
        )
        kept = {name: everyones[name].take(index).back(rows[name]) for name, index in left.items()}
        trace(answers[: self.args.dialogues_logged], own, kept, tokenizers, frozenset(critics))
        return kept, self._merge({name: annotated[name] | assigned[name] for name in annotated})

    def _digits(self) -> dict[str, frozenset[int]]:
        """By policy, the token ids that may repeat without penalty."""
        if self.reward.penalties is None or not self.reward.penalties.repetition:
            return {}
        return {policy.name: policy.voice.digits for policy in self.team.policies.values()}

    # -- playing and evaluating -----------------------------------------------------------------------------------

    def play(self, examples: list[Example], task: Task, temperature: float) -> list[Dialogue]:
        """One dialogue on each of ``examples`` with the current weights; nothing is learned or recorded."""
        return self._table(task, temperature).play(examples)

    def play_samples(self, examples: list[Example], task: Task, temperature: float, samples: int) -> list[Dialogue]:
        """``samples`` independent dialogues on each of ``examples``; nothing is learned or recorded."""
        return self._table(task, temperature).play(examples, samples)

    def _table(
        self,
        task: Task,
        temperature: float,
        past: str | None = None,
        draw: tuple | None = None,
        first: int = 0,
    ) -> RolloutDriver:
        protocol = self.protocol
        if hasattr(protocol, "at_update"):
            protocol = protocol.at_update(self._played_update())
        return RolloutDriver(
            task,
            protocol,
            self.seats(past),
            self.engines,
            temperature,
            self._referee(task),
            self.branching.common_seed,
            draw,
            first,
        )

    def play_with(
        self,
        examples: list[Example],
        task: Task,
        protocol: Protocol,
        seats: dict[str, SpeakerSpec],
        temperature: float,
        scores: bool = False,
    ) -> list[Dialogue]:
        """Dialogues of another protocol or with other seats, through the same engines; with ``scores``, between turns too."""
        return play_dialogues(
            examples, task, protocol, seats, self.engines, temperature, referee=self._referee(task, scores)
        )

    def _referee(self, task: Task, scores: bool = True) -> Referee:
        """Restates what cannot be read, and scores what the protocol wants scored between turns."""
        wanted = self._between_turns if scores else frozenset()

        def look(news: list[Dialogue]) -> None:
            if self.args.restate == "base_model":
                restate(news, task, self._say_untrained)
            if wanted:
                grade_answers(news, task)
                fill_in(news, task, {name: self.sources[name] for name in wanted - {"score"}})
            if "score" in wanted:
                score_dialogues(news, task, self.sources, self.reward.sources)

        return look

    def speak(self, agent: str, conversations: list[list[Message]]) -> list[str]:
        """What ``agent`` answers to each conversation, greedily, remembering nothing: for judges."""
        seat = self.team.agents[agent]
        policies = self.team.policies_of.get(agent, ())
        requests = []
        for number, messages in enumerate(conversations):
            system = [{"role": "system", "content": seat.system}] if seat.system else []
            ask = Ask(agent, [*system, *messages], fresh=True)
            transcript = Transcript(messages=list(ask.messages))
            example = Example(f"judged {number}", "", "")
            policy = policies[0].name if policies else agent
            requests.append(Request(ask, example, 0, 0, transcript, f"judge {agent!r}, {example.id}", policy))
        return [reply.text for reply in self.engines[seat.engine].generate(requests, 0.0)]

    def _say_untrained(self, policy: str, conversations: list[list[Message]], most: int) -> list[str]:
        """What the weights a policy started from say, greedily."""
        voice = self.team.policies[policy]
        prompts = [encode_prompt(voice.tokenizer, messages) for messages in conversations]
        for prompt in prompts:
            voice.voice.check_length(len(prompt), most, f"restating an answer of policy {policy!r}")
        sampling = Sampling(most, 0.0, voice.stop_ids, self.args.local_rollout_forward_batch_size)
        learner = self.learners.get(policy)
        with learner.reference_model() if learner is not None else voice.active() as model:
            answers = generate(model, prompts, voice.tokenizer.pad_token_id, sampling)
        return [voice.tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in answers]

    def seats(self, past: str | None = None) -> dict[str, SpeakerSpec]:
        """The speakers as the driver sees them: with whose weights they speak in this update; ``past`` are the weights of
        the agent of the opponent pool."""
        learning = frozenset(self.learners)
        weights_from = self.schedule.plan(self._played_update()).weights_from
        seats = {}
        for name in self.speakers:
            agent = self.team.agents[name]
            policies = tuple(p.name for p in self.team.policies_of.get(weights_from.get(name, name), ())) or (name,)
            if past is not None and self.opponents is not None and name == self.opponents.section.agent:
                policies = (past,)
            seats[name] = SpeakerSpec(agent.engine, policies, learning, agent.system, agent.role)
        return seats

    @torch.no_grad()
    def evaluate(self, eval_dataset: Any = None, ignore_keys=None, metric_key_prefix="eval") -> Metrics:
        """Play the first ``eval_questions`` of the evaluation split and log accuracy per turn, votes and flips."""
        evaluation = self.measure(eval_dataset)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in evaluation.metrics().items()}
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def measure(self, task: Task | None = None) -> Evaluation:
        """The :class:`Evaluation` of the current weights, without logging; random states are left as they were."""
        return evaluate_dialogues(self.play_evaluation(task))

    def play_evaluation(self, task: Task | None = None) -> list[Dialogue]:
        """The graded dialogues that :meth:`measure` measures, of all processes."""
        task = task if task is not None else self.eval_task
        if task is None:
            raise ValueError("evaluate: no evaluation split; pass eval_task to the trainer or a task here")
        if self.args.eval_questions < 1:
            raise ValueError("evaluate: eval_questions is 0; set it to the number of questions to evaluate on")
        with torch.random.fork_rng():
            torch.manual_seed(self.args.seed)
            number = min(len(task), self.args.eval_questions)
            mine = range(
                number * distributed.rank() // distributed.size(),
                number * (distributed.rank() + 1) // distributed.size(),
            )
            table = self._table(task, self.args.eval_temperature, draw=(self.args.seed, "eval"), first=mine.start)
            with self.whole_weights():
                dialogues = table.play([task[i] for i in mine])
        grade_answers(dialogues, task)
        return distributed.all_gather_lists(dialogues)

    def _sample_generations(self) -> None:
        """Nothing: the dialogues of every update are in ``dialogues.jsonl``."""

    # -- logging and saving ---------------------------------------------------------------------------------------

    def _merge(self, metrics: dict[str, Metrics]) -> Metrics:
        """Each policy's numbers under its own name."""
        return {f"{policy}/{key}": value for policy, own in metrics.items() for key, value in own.items()}

    def _finish_update(
        self, answers: list[Dialogue], rows: dict[str, TokenBatch], metrics: Metrics, clock: Clock
    ) -> None:
        if self._pending is not None:
            wait([self._pending])  # engines answer with one set of weights at a time
            self.ahead = 0
        with self.whole_weights():
            for policy in self.learners:
                for engine in self.engines.values():
                    engine.sync(policy)
        metrics |= evaluate_dialogues(answers).metrics()
        metrics |= mean_rewards(answers)
        for source in self.sources.values():
            if hasattr(source, "after_update"):
                metrics |= source.after_update(self.state.global_step + 1, answers, self.task)
        for engine in self.engines.values():
            if hasattr(engine, "metrics"):
                metrics |= engine.metrics()
        if self.opponents is not None:
            self.opponents.after_update(self.state.global_step + 1)
        self.run.add_dialogues(self.state.global_step + 1, answers[: self.args.dialogues_logged])
        super()._finish_update(answers, rows, metrics, clock)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """To the run folder's ``metrics.jsonl``, and to everything in ``report_to``."""
        self.run.add_metrics(self.state.global_step, logs)
        super().log(logs, start_time)

    def _save_policy(self, name: str, folder: Path) -> None:
        """Always under its name, as plain ``from_pretrained`` loads it, with a model card."""
        save_policy(self.learners[name], folder / name)
        write_model_card(folder / name, self.team.policies[name], self)

    def checkpoint_others(self) -> dict[str, Any]:
        """The reward sources that learn, and past opponents."""
        others: dict[str, Any] = {name: source for name, source in self.sources.items() if hasattr(source, "save")}
        return others if self.opponents is None else others | {"opponents": self.opponents}

    def checkpoint_state(self) -> dict:
        """Also what baselines remember."""
        return super().checkpoint_state() | {"baselines": dict(self.baselines.means)}

    def restore_state(self, state: dict) -> None:
        """Inverse of :meth:`checkpoint_state`."""
        super().restore_state(state)
        self.baselines.means = dict(state.get("baselines", {}))  # checkpoints of before have none
        self.run.rewind(self.state.global_step)

    def _start_or_resume(self, wanted: str | bool | None) -> None:
        if not wanted and self.state.global_step == 0:
            self.run.must_be_new()
        super()._start_or_resume(wanted)
