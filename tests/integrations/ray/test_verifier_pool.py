"""A verifier in processes of its own: scores to the bit, and what happens when a process dies or hangs. No Ray."""

import math
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from ray_groups import (
    Thread,
    check_cluster,
    config_of,
    newest_ray,  # noqa: F401  # a fixture
)

from maporl import Arithmetic
from maporl.config.schema import TinySection
from maporl.errors import ConfigError
from maporl.integrations.ray.member import GroupSpec
from maporl.integrations.ray.ray_backend import RayBackend
from maporl.integrations.ray.verifier_pool import VerifierPool, VerifierProcess
from maporl.rewards.base import RewardFailure
from maporl.run import ResolvedRun
from maporl.tiny import build_tiny_classifier, build_tiny_tokenizer
from maporl.types import Dialogue, Example, Utterance
from maporl.verifier.model import Verifier
from maporl.verifier.section import VerifierSection
from maporl.verifier.source import ServedVerifier, load_verifier

CHATS = [
    [{"role": "user", "content": f"{n}+{n}=?"}, {"role": "assistant", "content": str(n) * (1 + n % 5)}]
    for n in range(11)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a tiny verifier."""
    path = tmp_path_factory.mktemp("verifier")
    section = TinySection(hidden_size=32, layers=1, context=64)
    tokenizer = build_tiny_tokenizer(section)
    torch.manual_seed(5)
    build_tiny_classifier(section, tokenizer).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def run_of(folder, cluster=None, **verifier):
    verifier = {"model": str(folder), "batch_size": 2, **verifier}
    reward = {"sources": {"verifier": 1.0}, "verifier": verifier}
    return config_of(reward=reward, training={"use_cpu": True}, **({} if cluster is None else {"cluster": cluster}))


class Parts:
    """Processes of a pool, as threads.

    Calls of ``dying`` numbers kill their process, and those of ``hanging`` ones hang.
    """

    def __init__(self, config, dying=(), hanging=()):
        self.config, self.dying, self.hanging, self.calls, self.started = config, set(dying), set(hanging), 0, []
        self.lock = threading.Lock()

    def start(self, number, place):
        part = VerifierProcess(
            GroupSpec("verifier", self.config, (), (), 0, (), 1, 0, "replicated", 2, None, None, {}, {}, 0)
        )
        member, score = Thread(f"verifier {number}", part), part.score

        build = part.build

        def building():
            with self.lock:  # from_pretrained is not made for several threads
                build()

        part.build = building

        def scoring(*arguments):
            with self.lock:
                self.calls += 1
                call = self.calls
            if call in self.dying:
                member.end()
            if call in self.hanging:
                time.sleep(3)
            return score(*arguments)

        part.score = scoring
        self.started.append(member)
        return member


def pool_of(tmp_path, config, replicas, deadline=60.0, **parts):
    found = Parts(config, **parts)
    pool = VerifierPool(config.reward.verifier, replicas, found.start, deadline, tmp_path)
    pool.build()
    return pool, found


@pytest.mark.parametrize("replicas", [1, 2, 3, 8])
def test_scores_are_those_of_one_process_to_the_bit(replicas, folder, tmp_path):
    pool, parts = pool_of(tmp_path, run_of(folder), replicas)
    assert pool.scores(CHATS, [None] * len(CHATS)) == Verifier.load(str(folder), "cpu", batch_size=2).score(CHATS)
    again = [*CHATS[:7], *CHATS[::-1], CHATS[0]]
    assert pool.scores(again, [None] * len(again)) == Verifier.load(str(folder), "cpu", batch_size=2).score(again)
    assert pool.scores([], []) == [] and len(parts.started) == replicas
    assert pool.take_counts() | {"requests": 2 * replicas} == dict.fromkeys(pool.take_counts(), 0) | {
        "requests": 2 * replicas
    }
    pool.end()
    assert all(member.dead.is_set() for member in parts.started)


def test_what_a_dead_process_was_asked_is_asked_of_a_new_one(folder, tmp_path, caplog):
    expected = Verifier.load(str(folder), "cpu", batch_size=2).score(CHATS)
    pool, parts = pool_of(tmp_path, run_of(folder), 2, dying=(1, 3, 4))
    assert [pool.scores(CHATS, [None] * 11) for _ in range(3)] == [expected] * 3
    assert pool.take_counts() == {"requests": 9, "retries": 3, "ejected": 3, "waits": 0, "failures": 0, "labelled": 0}
    assert len(parts.started) == 5 and "is replaced: verifier" in caplog.text


def test_a_process_that_hangs_is_replaced_and_its_stacks_are_kept(folder, tmp_path):
    pool, parts = pool_of(tmp_path, run_of(folder), 1, deadline=1.0, hanging=(1,))
    assert len(pool.scores(CHATS, [None] * 11)) == 11
    assert (tmp_path / "stacks/verifier-0.txt").read_text() == "stacks of verifier 0" and parts.started[0].dead.is_set()


def test_after_the_retries_the_run_stops_or_takes_labels_or_waits(folder, tmp_path):
    pool, _ = pool_of(tmp_path, run_of(folder, retries=1), 1, dying=range(1, 100))
    with pytest.raises(RewardFailure, match=r"verifier 1: the process has ended; asked 2 times \(reward\.veri"):
        pool.scores(CHATS, [None] * 11)
    pool, _ = pool_of(tmp_path, run_of(folder, retries=1, on_failure="label"), 1, dying=range(1, 100))
    found = pool.scores(CHATS, [None] * 11)
    assert all(isinstance(outcome, RewardFailure) for outcome in found) and pool.take_counts()["failures"] == 1
    pool, _ = pool_of(tmp_path, run_of(folder, retries=1, on_failure="wait"), 1, dying=range(1, 6))
    assert len(pool.scores(CHATS, [None] * 11)) == 11
    counts = pool.take_counts()
    assert (counts["requests"], counts["retries"], counts["waits"]) == (6, 5, 4)


def test_a_chat_that_is_too_long_has_no_score(folder, tmp_path):
    long = [*CHATS[:3], [CHATS[0][0], {"role": "assistant", "content": "1" * 99}]]
    pool, _ = pool_of(tmp_path, run_of(folder), 2)
    with pytest.raises(RewardFailure, match=r"could not score an answer: the chat has .* tokens"):
        pool.scores(long, [None] * 4)
    pool, _ = pool_of(tmp_path, run_of(folder, on_failure="label"), 2)
    found = pool.scores(long, [None] * 4)
    assert [isinstance(outcome, float) for outcome in found] == [True, True, True, False]


def test_a_model_that_is_no_verifier_is_named(tmp_path):
    (tmp_path / "none").mkdir()
    config = run_of(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"reward\.verifier\.model: "):
        pool_of(tmp_path, config, 1)


# -- the configuration -------------------------------------------------------------------------------------------------

TWO = {"backend": "ray", "scoring": {"verifier": {"replicas": 2}}}


def test_the_backend_gives_the_source_that_asks_the_processes(folder):
    config = run_of(folder, TWO)
    assert check_cluster(ResolvedRun(config))[0] == f"verifier {folder}: 2 to score"
    backend = RayBackend(config.cluster)
    source = backend.sources(config)["verifier"]
    assert isinstance(source, ServedVerifier) and source.client is backend.verifier and backend.verifier.replicas == 2
    assert RayBackend(run_of(folder, {"backend": "ray"}).cluster).sources(config) == {}


@pytest.mark.parametrize(
    ("verifier", "cluster", "message"),
    [
        ({}, {"scoring": TWO["scoring"]}, "cluster.scoring: backend is local, which has none"),
        ({"model": None, "urls": ["http://a:1"]}, TWO, "has urls of servers, which score already; remove that"),
        ({"learn_every": 1}, TWO, r"learns \(learn_every\), which only one in the driver does"),
        ({"reads": "dialogue"}, TWO, r"reads whole dialogues \(reads\), which only one in the driver does"),
        ({"pays": "output"}, TWO, r"pays its output \(pays\), which only one in the driver does"),
        ({"model": None}, TWO, "reward.verifier has no model; remove that"),
    ],
)
def test_processes_that_nothing_uses_are_refused(verifier, cluster, message, folder):
    with pytest.raises(ConfigError, match=message):
        check_cluster(ResolvedRun(run_of(folder, cluster, **verifier)))
    with pytest.raises(ConfigError, match=r"nothing asks a verifier; add verifier to reward\.sources"):
        check_cluster(ResolvedRun(config_of(cluster=TWO)))


def test_an_answer_is_paid_the_probability_or_the_output(folder):
    said = [Utterance(number, "ann", "ann", number, 0, [], text) for number, text in enumerate(("4", "5"))]
    dialogue = Dialogue(Example("n", "2+2=", "4"), said)
    found = {}
    for pays in ("probability", "output"):
        source = load_verifier(VerifierSection(model=str(folder), pays=pays))
        (found[pays],) = source([dialogue], Arithmetic())
    temperature = Verifier.load(str(folder), "cpu").temperature
    assert found["probability"] == pytest.approx(
        [1 / (1 + math.exp(-output / temperature)) for output in found["output"]]
    )
    assert found["probability"] != found["output"]


def test_the_verifier_counts_among_the_devices(folder):
    config = run_of(folder, {**TWO, "devices": {"cpu": 5}})
    with pytest.raises(ConfigError, match=r"6 places \(the verifier 1, the verifier 1, ann to train 1.*has 5"):
        check_cluster(ResolvedRun(config))


def test_processes_that_score_need_a_configuration(folder):
    config = run_of(folder, TWO)
    backend = RayBackend(config.cluster)
    with pytest.raises(ConfigError, match="this trainer was made without one; use build_trainer"):
        backend.describe(config, SimpleNamespace(policies={}, critics=lambda *_: {}), SimpleNamespace())
