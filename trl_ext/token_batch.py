"""Token rows: what a learner is trained on. One row is one answer with the prompt it was given."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from trl_ext import distributed


@dataclass
class Completion:
    """One sampled answer, before it becomes tensors.

    ``group`` names the rows whose advantages are whitened together; ``head`` is the critic's output (the turn);
    ``label`` says in errors whose answer this is; ``score`` is filled in by the reward step; ``weight`` is how often it
    counts in the loss. ``critic_prompt_ids``: what the critic reads before the answer, where that is not the policy's own
    prompt. ``sampled_logprobs``: the engine's own log-probabilities of the answer's tokens, where it gives them.
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
    sampled_logprobs: list[float] | None = None


@dataclass
class TokenBatch:
    """Right-padded rows [N, T] and what is known of each token.

    Everything stored per token sits at *that token's own column*: its log-probability given all before it, the value
    of the state it was chosen in, its reward, advantage and return. ``sampled_mask`` is true where the policy sampled
    the token; column 0 is never an action. Positions outside the mask hold zeros. ``value_mask`` is true where the critic
    is trained. ``critic``: the same answers after what the critic reads, where that differs; only its ids and masks are
    used. ``family``: rows that begin alike to the end of the shorter one, such as the turns of one conversation, are read
    by one forward of the longest.
    """

    input_ids: Tensor
    attention_mask: Tensor
    sampled_mask: Tensor
    score: Tensor  # [N]
    head: Tensor  # [N]
    group: Tensor  # [N] index of the whitening group
    prefix_group: Tensor  # [N]
    weight: Tensor  # [N] how often a row counts in the loss
    value_mask: Tensor
    labels: list[str]
    sampler_logprobs: Tensor  # [N, T] the engine's log-probabilities of what it sampled; NaN where unknown
    sample: Tensor  # [N] the completion that each row was made of, by its place in what build_token_batch was given
    # [N, T]; zeros until annotate and assign_advantages fill them in
    old_logprobs: Tensor
    ref_logprobs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor
    critic: "TokenBatch | None" = None
    critic_only: bool = False

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    def microbatches(self, index: Tensor, most_rows: int, most_tokens: int | None = None) -> list[Tensor]:
        """``index`` cut into parts for one forward each, from short to long, so that they hold little padding.

        A forward reads at most ``most_rows`` rows, families counting once, and ``most_tokens`` tokens with padding; one
        that is longer by itself is read alone.
        """
        lengths, family = self.attention_mask.sum(1).tolist(), self.prefix_group.tolist()
        members: dict[int, list[int]] = {}
        for row in index.tolist():
            members.setdefault(family[row], []).append(row)
        width = {f: max(lengths[row] for row in rows) for f, rows in members.items()}
        parts: list[list[int]] = []
        read = 0
        for one in sorted(members, key=width.__getitem__):
            full = read == most_rows or (most_tokens is not None and (read + 1) * width[one] > most_tokens)
            if not parts or full:
                parts.append([])
                read = 0
            parts[-1] += members[one]
            read += 1
        return [torch.tensor(part, device=self.input_ids.device) for part in parts]

    def take(self, index: Tensor) -> "TokenBatch":
        """The rows at ``index``, cut to the longest of them."""
        width = int(self.attention_mask[index].sum(1).max()) if len(index) else 1
        chosen: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                chosen[f.name] = value[index][:, :width] if value.dim() == 2 else value[index]
        critic = self.critic.take(index) if self.critic is not None else None
        return replace(self, **chosen, labels=[self.labels[i] for i in index.tolist()], critic=critic)

    def to_read(self) -> tuple[Tensor, Tensor, Tensor]:
        """What a forward must read, [P, T-1]; where in it, flattened, each action token is chosen: [M], in row-major order
        of the rows; and which rows are read, [P].

        Of every family only the longest row is read. Nothing is predicted from the last column, so it is not read either.
        """
        family = self.prefix_group.tolist()
        longest = {family[row]: row for row in torch.argsort(self.attention_mask.sum(1), stable=True).tolist()}
        place = {name: position for position, name in enumerate(longest)}
        rows = torch.tensor(list(longest.values()), device=self.input_ids.device)
        read = self.input_ids[rows, :-1]
        row, column = self.sampled_mask.nonzero(as_tuple=True)
        places = torch.tensor([place[name] for name in family], device=read.device)
        return read, places[row] * read.shape[1] + column - 1, rows


