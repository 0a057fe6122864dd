#!/usr/bin/env python3
"""Compares the packets of two senders of RoCE version 2 in a capture, field by field as tshark shows them: `dissect.py FILE`.

The kernel's rxe is at 10.77.2.1, .2, fd77:2::1 and ::2; the embedded provider is at the other addresses. Packets of one kind (opcode,
management datagram, group or not, version of IP) must have the same value in each field, but for those of OWN. tshark does not take the
questions and answers of the connection manager apart: they are compared octet by octet, and so is the invariant CRC with one that is
computed here from the captured packet, whose identification of IPv4 is the true one.
"""

import collections
import re
import struct
import subprocess
import sys
import zlib

RXE = {"10.77.2.1", "10.77.2.2", "fd77:2::1", "fd77:2::2"}
# Fields that may differ, and the reasons.
OWN = {
    "infiniband.bth.psn": "each queue pair counts its own; nobody looks at it",
    "infiniband.bth.destqp": "the receiver's number, the same for management (1) and groups (0xffffff)",
    "infiniband.deth.srcqp": "the sender's number, the same for management (1)",
    "infiniband.immdt": "the sender's number, in the programs of this capture",
    "infiniband.payload": "what the programs send",
    "infiniband.mad.transactionid": "each side draws its own",
    "infiniband.mad.data": "compared octet by octet below",
    "infiniband.invariant.crc": "computed below",
    "ip.id": "0 from a socket with DF, counted up by rxe",
    "ip.ttl": "64 from a socket, 1 to a group; of rxe, what the program or rdma_cm says",
    "ipv6.hlim": "as ip.ttl",
    "ip.dsfield": "what the program asks for",
    "ipv6.tclass": "what the program asks for",
    "ipv6.flow": "0 from rxe; the system's choice from a socket",
    "udp.srcport": "4791 from the embedded provider, a number by queue pair from rxe: it spreads flows over paths",
    "udp.checksum": "0, none, from rxe; a socket's over IPv6 must not be 0",
    "udp.length": "the length of what the programs send",
}
# Fields that may differ in packets of management.
SAME_IN_MANAGEMENT = {"infiniband.bth.destqp", "infiniband.deth.srcqp", "udp.length"}
# Fields that may differ in all others: rxe requests the acknowledgement of management datagrams, which unreliable ones
# never have.
OWN_IN_MANAGEMENT = {"infiniband.bth.a"}
SAME_IN_GROUPS = {"infiniband.bth.destqp"}
# The bytes of the requests and answers that may differ, from the 24th byte of the datagram on: the number of the request, the port and the
# addresses of both sides, the service, the queue pair, and the private data of the program.
OWN_OCTETS = {
    0x17: [range(0, 4), range(14, 16), range(18, 20), range(20, 52), range(52, 232)],
    0x18: [range(0, 4), range(8, 11), range(18, 20), range(96, 232)],
}
OTHERS = ["frame.number", "ip.src", "ip.dst", "ipv6.src", "ipv6.dst", "_ws.malformed"]


def fields():
    """The fields of tshark's dissectors that a datagram of this kind may have."""
    listed = subprocess.run(["tshark", "-G", "fields"], check=True, capture_output=True, text=True).stdout
    names = [line.split("\t")[2] for line in listed.splitlines() if line.startswith("F\t")]
    ours = re.compile(r"infiniband\.(bth|deth|mad|immdt|payload|invariant)(\.|$)")
    whole = {"infiniband.bth", "infiniband.deth", "infiniband.mad"}
    found = sorted({name for name in names if ours.match(name) and name not in whole})
    assert len(found) > 20, found
    more = ["ip.version", "ip.hdr_len", "ip.flags.df", "ip.flags.mf", "ip.frag_offset", "ip.proto", "ip.id", "ip.ttl", "ip.dsfield"]
    more += ["ipv6.version", "ipv6.nxt", "ipv6.hlim", "ipv6.tclass", "ipv6.flow"]
    return more + ["udp.srcport", "udp.dstport", "udp.length", "udp.checksum"] + found


def packets(file):
    """The packets of a capture of Ethernet, from the IP header on."""
    data = open(file, "rb").read()
    order = {b"\xd4\xc3\xb2\xa1": "<", b"\xa1\xb2\xc3\xd4": ">"}[data[:4]]
    at = 24
    while at < len(data):
        captured, = struct.unpack(order + "I", data[at + 8 : at + 12])
        yield data[at + 16 + 14 : at + 16 + captured]
        at += 16 + captured


def crc(packet):
    """The invariant CRC of a packet as it should be, and as it is."""
    packet = bytearray(packet)
    if packet[0] >> 4 == 4:
        start, end = 20, struct.unpack(">H", packet[2:4])[0]
        packet[1] = packet[8] = packet[10] = packet[11] = 0xFF
    else:
        start, end = 40, 40 + struct.unpack(">H", packet[4:6])[0]
        packet[0:4] = bytes([0x6F, 0xFF, 0xFF, 0xFF])
        packet[7] = 0xFF
    packet[start + 6 : start + 8] = b"\xff\xff"
    packet[start + 8 + 4] = 0xFF
    covered = b"\xff" * 8 + bytes(packet[: end - 4])
    return zlib.crc32(covered), struct.unpack("<I", packet[end - 4 : end])[0]


