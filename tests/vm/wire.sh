#!/usr/bin/env bash
# Puts a second rxe device, rxe1, at the other end of rxe0's veth pair, and routes the traffic between the two over the pair, so that it can
# be captured and disturbed. In the guest only: it changes the routes of the whole machine. A kernel delivers packets for its own addresses
# without a wire, and rxe does so for its own MAC address. So the rules here precede the one for local addresses, and each end has the other
# as a neighbour.
set -euo pipefail
[ -n "${RDMA_VM:-}" ] || { echo "wire.sh: in the guest only" >&2; exit 2; }
here=10.77.2.1 there=10.77.3.1
ip address add $there/32 dev v1
rdma link add rxe1 type rxe netdev v1
for name in all v0 v1; do echo 0 >/proc/sys/net/ipv4/conf/$name/rp_filter; done
for name in v0 v1; do echo 1 >/proc/sys/net/ipv4/conf/$name/accept_local; done
ip neighbour replace $there lladdr "$(cat /sys/class/net/v1/address)" dev v0 nud permanent
ip neighbour replace $here lladdr "$(cat /sys/class/net/v0/address)" dev v1 nud permanent
# Incoming packets.
ip route add table 101 local $here dev v0
ip route add table 101 $there dev v0
ip route add table 102 local $there dev v1
ip route add table 102 $here dev v1
# Outgoing packets.
ip route add table 103 $there dev v0 src $here
ip route add table 104 $here dev v1 src $there
ip rule add pref 100 lookup local
ip rule add pref 1 iif v0 lookup 101
ip rule add pref 2 iif v1 lookup 102
ip rule add pref 3 iif lo to $there lookup 103
ip rule add pref 4 iif lo from $there to $here lookup 104
# The connection manager asks whether a peer is behind the device that it came in on.
ip rule add pref 5 oif v0 lookup 103
ip rule add pref 6 oif v1 lookup 104
ip rule del pref 0
for _ in {1..1200}; do
    grep -q ACTIVE /sys/class/infiniband/rxe1/ports/1/state && exit
    sleep 0.1
done
echo "wire.sh: rxe1 does not become active" >&2
exit 1
