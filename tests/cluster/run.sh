#!/usr/bin/env bash
# Runs all tests of rdma-mesh on clusters, on this machine: real engines, started and stopped; see examples/tools/cluster. They have
# a network namespace for themselves, with the interface that Open MPI requires besides the loopback. So nobody else uses their ports,
# and two runs on one machine do not meet.
cd "$(dirname "$0")" || exit 1
[ "${1:-}" = alone ] || exec unshare --net ./run.sh alone
ip link set lo up && ip link add eth0 type veth peer name eth1 && ip addr add 192.0.2.1/24 dev eth0 && ip link set eth0 up &&
    ip link set eth1 up || exit 1
failed=0
for part in slurm mpi kubernetes page; do
    timeout -k 10 1800 "./$part.sh" || failed=1
done
exit $failed