def main(file):
    names = fields()
    command = ["tshark", "-r", file, "-T", "fields", "-E", "occurrence=f", "-E", "separator=/t"]
    for name in OTHERS + names:
        command += ["-e", name]
    rows = [line.split("\t") for line in subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()]
    raw = list(packets(file))
    assert len(rows) == len(raw), (len(rows), len(raw))
    faults = []
    values = collections.defaultdict(lambda: collections.defaultdict(collections.Counter))
    octets = collections.defaultdict(lambda: collections.defaultdict(list))
    counts = collections.Counter()
    for row, packet in zip(rows, raw):
        row = dict(zip(OTHERS + names, row))
        source, target = row["ip.src"] or row["ipv6.src"], row["ip.dst"] or row["ipv6.dst"]
        who = "rxe" if source in RXE else "embedded"
        if row["_ws.malformed"]:
            faults.append(f"packet {row['frame.number']} of {who} is malformed")
        should, found = crc(packet)
        shown = int(row["infiniband.invariant.crc"], 0)
        if should != found or shown not in (found, int.from_bytes(found.to_bytes(4, "little"), "big")):
            faults.append(f"packet {row['frame.number']} of {who}: CRC {found:#010x}, tshark shows {shown:#010x}, wanted {should:#010x}")
        is_group = target.startswith(("239.", "ff"))
        attribute = int(row["infiniband.mad.attributeid"] or "0", 0)
        message = {0: "group" if is_group else "datagram", 0x17: "SIDR_REQ", 0x18: "SIDR_REP"}.get(attribute, hex(attribute))
        data = bytes.fromhex(row["infiniband.mad.data"].replace(":", ""))
        # The kernel's rdma_cm refuses a repeated request that was answered already (status 2).
        if message == "SIDR_REP" and data[4:5] != b"\0":
            message = f"SIDR_REP of status {data[4]}"
        kind = (f"IPv{row['ip.version'] or row['ipv6.version']}", message, f"opcode {row['infiniband.bth.opcode']}")
        counts[kind, who] += 1
        for name in names:
            # The padding of the payload depends on its length.
            if name == "infiniband.bth.padcnt":
                place = int(row["udp.length"]) - 8
                faults += [] if place % 4 == 0 else [f"packet {row['frame.number']} of {who} is not of whole words"]
                continue
            values[kind][name][who, row[name]] += 1
        if attribute:
            octets[kind, attribute][who].append(data)
    kinds = sorted(values)
    for kind in kinds:
        here = {who: counts[kind, who] for who in ("rxe", "embedded")}
        print(f"{' '.join(kind)}: {here['rxe']} packets of rxe, {here['embedded']} of the embedded provider")
        same, own = [], []
        for name in names:
            found = values[kind][name]
            of = {who: {value for (by, value) in found if by == who} for who in here}
            everything = of["rxe"] | of["embedded"]
            if everything <= {""}:
                continue
            free = name in OWN and not (kind[1].startswith("SIDR") and name in SAME_IN_MANAGEMENT)
            free = free or (kind[1].startswith("SIDR") and name in OWN_IN_MANAGEMENT)
            free = free and not (kind[1] == "group" and name in SAME_IN_GROUPS)
            if len(everything) == 1:
                same.append(f"{name}={next(iter(everything))[:24]}")
            elif free:
                own.append(name)
            else:
                faults.append(f"{' '.join(kind)}: {name} is {sorted(of['rxe'])[:4]} of rxe, {sorted(of['embedded'])[:4]} of ours")
        print(f"  the same ({len(same)}): {' '.join(same)}")
        print(f"  its own ({len(own)}): {' '.join(own)}")
        if not all(here.values()) and " of status" not in kind[1]:
            faults.append(f"{' '.join(kind)}: not sent by both")
    for (kind, attribute), of in sorted(octets.items()):
        lengths = {len(one) for all_ in of.values() for one in all_}
        if lengths != {232}:
            faults.append(f"{' '.join(kind)}: {lengths} octets")
            continue
        own = {place for places in OWN_OCTETS[attribute] for place in places}
        differ = [at for at in range(232) if len({one[at] for all_ in of.values() for one in all_}) > 1]
        wrong = sorted(set(differ) - own)
        print(f"{' '.join(kind)}: of 232 octets {232 - len(differ)} are the same in all, {len(set(differ) & own)} are their sender's own")
        if wrong:
            faults.append(f"{' '.join(kind)}: octets {wrong} differ")
    wanted = {(ip, message) for ip in ("IPv4", "IPv6") for message in ("datagram", "group", "SIDR_REQ", "SIDR_REP")}
    missing = wanted - {kind[:2] for kind in kinds}
    if missing:
        faults.append(f"no packets of {sorted(missing)}")
    print(f"{len(raw)} packets, {len(raw)} invariant CRCs computed, {len(faults)} faults")
    for fault in faults[:40]:
        print(f"fault: {fault}")
    return 1 if faults else 0


sys.exit(main(sys.argv[1]))
