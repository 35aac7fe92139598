"""Groups of processes without Ray: what is sent, who gets what, and what happens when a process dies or hangs."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError

import psutil
import pytest
import torch
from ray_groups import (
    Engine,
    Thread,
    check_cluster,
    config_of,
    learners_of,
    newest_ray,  # noqa: F401  # a fixture
    pool_of,
    row,
    spec,
)
from torch.distributed import TCPStore

from maporl.errors import ConfigError
from maporl.integrations.ray.engine_pool import EnginePool
from maporl.integrations.ray.group import GroupFailed
from maporl.integrations.ray.groups import groups_of
from maporl.integrations.ray.learner_process import LearnerProcess
from maporl.integrations.ray.member import MemberDied
from maporl.integrations.ray.messages import Samples, WeightsDiffer, dealt, numbers_of, pack, put_numbers, unpack
from maporl.integrations.ray.ray_cluster import Cluster
from maporl.integrations.ray.section import FailuresSection
from maporl.run import ResolvedRun
from trl_ext.ppo.batch import Completion, build_token_batch
from trl_ext.sampling.options import Sampled


def completions(rng, count):
    """Random completions: some share prefixes and trajectories, some have temperatures, log-probabilities or a critic's
    prompt."""
    found = []
    for number in range(count):
        prompt = [rng.randrange(1, 50) for _ in range(rng.randint(1, 6))]
        if found and rng.random() < 0.4:  # a later turn of an earlier conversation
            prompt = found[-1].prompt_ids + found[-1].response_ids + prompt
        response = [rng.randrange(1, 50) for _ in range(rng.randint(1, 5))]
        found.append(
            Completion(
                prompt_ids=prompt,
                response_ids=response,
                ended=rng.random() < 0.5,
                label=f"row {number}",
                head=rng.randrange(2),
                trajectory=("t", number // 2) if rng.random() < 0.5 else None,
                sampled_logprobs=[-rng.random() for _ in response] if rng.random() < 0.7 else None,
                temperature=rng.choice([None, 0.7]),
                critic_prompt_ids=prompt[:1] if rng.random() < 0.3 else None,
            )
        )
    return found


@pytest.mark.parametrize("seed", range(5))
def test_samples_arrive_as_they_were(seed):
    own = completions(random.Random(seed), 7)
    there = Samples.of(own).completions()
    one, other = build_token_batch(own, "cpu"), build_token_batch(there, "cpu")
    for name in ("input_ids", "sampled_mask", "head", "trajectory", "sampler_logprobs", "temperature"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), equal_nan=True, rtol=0, atol=0)
    assert one.labels == other.labels and [c.ended for c in own] == [c.ended for c in there]
    assert Samples.of([]).completions() == [] and (one.critic is None) == (other.critic is None)
    if one.critic is not None:
        assert one.critic.input_ids.tolist() == other.critic.input_ids.tolist()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("processes", [1, 2, 3, 8])
def test_rows_are_dealt_in_successive_groups(seed, processes):
    batch = build_token_batch(completions(random.Random(seed), 12), "cpu")
    shares = dealt(batch, processes)
    assert sorted(row for rows in shares for row in rows) == list(range(12)) and len(shares) == processes
    groups = batch.inseparable()
    owner = [next(n for n, rows in enumerate(shares) if group[0] in rows) for group in groups]
    assert owner == sorted(owner), "minibatches are dealt over groups in this order"
    assert all(row in shares[n] for group, n in zip(groups, owner, strict=True) for row in group)


@pytest.mark.parametrize("seed", range(3))
def test_numbers_come_back_to_their_tokens(seed):
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    own = completions(rng, 9)
    whole = build_token_batch(own, "cpu")
    computed = ("old_logprobs", "ref_logprobs", "values")
    expected = {name: torch.randn(whole.input_ids.shape, generator=generator) * whole.sampled_mask for name in computed}
    for rows in dealt(whole, 3):
        part = build_token_batch(Samples.of([own[row] for row in rows]).completions(), "cpu")
        for name in computed:
            getattr(part, name).copy_(
                expected[name][torch.tensor(rows, dtype=torch.long)][:, : part.input_ids.shape[1]]
            )
        put_numbers(whole, rows, numbers_of(part, "computed"))
    for name in computed:
        assert torch.equal(getattr(whole, name), expected[name]), name
    assert set(numbers_of(whole, "assigned")) == {"advantages", "returns", "value_mask"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_arrive_as_they_were_or_are_refused(dtype):
    torch.manual_seed(0)
    named = {"a": torch.randn(3, 4, dtype=dtype), "b": torch.randn(5, dtype=dtype), "c": torch.tensor(2.0, dtype=dtype)}
    size = sum(value.nbytes for value in named.values())
    packed = pack(named.items(), size)
    there = {name: torch.zeros_like(value) for name, value in named.items()}
    unpack(packed, there)
    assert all(torch.equal(there[name], value) for name, value in named.items())
    packed.buffer[1] ^= 64
    with pytest.raises(WeightsDiffer, match="'a' sums to"):
        unpack(packed, there)
    with pytest.raises(WeightsDiffer, match="'d' is on one side only"):
        unpack(pack(named.items(), size), {**there, "d": torch.zeros(1)})
    with pytest.raises(WeightsDiffer, match=r"'b' has shape \(6,\), got \(5,\)"):
        unpack(pack(named.items(), size), {**there, "b": torch.zeros(6, dtype=dtype)})


# -- processes, as threads ---------------------------------------------------------------------------------------------


class VLLM(Engine):
    """Answers as :class:`Engine` does, each row after as many calls as its key says. It works on others meanwhile."""

    def __init__(self):
        super().__init__()
        self.running, self.done, self.most, self.hurry = {}, {}, 0, threading.Event()

    def load(self, policy, version, weights):
        while self.running:  # what has begun ends with the old weights, and is told by the next call
            self._step()
        return super().load(policy, version, weights)

    def sample(self, rows, versions):
        for name, version in versions.items():
            assert self.versions[name] == version
        self.rows.append(len(rows))
        said = {n: Sampled([row.prompt_ids[0], self.versions["ann"]]) for n, row in rows.items()}
        self.running |= {n: [row.key[1], said[n]] for n, row in rows.items()}
        self.most = max(self.most, len(self.running))
        self._step()
        found, self.done = self.done, {}
        return found

    def _step(self):
        for own in self.running.values():
            own[0] -= own[0] if self.hurry.is_set() else 1
        self.done = self.done | {n: said for n, (left, said) in self.running.items() if left <= 0}
        self.running = {n: own for n, own in self.running.items() if own[0] > 0}


def test_what_was_asked_of_a_dead_engine_is_asked_again(tmp_path):
    """Twenty engines die while they answer, and a new one never answers with another version than the one asked for."""
    pool, started = pool_of(tmp_path, seconds=(0.005, 0.0), engine_replacements=20)
    rng = random.Random(1)
    for version in range(1, 21):
        pool.load("ann", version, f"weights {version}")
        answers = pool.ask([row(number) for number in range(50)])
        time.sleep(rng.uniform(0, 0.004))
        rng.choice([member for member in started if not member.dead.is_set()]).end()
        said = [answer.result(timeout=20) for answer in answers]
        assert [own.ids for own in said] == [[n, version] for n in range(50)]
        assert {own.version for own in said} == {version}
    assert 15 <= pool.replaced <= 20, "one that died without work is found dead when it is asked"


def test_engines_that_die_too_often_end_the_run(tmp_path):
    pool, started = pool_of(tmp_path, replicas=1, seconds=(0.05, 0.0), engine_replacements=2)
    answers = pool.ask([row(0), row(1)])
    with pytest.raises(GroupFailed, match=r"engines were replaced 2 times .*has no checkpoint yet"):
        while not answers[0].done():
            started[-1].end()
            time.sleep(0.02)
        answers[0].result()


def test_nothing_waits_for_engines_that_have_ended(tmp_path):
    """Answers that no engine has begun fail with the end of the pool, and so does a call that waits for an engine."""
    pool, _ = pool_of(tmp_path, replicas=1, rows=1, seconds=(0.2, 0.0))
    answers = pool.ask([row(0), row(1), row(2)])
    pool.end()
    for answer in answers:
        with pytest.raises((GroupFailed, MemberDied)):
            answer.result(timeout=5)
    pool, _ = pool_of(tmp_path, replicas=1)
    pool._members.clear()  # as while its only engine is replaced
    waiting = ThreadPoolExecutor(1).submit(pool.call, "untrained")
    time.sleep(0.05)
    assert not waiting.done()
    pool.end()
    with pytest.raises(GroupFailed, match="its processes have ended"):
        waiting.result(timeout=5)


def test_an_engine_that_hangs_is_replaced_and_its_stacks_are_kept(tmp_path):
    pool, started = pool_of(tmp_path, replicas=1, deadline=0.3)
    started[0].part.sample = lambda rows, versions: time.sleep(1.5)
    answers = pool.ask([row(7)])
    assert answers[0].result(timeout=20).ids == [7, 0]
    assert (tmp_path / "stacks/ann-engine-0.txt").read_text() == "stacks of ann engine 0"


def test_an_error_of_an_answer_is_raised_where_it_was_asked(tmp_path):
    pool, started = pool_of(tmp_path, replicas=1)

    def fail(rows, versions):
        raise ValueError("a prompt is empty")

    sample, started[0].part.sample = started[0].part.sample, fail
    with pytest.raises(ValueError, match="a prompt is empty"):
        pool.ask([row(0)])[0].result(timeout=5)
    started[0].part.sample = sample
    assert pool.ask([row(1)])[0].result(timeout=5).ids == [1, 0] and pool.replaced == 0


def test_answers_that_have_begun_end_with_the_old_weights_and_the_next_have_the_new(tmp_path):
    """Weights change while an answer is sampled. Nobody waits for it, and each answer says which weights it has."""
    pool, started = pool_of(tmp_path, replicas=1)
    pool.load("ann", 1, "weights 1")
    goes_on, began = threading.Event(), threading.Event()
    sample = started[0].part.sample

    def slow(rows, versions):
        began.set()
        assert goes_on.wait(10)
        return sample(rows, versions)

    started[0].part.sample = slow
    first = pool.ask([row(0)])[0]
    assert began.wait(10)
    pool.load("ann", 2, "weights 2")
    second = pool.ask([row(1)])[0]
    assert not first.done()
    goes_on.set()
    said = [answer.result(timeout=10) for answer in (first, second)]
    assert [(own.ids, own.version) for own in said] == [([0, 1], 1), ([1, 2], 2)]
    assert pool.replaced == 0


def test_weights_that_do_not_fit_are_raised_where_answers_are_asked_for(tmp_path):
    pool, started = pool_of(tmp_path, replicas=1)

    def refuse(policy, version, weights):
        raise WeightsDiffer("weights: 'a' sums to 1.0 after loading, expected 2.0")

    started[0].part.load = refuse
    pool.load("ann", 1, "weights 1")
    with pytest.raises(WeightsDiffer, match="'a' sums to"):
        pool.ask([row(0)])[0].result(timeout=10)
    with pytest.raises(WeightsDiffer, match="'a' sums to"):
        pool.ask([row(0)])


def test_engines_get_full_calls_although_dialogues_go_on_one_by_one(tmp_path):
    """256 dialogues of four utterances, engines of 20 ms and 1 ms a row, at most 64 rows: the calls are nearly full."""
    pool, started = pool_of(tmp_path, replicas=2, rows=64, seconds=(0.02, 0.001))
    pending = dict(zip(pool.ask([row(n) for n in range(256)]), [1] * 256, strict=True))
    while pending:
        done = [answer for answer in pending if answer.done()]
        turns = [pending.pop(answer) for answer in done]
        more = [turn + 1 for turn in turns if turn < 4]
        pending |= dict(zip(pool.ask([row(n) for n in range(len(more))]), more, strict=True))
        time.sleep(0.001)
    sizes = [size for member in started for size in member.part.rows]
    assert sum(sizes) == 1024 and sum(sizes) / len(sizes) >= 48
    pool.end()


def vllm_pool(tmp_path, replicas=1, rows=None, **failures):
    started = []

    def start(number, place):
        started.append(Thread(f"ann engine {number}", VLLM()))
        return started[-1]

    pool = EnginePool(spec(replicas, rows, vllm=["ann"]), start, FailuresSection(**failures), tmp_path)
    pool.build()
    return pool, started


def test_answers_of_vllm_come_one_by_one_and_new_rows_join_those_that_run(tmp_path):
    pool, [member] = vllm_pool(tmp_path)
    [slow] = pool.ask([row(1, calls=10**9)])
    for number in range(2, 6):
        [quick] = pool.ask([row(number, calls=2)])
        assert quick.result(timeout=10).ids == [number, 0]
    assert not slow.done() and member.part.most == 2
    pool.load("ann", 1, "weights 1")
    member.part.hurry.set()
    assert slow.result(timeout=10) == Sampled([1, 0], version=0), "it ends with the weights that it began with"
    assert pool.ask([row(7, calls=3)])[0].result(timeout=10) == Sampled([7, 1], version=1)
    pool.end()


def test_vllms_of_a_group_share_what_runs_and_keep_within_their_rows(tmp_path):
    pool, started = vllm_pool(tmp_path, replicas=2, rows=8)
    answers = [pool.ask([row(number, calls=5 + number % 7)])[0] for number in range(64)]
    assert [answer.result(timeout=20).ids for answer in answers] == [[number, 0] for number in range(64)]
    assert all(member.part.most <= 8 for member in started)
    assert sum(started[0].part.rows) + sum(started[1].part.rows) == 64
    assert min(sum(member.part.rows) for member in started) >= 8  # a busy machine shares them less evenly
    pool.end()


@pytest.mark.slow
def test_what_a_dead_vllm_was_asked_is_asked_again(tmp_path):
    pool, started = vllm_pool(tmp_path, replicas=2)
    rng = random.Random(3)
    for version in range(1, 11):
        pool.load("ann", version, f"weights {version}")
        answers = pool.ask([row(number, calls=rng.randint(1, 200)) for number in range(30)])
        time.sleep(rng.uniform(0, 0.004))
        rng.choice([member for member in started if not member.dead.is_set()]).end()
        said = [answer.result(timeout=20) for answer in answers]
        assert [own.ids for own in said] == [[n, version] for n in range(30)]
        assert {own.version for own in said} == {version}
    assert pool.replaced >= 5
    pool.end()


def updates(group, numbers):
    found = []
    for number in numbers:
        assert group.annotate([(f"{number} a",), (f"{number} b",)]) == [f"{number} a", f"{number} b"]
        found.append(group.update([(number,), (number,)]))
    return found


def test_a_group_whose_process_dies_goes_on_from_the_last_update(tmp_path):
    calm, _ = learners_of(tmp_path)
    group, world = learners_of(tmp_path, deaths=(1, 3, 4))
    assert updates(group, range(1, 6)) == updates(calm, range(1, 6)) == [1, 3, 6, 10, 15]
    assert group.restarts == 3 and len(world["members"]) == 8 and group.bytes == 12


def test_a_process_that_does_not_answer_is_named_with_the_stacks_of_all(tmp_path, caplog):
    group, _ = learners_of(tmp_path, hangs=(2,), deadline=0.4)
    assert updates(group, range(1, 4)) == [1, 3, 6]
    assert "ann learner 1: no answer to 'update' after 0.4 s (cluster.failures.deadline)" in caplog.text
    text = (tmp_path / "stacks/ann-update-0.txt").read_text()
    assert "stacks of ann learner 0" in text and "stacks of ann learner 1" in text


def test_a_group_that_dies_too_often_ends_the_run(tmp_path):
    group, _ = learners_of(tmp_path, deaths=range(1, 100), group_restarts=2)
    with pytest.raises(GroupFailed, match=r"'ann': .*started again 2 times .*group_restarts.*no checkpoint yet"):
        updates(group, [1])
    without, _ = learners_of(tmp_path, deaths=(2,), snapshots=False)
    with pytest.raises(GroupFailed, match="started again 0 times"):
        updates(without, [1, 2])


def test_processes_of_a_group_meet_at_the_address_of_their_machine_alone(monkeypatch):
    """The store listens there only; gloo is told the interface; on an accelerator each process sees its own as number
    0."""
    first = LearnerProcess(spec(), 0, "127.0.0.1")
    address, port = first.meeting_place()
    own = [
        c.laddr.ip
        for c in psutil.Process().net_connections()
        if c.status == psutil.CONN_LISTEN and c.laddr.port == port
    ]
    assert address == "127.0.0.1" and own == ["127.0.0.1"]
    TCPStore("127.0.0.1", port, is_master=False).set("key", "value")
    assert first._store.get("key") == b"value"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    told = LearnerProcess(spec(), 1, "127.0.0.1")._world(address, port, on_cpu=False)
    assert (told["RANK"], told["LOCAL_RANK"], told["WORLD_SIZE"]) == ("1", "0", "2") and told["MASTER_PORT"] == str(
        port
    )
    loopback = [name for name, each in psutil.net_if_addrs().items() if "127.0.0.1" in [own.address for own in each]]
    assert [told["GLOO_SOCKET_IFNAME"]] == loopback
    assert LearnerProcess(spec(), 1, "127.0.0.1")._world(address, port, on_cpu=True)["LOCAL_RANK"] == "1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert "GLOO_SOCKET_IFNAME" not in first._world(address, port, on_cpu=True)
    assert LearnerProcess(spec(devices=1), 0, "127.0.0.1").meeting_place() == ("127.0.0.1", 0)


# -- the configuration -------------------------------------------------------------------------------------------------


def test_groups_are_the_base_models():
    assert {n: g.policies for n, g in groups_of(config_of()).items()} == {"ann": ["ann"], "bob": ["bob"]}
    lora = {"ann": {"model": "m", "lora": {}}, "bob": {"model": "m", "lora": {}}, "cy": {"model": "m"}}
    assert {n: g.policies for n, g in groups_of(config_of(lora)).items()} == {"ann": ["ann", "bob"], "cy": ["cy"]}
    central = config_of(training={"critic": "central"})
    assert {n: g.policies for n, g in groups_of(central).items()} == {"ann": ["ann", "bob"]}


def cluster(**groups):
    return {"backend": "ray", "groups": {name: {"policies": names} for name, names in groups.items()}}


def vllm(**options):
    return {"model": "m", "engine": "vllm", "vllm": options}


RAY = {"backend": "ray"}
SLEEP = {"cluster": RAY | {"groups": {"a": {"policies": ["ann"], "sharing": "sleep"}}}}
APART = {"cluster": cluster(a=["ann"], b=["bob"])}
LORA = {"ann": {"model": "m", "lora": {}}, "bob": {"model": "m", "lora": {}}}
AHEAD = {"training": {"async_depth": 1}, "ppo": {"engine_tis_cap": 2.0}}


@pytest.mark.parametrize(
    ("agents", "sections", "message"),
    [
        (None, {"cluster": cluster(a=["ann"])}, "policy 'bob' is in no group; add it to one"),
        (None, {"cluster": cluster(a=["ann", "bob"], b=["bob"])}, "policy 'bob' is in 'a' and in 'b'; leave it in one"),
        (None, {"cluster": cluster(a=["ann", "bob", "dan"])}, "no policy 'dan'; the policies are ann, bob"),
        (
            None,
            APART | {"training": {"critic": "central"}},
            "share a central critic, and are in 'a' and 'b'; put them into",
        ),
        (LORA, APART, "'ann' and 'bob' are adapters of one base, and are in 'a' and 'b'"),
        (
            None,
            {"cluster": {"groups": {"a": {"policies": ["ann", "bob"]}}}},
            "cluster.groups: backend is local, which has",
        ),
        ({"ann": vllm(urls=["http://h:1"])}, {"cluster": RAY}, "policy 'ann': vllm.urls are servers, and a group has"),
        (
            {"ann": vllm(colocate={}), "bob": {"model": "m"}},
            {"cluster": cluster(a=["ann", "bob"])},
            "cluster.groups.a: vLLM samples from 'ann' and transformers from 'bob'; give their agents the same engine",
        ),
        ({"ann": vllm(colocate={"sleep": False})}, SLEEP, "a.sharing: sleep needs vllm.colocate.sleep: true for 'ann'"),
        (
            {"ann": vllm(colocate={})},
            SLEEP | AHEAD,
            "a.sharing: an engine that sleeps cannot play ahead; set training.a",
        ),
        (None, {"cluster": RAY, "training": {"placement": "split"}}, "does not do training.placement: split"),
    ],
)
def test_groups_that_do_not_fit_are_refused(agents, sections, message):
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        check_cluster(ResolvedRun(config_of(agents, **sections)))


def test_ray_that_is_missing_or_old_is_named_before_anything_is_loaded(monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr("maporl.integrations.ray.ray_cluster.version", missing)
    with pytest.raises(ConfigError, match=r"cluster\.backend: ray needs the package ray; .* pip install .*ray"):
        check_cluster(ResolvedRun(config_of(cluster=RAY)))
    monkeypatch.setattr("maporl.integrations.ray.ray_cluster.version", lambda name: "2.41.0")
    with pytest.raises(ConfigError, match=r"needs Ray 2\.59 or newer, got 2\.41\.0; update it"):
        check_cluster(ResolvedRun(config_of(cluster=RAY)))
    monkeypatch.setattr("maporl.integrations.ray.ray_cluster.version", lambda name: "2.99.1")
    assert check_cluster(ResolvedRun(config_of(cluster=RAY))) == [
        "group ann: ann; 1 to train (replicated), 1 to sample",
        "group bob: bob; 1 to train (replicated), 1 to sample",
    ]


def test_a_cluster_without_a_token_is_not_joined(monkeypatch):
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with pytest.raises(ConfigError, match=r"cluster\.address: a cluster without a token .*RAY_AUTH_MODE=token"):
        Cluster("10.0.0.1:6379")


def test_a_launcher_of_several_processes_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="the launcher has started several; start with: maporl"):
        check_cluster(ResolvedRun(config_of(cluster=RAY)))
    assert check_cluster(ResolvedRun(config_of())) == []
