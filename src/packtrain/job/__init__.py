"""Jobs: the typed and frozen form of a job file, and how to load one."""

from packtrain.job.job import Job
from packtrain.job.load import LoadedJob, load_job

__all__ = ["Job", "LoadedJob", "load_job"]
