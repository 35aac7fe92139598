"""Whether the training itself went well, in sentences about the numbers of the updates."""

import re
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
"""Rules of thumb for PPO on language models. Beyond them a sentence says what one can try. :data:`COLLAPSED` is an
entropy in nats per token, and :data:`CAPTURED` the share of one role in the gradients of a policy.
:data:`EQUAL_SCORES` is a standard deviation of a verifier's scores of an update, which are from 0 to 1."""


def health(run: Run) -> list[str]:
    """What was not trained on, and how the steps, gradients, entropy and critic of each policy were.

    Only the first is said where fewer than two updates were made.
    """
    updates = run.updates()
    if len(updates) < 2:
        return _untrained(run, updates)
    few = max(1, min(10, len(updates) // 3))
    names = {m[1] for record in updates for key in record if (m := re.fullmatch(r"(.+)/policy/approxkl_avg", key))}
    limit = finite(run.section("training").get("max_grad_norm"))
    ppo = run.section("ppo")
    one_step = ppo.get("num_ppo_epochs") == 1 and ppo.get("num_mini_batches") == 1
    told = [f"{name}: {text}" for name in sorted(names) if (text := _policy(updates, name, few, limit, one_step))]
    if told:
        told.insert(0, f"Numbers are means over the last {few_updates(few)} unless a sentence says otherwise.")
    return [*_untrained(run, updates), *_verifier(updates, few), *told]


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


def _policy(updates: list[dict[str, Any]], name: str, few: int, limit: float | None, one_step: bool) -> str:
    """The sentences about one policy. Gradients are cut to the norm ``limit``."""

    def recorded(key: str) -> list[float]:
        return [value for record in updates if (value := finite(record.get(f"{name}/{key}"))) is not None]

    def mean(values: list[float]) -> float | None:
        return sum(values) / len(values) if values else None

    kl, clipped = (mean(recorded(key)[-few:]) for key in ("policy/approxkl_avg", "policy/clipfrac_avg"))
    norms = recorded("grad_norm")
    learned = not norms or any(norms)
    told = [*(_steps(kl, clipped, one_step) if learned else []), *_gradients(norms, limit)]
    entropies = recorded("policy/entropy_avg")
    was, now = mean(entropies[:few]), mean(entropies[-few:])
    if was is not None and now is not None:
        if f"{was:.2f}" == f"{now:.2f}":
            told.append(f"Its entropy stayed at {now:.2f} nats.")
        else:
            told.append(f"Its entropy went from {was:.2f} nats in the first {few_updates(few)} to {now:.2f} nats.")
        if now < COLLAPSED:
            told.append(
                f"It has collapsed (below {COLLAPSED} nats): answers to a question are nearly all the same, so "
                "comparing them teaches little. A lower learning rate, ppo.kl_coef or ppo.entropy_coef keeps it "
                "higher."
            )
    told += _roles(updates, name, few)
    explained = mean(recorded("val/explained_variance")[-few:])
    if explained:  # exactly 0 without a critic
        told.append(f"The critic explains {explained:.0%} of the variance of the returns.")
        if explained < WEAK_CRITIC:
            told.append("That is little: the advantages are mostly the noise of single answers.")
    return " ".join(told)


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
        return ["An update is one step, so its KL and its clipped tokens, which are measured before the step, are 0."]
    told = [f"An update moves the policy by {kl:.2g} nats per token and clips {clipped:.0%} of the tokens."]
    if kl > LARGE_KL or clipped > LARGE_CLIP:
        told.append("These steps are large; a lower learning rate or ppo.target_kl makes them smaller.")
    elif kl < SMALL_KL:
        told.append("These steps are tiny; a higher learning rate makes them larger.")
    return told


def _gradients(norms: list[float], limit: float | None) -> list[str]:
    """Sentences about the norms of the gradients, and about how many of them were cut to ``limit``."""
    told = []
    if still := norms.count(0):
        told.append(
            f"Its gradient was 0 in {_of_all(still, len(norms))}, so nothing was learned there. This happens where all "
            "answers that are compared have equal rewards."
        )
    if norms and limit:
        over = sum(norm > limit for norm in norms)
        average = sum(norms) / len(norms)
        told.append(
            f"Its gradients were cut to max_grad_norm {limit:g} in {_of_all(over, len(norms))} (mean norm "
            f"{average:.2g})."
        )
    return told


def _of_all(some: int, updates: int) -> str:
    return f"{'all' if some == updates else f'{some} of'} {counted(updates, 'update')}"
