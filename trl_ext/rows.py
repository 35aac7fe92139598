"""Token rows: what a learner is trained on. One row is one answer with the prompt it was given."""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor


@dataclass
class Answer:
    """One sampled answer, before it becomes tensors.

    ``group`` names the rows whose advantages are whitened together; ``head`` is the critic's output (the turn);
    ``label`` says in errors whose answer this is; ``score`` is filled in by the reward step; ``weight`` is how often it
    counts in the loss. ``critic_prompt_ids``: what the critic reads before the answer, where that is not the policy's own
    prompt.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    ended: bool
    label: str
    prompt: Any = None
    text: str = ""
    group: tuple = ()
    head: int = 0
    score: float | None = None
    weight: float = 1.0
    critic_prompt_ids: list[int] | None = None


@dataclass
class TokenRows:
    """Right-padded rows [N, T] and what is known of each token.

    Everything stored per token sits at *that token's own column*: its log-probability given all before it, the value
    of the state it was chosen in, its reward, advantage and return. ``action_mask`` is true where the policy sampled
    the token; column 0 is never an action. Positions outside the mask hold zeros. ``value_mask`` is true where the critic
    is trained. ``critic``: the same answers after what the critic reads, where that differs; only its ids and masks are
    used.
    """

    input_ids: Tensor
    attention_mask: Tensor
    action_mask: Tensor
    score: Tensor  # [N]
    head: Tensor  # [N]
    group: Tensor  # [N] index of the whitening group
    weight: Tensor  # [N] how often a row counts in the loss
    value_mask: Tensor
    labels: list[str]
    # [N, T]; zeros until annotate and assign_advantages fill them in
    logprobs: Tensor
    ref_logprobs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor
    critic: "TokenRows | None" = None

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    def by_length(self, index: Tensor | None = None) -> Tensor:
        """``index`` (default: all rows) from short to long, so that rows of one forward waste little padding."""
        lengths = self.attention_mask.sum(1)
        index = torch.arange(len(self), device=lengths.device) if index is None else index
        return index[torch.argsort(lengths[index], stable=True)]

    def take(self, index: Tensor) -> "TokenRows":
        """The rows at ``index``, cut to the longest of them."""
        width = int(self.attention_mask[index].sum(1).max())
        chosen = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                chosen[f.name] = value[index][:, :width] if value.dim() == 2 else value[index]
        critic = self.critic.take(index) if self.critic is not None else None
        return replace(self, **chosen, labels=[self.labels[i] for i in index.tolist()], critic=critic)

    def predicting(self) -> tuple[Tensor, Tensor]:
        """What a forward must read, [N, T-1], and the positions in it whose output chooses an action token.

        Nothing is predicted from the last column, so it is not read.
        """
        return self.input_ids[:, :-1], self.action_mask[:, 1:]


def build_rows(answers: list[Answer], pad_id: int, device: torch.device | str) -> TokenRows:
    """``answers`` as right-padded tensors; groups are numbered in order of first appearance.

    Right padding needs no attention mask in a causal model: no real token can see a later column.
    """
    width = max(len(a.prompt_ids) + len(a.response_ids) for a in answers)
    shape = (len(answers), width)
    input_ids = torch.full(shape, pad_id, dtype=torch.long)
    attention = torch.zeros(shape, dtype=torch.bool)
    action = torch.zeros(shape, dtype=torch.bool)
    groups: dict[tuple, int] = {}
    for row, answer in enumerate(answers):
        if not answer.prompt_ids or not answer.response_ids:
            raise ValueError(f"{answer.label}: a row needs at least one prompt token and one answer token")
        start, end = len(answer.prompt_ids), len(answer.prompt_ids) + len(answer.response_ids)
        input_ids[row, :end] = torch.tensor(answer.prompt_ids + answer.response_ids)
        attention[row, :end] = True
        action[row, start:end] = True
        groups.setdefault(answer.group, len(groups))
    rows = TokenRows(
        input_ids=input_ids,
        attention_mask=attention,
        action_mask=action,
        score=torch.tensor([float("nan") if a.score is None else a.score for a in answers]),
        head=torch.tensor([a.head for a in answers]),
        group=torch.tensor([groups[a.group] for a in answers]),
        weight=torch.tensor([a.weight for a in answers]),
        value_mask=action.clone(),
        labels=[a.label for a in answers],
        logprobs=torch.zeros(shape),
        ref_logprobs=torch.zeros(shape),
        values=torch.zeros(shape),
        advantages=torch.zeros(shape),
        returns=torch.zeros(shape),
    )
    for f in fields(rows):
        value = getattr(rows, f.name)
        if isinstance(value, Tensor):
            setattr(rows, f.name, value.to(device))
    if any(a.critic_prompt_ids is not None for a in answers):
        seen = [replace(a, prompt_ids=a.critic_prompt_ids or a.prompt_ids, critic_prompt_ids=None) for a in answers]
        rows.critic = build_rows(seen, pad_id, device)
    return rows
