#!/usr/bin/env bash
# Eight ranks by the mpirun of Open MPI and of MPICH, oversubscribed on this machine, by the lines of examples/tools/cluster.
. "$(dirname "$0")/lib.sh"

# line NAME: the mpirun line of an engine in examples/tools/cluster/README.md.
line() { sed -n "s/^\(mpi[a-z]*\.$1 .*rdma-mesh\)\(.*\)$/\1\2/p" examples/tools/cluster/README.md | head -n 1; }

by_mpi() {
    local name=$1 command
    shift
    command=$(line "$name")
    [ -n "$command" ] || { echo "no line of $name in examples/tools/cluster/README.md"; return 1; }
    echo "$command"
    rm -f "$out/$name.json"
    # The words up to the program belong to the engine; the hosts of the example are replaced by this machine.
    local words
    read -ra words <<<"${command%%rdma-mesh*}"
    timeout 900 "${words[@]}" "$@" "$mesh" "${quick[@]}" --json "$out/$name.json" && whole "$name" 8
}

shown 'Open MPI: 8 ranks' by_mpi openmpi --allow-run-as-root --oversubscribe
shown 'MPICH: 8 ranks' by_mpi mpich
exit $failed
