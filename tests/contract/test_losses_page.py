"""Every number of docs/losses.md is what the library computes from the rest of its row.

A column whose head is code holds what those options of the section ``ppo`` make of the other columns.
"""

import re
from types import SimpleNamespace

import pytest
import torch
import yaml
from folders import ROOT, tables

from trl_ext.ppo import losses, maths
from trl_ext.ppo.advantages import gae_of
from trl_ext.ppo.options import PPOOptions
from trl_ext.ppo.value_bins import ValueBins

PAGE = ROOT / "docs/losses.md"


def column(rows, name):
    return torch.tensor([float(row[name]) for row in rows], dtype=torch.float64)


def by_answer(rows, values):
    """Put values of tokens into a padded row for each answer: [N, T]. Also return the mask of the tokens."""
    answers = [int(row["answer"]) for row in rows]
    lengths = [answers.count(answer) for answer in sorted(set(answers))]
    mask = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
    return torch.zeros(mask.shape, dtype=torch.float64).masked_scatter(mask, values), mask


def objective(rows, options):
    """The loss of every token, of which the rows are the answers or, for whole trajectories, one joined answer."""
    new, old, advantage = (column(rows, name) for name in ("p new", "p old", "A"))
    if options.ratio == "trajectory":
        rows = [{**row, "answer": "1"} for row in rows]
    (new, mask), (old, _), (advantage, _) = (by_answer(rows, v) for v in (new.log(), old.log(), advantage))
    return losses.OBJECTIVES[options.objective](new, old, advantage, mask, options)[0][mask]


def weight(rows, options):
    _, mask = by_answer(rows, column(rows, "token"))
    once = torch.ones(len(mask), dtype=torch.float64)
    total = losses.aggregation_total(mask, once, options.aggregation)
    if options.aggregation == "per_main_rollout":
        total = 1  # the page says that both answers are of one rollout
    return losses.token_weights(mask, once, total, options.aggregation)[mask]


def kl(rows, options):
    return maths.kl_estimate(column(rows, "p").log(), column(rows, "p reference").log(), options.kl_estimator)


def engine(rows, options):
    trainer, own = column(rows, "p of the trainer").log(), column(rows, "p of the engine").log()
    mask = torch.ones(1, len(rows)).bool()  # one answer
    told = SimpleNamespace(sampled_mask=mask, old_logprobs=trainer[None], sampler_logprobs=own[None])
    return losses.engine_weights(told, options.engine_tis_cap, options.engine_tis_mode)[0]


def value(rows, options):
    huber = options.huber_delta if options.value_loss == "huber" else None
    parts = (column(rows, name) for name in ("V", "V before", "return"))
    return maths.value_loss_terms(*parts, options.cliprange_value, huber)[0]


def lambdas(rows, options, values):
    columns = (column(rows, name)[None] for name in ("reward", values))
    return gae_of(*columns, torch.ones(1, len(rows)).bool(), options)


def advantage(rows, options):
    return lambdas(rows, options, "V here")[0][0]


def target(rows, options):
    return lambdas(rows, options, "V told")[1][0]


def entropy(rows, options):
    spread = torch.tensor([[float(p) for p in row["probabilities"].split()] for row in rows])
    return -options.entropy_coef * maths.token_entropies(spread.log())


KINDS = {
    "p new": objective,
    "V here": advantage,
    "V told": target,
    "token": weight,
    "p reference": kl,
    "p of the engine": engine,
    "V": value,
    "probabilities": entropy,
}


def computed(rows, head):
    """What the options in ``head`` make of the rows of a table."""
    options = PPOOptions(**yaml.safe_load(head.strip("`")))
    return next(function for name, function in KINDS.items() if name in rows[0])(rows, options).tolist()


def columns():
    return [(rows, head) for rows in tables(PAGE) for head in rows[0] if re.fullmatch(r"`{.*}`", head)]


@pytest.mark.parametrize(("rows", "head"), [pytest.param(*c, id=c[1]) for c in columns()])
def test_a_column_is_what_its_options_compute(rows, head):
    assert [float(row[head]) for row in rows] == pytest.approx(computed(rows, head), abs=6e-5)


def test_every_choice_of_a_loss_has_a_column_with_numbers():
    shown = [yaml.safe_load(head.strip("`")) for _, head in columns()]
    options = {name: {str(entry[name]) for entry in shown if name in entry} for entry in shown for name in entry}
    ours = {name for name, f in losses.OBJECTIVES.items() if f.__module__ == losses.__name__}  # other tests add some
    assert ours and options["objective"] == ours
    for name in ("ratio", "aggregation", "kl_estimator", "value_loss", "engine_tis_mode"):
        choices = set(re.findall(r"'(\w+)'", str(PPOOptions.__dataclass_fields__[name].type)))
        shown_by_default = {PPOOptions.__dataclass_fields__[name].default} if name == "engine_tis_mode" else set()
        elsewhere = {"hl_gauss"} & choices  # whose critic gives no number, but a distribution, as the table below shows
        assert choices and options[name] | shown_by_default | elsewhere == choices, name
    named = {"cliprange_high", "dual_clip", "tis_cap", "engine_tis_cap", "entropy_coef"}
    assert named | {"lam", "lam_alpha", "lam_critic"} <= options.keys()


def test_the_penalty_of_the_text_is_what_the_estimate_makes_of_its_coefficient():
    words = r"With `kl_coef: 0.05` the first token's reward falls by (\d\.\d+)"
    said = re.search(words, PAGE.read_text(encoding="utf-8"))
    assert float(said[1]) == pytest.approx(0.05 * torch.log(torch.tensor(0.65 / 0.5)).item(), abs=6e-5)


def test_the_histograms_of_the_page_are_those_of_a_categorical_critic():
    rows = re.findall(r"^\| (-?[\d.]+) " + r"\| ([\d.]+) " * 4 + r"\|$", PAGE.read_text("utf-8"), re.M)
    histograms = [list(map(float, row)) for row in rows if abs(sum(map(float, row[1:])) - 1) < 1e-3]
    assert len(histograms) == 3
    for returned, *shares in histograms:
        found = ValueBins(0.0, 1.0, 4, 0.25).targets(torch.tensor([returned]))[0].tolist()
        assert found == pytest.approx(shares, abs=1e-4)
