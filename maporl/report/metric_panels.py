"""Every number that a run logs, declared once: its name, what it means, its unit, and where it is shown.

The charts of the report, the view in a terminal, the progress bar and ``docs/metrics.md`` are made of
:data:`METRICS`. To add a metric, log it and give it a row here; then write the page again with ``python -m
maporl.report.metric_panels > docs/metrics.md``.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from maporl.text import markdown_table

PLACES = {"POLICY": "[^/]+", "AGENT": "[^/]+", "NAME": "[^/]+", "COUNT": ".+", "N": r"\d+", "M": r"\d+"}
"""What stands for what in a metric's name: a policy, an agent, any name, a count of the audit, and the numbers of two
turns, which count from 1."""
_PLACE = re.compile("|".join(PLACES))


@dataclass(frozen=True)
class Comparison:
    """A chart that has one line for each of several runs: the mean over the panel's metrics.

    ``title`` and ``about`` are the panel's own where they are empty. ``last_turn``: only the metric of the last turn
    counts, on held-out questions with ``held_out``. ``only``: this one metric counts.
    """

    title: str = ""
    about: str = ""
    last_turn: bool = False
    held_out: bool = False
    only: str = ""


@dataclass(frozen=True)
class Panel:
    """Metrics that are drawn together over the updates.

    ``about`` says in a sentence what is drawn. ``part`` is the part of the page that has the chart. ``whole``: the axis goes from 0 to 1. ``limit`` is the section and key of the configuration that
    bounds what is drawn. ``debate``: the chart says nothing of a game; ``voters`` is how many agents it needs at least.
    ``in_game`` is its title and sentence in a game. ``from_dialogues``: evaluations before and after training are the
    ends of its held-out lines, and lines of training have intervals over questions. ``absent_if_zero``: zeros
    throughout mean that the run does not have it. ``of_loss``: numbers of different losses are not compared.
    ``terminal``: the view in a terminal shows it.
    """

    title: str
    about: str
    part: str = "learning"
    whole: bool = False
    limit: tuple[str, str] | None = None
    debate: bool = False
    voters: int = 0
    in_game: tuple[str, str] | None = None
    from_dialogues: bool = False
    absent_if_zero: bool = False
    of_loss: bool = False
    terminal: bool = False
    comparisons: tuple[Comparison, ...] = ()


@dataclass(frozen=True)
class Metric:
    """A row of :data:`METRICS`. ``line`` is what a line of the panel is called, with the :data:`PLACES` of ``name``
    filled in; by default it is the part of the name that varies. ``bar`` is what the progress bar says of it, and the
    format of a number.
    """

    name: str
    meaning: str
    unit: str
    panel: Panel | None = None
    line: str = ""
    bar: tuple[str, str] | None = None

    @cached_property
    def _varying(self) -> slice:
        """The parts of the name, between slashes, from the first that varies to the last; without any, the last."""
        parts = self.name.split("/")
        varying = [number for number, part in enumerate(parts) if _PLACE.search(part)] or [len(parts) - 1]
        return slice(varying[0], varying[-1] + 1)

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Matches the metric's names in a record, those on held-out questions too; ``key`` is the part that varies."""
        parts = [_PLACE.sub(lambda place: f"(?P<{place[0]}>{PLACES[place[0]]})", p) for p in self.name.split("/")]
        varying = self._varying
        key = f"(?P<key>{'/'.join(parts[varying])})"
        return re.compile("(?P<held_out>eval_)?" + "/".join([*parts[: varying.start], key, *parts[varying.stop :]]))

    def label(self, match: re.Match[str]) -> str:
        """The name of the line of a metric that :attr:`pattern` matches."""
        places = match.groupdict()
        told = _PLACE.sub(lambda place: places[place[0]], self.line) if self.line else places["key"]
        return told.replace("_", " ")


@dataclass(frozen=True)
class Line:
    """A metric of a run in a panel: its ``name`` in the records, and what the line is called."""

    name: str
    label: str
    held_out: bool


RIGHT = "Share of answers, or of votes, that are right."
MEAN = (Comparison(),)

