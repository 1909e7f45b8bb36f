"""The environment extension: the drawing of answers in several turns."""

from llava_ds.extensions.base import Extension
from llava_ds.extensions.environment.episodes import Episodes
from llava_ds.runtime.ranks import Ranks, on_every_rank
from llava_ds.train.plan import Plan


def plan_episodes(plan: Plan, ranks: Ranks) -> Episodes:
    """Load the user's class, and prepare for its observations. Collective; raises ConfigError on every rank."""
    return on_every_rank(ranks, lambda: Episodes(plan))


extension = Extension(complete=plan_episodes)
