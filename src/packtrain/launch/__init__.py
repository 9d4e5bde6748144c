"""From a job file to a started run: `load`, `check`, `create`, `start`; `resume` one that ended; `parent` of a run."""
