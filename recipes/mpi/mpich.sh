#!/bin/bash
# MPICH, and others with its mpiexec (Intel MPI, MVAPICH). Change: RANKS, HOSTS (names separated by commas), and TRAIN.
set -eu
RANKS=${RANKS:-2}
TRAIN=${TRAIN:-"pardist fit -c recipes/gpt/config.yaml --trainer.strategy pardist_zero2 --trainer.devices $RANKS"}
# Where the script imports mpi4py: its wheel loads Open MPI unless told, and every rank would train alone.
options=(-n "$RANKS" -env OMP_NUM_THREADS 1 -env MPI4PY_MPIABI mpich)
[ -z "${HOSTS:-}" ] || options+=(-hosts "$HOSTS" -env MASTER_ADDR "${HOSTS%%,*}")

exec mpiexec "${options[@]}" $TRAIN
