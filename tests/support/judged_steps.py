"""Scripted answers of a team whose steps a judge marks."""

from scripted_training import recipe_values

RIGHT = (True, True, False, False)
VERDICTS = ((1, 1, -1), (1, -1, None), (1, 1, 1), (-1, -1, -1))
WORDS = {1: "Verdict: good", -1: "Verdict: bad", None: "Verdict: good. Verdict: bad"}


def one_step_values(tmp_path, **changes):
    """The recipe's judge, rewards and advantages for an agent that answers a sum once."""
    values = recipe_values("rl_anything", tmp_path)
    values["protocol"] = {"name": "debate", "turns": 1, "step_judge": values["protocol"]["step_judge"]}
    values["agents"] = {"ann": {}, "judge": {}}
    values["task"] = {"name": "toy_sum", "largest": 3}
    values["reward"]["sources"] = {"label": 1.0}
    values["branching"] = {"group": 4}
    return values | changes


def script(request, verdicts=VERDICTS, right=RIGHT):
    number = request.rng_key[-2]
    if request.ask.role == "judge":
        return WORDS[verdicts[number][request.utterance - 1]]
    return str(int(request.example.answer) + (0 if right[number] else 1))
