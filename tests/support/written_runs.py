"""Run folders that are written by hand, with hostile texts, and pages that are read back."""

import base64
import gzip
import json
import re

from maporl.evaluation.metrics import evaluate_dialogues
from maporl.report.read import read_run
from maporl.types import Dialogue, Example, Grade, Utterance, to_json, to_record


def of_group(name, seconds, learner, engines):
    """The metrics of a group in which the processes do this for so many seconds, and nothing in the rest."""
    found = {f"group/{name}/seconds": seconds}
    for part, own in (("learner", learner), ("engines", engines)):
        if own is not None:
            found |= {f"group/{name}/{part}/{what}": value for what, value in own.items()}
            found[f"group/{name}/{part}/idle"] = 1 - sum(own.values()) / seconds
    return found


LEARNS = {"learning": 7.0, "sending": 0.5, "saving": 0.0, "dead": 0.0}
SAMPLES = {"sampling": 2.0, "sending": 0.5, "dead": 0.0}


def run_with(folder, updates):
    folder = write_run(folder, updates=0)
    lines = [json.dumps({"step": number, "episode": 16 * number, **own}) for number, own in enumerate(updates, 1)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return read_run(folder)


HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>\u202e<b>&amp;\x1b[31m"


def utterance(number, agent, turn, answer, right, **more):
    text = more.pop("text", f"Answer: {answer}")
    return Utterance(
        number, agent, agent, turn, turn, [{"role": "user", "content": "1+1="}], text,
        grade=Grade(answer, right, "" if right else "differs from the label"), rewards={"score": float(right)}, **more,
    )  # fmt: skip


def debate(name, first, second, label="2", **more):
    """ann and bob, two turns; each turn a pair of (answer, right)."""
    utterances = [
        utterance(i, agent, turn, answer, right, **more)
        for i, (turn, agent, (answer, right)) in enumerate(
            (t, a, one) for t, pair in enumerate((first, second)) for a, one in zip(("ann", "bob"), pair, strict=True)
        )
    ]
    return Dialogue(Example(name, f"{name}=", label), utterances)


RIGHT, WRONG, NOTHING = ("2", True), ("3", False), (None, False)
BEFORE = [debate(f"q{n}", (WRONG, NOTHING), (WRONG, WRONG)) for n in range(10)]
AFTER = [
    *(debate(f"q{n}", (WRONG, RIGHT), (RIGHT, RIGHT)) for n in range(7)),
    debate("q7", (RIGHT, RIGHT), (RIGHT, WRONG)),
    debate("q8", (WRONG, WRONG), (WRONG, ("12", False)), label="2"),
    debate("q9", (NOTHING, NOTHING), (NOTHING, NOTHING), label="12"),
]


def write_run(folder, updates=4, dialogues=(), before=BEFORE, after=AFTER, **config):
    """A run folder as the trainer leaves it."""
    folder.mkdir(parents=True)
    shown = {
        "updates": updates, "task": {"name": "toy_sum"}, "protocol": {"name": "debate", "turns": 2}, "evaluation": {"questions": 10},
        "agents": {"ann": {"tiny": {"architecture": "llama", "layers": 2}}, "bob": {"model": "org/model", "lora": {"r": 8}}}, **config,
    }  # fmt: skip
    (folder / "config.yaml").write_text(json.dumps(shown))
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, updates + 1):
            values = {
                "accuracy/turn_1": 0.1, "accuracy/turn_2": min(1.0, step / 10), "reward/score": 0.5, "ann/objective/kl": 0.01 * step,
                "bob/objective/kl": float("nan"), "ann/grad_norm": 1.0, "time/update": 2.0, "tokens_per_second": 100.0, "episode": 8 * step,
                "memory/peak": 1.0,
            }  # fmt: skip
            file.write(json.dumps({"step": step, **values}) + "\n")
            if step % 2 == 0:
                file.write(json.dumps({"step": step, "eval_accuracy/turn_1": 0.2, "eval_accuracy/turn_2": 0.3}) + "\n")
    lines = [json.dumps({"step": 1 + n % updates, **to_record(d)}) for n, d in enumerate(dialogues)]
    (folder / "dialogues.jsonl").write_text("".join(line + "\n" for line in lines))
    for when, played in (("before", before), ("after", after)):
        if played:
            (folder / f"evaluation_{when}.json").write_text(json.dumps(evaluate_dialogues(played).to_json()))
            (folder / f"evaluation_{when}.jsonl").write_text("".join(to_json(d) + "\n" for d in played))
    if after:
        (folder / "final").mkdir()
        (folder / "final/config.json").write_text("{}")
    return folder


def data_of(page):
    """The data in a written page."""
    packed = re.search(r'<script type="application/octet-stream" id="data" data-live="no">([^<]*)</script>', page)[1]
    return json.loads(gzip.decompress(base64.b64decode(packed)))
