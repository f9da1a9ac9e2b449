"""Authority on how much is tried: profiles of generated problems, and the Hypothesis settings that go with them."""

from dataclasses import dataclass

from hypothesis import HealthCheck, Phase, settings
from hypothesis.database import ExampleDatabase


@dataclass(frozen=True)
class Profile:
    """`generated`: problems drawn per family and route, besides its examples. `budget`: seconds unless --budget says
    otherwise. `driven`: as many again, after all of these, each drawn from what came closest to its limit.
    """

    name: str
    generated: int
    budget: float
    shrink_seconds: float
    driven: int = 0


PROFILES = {
    profile.name: profile
    for profile in (
        Profile("dev", 1, 600.0, 30.0),
        Profile("ci", 2, 1500.0, 60.0),
        Profile("sweep", 25, 3600.0, 120.0, driven=50),
        Profile("nightly", 100, 8 * 3600.0, 300.0, driven=500),
    )
}
EXAMPLES = {"dev": 15, "ci": 15, "sweep": 200, "nightly": 2000}


def register(database: ExampleDatabase | None = None) -> None:
    """Make the profiles known to Hypothesis under the same names; ci draws the same problems every time and keeps no
    database, the others use `database` or Hypothesis's own.
    """
    common = {"deadline": None, "print_blob": True, "suppress_health_check": [HealthCheck.too_slow]}
    common |= {} if database is None else {"database": database}
    for name, examples in EXAMPLES.items():
        stable = {"derandomize": True, "database": None} if name == "ci" else {}
        settings.register_profile(name, max_examples=examples, **{**common, **stable})


def drawing(count: int, targeted: bool = False) -> settings:
    """Draw `count` problems and nothing else: no shrinking, no database, no deadline. `targeted`: drawn from those with
    the largest `hypothesis.target`.
    """
    return settings(
        max_examples=count,
        phases=[Phase.generate, Phase.target] if targeted else [Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
