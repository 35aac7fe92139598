"""The claims of papers that ``benchmarks/claims.py`` tests: their page follows from the committed figures."""

import json
import re
from contextlib import contextmanager

import claims
import claims_verifier
import httpx2
import pytest
import quickstart
import staleness
import torch
from claims_data import CLAIMS, Comparison
from claims_drawing import drawing
from folders import ROOT
from learning import Run
from one_policy import saved_verifier

from maporl.config.schema import TinySection
from maporl.studies.comparing.study import Measured, compared
from maporl.tiny import build_tiny_tokenizer
from maporl.validation.load import load
from maporl.verifier.encoding import chat_of
from maporl.verifier.model import Verifier

RESULTS = claims.read_results()


def report(differences):
    return {"seeds": {str(n): {"with": {"x": 10 + d}, "without": {"x": 10}} for n, d in enumerate(differences)}}


@pytest.mark.parametrize(("differences", "direction", "mean", "low", "high", "verdict"), [
    # 3 -+ 2.776 sqrt(2.5 / 5)
    ((1, 2, 3, 4, 5), 1, 3, 1.0371, 4.9629, "moves in the claimed direction"),
    ((1, 2, 3, 4, 5), -1, 3, 1.0371, 4.9629, "moves in the other direction"),
    ((-1, -2, -3, -4, -5), -1, -3, -4.9629, -1.0371, "moves in the claimed direction"),
    # 1 -+ 2.571 sqrt(12 / 5 / 6)
    ((-1, 1, -1, 1, 3, 3), 1, 1, -0.8776, 2.8776, "does not move by more than chance"),
])  # fmt: skip
def test_a_verdict_follows_from_students_interval_over_the_seeds(differences, direction, mean, low, high, verdict):
    told = claims.difference(report(differences), Comparison("x", "with", "without", direction))
    assert (told["mean"], told["verdict"]) == (mean, verdict)
    assert told["low"] == pytest.approx(low, abs=6e-3) and told["high"] == pytest.approx(high, abs=6e-3)


@pytest.mark.parametrize("name", RESULTS)
def test_committed_figures_are_those_of_the_claim_and_bear_out_its_words(name):
    kept, claim = RESULTS[name], CLAIMS[name]
    assert (kept["claim"], kept["expectation"], kept["world"]) == (claim.title, claim.expectation, claim.world)
    assert kept["arms"] == claim.arms and len(kept["seeds"]) >= claims.LEAST_SEEDS
    for arms in kept["seeds"].values():
        assert list(arms) == list(claim.arms)
        for figures in arms.values():
            assert set(figures) == {*claim.measures, *claims.PROVENANCE}
            assert re.fullmatch(r"[0-9a-f]{7,}( with changes)?", figures["commit"])
    assert kept["differences"] == [claims.difference(kept, comparison) for comparison in claim.comparisons]


def test_the_page_is_written_from_the_committed_figures():
    text = claims.PAGE.read_text()
    assert text == claims.page(RESULTS), "run: python benchmarks/claims.py page"
    assert RESULTS and text.count("\n## Claim: ") == len(RESULTS)
    drawn = {file.stem: file.read_text() for file in claims.DRAWINGS.iterdir()}
    assert drawn == {name: drawing(kept) for name, kept in RESULTS.items()}, "run: python benchmarks/claims.py page"
    assert all(f"(images/claims/{name}.svg)" in text for name in RESULTS)


def test_expectations_that_are_no_comparison_are_compared_with_what_was_measured():
    verifier, cory = (" ".join(claims.section(name, RESULTS[name]).split()) for name in ("verifier", "cory"))
    mean = {name: claims.means(RESULTS[name]) for name in ("verifier", "cory")}
    behind = mean["verifier"]["labels"]["final turn, %"] - mean["verifier"]["verifier"]["final turn, %"]
    assert f"ends {behind:.1f} points behind the team that learns from labels" in verifier and behind > 10
    share = mean["cory"]["CORY"]["KL, nats"] / mean["cory"]["PPO alone"]["KL, nats"]
    assert f"CORY's KL is {share:.0%} of PPO alone's" in cory and share > 0.5


def measured(name):
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())


def interval(difference, half):
    return f"{difference:+.1f} ({difference - half:+.1f} to {difference + half:+.1f})"


def of_a_claim():
    gain, more = RESULTS["varied_verifier"]["differences"]
    mean = claims.means(RESULTS["varied_verifier"])
    beside = mean["varied verifier"]["final turn, %"] - mean["labels"]["final turn, %"]
    wide = f"(95% interval {gain['low']:+.3g} to {gain['high']:+.3g})"
    yield f"gained {gain['mean']:+.3g} points over the untrained team {wide}"
    yield f"the team that learned from labels (difference {beside:+.1f} points)"
    yield f"taught {more['mean']:.3g} points less"