ACCURACY = Panel(
    "Accuracy, by turn",
    "Share of answers that are right, over all agents.",
    whole=True,
    in_game=("Won, by turn", "Share of moves whose player won the game, by the turn of the move."),
    from_dialogues=True,
    terminal=True,
    comparisons=(
        Comparison("Final turn, held out", RIGHT, last_turn=True, held_out=True),
        Comparison("Final turn, in training", RIGHT, last_turn=True),
    ),
)
MAJORITY = Panel(
    "Accuracy of the majority vote",
    "Share of questions that the agents' vote gets right. A tie counts as the chance that a fair draw is right.",
    whole=True,
    debate=True,
    voters=3,
    comparisons=(Comparison("Majority vote at the final turn", RIGHT, last_turn=True),),
)
AGREEMENT = Panel("Agreement", "Share of questions on which all agents give the same answer.", whole=True, debate=True)
CHANGES = Panel(
    "Corrected and spoiled answers",
    "Share of answers that went from wrong to right, or from right to wrong, between one turn and the next.",
    debate=True,
)
FINISHED = Panel(
    "Questions ended early",
    "Share of questions that ended because the agents agreed, by turn.",
    whole=True,
    debate=True,
)
REWARD = Panel(
    "Reward, by name",
    "Mean of each named reward over all utterances. The score is the weighted sum of the sources. The credit is what "
    "is trained on: the score after rules, fines and charges.",
    terminal=True,
    comparisons=(Comparison("Reward", "Mean score of an utterance.", only="reward/score"),),
)
VERIFIED = Panel(
    "The verifier's scores of right and wrong answers",
    "Mean score of the answers that the task's grader finds right, and of those that it finds wrong.",
    whole=True,
)
PENALTIES = Panel("Penalties", "Mean of each penalty over the utterances that got it.")
KL = Panel(
    "KL to the reference",
    "How far a policy has moved from where it began, in nats per answer.",
    part="health",
    terminal=True,
    comparisons=MEAN,
)
SECONDS = Panel(
    "Seconds per update",
    "Seconds of each phase: playing the dialogues, scoring them, computing advantages, and updating the weights.",
    part="machine",
)

UNUSED = Panel(
    "Idle processes",
    "Share of the time in which the processes of a group had nothing to do (cluster.backend: ray).",
    part="machine",
    whole=True,
    terminal=True,
    comparisons=MEAN,
)

LIKELIHOOD = Panel(
    "Log-probability of answers",
    "Mean log-probability of chosen and rejected answers after a stage of a loop. Without a reference, both may fall.",
    part="health",
    comparisons=MEAN,
)

