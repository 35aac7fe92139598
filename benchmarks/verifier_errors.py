"""What the verifiers of ``benchmarks/claims.py run varied_verifier`` say of errors that they have and have not seen.

    python benchmarks/verifier_errors.py [--seeds 0 1 2 3 4] [--keep runs/claims]

For questions of both kinds, each verifier scores the right answer and four kinds of wrong ones: the other skill's
answer, which is the one error of the untrained agents; a right answer with one digit changed; a right answer with one
digit said twice; and three random digits. Prints a Markdown table of mean scores over questions and seeds, and the
share of pairs in which the right answer scores more. A verifier that the claim's run has made is not made again.
"""

import argparse
import json
import os
import random
from pathlib import Path
from statistics import fmean

from claims import RESULTS, ROOT, warm_start, warm_started
from claims_data import CLAIMS
from claims_verifier import make_verifier
from quickstart import about

QUESTIONS = 300
CLAIM = CLAIMS["varied_verifier"]


def answers(rng: random.Random) -> dict[str, list[tuple[str, str]]]:
    """Return (question, answer) pairs for each kind of answer, of the same questions in the same order."""
    from maporl.playground.skills import SKILLS

    pairs: dict[str, list[tuple[str, str]]] = {}
    for number in rng.sample(range(1000), QUESTIONS):
        digits, (own, other) = f"{number:03d}", rng.sample(["next", "reversed"], 2)
        question, right = digits + SKILLS[own][0], SKILLS[own][1](digits)
        place = rng.randrange(3)
        changed = rng.choice([digit for digit in "0123456789" if digit != right[place]])
        kinds = {
            "right": right,
            "the other skill's": SKILLS[other][1](digits),
            "one digit wrong": right[:place] + changed + right[place + 1 :],
            "one digit twice": right[: place + 1] + right[place:],
            "random digits": f"{(int(right) + rng.randrange(1, 1000)) % 1000:03d}",
        }
        for kind, answer in kinds.items():
            pairs.setdefault(kind, []).append((question, answer))
    return pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--keep", type=Path, default=ROOT / "runs/claims", help="the folder of the claims' runs")
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    root = options.keep.resolve()
    from maporl.verifier.encoding import chat_of
    from maporl.verifier.model import Verifier

    found: dict[str, dict[str, dict[str, float]]] = {}
    for number, (arm, lore) in enumerate(CLAIM.verifiers.items()):
        scores: dict[str, list[float]] = {}
        for seed in options.seeds:
            folder = warm_start(CLAIM.world, seed, root).folder / f"verifiers/{number}"
            start = warm_started(CLAIM.world, seed, root)
            made = make_verifier(ROOT / CLAIM.world, seed, start, folder, lore)
            verifier = Verifier.load(str(made), "cpu", batch_size=512)
            for kind, pairs in answers(random.Random(seed)).items():
                scores.setdefault(kind, []).extend(verifier.score([chat_of(*pair) for pair in pairs]))
        found[arm] = {
            kind: {
                "mean score": fmean(own),
                "right scores more": fmean(r > w for r, w in zip(scores["right"], own, strict=True)),
            }
            for kind, own in scores.items()
        }
    report = {"command": "python benchmarks/verifier_errors.py", "seeds": options.seeds, **about(), "verifiers": found}
    (RESULTS / "verifier_errors.json").write_text(json.dumps(report, indent=1) + "\n")
    print("| answer | " + " | ".join(f"{arm}: mean score | right scores more" for arm in found) + " |")
    print("|---" * (1 + 2 * len(found)) + "|")
    for kind in found["verifier"]:
        cells = [f"{found[arm][kind]['mean score']:.3f} | {found[arm][kind]['right scores more']:.1%}" for arm in found]
        print(f"| {kind} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