def of_old_answers(world):
    """Each arm that was run is a row with the mean, the paired difference and every seed."""
    report = measured(f"staleness{world}")
    assert staleness.differences(report["runs"]) == report["differences"]
    for arm, told in report["differences"].items():
        apart = f"{told['difference']:+.1f} ± {told['half interval']}" if "difference" in told else ""
        seeds = ", ".join(f"{run['final turn']:.1f}" for run in report["runs"][arm].values())
        yield f" | {told['mean']} | {apart} | {seeds} |"


def of_unseen_errors():
    found = measured("verifier_errors")["verifiers"]
    for kind in found["verifier"]:
        cells = [
            f"{own[kind]['mean score']:.3f} | " + ("" if kind == "right" else f"{own[kind]['right scores more']:.1%}")
            for own in (found["verifier"], found["varied verifier"])
        ]
        yield f"| {kind} | {' | '.join(cells)} |"


def of_sharing():
    teams = {"voters": "three voters", "orchestrator": "orchestrator, two specialists"}
    for workflow, report in measured("sharing")["workflows"].items():
        runs = {(name.split("-")[0], int(name.split("-")[1])): Measured(**run) for name, run in report["runs"].items()}
        for measure in ("final turn", "peak", "fall"):
            row = compared(runs)[measure]
            means, apart = row["means"], row["differences"]["apart"]
            told = f"{means['shared']:.1f} | {means['apart']:.1f} | {interval(apart['difference'], apart['half'])}"
            yield f"| {teams.get(workflow, workflow)} | {measure} | {told} |"


def of_algorithms():
    for world in measured("algorithms")["comparisons"].values():
        row = world["compared"]["final turn"]
        first, *others = row["means"].values()
        yield f" | {first:.1f} | |"
        for mean, told in zip(others, row["differences"].values(), strict=True):
            yield f" | {mean:.1f} | {interval(told['difference'], told['half'])}: "


def of_a_service():
    told = measured("tinker_learning")["compared"]
    apart = told["differences"]["here"]
    low, high = (apart["difference"] + sign * apart["half"] for sign in (-1, 1))
    ends = f"{told['means']['service']:.1f}% on the service and {told['means']['here']:.1f}% locally"
    yield f"{ends} ({apart['difference']:+.1f}, {low:+.1f} to {high:+.1f})"


def of_answers_in_json():
    for measure, arms in measured("structured")["differences"].items():
        yield f"| json | {measure} | {arms['json']['mean']:.1f} | |"
        for arm in ("bare", "json_unmasked"):
            told = arms[arm]
            yield f"| {arm} | {measure} | {told['mean']:.1f} | {interval(told['minus json'], told['half'])} |"
    ends = {arm: [run["held out"] for run in seeds.values()] for arm, seeds in measured("structured")["runs"].items()}
    assert max(ends["json_unmasked"]) < 50 and sum(end < 80 for end in ends["json"]) == 3


def of_an_address():
    report, memory = measured("served_team"), measured("served_soak")["mib"]
    for clients in (1, 8, 32):
        kinds = ("ours", "two adapters", "transformers")
        cells = [report["medians"][f"{kind}, {clients}"]["tokens"] for kind in kinds] + [report["bare"][str(clients)]]
        yield f"| {clients} | {' | '.join(f'{cell:.1f}' for cell in cells)} |"
    yield f"{memory['1000']:.1f} MiB after 1,000 and {memory['10000']:.1f} MiB after all"


FIGURES = {
    "howto/verifier.md": of_a_claim,
    "cluster.md": lambda: (text for world in ("", "_cory", "_grouped") for text in of_old_answers(world)),
    "lab/verifiers.md": of_unseen_errors,
    "howto/sharing.md": of_sharing,
    "howto/algorithms.md": of_algorithms,
    "howto/tinker.md": of_a_service,
    "learning.md": of_answers_in_json,
    "howto/api.md": of_an_address,
}


@pytest.mark.parametrize("page", FIGURES)
def test_the_figures_of_a_page_are_those_that_were_measured(page):
    words, *wanted = (" ".join(text.split()) for text in ((ROOT / "docs" / page).read_text("utf-8"), *FIGURES[page]()))
    assert wanted and [text for text in wanted if text not in words] == []


def test_the_readme_and_a_page_say_what_the_seeds_of_the_quickstart_came_to():
    report = json.loads(quickstart.RESULTS.read_text())
    assert quickstart.tables(report) in quickstart.PAGE.read_text(encoding="utf-8"), (
        "python benchmarks/quickstart.py page"
    )
    assert quickstart.sentence(report) in " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert {(run["seed"], run["threads"]) for run in report["runs"]} >= {
        *((seed, threads) for seed in range(10) for threads in (1, 2)),
        *((seed, 4) for seed in range(5)),
    }
    assert all(run["final turn"] >= 94 for run in report["runs"])
    missed = {(run["seed"], run["threads"]): run["missed"] for run in report["runs"] if run["missed"]}
    assert missed == {(0, 2): ["first turn"], (0, 4): ["first turn"]}, "the page names the one that is outside"


