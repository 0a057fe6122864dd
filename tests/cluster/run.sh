#!/usr/bin/env bash
# Runs all tests of rdma-mesh on clusters, on this machine: real engines, started and stopped; see examples/tools/cluster.
cd "$(dirname "$0")" || exit 1
failed=0
for part in slurm mpi kubernetes page; do
    timeout -k 10 1800 "./$part.sh" || failed=1
done
exit $failed
