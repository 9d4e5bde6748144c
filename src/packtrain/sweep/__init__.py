"""Many runs of one job on one fleet: which ones (space), how long each trains (rungs), who starts them (drive)."""