METRICS = (
    Metric("step", "Updates done, or rounds of a loop.", "updates"),
    Metric("episode", "Questions asked so far. A method may play several dialogues on each of them.", "questions"),
    Metric("accuracy/turn_N", "Answers of turn N that are right, averaged over agents and then over questions. A question that ended early keeps its last answers.", "share", ACCURACY, bar=("accuracy {}", ".0%")),
    Metric("accuracy/turn_N/AGENT", "The same for one agent.", "share"),
    Metric("majority/turn_N", "Questions that the agents' vote gets right. A tie counts 1/(number tied) if the right answer is among the tied ones. An answer that cannot be read has no vote.", "share", MAJORITY),
    Metric("agreement/turn_N", "Questions on which all agents give the same readable answer.", "share", AGREEMENT),
    Metric("flips/N_to_M/wrong_to_right", "Answers that were corrected from turn N to turn M.", "answers"),
    Metric("flips/N_to_M/right_to_wrong", "Answers that were spoiled from turn N to turn M.", "answers"),
    Metric("change/N_to_M/improved", "Answers that were corrected, of those given in both turns.", "share", CHANGES, line="turn N to M, corrected"),
    Metric("change/N_to_M/declined", "Answers that were spoiled, of those given in both turns.", "share", CHANGES, line="turn N to M, spoiled"),
    Metric("change/N_to_M/same", "Answers that stayed right or stayed wrong, of those given in both turns.", "share"),
    Metric("finished/turn_N", "Questions that consensus ended at turn N. It is logged only where consensus ended some.", "share", FINISHED),
    Metric("reward/score", "Weighted sum of the reward sources. On held-out questions it is without those that an evaluation does not ask for.", "reward", REWARD),
    Metric("reward/credit", "What is trained on: the score with what later answers earned, after rules, fines and charges.", "reward", REWARD, bar=("credit {}", ".2f")),
    Metric("reward/label", "1 where the answer is right, else 0.", "reward", REWARD),
    Metric("reward/verifier", "Score of the learned verifier.", "reward", REWARD),
    Metric("reward/env", "Reward of the game.", "reward", REWARD),
    Metric("reward/legal", "1 where the move was legal, else 0.", "reward", REWARD),
    Metric("reward/bonus", "Bonus for collaboration.", "reward", REWARD),
    Metric("reward/missing_eos", "Penalty for an answer that did not end by itself.", "reward", REWARD),
    Metric("reward/NAME", "Any other source of rewards, or a term of a reward rule.", "reward", REWARD),
    Metric("reward/penalty/NAME", "A penalty, over the utterances that got it.", "reward", PENALTIES),
    Metric("reward/charge/NAME", "What a reward costs (`reward.charges`), over the utterances that are charged for it.", "reward"),
    Metric("reward/penalty/NAME/AGENT", "The same for one agent.", "reward"),
    Metric("reward/penalty/NAME/AGENT/turn_N", "The same for one agent in one turn.", "reward"),
    Metric("reward/bonus/AGENT/turn_N", "Bonus for collaboration of one agent in one turn.", "reward"),
    Metric("reward/NAME/AGENT", "A reward of one agent.", "reward"),
    Metric("reward/NAME/AGENT/turn_N", "A reward of one agent in one turn.", "reward"),
    Metric("count/penalty/NAME", "Utterances that got a penalty.", "utterances"),
    Metric("count/penalty/NAME/AGENT", "The same for one agent.", "utterances"),
    Metric("count/penalty/NAME/AGENT/turn_N", "The same for one agent in one turn.", "utterances"),
    Metric("POLICY/untrained_share", "Utterances that could have been trained on but have no credit, of all that the policy was to learn from.", "share",
           Panel("Utterances without credit", "Share of a policy's utterances that could have been trained on but have no credit.", "health", whole=True, absent_if_zero=True, comparisons=MEAN)),
    Metric("POLICY/untrained/AGENT", "Such utterances of one agent. It is logged only where there are some.", "utterances"),
    Metric("POLICY/untrained/AGENT/NAME", "The same in one role.", "utterances"),
    Metric("POLICY/objective/scores", "Mean credit of the rows that the policy learns from.", "reward"),
    Metric("POLICY/objective/kl", "KL to the reference by the configured estimator. It is logged only where `kl_coef` is not 0.", "nats per answer", KL),
    Metric("POLICY/objective/kl_k1", "The same by the estimator k1.", "nats per answer"),
    Metric("POLICY/objective/kl_k3", "The same by the estimator k3.", "nats per answer"),
    Metric("POLICY/objective/non_score_reward", "Minus the KL penalty of an answer.", "reward"),
    Metric("POLICY/objective/rlhf_reward", "Mean credit minus the KL penalty.", "reward"),
    Metric("POLICY/objective/entropy", "Minus the summed log-probability of an answer's tokens: an estimate from one sample.", "nats per answer"),
    Metric("POLICY/policy/entropy_avg", "Mean entropy of the next token under the policy before the update.", "nats",
           Panel("Entropy", "How undecided a policy is about the next token, in nats.", "health", terminal=True, comparisons=MEAN)),
    Metric("POLICY/policy/approxkl_avg", "Half the mean squared change of the tokens' log-probabilities, averaged over the update's steps.", "nats per token",
           Panel("KL of the update", "How far an update moves a policy: approximate KL, in nats per token.", "health", limit=("ppo", "target_kl"), comparisons=MEAN)),
    Metric("POLICY/policy/clipfrac_avg", "Tokens whose probability ratio was clipped.", "share",
           Panel("Clipped tokens", "Share of tokens whose probability ratio was clipped.", "health", of_loss=True, comparisons=MEAN)),
    Metric("POLICY/measure/NAME", "A measure that an objective of your own returns: its mean over the tokens, averaged over the update's steps.", "its own",
           Panel("Measures of the objective", "What an objective of your own measures, as a mean over the tokens of an update.", "health", of_loss=True), line="POLICY, NAME"),
    Metric("POLICY/policy/stopped_early", "1 where `target_kl` ended the update's passes early, else 0.", "0 or 1"),
    Metric("POLICY/loss/policy_avg", "Policy loss, averaged over the update's steps.", "loss"),
    Metric("POLICY/loss/value_avg", "Value loss, averaged over the update's steps.", "loss"),
    Metric("POLICY/loss/kl_avg", "KL loss, averaged over the update's steps. It is logged only with `kl_in: loss`.", "loss"),
    Metric("POLICY/grad_norm", "Norm of the gradient of the policy and its critic before clipping, averaged over the update's steps. `central_critic` stands for the critic that policies share.", "norm",
           Panel("Gradient norm", "Norm of the gradient before it is cut to its limit.", "health", of_loss=True, limit=("training", "max_grad_norm"), comparisons=MEAN)),
    Metric("POLICY/role/ROLE/grad_norm", "Norm of the gradient of the policy's loss on its completions in a role, in the first minibatch of an update (`training.role_gradients`). An agent without a role has its name.", "norm"),
    Metric("POLICY/role/ROLE/grad_share", "That norm divided by the sum over the policy's roles.", "share",
           Panel("Roles that move a policy", "Share of each role in the gradients of a policy that speaks in several.", "health", whole=True, comparisons=MEAN)),
    Metric("POLICY/role/ROLE/weight", "The factor of the role's loss by `training.balance: role`.", "factor"),
    Metric("POLICY/distill/reward", "Mean over the tokens of first answers of the teacher's log-probability minus the agent's (`reward.distill`). It is minus a KL divergence: about 0 or less, and it rises to 0 as the two agree.", "nats",
           Panel("Distillation", "Teacher's log-probability of a token of a first answer, minus the agent's own.", "health", comparisons=MEAN)),
    Metric("POLICY/distill/share", "Share of the first answers that had a teacher. The others earn their scores alone.", "share"),
    Metric("POLICY/val/explained_variance", "1 - Var(return - value) / Var(return): 1 is a perfect critic, 0 is as good as the mean. It is logged only where there is a critic and something to explain: not where all answers earn the same.", "share of variance",
           Panel("Critic", "Explained variance of the returns: 1 is a perfect critic, 0 is as good as the mean.", "health", absent_if_zero=True, comparisons=MEAN)),
    Metric("POLICY/val/clipfrac_avg", "Tokens whose value was clipped.", "share"),
    Metric("POLICY/val/ratio", "Mean ratio of the new probability of a token to the old one.", "ratio"),
    Metric("POLICY/val/ratio_var", "Variance of that mean over the update's steps.", "ratio squared"),
    Metric("POLICY/val/first_ratio", "That mean in the update's first step, where it is 1 up to rounding.", "ratio"),
    Metric("POLICY/val/num_eos_tokens", "Answers that ended by themselves.", "answers"),
    Metric("POLICY/completions/mean_length", "Mean number of sampled tokens of an answer.", "tokens",
           Panel("Length of answers", "Mean number of sampled tokens of an answer.", "health", comparisons=MEAN)),
    Metric("POLICY/completions/clipped_ratio", "Answers that did not end by themselves, and were cut at `ppo.response_length`.", "share",
           Panel("Answers cut short", "Share of answers that were cut at the longest length.", "health", whole=True, absent_if_zero=True, comparisons=MEAN)),
    Metric("POLICY/reward_std", "Standard deviation of the returns in a group, averaged over groups. It is logged only where groups are compared.", "reward"),
    Metric("POLICY/frac_reward_zero_std", "Groups whose returns are all equal, so that nothing is learned from them.", "share",
           Panel("Groups without a difference", "Share of groups whose returns are all equal. Nothing is learned from them.", "health", whole=True, absent_if_zero=True, comparisons=MEAN)),
    Metric("POLICY/frac_groups_dropped", "Groups of which a transform leaves out all rows (`advantage.post`: `drop_groups`, `drop_zeros`).", "share"),
    Metric("POLICY/policy/engine_gap", "Mean distance between two log-probabilities of a sampled token: the engine's and the trainer's. Of vLLM it contains what ppo.top_p and ppo.top_k cut off.", "nats",
           Panel("Sampler against trainer", "Mean distance between the log-probability with which a token was sampled and the one it is trained with, in nats.", "machine", comparisons=MEAN)),
    Metric("POLICY/policy/engine_kl", "Mean difference between the same two log-probabilities.", "nats"),
    Metric("POLICY/policy/staleness", "Mean number of updates by which the answers of an update are older than the weights that they train (training.async_depth).", "updates",
           Panel("Age of answers", "Mean number of updates by which answers are older than the weights that they train.", "machine", comparisons=MEAN), line="POLICY"),
    Metric("POLICY/policy/staleness_max", "The same of the oldest answer. It is at most training.async_depth.", "updates"),
    Metric("POLICY/policy/partner_lag", "The same of the oldest answer of a partner, as a mean over dialogues. Probability ratios do not correct for it.", "updates"),
    Metric("async/across_updates", "Share of dialogues whose answers have weights of several updates.", "share"),
    Metric("async/in_progress", "Later batches of dialogues that were being played, or waited to be trained on, at the end of the update.", "batches"),
    Metric("accepted", "1 where a round's weights are kept, and 0 where `loop.accept: not_worse` went back to those before it.", "0 or 1"),
    Metric("POLICY/stage_N/rows", "Rows, or pairs, on which a policy was trained in stage N of a round of a loop.", "rows",
           Panel("Rows of a stage", "Rows, or pairs, on which a policy was trained in each stage of a round.", "health", comparisons=MEAN)),
    Metric("POLICY/stage_N/dialogues", "Dialogues of the updates of stage N.", "dialogues"),
    Metric("POLICY/stage_N/score", "Mean score over the updates of stage N.", "reward"),
    Metric("POLICY/stage_N/pairs", "Pairs of trajectories on which a critic of turns was trained in stage N.", "pairs"),
    Metric("POLICY/stage_N/pair_accuracy",
           "Comparisons that the reward model, or the critic of turns, decides rightly after stage N.", "share"),
    Metric("POLICY/stage_N/good", "Rows for KTO whose answers are good.", "rows"),
    Metric("POLICY/stage_N/loss", "Mean loss of stage N.", "loss",
           Panel("Loss of a stage", "Mean loss of a policy in each stage of a round.", "health", comparisons=MEAN)),
    Metric("POLICY/stage_N/mean_gap", "Mean difference in value between the chosen and the rejected answers.", "reward"),
    Metric("POLICY/stage_N/mean_tokens", "Mean number of tokens of the rows' answers.", "tokens"),
    Metric("POLICY/stage_N/share_cut_off", "Rows whose answers were cut off.", "share"),
    Metric("POLICY/stage_N/chosen_mean_tokens", "Mean number of tokens of the chosen answers.", "tokens"),
    Metric("POLICY/stage_N/rejected_mean_tokens", "The same of the rejected answers.", "tokens"),
    Metric("POLICY/stage_N/chosen_share_cut_off", "Chosen answers that were cut off.", "share"),
    Metric("POLICY/stage_N/rejected_share_cut_off", "Rejected answers that were cut off.", "share"),
    Metric("POLICY/stage_N/chosen_before", "Mean log-probability of a chosen answer before the stage.", "nats per answer"),
    Metric("POLICY/stage_N/chosen_after", "The same after the stage.", "nats per answer",
           LIKELIHOOD, line="POLICY, stage N, chosen"),
    Metric("POLICY/stage_N/rejected_before", "Mean log-probability of a rejected answer before the stage.", "nats per answer"),
    Metric("POLICY/stage_N/rejected_after", "The same after the stage.", "nats per answer", LIKELIHOOD, line="POLICY, stage N, rejected"),
    Metric("lr", "Learning rate of the first policy.", "per step"),
    Metric("POLICY/lr", "Learning rate of a policy in this update. `central_critic` stands for the critic that policies share.", "per step"),
    Metric("POLICY/critic_lr", "Learning rate of its critic, where this is another one (`training.value_learning_rate`).", "per step"),
    Metric("tokens_per_second", "Sampled tokens divided by the seconds of the whole update.", "tokens per second",
           Panel("Tokens per second", "Sampled tokens divided by the seconds of the whole update.", "machine", terminal=True, comparisons=MEAN), bar=("{} tokens/s", ".0f")),
    Metric("time/collect", "Time to play the dialogues.", "seconds", SECONDS),
    Metric("time/score", "Time to grade and score them.", "seconds", SECONDS),
    Metric("time/advantage", "Time to compute old log-probabilities, values and advantages.", "seconds", SECONDS),
    Metric("time/update", "Time to update the weights.", "seconds", SECONDS),
    Metric("threads", "Threads that compute on the CPU. A run repeats bit by bit only with the same number.", "threads"),
    Metric("memory/peak", "The most memory that this process has held: of its fullest accelerator, or main memory on CPUs.", "GiB",
           Panel("Memory", "The most memory that this process has held, in GiB.", "machine", terminal=True, comparisons=MEAN)),
    Metric("kv_cache/gib", "The most KV cache that was kept between turns at one time.", "GiB"),
    Metric("kv_cache/forgotten", "Conversations that found no room in the kept KV cache. Those that continue are read again.", "conversations"),
    Metric("group/NAME/seconds", "Time since the last record of a group (cluster.backend: ray).", "seconds"),
    Metric("group/NAME/learner/learning", "Time in which the processes that train computed log-probabilities and values, and updated the weights.", "seconds"),
    Metric("group/NAME/learner/sending", "Time in which they gave away their weights.", "seconds"),
    Metric("group/NAME/learner/saving", "Time in which they saved them. What `training.async_save` writes in the background is not in it.", "seconds"),
    Metric("group/NAME/learner/dead", "Time in which they were started again, because one of them died or hung.", "seconds"),
    Metric("group/NAME/learner/idle", "Share of the time in which they did nothing of this.", "share", UNUSED, line="NAME, learner"),
    Metric("group/NAME/engines/sampling", "Time in which a process that samples did so, as a mean over these processes.", "seconds"),
    Metric("group/NAME/engines/sending", "Time in which it took over new weights, in the same way.", "seconds"),
    Metric("group/NAME/engines/dead", "Time in which it was dead and another one took its place, in the same way.", "seconds"),
    Metric("group/NAME/engines/idle", "Share of the time in which it did nothing of this, in the same way.", "share", UNUSED, line="NAME, engines"),
    Metric("group/NAME/rows_per_call", "Mean number of answers that a process of a group samples at a time.", "answers"),
    Metric("group/NAME/tokens_per_second", "Tokens that a process samples per second of sampling.", "tokens per second"),
    Metric("group/NAME/waiting", "The most answers that waited for a free process at one time.", "answers"),
    Metric("group/NAME/sent_bytes", "Bytes of weights that reached the processes that sample, over all of them.", "bytes"),
    Metric("group/NAME/replaced", "Processes that sample that were replaced so far, because they died or hung.", "processes"),
    Metric("group/NAME/restarts", "How often the processes that train were started again so far.", "times"),
    Metric("proposals/asked", "Share of proposed questions that were asked (protocol propose).", "share",
           Panel("Proposals", "Shares of proposed questions that were asked, and that repeat an earlier one of the update.", "machine", comparisons=MEAN)),
    Metric("proposals/repeated", "Share of proposed questions that repeat an earlier one of the update.", "share"),
    Metric("judgements/balanced_accuracy",
           "Mean of the shares of useful results that were called useful, and of others that were called useless (source judgement).", "share",
           Panel("Judgements of results", "Share of results of calls that were judged rightly, useful and useless ones weighed alike.", whole=True,
                 comparisons=MEAN)),
    Metric("judgements/useful", "Share of results that were called useful.", "share"),
    Metric("verdicts/balanced_accuracy",
           "Mean of the shares of verdicts on steps of successes that were good, and on steps of failures that were "
           "bad; 0.5 says nothing (step_judge).",
           "share",
           Panel("Verdicts of the judge of steps", "How far verdicts follow the outcome: 0.5 says nothing, 1 is always.", whole=True,
                 comparisons=MEAN)),
    Metric("verdicts/good", "Share of readable verdicts that were good.", "share"),
    Metric("verdicts/unreadable", "Share of verdicts that could not be read.", "share"),
    Metric("annotations/known", "Share of observations of an update that had a label when they were scored (source annotator).", "share",
           Panel("Observations with a label", "Share of an update's observations whose label was known when they were scored.", whole=True,
                 comparisons=MEAN)),
    Metric("annotations/notes", "Observations that the annotator has been asked about.", "observations"),
    Metric("annotations/unreadable", "Share of these of which no label could be read.", "share"),
    Metric("annotations/label", "Mean label.", "label"),
    Metric("program/failed", "Programs that ended without an answer.", "share"),
    Metric("program/refused", "Requests of programs that were refused.", "share"),
    Metric("AGENT/continued_share", "Requests of a program that repeat a conversation and go on with it token by token. The others have changed it.", "share"),
    Metric("calls/AGENT", "Calls of tools that an agent wrote.", "calls",
           Panel("Calls of tools", "Calls of tools that an agent wrote in an update.", "machine", comparisons=MEAN)),
    Metric("calls_failed/NAME", "Calls that failed, by reason: unread, unknown, arguments, raised, timeout, limit, over, lost.", "calls",
           Panel("Calls that failed", "Calls of tools that failed, by reason.", "machine", absent_if_zero=True, comparisons=MEAN)),
    Metric("turns/end/NAME", "Turns of agents with tools, by why they ended: answer, limit, length, over, context, lost.", "turns"),
    Metric("tools/NAME/calls", "Calls of a tool that were carried out.", "calls"),
    Metric("tools/NAME/failed", "Those of them that failed.", "calls"),
    Metric("tools/seconds", "Time that all calls took together.", "seconds"),
    Metric("tools/left_out", "Tokens of results that no agent was shown, because results are cut.", "tokens"),
    Metric("tools/timeouts", "Calls of tools that took too long.", "calls"),
    Metric("env/NAME/opened", "Environments that were opened.", "environments"),
    Metric("env/NAME/closed", "Environments that were closed.", "environments"),
    Metric("env/NAME/close_failed", "Environments whose `close` raised an error or took too long.", "environments"),
    Metric("env/NAME/lost", "Environments that did not answer in time. Their dialogues are left out.", "environments"),
    Metric("api/AGENT/requests", "Answers of an API to an agent, since the run began.", "answers"),
    Metric("api/AGENT/cached", "Answers that were kept from an earlier run, since the run began.", "answers"),
    Metric("api/AGENT/no_text", "Answers without text, such as refusals, since the run began.", "answers"),
    Metric("api/AGENT/not_whole", "Answers that a server broke off, or that did not say why they end. They were asked for again.", "answers"),
    Metric("api/AGENT/prompt_tokens", "Tokens of prompts that the API counted, since the run began.", "tokens"),
    Metric("api/AGENT/completion_tokens", "Tokens of answers that the API counted, since the run began.", "tokens"),
    Metric("vllm/pushed", "How often weights were sent to vLLM servers.", "times"),
    Metric("verifier/on_right", "The verifier's mean score of answers that the task's grader finds right.", "score", VERIFIED),
    Metric("verifier/on_wrong", "The same of answers that it finds wrong. It rises where the team finds wrong answers that pay.", "score", VERIFIED),
    Metric("verifier/spread", "Standard deviation of the verifier's scores of an update's answers. Near 0 it teaches nothing.", "score"),
    Metric("verifier/pair_loss", "Mean loss of a verifier that keeps learning, where it has learned.", "nats"),
    Metric("verifier/pairs", "Pairs of a right and a wrong answer that it learned from.", "pairs"),
    Metric("verifier/answer_loss", "Mean loss of a verifier that keeps learning from single answers, where it has learned.", "nats"),
    Metric("verifier/answers", "Answers that it learned from.", "answers"),
    Metric("verifier/requests", "Requests that were sent to verifier servers, or to the processes of `cluster.scoring.verifier`. Those of an evaluation count with the next update.", "requests"),
    Metric("verifier/retries", "Requests that were sent again after a failure.", "requests"),
    Metric("verifier/waits", "Retries beyond `reward.verifier.retries`, which only `on_failure: wait` makes.", "requests"),
    Metric("verifier/ejected", "How often a server that failed was left out for a while, or a process was replaced.", "times"),
    Metric("verifier/failures", "Requests that failed for good.", "requests"),
    Metric("verifier/labelled", "Answers that got the label's reward because no server or process gave a score.", "answers"),
    Metric("audit/COUNT", "What an update counted for the audit of the run: a kind of part, its name, and what was counted.", "number"),
)  # fmt: skip
"""Every metric of a run, in the order of the charts."""

