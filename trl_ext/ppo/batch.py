"""Token batches: what a learner is trained on. One row is one completion after its prompt."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor

from trl_ext.ppo.options import Grammar
from trl_ext.ppo.prefix_tree import Layout, PrefixTree, TreeLimits
from trl_ext.process import distributed

PADDING = 0
"""The id at padded positions. A mask hides them, so any id of the vocabulary serves.

The tokenizer's own padding token does not: scripts add one whose id the model's embedding does not have.
"""


Mark = Literal["host", "sent", "computed", "assigned"]
"""What a tensor of a :class:`TokenBatch` may be, beside its type.

``host``: it stays on the CPU, because reading by it would wait for an accelerator. ``sent``: processes send it each
other, to compute advantages over the rows of all of them. ``computed``: the policy and its critic compute it before.
``assigned``: it comes with the advantages.
"""


@dataclass
class Completion:
    """One sampled completion, before it becomes a row of a :class:`TokenBatch`.

    Args:
        prompt_ids: the token ids that the policy read.
        response_ids: the token ids that it sampled.
        ended: whether the completion ended by itself, with a stop token.
        label: the completion's name in errors.
        prompt: the readable prompt, for reward functions and logs.
        text: the decoded completion.
        group: completions of the same group have their advantages whitened together.
        head: the critic's output for this row, such as the turn.
        trajectory: completions of the same trajectory have one importance ratio with ``ratio: trajectory``. By default
            a completion is a trajectory of its own.
        score: what the completion earned, which the reward step fills in.
        token_scores: where it was earned: a number for each of ``response_ids``, whose sum is ``score``. By default all
            of it is at the last token.
        weight: how often the row counts in the loss.
        critic_prompt_ids: the critic's prompt, if it differs from the policy's.
        sampled_logprobs: the log-probabilities of ``response_ids`` from the engine that sampled them, if it gives them.
        temperature: the temperature at which it was sampled, above 0. None: that of the run.
        grammar: what it was held to. Its log-probabilities are those among the tokens that were allowed.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    ended: bool
    label: str
    prompt: Any = None
    text: str = ""
    group: tuple = ()
    head: int = 0
    trajectory: tuple | None = None
    score: float | None = None
    token_scores: list[float] | None = None
    weight: float = 1.0
    critic_prompt_ids: list[int] | None = None
    sampled_logprobs: list[float] | None = None
    temperature: float | None = None
    grammar: Grammar | None = None


