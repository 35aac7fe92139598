"""The rollouts of recipes with scripted answers and a judge's verdicts, their loss and gradients, and how long some train."""

import torch
from scripted_training import recipe_values

from trl_ext.ppo.losses import Totals, micro_batch_loss


class Output:
    """A learner's output at the sampled tokens of a token batch, without a critic."""

    def __init__(self, logprobs):
        self.logprobs, self.values, self.entropies = logprobs, None, torch.zeros_like(logprobs.detach())


def loss_and_gradients(trainer, tokens, parts=None, shift=0.0):
    """Return the loss of a token batch and the gradient of each row's tokens, with all new log-probabilities moved.

    ``parts`` cuts the batch into micro-batches. By default one reads all rows.
    """
    args = trainer.args
    everything = torch.arange(len(tokens))
    totals = Totals.of(tokens, everything, args)
    new = (tokens.old_logprobs + shift).detach().requires_grad_(True)
    objective = next(iter(trainer.learners.values())).objective
    total = torch.zeros(())
    for part in [everything] if parts is None else parts:
        piece = tokens.take(part)
        width = piece.input_ids.shape[1]
        output = Output(new[part][:, :width][piece.sampled_mask])
        total = total + micro_batch_loss(piece, output, totals, args, objective)[0]
    total.backward()
    gradients = [new.grad[i][tokens.sampled_mask[i]] for i in range(len(tokens))]
    return float(total.detach()), gradients


def rollout_of(request):
    """Return the number of a request's dialogue among those on the same question."""
    return int(request.label.rsplit(".", 1)[1])


# enough for answers of different worth, without which groups of equals have no gradient
BRIEF = {"steps": 15, "batch_size": 8, "learning_rate": 1e-2}
STEPS = {
    40: ("g_ra", "spa_rl", "turn_ppo", "oni", "reseek", "cooper", "metaagent_x"),
    60: ("co_rl", "search_self_play", "parl", "absolute_zero"),
    80: ("at_grpo_code", "spice"),
}
LONGER = {name: {"steps": steps} for steps, names in STEPS.items() for name in names}
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
