"""A verifier that learns beside the team."""

from maporl.config.schema import RewardSection, TinySection
from maporl.rewards.build import build_sources
from maporl.verifier.section import VerifierSection

TINY = TinySection(alphabet="0123456789+=", hidden_size=32, layers=1, heads=2)


def learner(**options):
    section = VerifierSection(tiny=TINY, learn_every=1, learning_rate=3e-3, **options)
    return build_sources(RewardSection(sources={"verifier": 1.0}, verifier=section), ["verifier"])["verifier"]
