"""How long a learner waits for dialogues that are played ahead: whole batches in order, or the dialogues that end
first.

    python benchmarks/pacing.py

Simulated: dialogues take log-normal times, as long answers do, and an update takes one unit. Both rules hold the bound:
no dialogue is trained on by weights more than ``depth`` updates younger. ``in order`` is what ``training.async_depth``
does. ``first ended`` makes a batch of the dialogues that ended first, and waits for those that would otherwise pass the
bound (pacing as in AReaL, arXiv 2505.24298, with a strict bound). Every seed plays the same dialogues under both rules.
"""

import random
import statistics
import sys

SIZE, UPDATES = 64, 200


def seconds(rng: random.Random, spread: float) -> float:
    """Return the time of a dialogue, whose median is 1."""
    return rng.lognormvariate(0.0, spread)


def in_order(times: list[float], depth: int) -> tuple[float, float, float]:
    """Return the mean time between updates, the mean age of dialogues, and the largest age."""
    clock, updated, ages, starts = 0.0, [], [], {}
    for number in range(UPDATES):
        for later in range(number, min(number + depth + 1, UPDATES)):
            starts.setdefault(later, clock)
        clock = max(clock, starts[number] + max(times[number * SIZE : (number + 1) * SIZE]))
        ages.append(number - sum(end <= starts[number] for end in updated))
        clock += 1.0
        updated.append(clock)
    return clock / UPDATES, statistics.mean(ages), max(ages)


def first_ended(times: list[float], depth: int) -> tuple[float, float, float]:
    """Return the same, for batches of the dialogues that end first as far as the bound allows."""
    clock, waiting, ages, begun = 0.0, [], [], 0
    for number in range(UPDATES):
        while begun < len(times) and len(waiting) < (depth + 1) * SIZE:
            waiting.append((clock + times[begun], number))  # when it ends, and the version with which it begins
            begun += 1
        chosen: list[tuple[float, int]] = []
        left = sorted(waiting)
        # what must be trained on by each later update, if nothing is to pass the bound
        for one in sorted(waiting, key=lambda one: (one[1], one[0])):
            due = one[1] + depth - number
            if due <= 0 or sum(other[1] <= one[1] for other in left) > due * SIZE:
                chosen.append(one)
                left.remove(one)
        chosen += left[: max(SIZE - len(chosen), 0)]
        assert len(chosen) == SIZE, len(chosen)
        for one in chosen:
            waiting.remove(one)
            ages.append(number - one[1])
        clock = max(clock, *(end for end, _ in chosen)) + 1.0
    return clock / UPDATES, statistics.mean(ages), max(ages)


def main() -> None:
    """Print the table."""
    print(f"{SIZE} dialogues a batch, {UPDATES} updates, 5 seeds; units are those of an update")
    for spread in (0.5, 1.0):
        for depth in (1, 2, 4):
            found: dict[str, list[tuple[float, float, float]]] = {"in order": [], "first ended": []}
            for seed in range(5):
                rng = random.Random(seed)
                times = [seconds(rng, spread) for _ in range(SIZE * UPDATES)]
                found["in order"].append(in_order(times, depth))
                found["first ended"].append(first_ended(times, depth))
            told = "; ".join(
                f"{name} {statistics.mean(p for p, *_ in own):.2f} a update, age "
                f"{statistics.mean(a for _, a, _ in own):.2f} (at most {max(m for *_, m in own):.0f})"
                for name, own in found.items()
            )
            print(f"spread {spread}, depth {depth}: {told}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
