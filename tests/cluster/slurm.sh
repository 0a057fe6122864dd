#!/usr/bin/env bash
# A Slurm of one machine: munge, a controller and two nodes on the loopback, in a separate folder. Four ranks, started
# by srun and by the batch script of examples/tools/cluster. Everything is stopped again.
. "$(dirname "$0")/lib.sh"
work=$(mktemp -d) && chmod 755 "$work"
export SLURM_CONF=$work/slurm.conf PATH=$PATH:/usr/sbin

take_down() {
    local file
    for file in "$work"/*.pid; do
        [ -s "$file" ] && kill "$(cat "$file")" 2>/dev/null
    done
    for _ in $(seq 50); do
        pgrep -F "$work/slurmctld.pid" >/dev/null 2>&1 || break
        sleep 0.1
    done
    rm -rf "$work"
}
trap take_down EXIT
# munged closes a connection that brings nothing for 2 s. A client then tries again, but at its first write SIGPIPE would end it.
trap '' PIPE

# Two clusters on one machine must not meet: munge has a socket, a key and a log in the folder, too.
start_munge() {
    dd if=/dev/urandom of="$work/munge.key" bs=128 count=1 2>/dev/null
    chmod 600 "$work/munge.key"
    timeout 900 munged --force --socket "$work/munge.socket" --key-file "$work/munge.key" --log-file "$work/munge.log" \
        --pid-file "$work/munge.pid" --seed-file "$work/munge.seed"
}

settings() {
    local name
    name=$(hostname)
    cat >"$SLURM_CONF" <<C
ClusterName=rdma-mesh
SlurmctldHost=$name(127.0.0.1)
AuthType=auth/munge
AuthInfo=socket=$work/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool.%n
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/slurmd.%n.pid
SlurmctldLogFile=$work/slurmctld.log
SlurmdLogFile=$work/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=2
NodeName=n1 NodeHostname=$name NodeAddr=127.0.0.1 Port=6818 CPUs=2
NodeName=n2 NodeHostname=$name NodeAddr=127.0.0.1 Port=6819 CPUs=2
PartitionName=all Nodes=n1,n2 Default=YES OverSubscribe=FORCE:4 State=UP
C
    mkdir -p "$work/state" "$work/spool.n1" "$work/spool.n2"
}

bring_up() {
    settings && start_munge && slurmctld -c && slurmd -N n1 && slurmd -N n2 || return
    # If the controller has ended, each question takes sinfo 9 s.
    local end=$((SECONDS + 300))
    while [ $SECONDS -lt $end ]; do
        [ "$(sinfo -h -o %T 2>/dev/null)" = idle ] && [ "$(sinfo -h -o %D)" = 2 ] && return
        sleep 0.1
    done
    return 1
}

# The daemons write what they fail at to their logs only.
start() {
    bring_up && return
    sinfo -N -l
    tail -n 20 "$work"/*.log
    return 1
}

by_srun() {
    rm -f "$out/srun.json"
    timeout 900 srun -N2 -n4 "$mesh" "${quick[@]}" --json "$out/srun.json" && whole srun 4 n1 n2
}

by_batch() {
    rm -f "$out/mesh.json"
    # The script is the one that users copy; it takes the program and its options from the environment.
    MESH=$mesh MESH_OPTIONS=${quick[*]} timeout 900 \
        sbatch --wait -N2 --ntasks-per-node=2 --chdir="$out" --output="$work/batch.out" examples/tools/cluster/mesh.sbatch
    local status=$?
    cat "$work/batch.out"
    [ $status = 0 ] && whole mesh 4 n1 n2
}

# A rank that dies ends no other, as long as Slurm keeps them running. It is killed once rank 0 reports that the pairs
# measure.
with_a_dead_rank() {
    rm -f "$out"/dead.*
    # shellcheck disable=SC2016
    PROGRESS=$out/dead.progress timeout 900 srun -N2 -n4 --kill-on-bad-exit=0 sh -c '
        case $SLURM_PROCID in
            0) exec "$@" 2>"$PROGRESS" ;;
            2) "$@" & rank=$!
               until grep -q latency "$PROGRESS" 2>/dev/null; do sleep 0.1; done
               kill -KILL $rank; wait $rank ;;
            *) exec "$@" ;;
        esac' sh \
        "$mesh" "${quick[@]}" -n 10000000 --silence 20 --json "$out/dead.json"
    jq -e '(.good | not) and (.ranks[2].gone | test("has ended")) and all(.ranks[0,1,3]; .gone == null)
        and all(.pairs[] | select(.a != 2 and .b != 2); .broken == null)' "$out/dead.json"
}

shown 'Slurm: munge, controller and two nodes start' start
[ $failed = 0 ] || exit 1
shown 'Slurm: 4 ranks on two nodes by srun' by_srun
shown 'Slurm: 4 ranks by the batch script' by_batch
shown 'Slurm: a killed rank is a row, the others finish' with_a_dead_rank
exit $failed
