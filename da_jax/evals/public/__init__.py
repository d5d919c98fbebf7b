"""The fifteen public sources of the paper, read from local files or, if allowed, from the hub.

Nothing is downloaded unless `PublicOptions.allow_download` says so. A source that is not there is
an error that says where to get it and where to put it. An example is asked once, at the least of
the lengths of a run that it fits; greater lengths may be added later. Data for non-commercial use
is not included.
"""

from da_jax.evals.public.sources import PublicOptions, SourceError
from da_jax.evals.public.tasks import TASKS

__all__ = ["TASKS", "PublicOptions", "SourceError"]
