//! The parts that the tests share do what they are there for. They have no unit tests of their own: with these, the whole library would be
//! built twice.

mod captures_of_roce {
    use std::net::Ipv4Addr;

    use rdma_reactor_tests::capture::{PORT, Packet, TRANSPORT, UDP};

    #[test]
    fn packets_of_roce_are_told_from_others() {
        let mut packet = vec![0_u8; 20 + UDP + TRANSPORT];
        (packet[0], packet[1], packet[9]) = (0x45, 0x68, 17);
        packet[12..16].copy_from_slice(&[10, 77, 2, 1]);
        packet[22..24].copy_from_slice(&PORT.to_be_bytes());
        packet[28] = 4;
        let source = Ipv4Addr::new(10, 77, 2, 1);
        let parsed = Packet { source, type_of_service: 0x68, opcode: 4, len: packet.len() };
        assert_eq!(Packet::parse(&packet), Some(parsed));
        assert!(parsed.is_of_connection() && !Packet { opcode: 0x64, ..parsed }.is_of_connection());
        assert_eq!(Packet::parse(&packet[..30]), None, "cut short");
        packet[9] = 6;
        assert_eq!(Packet::parse(&packet), None, "not of UDP");
        assert_eq!(Packet::parse(&[]), None);
    }
}

mod recorded_exchanges {
    use rdma_reactor_tests::pcap::{End, Hole, parse};

    const SYN: u8 = 2;
    const ACK: u8 = 16;
    const FIN: u8 = 1;
    const RST: u8 = 4;

    fn packet(client: bool, sequence: u32, flags: u8, data: &[u8]) -> Vec<u8> {
        let mut out = vec![0; 12];
        out.extend([8, 0, 0x45, 0]);
        out.extend((40 + data.len() as u16).to_be_bytes());
        out.extend([0, 0, 0x40, 0, 64, 6, 0, 0]);
        let (source, target) = if client { ([10, 0, 0, 1], [10, 0, 0, 2]) } else { ([10, 0, 0, 2], [10, 0, 0, 1]) };
        out.extend(source);
        out.extend(target);
        out.extend(if client { [0x80, 0, 0x1b, 0x58] } else { [0x1b, 0x58, 0x80, 0] });
        out.extend(sequence.to_be_bytes());
        out.extend([0, 0, 0, 0, 0x50, flags, 0, 0, 0, 0, 0, 0]);
        out.extend(data);
        out.resize(out.len().max(60), 0xee);
        out
    }

    fn file(packets: &[Vec<u8>]) -> Vec<u8> {
        let mut out = vec![0xd4, 0xc3, 0xb2, 0xa1, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 1, 0, 0, 0];
        for packet in packets {
            out.extend([0; 8]);
            out.extend((packet.len() as u32).to_le_bytes());
            out.extend((packet.len() as u32).to_le_bytes());
            out.extend(packet);
        }
        out
    }

    /// Packets that are lost, repeated, overtaken and overlapping, with a sequence number that wraps.
    fn awkward() -> Vec<Vec<u8>> {
        let at = |offset: u32| (u32::MAX - 3).wrapping_add(offset);
        vec![
            packet(true, at(u32::MAX), SYN, b""),
            packet(true, at(u32::MAX), SYN, b""),
            packet(false, 99, SYN | ACK, b""),
            packet(true, at(0), ACK, b"abcd"),
            packet(true, at(8), ACK, b"ijkl"),
            packet(true, at(u32::MAX), ACK, b"?"),
            packet(true, at(0), ACK, b"abcd"),
            packet(true, at(2), ACK, b"cdefghi"),
            packet(false, 100, FIN | ACK, b"answer"),
            packet(true, at(12), FIN | ACK, b""),
        ]
    }

    #[test]
    fn reassembles_awkward_streams() {
        let capture = parse(&file(&awkward())).unwrap();
        assert_eq!(capture.client_to_server, b"abcdefghijkl");
        assert_eq!(capture.server_to_client, b"answer");
        assert_eq!((capture.client_end, capture.server_end), (End::Fin, End::Fin));
        assert_eq!(capture.holes, []);
        let pieces: Vec<_> = capture.segments.iter().map(|s| (s.from_client, s.start, s.len)).collect();
        assert_eq!(pieces, [(true, 0, 4), (true, 4, 5), (true, 9, 3), (false, 0, 6)]);
    }

    #[test]
    fn refuses_what_it_cannot_read() {
        let whole = file(&awkward());
        for len in 0..whole.len() {
            // A file cut between packets is a capture that stopped early, not one that cannot be read.
            if let Ok(capture) = parse(&whole[..len]) {
                assert_eq!(capture.server_to_client.len() % 6, 0);
            }
        }
        let mut gap = awkward();
        gap.remove(7);
        let capture = parse(&file(&gap)).unwrap();
        assert_eq!(capture.client_to_server, b"abcdijkl");
        assert_eq!(capture.holes, [Hole { from_client: true, at: 4, len: 4 }]);
        gap.remove(4);
        assert_eq!(parse(&file(&gap)).unwrap().holes, [Hole { from_client: true, at: 4, len: 8 }]);
        gap.push(packet(true, 9, ACK, b"?"));
        assert!(parse(&file(&gap)).unwrap_err().contains("octets behind the FIN"));
        let mut other = awkward();
        other[4][37] ^= 1;
        assert!(parse(&file(&other)).unwrap_err().contains("packet 5: of another connection"));
        let mut cut = whole.clone();
        cut[24 + 12] += 1;
        assert!(parse(&cut).unwrap_err().contains("octets captured"));
        let mut again = awkward();
        again.push(packet(true, 5, SYN, b""));
        assert!(parse(&file(&again)).unwrap_err().contains("a second connection"));
        let mut arp = awkward();
        arp[3][13] = 6;
        assert!(parse(&file(&arp)).unwrap_err().contains("not IPv4"));
    }

