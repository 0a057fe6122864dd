#!/usr/bin/env bash
# Puts two rxe devices, rxe8 and rxe9, at the ends of a veth pair of their own, with traffic between the two that crosses the pair, for
# IPv4 and IPv6: queue pairs connect by exchange between them. In the guest only: it changes the routes of the whole machine, and the
# guest ends with it. `wire.sh` says why the rules are as they are.
set -euo pipefail
[ -n "${RDMA_VM:-}" ] || { echo "exchange_wire.sh: in the guest only" >&2; exit 2; }
ip link add x8 type veth peer name x9
ip link set x8 up
ip link set x9 up
rdma link add rxe8 type rxe netdev x8
rdma link add rxe9 type rxe netdev x9
for name in all x8 x9; do echo 0 >/proc/sys/net/ipv4/conf/$name/rp_filter; done
for name in x8 x9; do echo 1 >/proc/sys/net/ipv4/conf/$name/accept_local; done
wire() { # FAMILY HERE THERE LENGTH OPTION...: a network between the two ends
    local family=$1 here=$2 there=$3 length=$4
    shift 4
    ip "$family" address add "$here/$length" dev x8 "$@"
    ip "$family" address add "$there/$length" dev x9 "$@"
    ip "$family" neighbour replace "$there" lladdr "$(cat /sys/class/net/x9/address)" dev x8 nud permanent
    ip "$family" neighbour replace "$here" lladdr "$(cat /sys/class/net/x8/address)" dev x9 nud permanent
    # What arrives.
    ip "$family" route add table 108 local "$here" dev x8
    ip "$family" route add table 109 local "$there" dev x9
    # What leaves.
    ip "$family" route add table 118 "$there" dev x8 src "$here"
    ip "$family" route add table 119 "$here" dev x9 src "$there"
    ip "$family" rule add pref 100 lookup local
    ip "$family" rule add pref 1 iif x8 lookup 108
    ip "$family" rule add pref 2 iif x9 lookup 109
    ip "$family" rule add pref 3 iif lo to "$there" lookup 118
    ip "$family" rule add pref 4 iif lo from "$there" to "$here" lookup 119
    # What a device asks for.
    ip "$family" rule add pref 5 oif x8 lookup 118
    ip "$family" rule add pref 6 oif x9 lookup 119
    ip "$family" rule del pref 0
}
wire -4 10.77.8.1 10.77.9.1 32
wire -6 fd77:8::1 fd77:9::1 128 nodad
for _ in {1..1200}; do
    [ "$(cat /sys/class/infiniband/{rxe8,rxe9}/ports/1/state | grep -c ACTIVE)" = 2 ] && exit
    sleep 0.1
done
echo "exchange_wire.sh: rxe8 and rxe9 do not become active" >&2
exit 1