def build_token_batch(
    answers: Sequence[Completion], pad_id: int, device: torch.device | str, critic_only: bool = False
) -> TokenBatch:
    """``answers`` as right-padded tensors; groups are numbered in order of first appearance.

    Right padding needs no attention mask in a causal model: no real token can see a later column.
    """
    sequences = [a.prompt_ids + a.response_ids for a in answers]
    width = max(map(len, sequences), default=1)
    shape = (len(answers), width)
    input_ids = torch.full(shape, pad_id, dtype=torch.long)
    attention = torch.zeros(shape, dtype=torch.bool)
    action = torch.zeros(shape, dtype=torch.bool)
    sampled = torch.full(shape, float("nan"))
    groups: dict[tuple, int] = {}
    for row, answer in enumerate(answers):
        if not answer.prompt_ids or not answer.response_ids:
            raise ValueError(f"{answer.label}: a row needs at least one prompt token and one answer token")
        start, end = len(answer.prompt_ids), len(sequences[row])
        input_ids[row, :end] = torch.tensor(sequences[row])
        attention[row, :end] = True
        action[row, start:end] = True
        if answer.sampled_logprobs is not None:
            sampled[row, start:end] = torch.tensor(answer.sampled_logprobs)
        groups.setdefault(answer.group, len(groups))
    rows = TokenBatch(
        input_ids=input_ids,
        attention_mask=attention,
        sampled_mask=action,
        score=torch.tensor([float("nan") if a.score is None else a.score for a in answers]),
        head=torch.tensor([a.head for a in answers]),
        group=torch.tensor([groups[a.group] for a in answers]),
        prefix_group=torch.tensor(_prefix_groups(sequences)),
        weight=torch.tensor([a.weight for a in answers]),
        value_mask=action.clone(),
        labels=[a.label for a in answers],
        sampler_logprobs=sampled,
        sample=torch.arange(len(answers)),
        old_logprobs=torch.zeros(shape),
        ref_logprobs=torch.zeros(shape),
        values=torch.zeros(shape),
        advantages=torch.zeros(shape),
        returns=torch.zeros(shape),
        critic_only=critic_only,
    )
    rows = _moved(rows, device)
    if any(a.critic_prompt_ids is not None for a in answers):
        seen = [replace(a, prompt_ids=a.critic_prompt_ids or a.prompt_ids, critic_prompt_ids=None) for a in answers]
        rows.critic = build_token_batch(seen, pad_id, device, critic_only)
    return rows


def _prefix_groups(sequences: list[list[int]]) -> list[int]:
    """For each sequence the index of one that it is the beginning of and that is the beginning of no other.

    In alphabetical order, what begins with a sequence follows right after it.
    """
    family = list(range(len(sequences)))
    order = sorted(family, key=sequences.__getitem__)
    for one, after in reversed(list(pairwise(order))):
        if sequences[after][: len(sequences[one])] == sequences[one]:
            family[one] = family[after]
    return family


def concatenated(parts: Sequence[TokenBatch]) -> TokenBatch:
    """The rows of all ``parts``, one after the other, padded to the widest; families stay within their part. What critics
    read is left out."""
    width = max(part.input_ids.shape[1] for part in parts)
    columns: dict[str, Any] = {}
    for f in fields(TokenBatch):
        values = [getattr(part, f.name) for part in parts]
        if isinstance(values[0], Tensor):
            wide = [torch.nn.functional.pad(v, (0, width - v.shape[1])) if v.dim() == 2 else v for v in values]
            columns[f.name] = torch.cat(wide)
    starts = [sum(int(p.prefix_group.max()) + 1 for p in parts[:i] if len(p)) for i in range(len(parts))]
    columns["prefix_group"] = torch.cat([part.prefix_group + start for part, start in zip(parts, starts, strict=True)])
    columns["labels"] = [label for part in parts for label in part.labels]
    return replace(parts[0], **columns, critic=None)


def placeholder(device: torch.device | str) -> TokenBatch:
    """A row of two tokens, for forwards that a process makes only because others do."""
    return build_token_batch([Completion([0], [0], True, "placeholder")], 0, device)


@dataclass
class GlobalBatch:
    """The rows of all processes, for statistics over all of them; ``process`` and ``row`` [N] say where each is."""

    rows: TokenBatch
    process: Tensor
    row: Tensor

    @classmethod
    def of(cls, own: TokenBatch, device: torch.device | None = None) -> "GlobalBatch":
        """All processes call this together. What the critic reads stays where it is."""
        if distributed.size() == 1 and (device is None or own.input_ids.device == device):
            return cls(own, torch.zeros(len(own), dtype=torch.long), torch.arange(len(own)))
        parts: list[TokenBatch] = distributed.all_gather(_moved(replace(own, critic=None), "cpu"))
        rows = concatenated(parts)
        process = torch.cat([torch.full((len(part),), number) for number, part in enumerate(parts)])
        return cls(rows, process, torch.cat([torch.arange(len(part)) for part in parts]))

    def take(self, index: Tensor) -> "GlobalBatch":
        """Those at ``index``."""
        if len(index) == len(self.rows):
            return self
        return GlobalBatch(self.rows.take(index), self.process[index], self.row[index])

    def back(self, own: TokenBatch) -> TokenBatch:
        """This process's rows that are left, with what was worked out for them here."""
        if distributed.size() == 1 and self.rows.input_ids.device == own.input_ids.device:
            return self.rows
        index = (self.process == distributed.rank()).nonzero().flatten()
        found = _moved(self.rows.take(index), own.input_ids.device)
        worked_out = ("advantages", "returns", "group", "weight", "value_mask")
        here = own.take(self.row[index].to(own.input_ids.device))
        values: Any = {name: getattr(found, name) for name in worked_out}
        return replace(here, **values)


def _moved(rows: TokenBatch, device: torch.device | str) -> TokenBatch:
    tensors: dict[str, Any] = {f.name: getattr(rows, f.name) for f in fields(rows)}
    there: Any = {name: v.to(device) for name, v in tensors.items() if isinstance(v, Tensor)}
    return replace(rows, **there)
