"""Whether the training itself went well: the numbers of the update, in sentences."""

import re

from maporl.report.charts import finite
from maporl.report.language import counted
from maporl.report.read import Run

LARGE_KL, SMALL_KL = 0.1, 1e-5
LARGE_CLIP = 0.3
WEAK_CRITIC = 0.1
"""Rules of thumb of PPO on language models; beyond them a sentence says what one may try."""


def health(run: Run) -> list[str]:
    """A sentence for each policy's steps, gradients, entropy and critic; none where fewer than two updates were made."""
    updates = run.updates()
    if len(updates) < 2:
        return []
    names = sorted(
        {m[1] for record in updates for key in record if (m := re.fullmatch(r"(.+)/policy/approxkl_avg", key))}
    )
    limit = finite(run.section("training").get("max_grad_norm"))
    few = max(1, min(10, len(updates) // 3))
    told = []
    for name in names:

        def mean(key: str, first: bool = False, policy: str = name) -> float | None:
            known = [v for r in updates if (v := finite(r.get(f"{policy}/{key}"))) is not None]
            part = known[:few] if first else known[-few:]
            return sum(part) / len(part) if part else None

        parts = []
        kl, clipped = mean("policy/approxkl_avg"), mean("policy/clipfrac_avg")
        if kl is not None and clipped is not None:
            advice = ""
            if kl > LARGE_KL or clipped > LARGE_CLIP:
                advice = ", large steps: a lower learning rate or ppo.target_kl makes them smaller"
            elif kl < SMALL_KL:
                advice = ", hardly at all: a higher learning rate moves it more"
            parts.append(f"an update moves it by {kl:.2g} nats per token and clips {clipped:.0%} of the tokens{advice}")
        norms = [v for r in updates if (v := finite(r.get(f"{name}/grad_norm"))) is not None]
        if norms and limit:
            over = sum(v > limit for v in norms)
            often = "all" if over == len(norms) else f"{over} of"
            parts.append(
                f"its gradients were cut to max_grad_norm {limit:g} in {often} {counted(len(norms), 'update')} (mean norm {sum(norms) / len(norms):.2g})"
            )
        was, now = mean("policy/entropy_avg", first=True), mean("policy/entropy_avg")
        if was is not None and now is not None:
            course = (
                f"stayed at {now:.2f}"
                if f"{was:.2f}" == f"{now:.2f}"
                else f"went from {was:.2f} in the first {few} to {now:.2f}"
            )
            parts.append(f"entropy {course} nats")
        explained = mean("val/explained_variance")
        if explained:  # exactly 0 where there is no critic
            advice = ", little: the advantages are mostly noise of single answers" if explained < WEAK_CRITIC else ""
            parts.append(f"the critic explains {explained:.0%} of the variance of returns{advice}")
        if parts:
            told.append(f"{name}: {'; '.join(parts)}.")
    if told:
        told.insert(0, f"Means of the last {counted(few, 'update')}, where nothing else is said.")
    return told
