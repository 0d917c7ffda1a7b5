#!/bin/bash
# Open MPI. Change: RANKS, HOSTFILE (one line a host: NAME slots=RANKS_ON_IT), and TRAIN. mpi4py is not needed.
set -eu
RANKS=${RANKS:-2}
TRAIN=${TRAIN:-"pardist fit -c recipes/gpt/config.yaml --trainer.strategy pardist_zero2 --trainer.devices $RANKS"}
options=(-np "$RANKS" -x OMP_NUM_THREADS=1)
if [ -n "${HOSTFILE:-}" ]; then
    # Several hosts: ranks meet at the first. Set --trainer.devices to the slots of a host, and --trainer.num_nodes.
    options+=(--hostfile "$HOSTFILE" --map-by slot -x MASTER_ADDR="$(awk '!/^#/ && NF {print $1; exit}' "$HOSTFILE")")
fi

exec mpirun "${options[@]}" ${MPIRUN_OPTIONS:-} $TRAIN
