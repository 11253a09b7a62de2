"""How long examples of hypothesis may take; imported before a test is decorated.

There is no deadline: the machines that run tests are shared.
"""

from hypothesis import HealthCheck, settings

settings.register_profile("house", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")
