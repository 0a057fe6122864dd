#!/usr/bin/env bash
# listens.sh PORT PID: waits until something listens on that port of an RDMA device; fails after some 8 s, or if process PID ends first.
for _ in {1..400}; do
    ! rdma resource show cm_id | grep -q "state LISTEN.*:$1\>" || exit 0
    kill -0 "$2" 2>/dev/null || exit 1
    sleep 0.02
done
exit 1
