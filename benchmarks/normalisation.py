"""Draw the identity of Dr. MAS: one normalisation for all agents may inflate one agent's gradient.

    python benchmarks/normalisation.py docs/images/normalisation.png

An agent speaks in a share w of a prompt's rows. Its rewards have the same spread s as the others', and a mean m_i that
is D higher. All rows have the mean m and the spread S. Then E[A^2] of that agent is (s^2 + (m_i - m)^2) / S^2. The
lines show this formula, and the dots show what ``estimate`` gives on sampled rewards. With the key [prompt, agent] it
is 1.
"""

import argparse
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from maporl.advantages import AdvantageConfig, TurnBatch, estimate

SPREAD = 0.3
ROWS = 4000


def measured(share: float, distance: float, key: tuple[str, ...]) -> float:
    """Return the mean of the rare agent's squared advantages."""
    rng = np.random.default_rng(0)
    rare = round(ROWS * share)
    rewards = np.concatenate([rng.normal(distance, SPREAD, rare), rng.normal(0.0, SPREAD, ROWS - rare)])
    batch = TurnBatch(reward=rewards, prompt=[0] * ROWS, agent=["rare"] * rare + ["other"] * (ROWS - rare))
    config = AdvantageConfig(returns="utterance", baseline="mean", scale="std", key=key, ddof=0)
    return float((estimate(batch, config)[:rare] ** 2).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    file = parser.parse_args().file
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    distances = np.linspace(0, 2, 41)
    for number, share in enumerate((0.5, 0.25, 0.1)):
        spread = SPREAD**2 + share * (1 - share) * distances**2
        axes.plot(distances, (SPREAD**2 + ((1 - share) * distances) ** 2) / spread, color=f"C{number}",
                  label=f"key [prompt], the agent speaks in {share:.0%} of the rows")  # fmt: skip
        dots = distances[::8]
        axes.plot(dots, [measured(share, d, ("prompt",)) for d in dots], "o", color=f"C{number}", markersize=4)
    alone = [measured(0.1, d, ("prompt", "agent")) for d in distances[::8]]
    axes.plot(distances[::8], alone, "k--", label="key [prompt, agent]")
    axes.set_xlabel("distance of the agent's mean reward from the others' (spread of each: 0.3)")
    axes.set_ylabel("E[A²] of the agent")
    axes.legend(fontsize=8)
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    main()