    #[test]
    fn sees_a_reset() {
        let mut packets = awkward();
        packets.push(packet(false, 107, RST, b""));
        assert_eq!(parse(&file(&packets)).unwrap().server_end, End::Reset);
    }
}

mod verdicts_on_attacks {
    use std::time::Duration;

    use rdma_reactor_tests::floods::Kind;
    use rdma_reactor_tests::hostile_run::attacker::{self, End, Plan, Source, Stage};
    use rdma_reactor_tests::hostile_run::newcomers::Outcome;
    use rdma_reactor_tests::hostile_run::row::{Attack, Attacked, Left, Row, scribbles as scribbling, short};
    use rdma_reactor_tests::hostile_run::server;
    use rdma_reactor_tests::hostile_run::verdict::{RESIDENT_KIB, missed};

    fn outcome(up: usize, refused: usize, micros: u64) -> Outcome {
        let failed = [("rejected".to_owned(), refused)].into_iter().filter(|&(_, count)| count > 0).collect();
        Outcome { micros: vec![micros; up], failed }
    }

    fn judged(source: Source, honest: Outcome, highest_unknown: usize) -> Vec<String> {
        let left = Left { pool: Some(Duration::ZERO), resident_kib: RESIDENT_KIB };
        let plan = Plan { stage: Stage::Started, held: 1, rate: None, source, end: End::Server };
        judge(Attack::Connects(plan), (honest, highest_unknown), 0, left)
    }

    fn judge(attack: Attack, (honest, highest_unknown): (Outcome, usize), least: u64, left: Left) -> Vec<String> {
        let row = Row { attack, is_first: true, least, ..short()[0] };
        let server = server::Report { highest: 2000, highest_unknown, ..server::Report::default() };
        let attackers = attacker::Report { opened: 10, ..attacker::Report::default() };
        let attacked = Attacked { honest, attackers, server, load: 0.5, waited: 0.0 };
        missed(&row, &attacked, Some(&outcome(100, 0, 500)), Some(left))
    }

    #[test]
    fn each_target_can_be_missed() {
        assert_eq!(judged(Source::One, outcome(100, 0, 1500), 1024), [""; 0]);
        assert_eq!(judged(Source::One, outcome(99, 1, 500), 0), ["99 of 100 are up"]);
        assert_eq!(judged(Source::One, outcome(100, 0, 1501), 0), ["p99 is 3.0 times that of the control"]);
        for source in [Source::Many, Source::Shared] {
            assert_eq!(judged(source, outcome(90, 10, 9000), 0), [""; 0]);
            assert_eq!(judged(source, outcome(89, 11, 500), 0), ["89 of 100 are up"]);
            assert_eq!(judged(source, outcome(0, 100, 0), 0), ["0 of 100 are up"]);
        }
        assert_eq!(judged(Source::One, outcome(100, 0, 500), 1025), ["1025 connections are not up, of 1024 at most"]);
        let flood = Attack::Flood(Kind::Data);
        let good = || (outcome(100, 0, 500), 0);
        let left = Left { pool: Some(Duration::ZERO), resident_kib: 0 };
        assert_eq!(judge(flood, (outcome(100, 0, 9000), 0), 10, left), ["p99 is 18.0 times that of the control"]);
        assert_eq!(judge(flood, good(), 10, left), [""; 0]);
        assert_eq!(judge(flood, (outcome(99, 1, 500), 0), 10, left), ["99 of 100 are up"]);
        assert_eq!(judge(flood, good(), 11, left), ["10 connections of attackers, of 11 at least"]);
        assert_eq!(judge(flood, good(), 0, Left { pool: None, ..left }), ["the pool is not small again after 60 s"]);
        let scribbles = |reached, micros| {
            let attackers = attacker::Report { opened: 10, reached, refused: 0 };
            let row = Row { is_first: true, ..scribbling(100) };
            let server = server::Report { touched: reached as usize, ..server::Report::default() };
            let attacked = Attacked { honest: outcome(100, 0, micros), attackers, server, load: 0.5, waited: 0.0 };
            missed(&row, &attacked, Some(&outcome(100, 0, 500)), None)
        };
        assert_eq!(scribbles(0, 1000), [""; 0]);
        assert_eq!(scribbles(0, 1001), ["p99 is 2.0 times that of the control"]);
        assert_eq!(scribbles(1, 500), ["1 regions were written and 1 things were done by peers without the right"]);
        let large = Left { resident_kib: RESIDENT_KIB + 1024, ..left };
        assert_eq!(judge(flood, good(), 0, large), ["65 MiB are resident afterwards, of 64 at most"]);
    }

    #[test]
    fn a_quantile_is_that_of_the_nearest_rank() {
        let outcome = Outcome { micros: (1..=200).collect(), failed: Default::default() };
        assert_eq!([0.0, 0.5, 0.99, 1.0].map(|share| outcome.quantile(share)), [1, 100, 198, 200].map(Some));
        assert_eq!(Outcome::default().quantile(0.5), None);
    }
}
