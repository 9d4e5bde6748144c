#!/bin/bash
# @run@: one node on each machine; they coordinate through the store.
# Submit it by hand with:  sbatch slurm.sh
@header@

# @notice@ s before the time limit Slurm sends SIGUSR1: nodes commit and leave, and the job is requeued.
export @variable@=@notice@
noticed=no
trap 'noticed=$SECONDS; kill -USR1 "$nodes" 2>/dev/null' USR1
# SIGTERM comes from scancel, or @notice@ s after the notice from the time limit. A requeue would undo a scancel.
cancelled=no
trap '[ "$noticed" != no ] && [ $((SECONDS - noticed)) -ge @almost@ ] || cancelled=yes
  kill -TERM "$nodes" 2>/dev/null' TERM

@environment@srun --export=ALL --kill-on-bad-exit=0 --ntasks-per-node=1 --cpu-bind=none \
  @command@ &
nodes=$!
while kill -0 "$nodes" 2>/dev/null; do wait "$nodes"; done # a signal ends the wait, but not the nodes
wait "$nodes"
code=$?

# srun exits with the highest code of all nodes, so one that was killed may hide that the others only left. Without a
# notice srun itself may have failed: it kills all nodes (137) after losing touch with one that is back already.
again=no
if [ "$noticed" != no ]; then
  case "$code" in @over@) ;; *) again=yes ;; esac # these say that the run is over
elif [ "$cancelled" = no ] && [ "$code" != @done@ ]; then
  # Asks the store for the run's result, and counts: a job that always fails must not be requeued forever.
  @decide@ --job "$SLURM_JOB_ID" --code "$code" && again=yes
fi
if [ "$again" = yes ]; then
  # By its place in the array: the first job of an array has the array's own number, and requeuing that number would
  # requeue all of them.
  job="${SLURM_ARRAY_TASK_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}"
  # More than once: a machine that has just lost its network may not reach the controller yet.
  for pause in 5 15 30 60 0; do
    [ "$cancelled" = no ] || break # maybe only just now
    scontrol requeue "$job" && break
    sleep "$pause"
  done
fi
exit "$code"
