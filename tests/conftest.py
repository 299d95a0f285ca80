"""What all tests share: none of them fails because a machine is slow."""

from hypothesis import settings

settings.register_profile("any speed", deadline=None)
settings.load_profile("any speed")
