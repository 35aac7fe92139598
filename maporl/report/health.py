"""Whether the training itself went well, in sentences about the numbers of the updates."""

import re
import statistics
from collections.abc import Sequence
from typing import Any

from maporl.report.charts import finite
from maporl.report.language import counted, few_updates
from maporl.report.read import Run

LARGE_KL, SMALL_KL = 0.1, 1e-5
LARGE_CLIP = 0.3
WEAK_CRITIC = 0.1
COLLAPSED = 0.05
CAPTURED = 0.7
EQUAL_SCORES = 1e-3
FAR = 0.1
"""Rules of thumb for PPO on language models. Beyond them a sentence says what one can try. :data:`COLLAPSED` is an
entropy in nats per token, and :data:`CAPTURED` the share of one role in the gradients of a policy.
:data:`EQUAL_SCORES` is a standard deviation of a verifier's scores of an update, which are from 0 to 1. :data:`FAR` is
the distance in nats a token between the weights that answered and those that are trained. In tiny worlds, answers that
were 0.3 away lost 39 points of accuracy, and nearer ones 7 and none (docs/cluster.md)."""
GROWN = 10
"""Gradients whose norm has grown by this factor are named."""
SOLVED = 0.9
"""With this share of right last answers in training, a low entropy is what learning leaves."""


def health(run: Run) -> list[str]:
    """What was not trained on, and what of the steps, gradients, entropy and critic of each policy calls for a change.

    The numbers of healthy policies are in :func:`vital_signs`. Only what was not trained on is said where fewer than
    two updates were made.
    """
    updates = run.updates()
    untrained = [*_untrained(run, updates), *_verifier(updates, _few(updates))]
    names = _policies(updates)
    if not names:
        return untrained
    told = [f"{name}: {text}" for name in names if (text := _policy(run, updates, name))]
    return [*untrained, *told] or ["Nothing in these numbers calls for a change."]


def vital_signs(run: Run) -> dict[str, Any] | None:
    """A table with a row for each policy: the size of its steps, its gradients, its entropy and its critic.

    None where fewer than two updates were made.
    """
    updates = run.updates()
    if not (names := _policies(updates)):
        return None
    few = _few(updates)
    columns = {
        "KL of an update, nats per token": ("policy/approxkl_avg", lambda v: _mean(v[-few:]), "{:.4f}"),
        "clipped tokens": ("policy/clipfrac_avg", lambda v: _mean(v[-few:]), "{:.1%}"),
        "gradient norm before the limit": ("grad_norm", lambda v: _mean(v[-few:]), "{:.2f}"),
        f"entropy, first {few_updates(few)}": ("policy/entropy_avg", lambda v: _mean(v[:few]), "{:.2f} nats"),
        f"entropy, last {few_updates(few)}": ("policy/entropy_avg", lambda v: _mean(v[-few:]), "{:.2f} nats"),
        "variance that the critic explains": ("val/explained_variance", lambda v: _mean(v[-few:]) or None, "{:.1%}"),
    }
    rows = []
    for name in names:
        values = [of(_recorded(updates, name, key)) for key, of, _ in columns.values()]
        shown = zip(values, [shape for *_, shape in columns.values()], strict=True)
        rows.append([name, *("\u2013" if value is None else shape.format(value) for value, shape in shown)])
    kept = [i for i in range(len(columns) + 1) if any(row[i] != "\u2013" for row in rows)]
    limit = finite(run.section("training").get("max_grad_norm"))
    about = [f"Means over the last {few_updates(few)}, unless a column says otherwise."]
    if limit:
        about.append(f"A gradient whose norm is above max_grad_norm {limit:g} is scaled down to it.")
    if _one_step(run):
        about.append("An update is one step, and KL and clipped tokens are measured before it.")
    return {
        "about": " ".join(about),
        "columns": [["policy", *columns][i] for i in kept],
        "rows": [[row[i] for i in kept] for row in rows],
    }


def _policies(updates: list[dict[str, Any]]) -> list[str]:
    """The policies whose updates were measured at least twice."""
    if len(updates) < 2:
        return []
    keys = {key for record in updates for key in record}
    return sorted(m[1] for key in keys if (m := re.fullmatch(r"(.+)/policy/approxkl_avg", key)))


