"""Predict the time and cost of an update for other teams, models and ranks, by a model that is fitted to measured
points.

    python benchmarks/debate_step.py sweep --model DIR --json > points.json     # twelve measured points python
    benchmarks/scaling.py check points.json                              # fit on eight of them, predict the other four
    python benchmarks/scaling.py predict points.json --agents 4 --turns 3 --questions 256 --new-tokens 512 \
        --parameters 1.7e9 --ranks 8 --speed 400 --price 2.5

With N agents, T turns, Q questions and L new tokens in each completion, all agents on one base:

    rollout = a L T + b (tokens sampled) + c (tokens read before sampling)      decoding: a per step, b per token;
    prefill: c update  = d + e (tokens read by the update)                                  forward, backward,
    reference, old log-probabilities over R ranks: tokens / R, plus the sum of gradients: 2 (R - 1) / R * trained bytes
    / bandwidth

``--parameters`` scales b, c and e in proportion to the measured model's parameters. ``--speed`` divides all seconds by
how many times as fast the other machine multiplies matrices. The model is rough. It does not consider memory, and
decoding on GPUs is limited by bandwidth rather than computation. Its rollouts on GPUs are therefore a lower bound.
"""

import argparse
import json
from pathlib import Path

import numpy as np


def features(point: dict) -> tuple[list[float], list[float]]:
    """Return the terms of the rollout and of the update for a measured point."""
    sampled = point["agents"] * point["turns"] * point["questions"] * point["new_tokens"]
    steps = point["turns"] * point["new_tokens"]
    return [steps, sampled, point["tokens_prefilled"]], [1.0, point["tokens_read_by_the_update"]]


def fit(points: list[dict]) -> tuple[np.ndarray, np.ndarray]:
    """Fit by least squares on relative errors. Negative coefficients are set to 0, and the rest is fitted again."""

    def solve(rows: list[list[float]], seconds: list[float]) -> np.ndarray:
        matrix, target = np.array(rows) / np.array(seconds)[:, None], np.ones(len(seconds))
        used = list(range(matrix.shape[1]))
        while True:
            found, *_ = np.linalg.lstsq(matrix[:, used], target, rcond=None)
            if (found >= 0).all() or len(used) == 1:
                result = np.zeros(matrix.shape[1])
                result[used] = found
                return result
            used.pop(int(found.argmin()))

    rollout = solve([features(p)[0] for p in points], [p["phases"]["collect"] for p in points])
    update = solve([features(p)[1] for p in points], [p["phases"]["advantage"] + p["phases"]["update"] for p in points])
    return rollout, update


def seconds_of(point: dict, model: tuple[np.ndarray, np.ndarray]) -> tuple[float, float]:
    """Return the predicted seconds of the rollout and of the update."""
    return float(np.dot(features(point)[0], model[0])), float(np.dot(features(point)[1], model[1]))


def check(points: list[dict]) -> None:
    """Fit eight points, and print a table of the predictions for the other four."""
    held_out = [points[i] for i in (2, 5, 8, 11) if i < len(points)]
    model = fit([p for p in points if p not in held_out])
    print("| agents | turns | measured s | predicted s | error |\n|---|---|---|---|---|")
    for point in held_out:
        measured, predicted = sum(point["phases"].values()), sum(seconds_of(point, model))
        print(
            f"| {point['agents']} | {point['turns']} | {measured:.1f} | {predicted:.1f} | "
            f"{predicted / measured - 1:+.0%} |"
        )


def predict(points: list[dict], options: argparse.Namespace) -> None:
    """Print the predicted seconds and cost of a run with ``options``."""
    rollout, update = fit(points)
    size = options.parameters / points[0]["parameters"]
    typical = points[-1]
    prompt = typical["tokens_prefilled"] / (typical["agents"] * typical["turns"] * typical["questions"])
    sampled = options.agents * options.turns * options.questions * options.new_tokens / options.ranks
    prefilled = options.agents * options.turns * options.questions * (options.prompt_tokens or prompt) / options.ranks
    read = sampled + prefilled
    play = (
        rollout[0] * options.turns * options.new_tokens + size * (rollout[1] * sampled + rollout[2] * prefilled)
    ) / options.speed
    learn = (update[0] + size * update[1] * read) / options.speed
    trained = options.trained_parameters or options.parameters
    sync = 2 * (options.ranks - 1) / options.ranks * trained * 2 * options.agents / (options.bandwidth * 1e9)
    step = play + learn + sync
    print(f"rollout {play:.1f} s, update {learn:.1f} s, gradients between ranks {sync:.2f} s: {step:.1f} s per update")
    print(
        f"{step * options.ranks / 3600 * options.price * options.updates:.2f} for {options.updates} updates at "
        f"{options.price} an hour and rank"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["check", "predict"])
    parser.add_argument("points", type=Path)
    parser.add_argument("--agents", type=int, default=3)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--questions", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=float, default=None, help="tokens of a prompt; default: as measured")
    parser.add_argument("--parameters", type=float, default=1.7e9)
    parser.add_argument(
        "--trained-parameters", type=float, default=None, help="per agent; default: all (a LoRA has fewer)"
    )
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--speed", type=float, default=1.0)
    parser.add_argument("--bandwidth", type=float, default=50.0, help="GB/s between ranks")
    parser.add_argument("--price", type=float, default=2.5)
    parser.add_argument("--updates", type=int, default=100)
    options = parser.parse_args()
    points = json.loads(options.points.read_text())
    check(points) if options.command == "check" else predict(points, options)


if __name__ == "__main__":
    main()
