"""Weights on their way from two processes that share them: whole, and one at a time."""

import multiprocessing
import time
import weakref
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from tiny_runs import config_of

from maporl.integrations.ray.learner_process import LearnerProcess
from maporl.integrations.ray.member import GroupSpec, without_devices
from maporl.integrations.ray.messages import sent_parameters, tensors_of
from maporl.training.args import MultiAgentPPOConfig
from trl_ext.ppo.losses import OBJECTIVES


def spec_of(folder, strategy):
    on_cpu = not strategy.startswith("zero")  # DeepSpeed finds out by itself
    config = config_of(folder, 1, use_cpu=on_cpu)
    args = without_devices(MultiAgentPPOConfig.from_config(config))
    of_run = (args, {"ppo": OBJECTIVES["ppo"]}, {"ann": (frozenset(), ())}, 3)
    return GroupSpec("ann", config, ("ann",), ("ann",), 1, ("ann",), 1, 2, strategy, 1, None, *of_run)


def watched(stream, most):
    """The same stream, with the most elements of its tensors that were in memory at once in ``most[0]``."""
    seen = []
    for name, tensor in stream:
        seen.append(weakref.ref(tensor))
        held = sum(own.numel() for ref in seen if (own := ref()) is not None)
        most[0] = max(most[0], held)
        yield name, tensor
        del tensor


def sent_by(rank, folder, spec):
    """Build process number ``rank`` of a group. Return what it sends and what is whole in it."""
    torch.set_num_threads(1)
    process, place = LearnerProcess(spec, rank, "127.0.0.1"), folder / "place"
    if rank == 0:
        (folder / "new").write_text(str(process.meeting_place()[1]))
        (folder / "new").rename(place)
    while not place.exists():
        time.sleep(0.05)
    process.build("127.0.0.1", int(place.read_text()))
    own = process.learning.learners["ann"].strategy
    stream, most = own.stream, [0]
    own.stream = lambda parameters: watched(stream(parameters), most)
    sent = process.weights("ann")
    with process.learning.whole_weights(["ann"]):
        whole = {n: p.detach().clone() for n, p in sent_parameters(process.team.policies["ann"]).items()}
    return sent, whole, most[0]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
def test_weights_are_sent_whole_and_one_at_a_time(strategy, tmp_path):
    if strategy == "zero3":
        pytest.importorskip("deepspeed")
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as processes:
        spec = spec_of(tmp_path / "run", strategy)
        (sent, whole, most), (nothing, *_) = processes.map(sent_by, range(2), [tmp_path] * 2, [spec] * 2)
    found, sizes = dict(tensors_of(sent)), [value.numel() for value in whole.values()]
    assert found.keys() == whole.keys() and all(found[name].equal(value) for name, value in whole.items())
    assert nothing is None and most == max(sizes) < sum(sizes) / 4
