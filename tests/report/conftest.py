from __future__ import annotations

from hypothesis import settings

# No deadline for an example: how long one takes says nothing on a machine that others use too.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
