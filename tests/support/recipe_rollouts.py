"""The rollouts of a recipe with scripted answers, and the loss and gradients that they give."""

import torch

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
        total = (
            total
            + micro_batch_loss(piece, Output(new[part][:, :width][piece.sampled_mask]), totals, args, objective)[0]
        )
    total.backward()
    gradients = [new.grad[i][tokens.sampled_mask[i]] for i in range(len(tokens))]
    return float(total.detach()), gradients


def rollout_of(request):
    """Return the number of a request's dialogue among those on the same question."""
    return int(request.label.rsplit(".", 1)[1])
