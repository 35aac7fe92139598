"""Random generators that are put back, compared and seeded."""

import random

import numpy as np
import pytest
import torch

from trl_ext.process.random_states import (
    forked_generators,
    forked_rng,
    generator_states,
    number_of,
    same_states,
    seed_generators,
)


def draw():
    return random.random(), np.random.random(), np.random.standard_normal()


def test_what_is_drawn_or_seeded_inside_leaves_the_generators_as_they_were():
    seed_generators(5)
    np.random.standard_normal()  # one of the two numbers that NumPy draws at once is kept for the next call
    before = generator_states()
    with forked_generators():
        inside = draw()
        seed_generators(2**40 + 1)
        assert random.random() == random.Random(2**40 + 1).random()
        assert np.random.random() == np.random.RandomState(1).random()
    assert same_states(before, generator_states()) == (True, True)
    assert draw() == inside and same_states(before, generator_states()) == (False, False)
    random.setstate(before.python)
    assert same_states(before, generator_states()) == (True, False)
    before = generator_states()
    with pytest.raises(KeyError), forked_generators():
        draw()
        raise KeyError
    assert same_states(before, generator_states()) == (True, True)


def test_numpy_may_not_be_imported(monkeypatch):
    import sys

    numbers = np.random.get_state()[1].tolist()
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "numpy")
        before = generator_states()
        with forked_generators():
            seed_generators(3)
        assert before.numpy is None and same_states(before, generator_states()) == (True, True)
    assert np.random.get_state()[1].tolist() == numbers
    assert same_states(before, generator_states()) == (True, True)


def test_torch_has_its_own():
    torch.manual_seed(3)
    with forked_rng():
        inside = torch.rand(1)
    assert torch.equal(torch.rand(1), inside)
    assert number_of(("a", 1)) == number_of(("a", 1)) != number_of(("a", 2)) and number_of(()) < 2**128