@pytest.mark.parametrize("name", CLAIMS)
def test_the_worlds_and_their_arms_are_configurations(name):
    claim = CLAIMS[name]

    def taught(sets):
        return [re.sub("<.+", "org/lesson", line) for line in sets]

    names = load(ROOT / claim.world).agents
    loaded = [line for n in names for line in (f"agents.{n}.tiny=null", f"agents.{n}.model=start")]
    resolved = [
        load(ROOT / claim.world, ["warm_start.steps=0", *loaded, *taught(sets)]) for sets in claim.arms.values()
    ]
    told = [(own, claim.verifiers.get(arm)) for own, arm in zip(resolved, claim.arms, strict=True)]
    assert all(a != b for n, a in enumerate(told) for b in told[:n])
    assert {arm for arm, own in zip(claim.arms, resolved, strict=True) if own.reward.verifier} == set(claim.verifiers)
    measured = {(c.measure, arm) for c in claim.comparisons for arm in (c.arm, c.against)}
    assert measured <= {(measure, arm) for measure in claim.measures for arm in claim.arms}


def test_finished_runs_are_not_run_again_and_interrupted_ones_are(tmp_path, monkeypatch):
    trained = []

    def train(world, seed, sets, folder, variables):
        trained.append((seed, sets))
        folder.mkdir(parents=True)  # fails if an interrupted run has left something
        if sets == ["updates=3"]:
            raise KeyboardInterrupt
        return Run(folder, 7.0)

    monkeypatch.setattr(claims, "train", train)
    world = CLAIMS["co_training"].world
    done = [claims.finished_run(world, seed, ["updates=2"], tmp_path) for seed in (0, 1, 0)]
    assert trained == [(0, ["updates=2"]), (1, ["updates=2"])]
    assert done[0] == done[2] != done[1] and done[2].seconds == 7
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            claims.finished_run(world, 0, ["updates=3"], tmp_path)
    assert trained[2:] == [(0, ["updates=3"])] * 2


def test_an_arm_knows_its_verifiers_address_and_is_not_run_again_at_another(tmp_path, monkeypatch):
    """Each seed has verifiers of its own, made from its own warm-started agents.

    The port changes from call to call. Arms with one configuration have runs of their own if they ask other verifiers.
    """
    ports, made, trained = iter(range(1, 7)), [], []

    @contextmanager
    def served(verifier):
        yield f"http://127.0.0.1:{next(ports)}/{verifier}"

    def make_verifier(world, seed, sets, folder, lore):
        made.append((seed, folder, lore))
        return f"{seed}-{folder.name}"

    def train(world, seed, sets, folder, variables):
        trained.append((seed, "reward.verifier={}" in sets, (variables or {}).get("MAPORL_VERIFIER_URLS")))
        for agent in ("ann", "bob"):
            (folder / "initial" / agent).mkdir(parents=True)
            (folder / "initial" / agent / "config.json").write_text("{}")
        share = {"value": 0.5}
        turns = [{"team": share, "agents": {}}] * 2
        (folder / "evaluation_after.json").write_text(json.dumps({"turns": turns}))
        return Run(folder, 7.0)

    for replaced in (served, make_verifier, train):
        monkeypatch.setattr(claims, replaced.__name__, replaced)
    for seed in (0, 1, 0):
        claims.measure_seed(CLAIMS["varied_verifier"], seed, tmp_path)
    usual, varied = claims_verifier.USUAL, claims_verifier.VARIED
    assert [(seed, lore) for seed, _, lore in made] == [(seed, lore) for seed in (0, 1, 0) for lore in (usual, varied)]
    assert made[:2] == made[4:] and len({folder for _, folder, _ in made}) == 4
    told = []  # the warm start, and four arms, of which two are scored by a verifier
    for own in (0, 1):
        urls = [f"http://127.0.0.1:{2 * own + 1 + n}/{own}-{n}" for n in (0, 1)]
        told += [(own, False, None), *((own, True, url) for url in urls), (own, False, None), (own, False, None)]
    assert trained == told


@pytest.mark.slow
def test_a_verifier_is_served_until_its_runs_have_ended(tmp_path):
    torch.manual_seed(0)
    folder = saved_verifier(build_tiny_tokenizer(TinySection(alphabet="0123456789+*;")), tmp_path / "verifier")
    chats = [chat_of("472+", answer) for answer in ("583", "274")]
    with claims_verifier.served(tmp_path / "verifier") as url:
        found = [item["score"] for item in httpx2.post(f"{url}/v1/score", json={"chats": chats}).json()["results"]]
    assert found == pytest.approx(Verifier.load(folder, "cpu").score(chats), abs=1e-5)
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(url)
    with (
        pytest.raises(RuntimeError, match=r"did not start; see .+server\.log"),
        claims_verifier.served(tmp_path / "none"),
    ):
        pass
