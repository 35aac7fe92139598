"""Whether two runs are equal, weights and records."""

OWN = ("kv_cache/", "group/")


"""Metrics that only one of the backends has."""


def assert_equal(end, other):
    """The same to the bit: weights and optimizers of the checkpoint and of the end, metrics, and dialogues."""
    (weights, records, dialogues), (expected, calm, spoken) = end, other
    assert weights.keys() == expected.keys() and len(weights) > 4 and dialogues == spoken
    for name, tensors in expected.items():
        assert all(value.equal(weights[name][key]) for key, value in tensors.items()), name
    kept = [[{k: v for k, v in r.items() if not k.startswith(OWN)} for r in part] for part in (records, calm)]
    assert kept[0] == kept[1]