ROWS: dict[Panel, list[Metric]] = {}
"""The rows of each panel."""
for _metric in METRICS:
    if _metric.panel is not None:
        ROWS.setdefault(_metric.panel, []).append(_metric)


def lines_of(panel: Panel, names: Iterable[str]) -> list[Line]:
    """The lines of ``panel`` among the ``names`` of a run's metrics: those of training first, turn 2 before turn 10."""
    lines: dict[str, tuple[tuple[bool, list[str | int], str], Line]] = {}
    for name in names:
        for metric in ROWS[panel]:
            match = metric.pattern.fullmatch(name)
            if match and name not in lines:
                held_out = match["held_out"] is not None
                order = (held_out, _in_order(match["key"]), name)
                lines[name] = (order, Line(name, metric.label(match), held_out))
    return [line for _, line in sorted(lines.values(), key=lambda one: one[0])]


def _in_order(key: str) -> list[str | int]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", key)]


def bar_text(values: Mapping[str, float]) -> str:
    """What a progress bar says of an update's metrics.

    >>> bar_text({"accuracy/turn_2": 0.5, "accuracy/turn_1": 0.25, "reward/credit": 0.5, "tokens_per_second": 120.4})
    'accuracy 25% 50%, credit 0.50, 120 tokens/s'
    """
    told = []
    for metric in METRICS:
        if metric.bar is not None:
            words, number = metric.bar
            matches = {name: match for name in values if (match := metric.pattern.fullmatch(name))}
            names = sorted(
                (n for n, m in matches.items() if not m["held_out"]), key=lambda n: _in_order(matches[n]["key"])
            )
            if names:
                told.append(words.format(" ".join(format(values[name], number) for name in names)))
    return ", ".join(told)