@dataclass
class TokenBatch:
    """N right-padded rows of T tokens, with the training values of each token.

    Every value of a token is in *that token's own column*: its log-probability given all tokens before it, the value of
    the state in which it was chosen, its advantage and its return. Positions outside ``sampled_mask`` hold zeros. The
    policy never samples column 0.

    A shared-prefix group is a set of rows in which each row begins a longer one, such as the turns of one conversation.
    One forward of its longest row serves the whole group. Rows that only begin alike, such as the answers to one
    prompt, are a tree of tokens, which a forward can read as one line.

    What decides about shapes is on the host, so that nothing waits for an accelerator: ``tree``, ``first`` and tensors
    with the :data:`Mark` ``host``. Indices of rows may be on the host too.

    ``rollouts`` is the number of rollouts of the update, over all policies and processes, by which ``aggregation:
    per_main_rollout`` divides. None means that every row is a rollout.
    """

    input_ids: Tensor  # [N, T]
    attention_mask: Tensor  # [N, T] true at tokens, false at padding
    sampled_mask: Annotated[Tensor, "sent"]  # [N, T] true where the policy sampled the token
    # [N, T] what was earned at each sampled token; a score of the completion is at its last one
    token_scores: Annotated[Tensor, "sent"]
    head: Tensor  # [N] the critic's output for the row
    group: Annotated[Tensor, "assigned"]  # [N] index of the whitening group
    # [N] index of the trajectory: its rows have one importance ratio with ratio: trajectory
    trajectory: Annotated[Tensor, "host"]
    weight: Annotated[Tensor, "assigned"]  # [N] how often a row counts in the loss
    value_mask: Annotated[Tensor, "host", "sent", "assigned"]  # [N, T] true where the critic is trained
    labels: list[str]
    grammars: list[Grammar | None]  # what each completion was held to
    first: list[int]  # the column of each row's first sampled token; all behind it are sampled
    sampler_logprobs: Tensor  # [N, T] the sampling engine's log-probabilities; NaN where they are unknown
    tree: PrefixTree  # which rows begin alike
    sample: Tensor  # [N] the index of the row's completion among those that build_token_batch received
    temperature: Annotated[Tensor, "host"]  # [N] the sampling temperature of the row; NaN for that of the run
    # [N, T]; zeros until Learner.annotate and assign_advantages fill them in
    old_logprobs: Annotated[Tensor, "sent", "computed"]
    ref_logprobs: Annotated[Tensor, "sent", "computed"]
    values: Annotated[Tensor, "sent", "computed"]
    forced: Annotated[Tensor, "sent", "computed"]  # [N, T] true where a grammar allowed the sampled token alone
    advantages: Annotated[Tensor, "assigned"]
    returns: Annotated[Tensor, "assigned"]
    critic_only: bool  # whether only the critic is trained
    critic: "TokenBatch | None" = None  # the completions after the critic's prompts, if these differ
    rollouts: int | None = None

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    def marked(self, mark: Mark) -> dict[str, Tensor]:
        """Return the tensors with a mark, by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if mark in MARKS[f.name]}

    @property
    def chosen(self) -> Tensor:
        """Return [N, T], true where the policy could choose the token, which are those that averages over tokens
        count."""
        return self.sampled_mask & ~self.forced if any(self.grammars) else self.sampled_mask

    @cached_property
    def sampled_on_host(self) -> tuple[Tensor, Tensor]:
        """Return the rows and the columns of the M sampled tokens, each [M], in row-major order.

        They read a tensor [N, T] as ``sampled_mask`` does, but a mask must be counted first.
        """
        first = np.asarray(self.first, dtype=np.int64)
        count = np.asarray(self.tree.lengths, dtype=np.int64) - first
        row = np.repeat(np.arange(len(first)), count)
        column = np.arange(len(row)) - np.repeat(np.cumsum(count) - count - first, count)
        return torch.from_numpy(row), torch.from_numpy(column)

    @cached_property
    def sampled(self) -> tuple[Tensor, Tensor]:
        """Return :attr:`sampled_on_host` on the device of the batch."""
        row, column = self.sampled_on_host
        return row.to(self.input_ids.device), column.to(self.input_ids.device)

    def temperatures(self, default: float) -> float | Tensor:
        """Return the temperature of each of the M sampled tokens, [M], or one number if it is the same for all.

        ``default`` is the temperature of the run.
        """
        by_row = torch.where(self.temperature.isnan(), default, self.temperature)
        distinct = by_row.unique().tolist()
        if len(distinct) < 2:
            return distinct[0] if distinct and not self.temperature.isnan().all() else default
        return by_row[self.sampled_on_host[0]].to(self.input_ids.device, torch.float32)

    def without_prompts(self) -> "TokenBatch":
        """Return what advantages are computed from: the rows on the CPU, with the values of their sampled tokens only.

        A row begins with its first sampled token. Ids and labels stay behind, and so does what is only known later.
        """
        row, column = self.sampled_on_host
        first = torch.tensor(self.first, dtype=torch.long)
        lengths = (torch.tensor(self.tree.lengths, dtype=torch.long) - first).tolist()
        shape = len(self), max(lengths, default=0)
        columns: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                value = value.cpu()
                columns[f.name] = value
                if value.dim() == 2:
                    # one number takes the place of all that nobody reads
                    columns[f.name] = value.new_zeros(()).expand(shape)
                    if "sent" in MARKS[f.name]:
                        columns[f.name] = value.new_zeros(shape)
                        columns[f.name][row, column - first[row]] = value[row, column]
        none = [0] * len(self)
        tree = PrefixTree(list(range(len(self))), none, lengths, none)
        return replace(self, **columns, tree=tree, first=none, labels=[""] * len(self), critic=None)

    @property
    def score(self) -> Tensor:
        """Return what each completion earned [N], the sum over its tokens. It is NaN where nothing was scored."""
        return self.token_scores.sum(1)

    def microbatches(
        self, index: Tensor, most_rows: int, most_tokens: int | None = None, limits: TreeLimits | None = None
    ) -> list[Tensor]:
        """Cut the rows ``index`` into micro-batches of one forward each, from short rows to long ones.

        Rows of similar length need little padding. Rows of a tree stand together, so that a forward reads what they
        share once. A forward reads at most ``most_rows`` rows and ``most_tokens`` tokens, padding included. A
        shared-prefix group counts as one row. Rows that are :meth:`inseparable` are read together even if they exceed
        this. ``limits`` says how far the model can read trees.
        """
        wanted = index.tolist()
        tree = self.tree.take(wanted)
        chain = dict(zip(wanted, tree.chains, strict=True))
        parts: list[list[int]] = []
        lines: set[int] = set()  # the chains of the last part
        for rows in self._by_tree(wanted, tree, limits):
            lines |= {chain[row] for row in rows}
            full = len(lines) > most_rows
            if most_tokens is not None and not full and parts:
                full = self.tree.take(parts[-1] + rows).reads(limits) > most_tokens
            if not parts or full:
                parts.append([])
                lines = {chain[row] for row in rows}
            parts[-1] += rows
        return [torch.tensor(part) for part in parts]

    def _by_tree(self, index: list[int], tree: PrefixTree, limits: TreeLimits | None) -> list[list[int]]:
        """Return the :meth:`inseparable` rows of ``index``, from short rows to long ones, with trees in one piece."""
        groups = self.inseparable(index)
        if limits is None or not tree.worthwhile(limits):
            return sorted(groups, key=lambda rows: max([self.tree.lengths[row] for row in rows]))
        place: dict[int, tuple[int, int, int]] = {}
        for family in tree.trees(limits):
            longest = max([tree.lengths[row] for row in family])
            place |= {index[row]: (longest, min(family), number) for number, row in enumerate(family)}
        return sorted(groups, key=lambda rows: max([place[row] for row in rows]))

    def inseparable(self, index: Sequence[int] | None = None) -> list[list[int]]:
        """Return the rows ``index`` (default: all) in groups that must stay in one micro-batch, in order of appearance.

        The rows of a shared-prefix group are read by one forward, and the rows of a trajectory have one importance
        ratio.
        """
        prefixes, trajectories = self.tree.chains, self.trajectory.tolist()
        group_of: dict[tuple[str, int], list[int]] = {}
        groups: list[list[int]] = []
        for row in range(len(self)) if index is None else index:
            names = [("prefix", prefixes[row]), ("trajectory", trajectories[row])]
            joined = [group_of[name] for name in names if name in group_of]
            group = joined[0] if joined else []
            if not joined:
                groups.append(group)
            for other in joined[1:]:
                if other is not group:
                    group += other
                    group_of |= {name: group for name, old in group_of.items() if old is other}
                    groups = [part for part in groups if part is not other]
            group.append(row)
            group_of |= dict.fromkeys(names, group)
        return groups

    def take(self, index: Tensor) -> "TokenBatch":
        """Return the rows at ``index``, without the columns that are padding in all of them."""
        rows = index.tolist()
        tree = self.tree.take(rows)
        width = max(tree.lengths, default=1)
        device, host = self.input_ids.device, self.value_mask.device
        places = {device: index.to(device), host: index.to(host)}
        chosen: dict[str, Any] = {
            "labels": [self.labels[row] for row in rows],
            "grammars": [self.grammars[row] for row in rows],
            "first": [self.first[row] for row in rows],
        }
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                column = value[places[value.device]]
                chosen[f.name] = column[:, :width] if column.dim() == 2 else column
        critic = self.critic.take(index) if self.critic is not None else None
        return replace(self, **chosen, tree=tree, critic=critic)

    def put(self, index: Tensor, part: "TokenBatch") -> None:
        """Take over the advantages of ``part``, which has the rows at ``index`` (:meth:`take`)."""
        for name, value in part.marked("assigned").items():
            column = getattr(self, name)
            rows = column.index_select(0, index.to(column.device))
            rows[(..., slice(value.shape[1])) if value.dim() == 2 else ...] = value
            column[index.to(column.device)] = rows

    def to_read(self, limits: TreeLimits | None) -> "ToRead":
        """Return what one forward over these rows must read, by a model that reads trees as far as ``limits``.

        The last token of a row predicts no token of it, so it is left out.
        """
        row, column = self.sampled
        layout = self.tree.layout(limits)
        if layout is None:
            chains = self.tree.chains
            line = {chain: number for number, chain in enumerate(dict.fromkeys(chains))}
            read = self.input_ids[torch.tensor(list(line), device=row.device), :-1]
            lines = torch.tensor([line[chain] for chain in chains], device=row.device)
            return ToRead(read, lines[row] * read.shape[1] + column - 1)
        held, columns, place = (
            torch.from_numpy(array).to(row.device) for array in (layout.row, layout.column, layout.place)
        )
        return ToRead(self.input_ids[held, columns], place[row, column - 1], columns, layout)

    def by_length(self, regimes: Sequence[int]) -> list[tuple["TokenBatch", Tensor]]:
        """Return the rows in parts that a model reads by the same angles, and the place of each part's tokens among the
        M.

        ``regimes`` are the lengths beyond which the angles change, in order. A token with n tokens in front of it
        belongs to the part of n. A row that goes on beyond a length is in two parts, and in the first it ends there.
        The parts are for reading only: their other columns are as wide as before.
        """
        column = self.sampled_on_host[1].numpy()
        part = np.searchsorted(regimes, column)
        first, lengths, parts = np.asarray(self.first), np.asarray(self.tree.lengths), []
        for number in np.unique(part).tolist():
            start = np.maximum(first, regimes[number - 1] + 1 if number else 0)
            end = np.minimum(lengths, regimes[number] + 1 if number < len(regimes) else lengths.max())
            index = np.flatnonzero(start < end)
            rows = self.take(torch.from_numpy(index))
            tree = replace(
                rows.tree,
                lengths=end[index].tolist(),
                shared=[min(shared, int(end.max())) for shared in rows.tree.shared],
            )
            width = int(end[index].max())
            rows = replace(
                rows, tree=tree, first=start[index].tolist(), input_ids=rows.input_ids[:, :width], critic=None
            )
            parts.append((rows, torch.from_numpy(np.flatnonzero(part == number)).to(rows.input_ids.device)))
        return parts


MARKS: dict[str, tuple[Mark, ...]] = {f.name: getattr(f.type, "__metadata__", ()) for f in fields(TokenBatch)}


@dataclass
class ToRead:
    """The inputs of one forward, and the positions of the sampled tokens.

    A model reads lines of tokens. A line is a row, or some trees of rows.
    """

    input_ids: Tensor  # [P, L]
    index: Tensor  # [M] the flattened position that predicts each sampled token, in row-major order of the rows
    position_ids: Tensor | None = None  # [P, L] for trees
    layout: Layout | None = None


def build_token_batch(
    completions: Sequence[Completion], device: torch.device | str, critic_only: bool = False
) -> TokenBatch:
    """Return ``completions`` as right-padded tensors. Groups are numbered in order of first appearance.

    Right padding needs no attention mask in a causal model, because no real token can see a later column.

    Raises:
        ValueError: a completion has an empty prompt or no tokens, or was sampled at temperature 0.
    """
    sequences = [c.prompt_ids + c.response_ids for c in completions]
    width = max(map(len, sequences), default=1)
    shape = (len(completions), width)
    input_ids = torch.full(shape, PADDING, dtype=torch.long)
    attention = torch.zeros(shape, dtype=torch.bool)
    sampled = torch.zeros(shape, dtype=torch.bool)
    sampler_logprobs = torch.full(shape, float("nan"))
    token_scores = torch.zeros(shape)
    groups: dict[tuple, int] = {}
    trajectories: dict[tuple, int] = {}  # a trajectory's number is that of its first row
    for row, completion in enumerate(completions):
        if not completion.prompt_ids or not completion.response_ids:
            raise ValueError(f"{completion.label}: a row needs at least one prompt token and one completion token")
        if completion.temperature is not None and completion.temperature <= 0:
            raise ValueError(f"{completion.label}: it was sampled at temperature 0, so it has no ratio to train on")
        start, end = len(completion.prompt_ids), len(sequences[row])
        input_ids[row, :end] = torch.tensor(sequences[row])
        attention[row, :end] = True
        sampled[row, start:end] = True
        token_scores[row, end - 1] = float("nan") if completion.score is None else completion.score
        if completion.token_scores is not None:
            token_scores[row, start:end] = torch.tensor(completion.token_scores)
        if completion.sampled_logprobs is not None:
            sampler_logprobs[row, start:end] = torch.tensor(completion.sampled_logprobs)
        groups.setdefault(completion.group, len(groups))
    temperatures = [float("nan") if c.temperature is None else c.temperature for c in completions]
    rows = TokenBatch(
        input_ids=input_ids,
        attention_mask=attention,
        sampled_mask=sampled,
        token_scores=token_scores,
        head=torch.tensor([c.head for c in completions]),
        group=torch.tensor([groups[c.group] for c in completions]),
        trajectory=torch.tensor([trajectories.setdefault(c.trajectory or (i,), i) for i, c in enumerate(completions)]),
        weight=torch.tensor([c.weight for c in completions]),
        value_mask=sampled.clone(),
        labels=[c.label for c in completions],
        grammars=[c.grammar for c in completions],
        first=[len(c.prompt_ids) for c in completions],
        sampler_logprobs=sampler_logprobs,
        tree=PrefixTree.of(sequences),
        sample=torch.arange(len(completions)),
        temperature=torch.tensor(temperatures, dtype=torch.float64),
        old_logprobs=torch.zeros(shape),
        ref_logprobs=torch.zeros(shape),
        values=torch.zeros(shape),
        forced=torch.zeros(shape, dtype=torch.bool),
        advantages=torch.zeros(shape),
        returns=torch.zeros(shape),
        critic_only=critic_only,
    )
    rows = _moved(rows, device)
    prompts = [c.critic_prompt_ids for c in completions]
    if any(prompts):
        pairs = zip(completions, prompts, strict=True)
        seen = [replace(c, prompt_ids=ids or c.prompt_ids, critic_prompt_ids=None) for c, ids in pairs]
        rows.critic = build_token_batch(seen, device, critic_only)
    return rows


def concatenated(parts: Sequence[TokenBatch]) -> TokenBatch:
    """Return the rows of all ``parts``, joined and padded to the widest part.

    Trees and trajectories stay within their part. The critics' own rows are left out.
    """
    width = max(part.input_ids.shape[1] for part in parts)
    columns: dict[str, Any] = {}
    for f in fields(TokenBatch):
        values = [getattr(part, f.name) for part in parts]
        if isinstance(values[0], Tensor):
            wide = [torch.nn.functional.pad(v, (0, width - v.shape[1])) if v.dim() == 2 else v for v in values]
            columns[f.name] = torch.cat(wide)
    numbers = [part.trajectory for part in parts]
    starts = [sum(int(n.max()) + 1 for n in numbers[:i] if len(n)) for i in range(len(parts))]
    columns["trajectory"] = torch.cat([number + start for number, start in zip(numbers, starts, strict=True)])
    columns["tree"] = PrefixTree.joined([part.tree for part in parts])
    for name in ("labels", "grammars"):
        columns[name] = [one for part in parts for one in getattr(part, name)]
    columns["first"] = [first for part in parts for first in part.first]
    return replace(parts[0], **columns, critic=None)


def placeholder(device: torch.device | str, critic_only: bool = False) -> TokenBatch:
    """Return a row of two tokens, for a forward that a process makes only because other processes make one."""
    return build_token_batch([Completion([0], [0], True, "placeholder")], device, critic_only)


@dataclass
class GlobalBatch:
    """The rows of all processes, for statistics over all of them.

    Where they come from several processes or devices, they are :meth:`TokenBatch.without_prompts`. ``process`` [N] and
    ``row`` [N] say which process each row belongs to, and which row it is there.
    """

    rows: TokenBatch
    process: Tensor
    row: Tensor

    @classmethod
    def of(cls, own: TokenBatch, device: torch.device | None = None) -> "GlobalBatch":
        """Gather the rows of all processes. All processes call this together.

        Prompts, ids and the critics' own rows are not sent. ``device``: where the rows must be, if a single process has
        several devices.
        """
        if distributed.size() == 1 and (device is None or own.input_ids.device == device):
            row = torch.arange(len(own), device=own.input_ids.device)
            return cls(own, torch.zeros_like(row), row)
        parts: list[TokenBatch] = distributed.all_gather(own.without_prompts())
        rows = concatenated(parts)
        process = torch.cat([torch.full((len(part),), number) for number, part in enumerate(parts)])
        return cls(rows, process, torch.cat([torch.arange(len(part)) for part in parts]))

    def take(self, index: Tensor) -> "GlobalBatch":
        """Return the rows at ``index``."""
        if len(index) == len(self.rows):
            return self
        return GlobalBatch(self.rows.take(index), self.process[index], self.row[index])

    def back(self, own: TokenBatch) -> TokenBatch:
        """Return this process's rows among these, with the advantages that were computed here.

        ``own`` is the process's token batch as it was before it was gathered.
        """
        if distributed.size() == 1 and self.rows.input_ids.device == own.input_ids.device:
            return self.rows
        index = (self.process == distributed.rank()).nonzero().flatten()
        gathered, local = self.rows.take(index), own.take(self.row[index])
        row, column = local.sampled_on_host
        place = column - torch.tensor(local.first, dtype=torch.long)[row]
        assigned: dict[str, Any] = gathered.marked("assigned")
        for name, value in assigned.items():
            if value.dim() == 2:
                assigned[name] = value.new_zeros(local.input_ids.shape)
                assigned[name][row, column] = value[row, place]
        return _moved(replace(local, **assigned), own.input_ids.device)


def _moved(rows: TokenBatch, device: torch.device | str) -> TokenBatch:
    tensors: dict[str, Any] = {f.name: getattr(rows, f.name) for f in fields(rows) if "host" not in MARKS[f.name]}
    moved: Any = {name: value.to(device) for name, value in tensors.items() if isinstance(value, Tensor)}
    return replace(rows, **moved)
