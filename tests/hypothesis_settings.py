"""How long examples of hypothesis may take; imported before a test is decorated.

There is no deadline: the machines that run tests are shared. The gate tries the same examples in
each run, so that it says something about the commit; `just slow` searches for others.
"""

from hypothesis import HealthCheck, settings

settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("gate", settings.get_profile("search"), derandomize=True)
settings.load_profile("gate")