def _one_step(run: Run) -> bool:
    """Whether an update is a single step of the optimizer."""
    ppo = run.section("ppo")
    return bool(ppo.get("num_ppo_epochs") == 1 and ppo.get("num_mini_batches") == 1)


def _few(updates: list[dict[str, Any]]) -> int:
    """How many updates stand for the beginning of a run, and for its end."""
    return max(1, min(10, len(updates) // 3))


def _recorded(updates: list[dict[str, Any]], name: str, key: str) -> list[float]:
    """The values of a policy's metric."""
    return [value for record in updates if (value := finite(record.get(f"{name}/{key}"))) is not None]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _verifier(updates: list[dict[str, Any]], few: int) -> list[str]:
    """A sentence about a verifier that scores all answers alike, over the last updates."""
    spreads = [value for record in updates if (value := finite(record.get("verifier/spread"))) is not None][-few:]
    if not spreads or max(spreads) >= EQUAL_SCORES:
        return []
    return [
        f"The verifier gave all answers nearly the same score in the last {few_updates(few)} (standard deviation at "
        f"most {max(spreads):.1g}), so that its scores taught nothing."
    ]


def _untrained(run: Run, updates: list[dict[str, Any]]) -> list[str]:
    """A sentence about each agent, in each role, with utterances that could have been trained on but had no credit."""
    counts: dict[tuple[str, str | None], list[float]] = {}
    for key, value in ((key, finite(value)) for record in updates for key, value in record.items()):
        if value and value > 0 and (match := re.fullmatch(r"[^/]+/untrained/([^/]+)(?:/(.+))?", key)):
            counts.setdefault((match[1], match[2]), []).append(value)
    ruled = ", no rule credited them" if run.section("reward").get("rules") else ""
    return [
        f"{agent}: {counted(int(sum(numbers)), 'utterance')}{f' as {role}' if role else ''} in {len(numbers)} of "
        f"{counted(len(updates), 'update')} had no credit, so nothing was learned from them: no reward scored "
        f"them{ruled}, and they were shown to nobody who had a credit. Name their ids in Ask.parents of those who are "
        "shown them, or let a reward source, the protocol (pays) or a rule credit them."
        for (agent, role), numbers in counts.items()
    ]


def _policy(run: Run, updates: list[dict[str, Any]], name: str) -> str:
    """What of one policy's numbers calls for a change, in sentences."""
    few = _few(updates)
    kl, clipped = (_mean(_recorded(updates, name, f"policy/{key}")[-few:]) for key in ("approxkl_avg", "clipfrac_avg"))
    norms = _recorded(updates, name, "grad_norm")
    learned = not norms or any(norms)
    told = [*(_steps(kl, clipped, _one_step(run)) if learned else []), *_gradients(norms, few)]
    told += [*_age(run, updates, name, few), *_entropy(run, updates, name, few), *_roles(updates, name, few)]
    explained = _mean(_recorded(updates, name, "val/explained_variance")[-few:])
    if explained and explained < WEAK_CRITIC:  # exactly 0 without a critic
        told.append(
            f"The critic explains {explained:.0%} of the variance of the returns. That is little: the advantages are "
            "mostly the noise of single answers."
        )
    return " ".join(told)


def _age(run: Run, updates: list[dict[str, Any]], name: str, few: int) -> list[str]:
    """A sentence about answers of older weights that are far from the weights that they train, over the last
    updates."""
    age, gap = (_mean(_recorded(updates, name, f"policy/{key}")[-few:]) for key in ("staleness", "engine_gap"))
    if not age or gap is None or gap < FAR:
        return []
    ratio = "" if run.section("ppo").get("ratio_to") == "sampler" else "ppo.ratio_to: sampler, "
    return [
        f"Its answers were {age:.1f} updates old, and {gap:.2f} nats a token away from the weights that they trained. "
        f"So far away they teach less: {ratio}a lower learning rate or a smaller training.async_depth helps."
    ]


def _entropy(run: Run, updates: list[dict[str, Any]], name: str, few: int) -> list[str]:
    """Say that the entropy has collapsed: it fell below the bound, and neither the reward rose nor is the task solved.

    A policy that becomes sure of right answers has a low entropy too, and nothing is wrong with it.
    """
    entropies = _recorded(updates, name, "policy/entropy_avg")
    was, now = _mean(entropies[:few]), _mean(entropies[-few:])
    if was is None or now is None or not now < COLLAPSED <= was:
        return []
    scores = [value for record in updates if (value := finite(record.get("reward/score"))) is not None]
    if scores and _rose(scores[:few], scores[-few:]):
        return []
    turns = sorted({int(m[1]) for r in updates for key in r if (m := re.fullmatch(r"accuracy/turn_(\d+)", key))})
    right = [finite(r.get(f"accuracy/turn_{turns[-1]}")) for r in updates[-few:]] if turns else []
    if right and (_mean([value for value in right if value is not None]) or 0.0) >= SOLVED:
        return []
    ends = [statistics.fmean(part) for part in (scores[:few], scores[-few:])] if scores else []
    reward = f", and the mean score went from {ends[0]:.2f} to {ends[1]:.2f}" if ends else ""
    return [
        f"Its entropy fell from {was:.2f} to {now:.2f} nats per token{reward}. It has collapsed (below {COLLAPSED} "
        "nats, without a gain): what it samples is nearly always the same, so it finds nothing better. A lower "
        "learning rate, a larger ppo.kl_coef or ppo.entropy_coef keeps the entropy higher."
    ]


def _rose(first: Sequence[float], last: Sequence[float]) -> bool:
    """Whether the mean of the ``last`` values is above that of the ``first`` by more than twice its standard error."""

    def error(values: Sequence[float]) -> float:
        return statistics.variance(values) / len(values) if len(values) > 1 else 0.0

    return statistics.fmean(last) - statistics.fmean(first) > 2 * (error(first) + error(last)) ** 0.5


def _roles(updates: list[dict[str, Any]], name: str, few: int) -> list[str]:
    """A sentence about a role from which most of what moves the policy comes, over the last measured updates."""
    shares: dict[str, list[float]] = {}
    for record in updates:
        for key, value in record.items():
            if (match := re.fullmatch(rf"{re.escape(name)}/role/(.+)/grad_share", key)) and finite(value) is not None:
                shares.setdefault(match[1], []).append(float(value))
    means = {role: sum(values[-few:]) / len(values[-few:]) for role, values in shares.items()}
    role = max(means, key=lambda role: means[role], default="")
    if not role or means[role] <= max(CAPTURED, 1.5 / len(means)):
        return []
    return [
        f"{means[role]:.0%} of what moves it comes from what it says as {role}, of {len(means)} roles. "
        "training.balance: role weighs them equally, and a policy for each role cannot be captured by one (maporl "
        "sharing compares both)."
    ]


def _steps(kl: float | None, clipped: float | None, one_step: bool) -> list[str]:
    """Sentences about the size of the steps, for the means of an update's KL and of its share of clipped tokens."""
    # where an update is one step, both numbers are of the policy before it, which has not moved yet
    if kl is None or clipped is None:
        return []
    if one_step and kl < SMALL_KL:
        return []
    moved = f"An update moves the policy by {kl:.2g} nats per token and clips {clipped:.0%} of the tokens."
    if kl > LARGE_KL or clipped > LARGE_CLIP:
        return [moved, "These steps are large; a lower learning rate or ppo.target_kl makes them smaller."]
    if kl < SMALL_KL:
        return [moved, "These steps are tiny; a higher learning rate makes them larger."]
    return []


def _gradients(norms: list[float], few: int) -> list[str]:
    """Sentences about gradients that vanished, and about norms that have grown."""
    told = []
    if still := norms.count(0):
        told.append(
            f"Its gradient was 0 in {_of_all(still, len(norms))}, so nothing was learned there. This happens where all "
            "answers that are compared have equal rewards."
        )
    ends = [statistics.fmean(part) for part in (norms[:few], norms[-few:])] if len(norms) >= 2 * few else [0.0, 0.0]
    if ends[0] and ends[1] > GROWN * ends[0]:
        told.append(
            f"The norm of its gradients grew from {ends[0]:.2g} to {ends[1]:.2g}. A lower learning rate keeps it lower."
        )
    return told


def _of_all(some: int, updates: int) -> str:
    return f"{'all' if some == updates else f'{some} of'} {counted(updates, 'update')}"