def what_matters_first(values: Mapping[str, float]) -> dict[str, float]:
    """Return metrics in an order for people: held-out figures, what a progress bar shows, and the rest as in the table.

    >>> list(what_matters_first({"lr": 1.0, "reward/credit": 0.5, "accuracy/turn_1": 0.2, "eval_accuracy/turn_1": 0.3}))
    ['eval_accuracy/turn_1', 'accuracy/turn_1', 'reward/credit', 'lr']
    """

    def place(name: str) -> tuple[bool, bool, int]:
        for number, metric in enumerate(METRICS):
            if match := metric.pattern.fullmatch(name):
                return not match["held_out"], metric.bar is None, number
        return True, True, len(METRICS)

    return {name: values[name] for name in sorted(values, key=place)}


def page() -> str:
    """``docs/metrics.md``: every metric with its meaning and unit, and where it is drawn."""
    lines = [
        "# Every logged metric",
        "",
        "A run writes one JSON object a line to `metrics.jsonl`. In a name, `N` and `M` are turns, which count from 1, as in `dialogues.jsonl` and on",
        "pages; `AGENT`, `POLICY` and `NAME` stand for names. `eval_` before a name means that it was measured on held-out questions",
        "(`training.eval_steps`). With several processes, every number is about all of them. Each `reward/...` is a mean over the utterances that",
        "have the reward. What `training.report_to` names gets the same numbers: MLflow under these names; TensorBoard, Weights & Biases and Trackio",
        "with `train/` before a name, or `eval/` in place of `eval_` (`train/reward/credit`, `eval/accuracy/turn_1`). They get the trainer's",
        "arguments too, and the configuration's sections `agents`, `task`, `protocol`, `reward`, `advantage`, `branching` and `schedule`.",
        "`runs/debate` is called `runs-debate` there (or as `WANDB_NAME` says), in the project `huggingface` (`WANDB_PROJECT` names another one).",
        "",
        "The last column names the chart of the report that shows the metric.",
        "",
        *markdown_table(
            ("metric", "what it is", "unit", "drawn in"),
            [(f"`{m.name}`", m.meaning, m.unit, m.panel.title if m.panel is not None else "") for m in METRICS],
        ),
        "",
        "A policy trained alone (`trl_ext.PPOv2Trainer`) logs the same without `POLICY/`. Its evaluations log "
        "`eval_score`, the mean score,",
        "and `eval_ended`, the share of answers that ended by themselves.",
        "",
        "(This page is written by `python -m maporl.report.metric_panels`.)",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
