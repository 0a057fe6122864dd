//! The MPA handshake (RFC 5044 §7.1, RFC 6581): reads one startup frame, and decides whether to accept the connection. Reads no byte behind
//! the frame.

use super::config::MAX_READ_DEPTH;
use super::wire::TerminateCause;
use super::wire::mpa::{ENHANCED_LEN, MAX_PRIVATE_DATA, NO_NEGOTIATION, STARTUP_HEADER_LEN};
use super::wire::{Enhanced, StartupError, StartupHeader, StartupKind};
use rdma_transport::cm::ReadDepth;

/// The length in bytes of the longest private data that a program can send. siw stores the length of the enhanced block and the private
/// data together in one byte.
pub(crate) const MAX_PRIVATE_DATA_OUT: usize = u8::MAX as usize - ENHANCED_LEN;

/// A reserved bit of the MPA request: the initiator can use shared memory. siw echoes the bit in its reply.
const LOCAL: u8 = 0x01;
/// A reserved bit of the MPA request: the last bytes of the private data are the initiator's hash
/// of the path ([`super::net::LocalSockets::local_path`]), and no part of the program's private
/// data.
const PATH: u8 = 0x02;
/// The length in bytes of the hash of the path.
pub(crate) const PATH_LEN: usize = 4;

/// Reads one startup frame. The bytes behind the frame are FPDUs, and stay in the socket.
#[derive(Debug)]
pub(crate) struct FrameReader {
    kind: StartupKind,
    buffer: [u8; STARTUP_HEADER_LEN + MAX_PRIVATE_DATA],
    have: usize,
    need: usize,
    header: Option<StartupHeader>,
}

impl FrameReader {
    pub(crate) fn new(kind: StartupKind) -> Self {
        let buffer = [0; STARTUP_HEADER_LEN + MAX_PRIVATE_DATA];
        Self { kind, buffer, have: 0, need: STARTUP_HEADER_LEN, header: None }
    }

    /// Returns the buffer for the next bytes. The buffer has exactly the number of bytes that may be read from the socket now.
    pub(crate) fn space(&mut self) -> &mut [u8] {
        &mut self.buffer[self.have..self.need]
    }

    /// Returns true if no byte of the frame has arrived yet.
    pub(crate) fn is_untouched(&self) -> bool {
        self.have == 0
    }

    /// Records that `n` bytes were read into [`FrameReader::space`]. Returns the header if the frame is complete, and `None` if bytes are
    /// missing.
    pub(crate) fn filled(&mut self, n: usize) -> Result<Option<StartupHeader>, StartupError> {
        self.have = (self.have + n).min(self.need);
        if self.have < self.need {
            return Ok(None);
        }
        if let Some(bytes) = self.buffer.first_chunk::<STARTUP_HEADER_LEN>().filter(|_| self.header.is_none()) {
            let header = StartupHeader::parse(bytes)?;
            if header.kind != self.kind {
                return Err(StartupError::BadKey);
            }
            self.need += usize::from(header.private_data_len).min(MAX_PRIVATE_DATA);
            self.header = Some(header);
        }
        Ok(self.header.filter(|_| self.have == self.need))
    }

    /// Returns the enhanced block and the private data of a complete frame. The block is `None` if
    /// the frame has none.
    pub(crate) fn body(&self) -> (Option<Enhanced>, &[u8]) {
        let body = &self.buffer[STARTUP_HEADER_LEN.min(self.have)..self.have];
        match (self.header, body.split_first_chunk::<ENHANCED_LEN>()) {
            (Some(header), Some((block, rest))) if header.enhanced && header.revision >= 2 => {
                (Some(Enhanced::parse(*block)), rest)
            }
            _ => (None, body),
        }
    }
}

/// The initiator's first message, which allows the responder to send ("ready to receive", RFC 6581 §5). This message has no payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReadyToReceive {
    Write,
    Read,
    Send,
}

/// The terms on which both peers agreed in the handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Agreement {
    pub(crate) crc: bool,
    /// The number of RDMA Reads that the peer may have outstanding at the local side.
    pub(crate) ird: u16,
    /// The number of RDMA Reads that the local side may have outstanding at the peer.
    pub(crate) ord: u16,
    /// The kind of the initiator's first message. `None` if the peers did not agree on the peer-to-peer model.
    pub(crate) rtr: Option<ReadyToReceive>,
    /// True if the peer requires markers in the stream that it receives.
    pub(crate) markers: bool,
}

impl Agreement {
    pub(crate) const fn read_depth(&self) -> ReadDepth {
        ReadDepth { responder_resources: self.ird, initiator_depth: self.ord }
    }
}

/// The terms that the local side offers in the handshake.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StartupTerms {
    /// True if the local side requests a CRC.
    pub(crate) crc: bool,
    pub(crate) ird: u16,
    pub(crate) ord: u16,
    pub(crate) revision: u8,
    /// True if the local side sends markers when the peer requires them.
    pub(crate) markers: bool,
    /// True if the local side can use shared memory with this peer.
    pub(crate) local: bool,
    /// The hash of the path that the initiator appends to its request, if any.
    pub(crate) path: Option<u32>,
}

impl StartupTerms {
    /// Creates terms from the settings. The numbers of outstanding Reads are limited to [`MAX_READ_DEPTH`]. The IRD is rounded up to a
    /// power of two, because siw also rounds up the IRD that its peer offers, and may have that many Reads outstanding.
    pub(crate) fn new(crc: bool, ird: u16, ord: u16, markers: bool) -> Self {
        Self { crc, ird: round_up(ird), ord: ord.min(MAX_READ_DEPTH), revision: 2, markers, local: false, path: None }
    }
}

/// Returns the IRD that is offered to peers if the settings allow `ird` Reads.
fn round_up(ird: u16) -> u16 {
    if ird == 0 { 0 } else { ird.min(MAX_READ_DEPTH).next_power_of_two() }
}

fn frame(mut header: StartupHeader, enhanced: Option<Enhanced>, private_data: &[u8]) -> Vec<u8> {
    debug_assert!(private_data.len() <= MAX_PRIVATE_DATA - ENHANCED_LEN);
    header.enhanced = enhanced.is_some();
    header.private_data_len = (private_data.len() + enhanced.map_or(0, |_| ENHANCED_LEN)) as u16;
    let mut out = Vec::with_capacity(STARTUP_HEADER_LEN + usize::from(header.private_data_len));
    out.extend_from_slice(&header.emit());
    out.extend_from_slice(enhanced.map(|block| block.emit()).as_ref().map_or(&[], |block| block.as_slice()));
    out.extend_from_slice(private_data);
    out
}

fn header(kind: StartupKind, revision: u8, crc: bool) -> StartupHeader {
    StartupHeader {
        kind,
        markers: false,
        crc,
        reject: false,
        enhanced: false,
        reserved: 0,
        revision,
        private_data_len: 0,
    }
}

/// Returns the MPA request of an initiator. The request offers a Write or a Read without payload as the initiator's first message. A Read
/// needs an ORD of at least 1, so a smaller ORD is raised to 1.
pub(crate) fn request(terms: &StartupTerms, private_data: &[u8]) -> Vec<u8> {
    let enhanced = (terms.revision >= 2).then(|| Enhanced {
        peer_to_peer: true,
        rtr_send: false,
        ird: terms.ird,
        rtr_write: true,
        rtr_read: true,
        ord: terms.ord.max(1),
    });
    let mut header = header(StartupKind::Request, terms.revision, terms.crc);
    if terms.revision < 2 {
        return frame(header, enhanced, private_data);
    }
    header.reserved = if terms.local { LOCAL } else { 0 } | terms.path.map_or(0, |_| PATH);
    let path = terms.path.map(u32::to_le_bytes);
    frame(header, enhanced, &[private_data, path.as_ref().map_or(&[], |path| path)].concat())
}

/// The decision of an initiator about the MPA reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Accepted(Agreement),
    Rejected,
    /// The connection fails for this reason. If the RFCs define a Terminate for this failure, a Terminate with this cause is sent. The flag
    /// is true if the FPDU of the Terminate has a CRC.
    Failed(&'static str, Option<(TerminateCause, bool)>),
}

/// Decides about the MPA reply to a request that offered `terms`.
pub(crate) fn judge_reply(terms: &StartupTerms, reply: &StartupHeader, enhanced: Option<Enhanced>) -> Verdict {
    if reply.reject {
        return Verdict::Rejected;
    }
    let crc = terms.crc || reply.crc;
    if reply.markers && !terms.markers {
        return Verdict::Failed("it requires MPA markers", None);
    }
    if reply.revision > terms.revision {
        return Verdict::Failed("its MPA revision is above ours", Some((TerminateCause::LLP_STARTUP, crc)));
    }
    let mut agreement = Agreement { crc, ird: terms.ird, ord: terms.ord, rtr: None, markers: reply.markers };
    let Some(enhanced) = enhanced.filter(|_| terms.revision >= 2) else { return Verdict::Accepted(agreement) };
    if enhanced.ird != NO_NEGOTIATION {
        agreement.ord = agreement.ord.min(enhanced.ird);
    }
    if enhanced.ord != NO_NEGOTIATION {
        if enhanced.ord > terms.ird {
            let what = "it wants more RDMA Reads outstanding than we serve";
            return Verdict::Failed(what, Some((TerminateCause::LLP_IRD, crc)));
        }
        agreement.ird = enhanced.ord;
    }
    if enhanced.peer_to_peer {
        agreement.rtr = Some(match enhanced {
            Enhanced { rtr_write: true, .. } => ReadyToReceive::Write,
            Enhanced { rtr_read: true, .. } => ReadyToReceive::Read,
            _ => {
                let what = "it chose no ready-to-receive message that we offered";
                return Verdict::Failed(what, Some((TerminateCause::LLP_RTR, crc)));
            }
        });
    }
    Verdict::Accepted(agreement)
}

/// The parts of a peer's MPA request that are needed for the reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RequestTerms {
    revision: u8,
    crc: bool,
    markers: bool,
    enhanced: Option<Enhanced>,
    /// True if the initiator can use shared memory. In that case, the private data of the reply may contain an offer.
    pub(crate) local: bool,
    /// The initiator's hash of the path, if the request has one.
    pub(crate) path: Option<u32>,
}

impl RequestTerms {
    /// Returns false if the request contains a hash of the path, and this hash differs from `path`,
    /// the hash that the local side has computed. Different hashes mean that a proxy is between the
    /// peers. A request without a hash passes: the hello of the initiator contains the hash, and is
    /// checked later.
    pub(crate) fn is_direct(&self, path: Option<u32>) -> bool {
        self.path.is_none() || self.path == path
    }

    /// Returns the numbers of outstanding Reads that the initiator requests. `limit` replaces a number for which the initiator requests no
    /// negotiation.
    pub(crate) fn read_depth(&self, limit: u16) -> ReadDepth {
        let of = |depth: fn(&Enhanced) -> u16| {
            self.enhanced.as_ref().map(depth).filter(|&depth| depth != NO_NEGOTIATION).unwrap_or(limit)
        };
        ReadDepth { responder_resources: of(|requested| requested.ord), initiator_depth: of(|requested| requested.ird) }
    }
}

/// The decision of a responder about an MPA request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Judgement {
    Acceptable(RequestTerms),
    /// The request is rejected with a reply, and the program is not notified.
    Refused(&'static str, RequestTerms),
    /// The connection is closed without a reply.
    Unknown(&'static str),
}

/// Splits the private data of a request into the program's private data and the initiator's hash
/// of the path.
pub(crate) fn split_path<'a>(request: &StartupHeader, private_data: &'a [u8]) -> (&'a [u8], Option<u32>) {
    match private_data.split_last_chunk::<PATH_LEN>() {
        Some((rest, path)) if request.revision == 2 && request.reserved & PATH != 0 => {
            (rest, Some(u32::from_le_bytes(*path)))
        }
        _ => (private_data, None),
    }
}

/// Decides about an MPA request. `markers` is true if the local side can send markers.
pub(crate) fn judge_request(request: &StartupHeader, enhanced: Option<Enhanced>, markers: bool) -> Judgement {
    // Shared memory needs an initiator that sends first. The responder waits for the first message, which shows whether the connection
    // continues on the stream or in shared memory.
    let speaks_first = enhanced.is_some_and(|enhanced| enhanced.peer_to_peer);
    let local = request.revision == 2 && speaks_first && request.reserved & LOCAL != 0;
    let StartupHeader { revision, crc, markers: wants_markers, .. } = *request;
    let requested = RequestTerms { revision, crc, markers: wants_markers, enhanced, local, path: None };
    if request.revision > 2 {
        Judgement::Unknown("an MPA revision above 2")
    } else if request.reject {
        Judgement::Unknown("a request that rejects")
    } else if request.markers && !markers {
        Judgement::Refused("it requires MPA markers", requested)
    } else {
        Judgement::Acceptable(requested)
    }
}

/// Returns the MPA reply that accepts a request, and the agreed terms.
pub(crate) fn accept(terms: &StartupTerms, requested: &RequestTerms, private_data: &[u8]) -> (Vec<u8>, Agreement) {
    let crc = requested.crc || terms.crc;
    let mut agreement = Agreement { crc, ird: terms.ird, ord: terms.ord, rtr: None, markers: requested.markers };
    let block = requested.enhanced.map(|requested| {
        let mut block = Enhanced { peer_to_peer: requested.peer_to_peer, ..Enhanced::default() };
        block.ird = NO_NEGOTIATION;
        block.ord = NO_NEGOTIATION;
        if requested.ord != NO_NEGOTIATION {
            agreement.ird = round_up(terms.ird.max(requested.ord));
            block.ird = agreement.ird;
        }
        if requested.ird != NO_NEGOTIATION {
            agreement.ord = terms.ord.min(requested.ird);
            block.ord = agreement.ord;
        }
        if requested.peer_to_peer {
            let choice = match requested {
                Enhanced { rtr_write: true, .. } => ReadyToReceive::Write,
                Enhanced { rtr_read: true, .. } => ReadyToReceive::Read,
                Enhanced { rtr_send: true, .. } => ReadyToReceive::Send,
                // The request offers no kind of first message. Like siw, the responder then chooses
                // one itself.
                _ => ReadyToReceive::Write,
            };
            block.rtr_write = choice == ReadyToReceive::Write;
            block.rtr_read = choice == ReadyToReceive::Read;
            block.rtr_send = choice == ReadyToReceive::Send;
            agreement.rtr = Some(choice);
        }
        block
    });
    (frame(header(StartupKind::Reply, requested.revision, agreement.crc), block, private_data), agreement)
}

/// Returns the MPA reply that rejects a request.
pub(crate) fn reject(requested: &RequestTerms, private_data: &[u8]) -> Vec<u8> {
    let mut header = header(StartupKind::Reply, requested.revision, requested.crc);
    header.reject = true;
    frame(header, requested.enhanced.map(|_| Enhanced::default()), private_data)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(kind: StartupKind, bytes: &[u8]) -> (StartupHeader, Option<Enhanced>, Vec<u8>) {
        let mut reader = FrameReader::new(kind);
        let mut at = 0;
        loop {
            // The bytes arrive one at a time. The reader must not request a byte behind the frame.
            reader.space()[0] = bytes[at];
            at += 1;
            if let Some(header) = reader.filled(1).unwrap() {
                assert_eq!(at, bytes.len());
                let (enhanced, private_data) = reader.body();
                return (header, enhanced, private_data.to_vec());
            }
        }
    }

    fn terms(crc: bool, revision: u8) -> StartupTerms {
        StartupTerms { revision, ..StartupTerms::new(crc, 4, 8, false) }
    }

    #[test]
    fn both_sides_agree() {
        for revision in [1, 2] {
            for (ours, theirs) in [(false, false), (false, true), (true, false), (true, true)] {
                let offer = terms(ours, revision);
                let bytes = request(&offer, b"question");
                let (header, enhanced, private_data) = read(StartupKind::Request, &bytes);
                assert_eq!(private_data, b"question");
                let Judgement::Acceptable(requested) = judge_request(&header, enhanced, false) else { panic!() };
                let (bytes, passive) = accept(&terms(theirs, 2), &requested, b"answer");
                let (header, enhanced, private_data) = read(StartupKind::Reply, &bytes);
                assert_eq!((header.revision, private_data.as_slice()), (revision, b"answer".as_slice()));
                let Verdict::Accepted(active) = judge_reply(&offer, &header, enhanced) else { panic!() };
                assert_eq!((active.crc, active.rtr), (passive.crc, passive.rtr));
                assert_eq!(active.crc, ours || theirs);
                assert_eq!(active.rtr, (revision == 2).then_some(ReadyToReceive::Write));
                if revision == 2 {
                    assert_eq!((active.ord, active.ird), (passive.ird.min(8), passive.ord));
                    assert_eq!((active.ord, active.ird), (8, 4));
                }
                let (header, enhanced, private_data) = read(StartupKind::Reply, &reject(&requested, b"no"));
                assert_eq!(judge_reply(&offer, &header, enhanced), Verdict::Rejected);
                assert_eq!(private_data, b"no");
            }
        }
    }

    #[test]
    fn ready_to_receive_of_every_kind() {
        for bits in 0..8u8 {
            let (rtr_write, rtr_read, rtr_send) = (bits & 1 != 0, bits & 2 != 0, bits & 4 != 0);
            let block = Enhanced { peer_to_peer: true, rtr_send, ird: 1, rtr_write, rtr_read, ord: 1 };
            let requested = RequestTerms {
                revision: 2,
                crc: true,
                markers: false,
                enhanced: Some(block),
                local: false,
                path: None,
            };
            let (bytes, agreement) = accept(&terms(true, 2), &requested, b"");
            let chosen = read(StartupKind::Reply, &bytes).1.unwrap();
            assert_eq!(u8::from(chosen.rtr_write) + u8::from(chosen.rtr_read) + u8::from(chosen.rtr_send), 1);
            assert!(chosen.peer_to_peer && agreement.rtr.is_some());
            if bits != 0 {
                assert!(!chosen.rtr_write || rtr_write);
                assert!(!chosen.rtr_read || rtr_read);
                assert!(!chosen.rtr_send || rtr_send);
            }
            // The case from the initiator's side: the peer replies to a local request with the options in `block`.
            let reply = header(StartupKind::Reply, 2, true);
            let want = match bits {
                _ if rtr_write => Some(ReadyToReceive::Write),
                _ if rtr_read => Some(ReadyToReceive::Read),
                _ => None,
            };
            match judge_reply(&terms(true, 2), &reply, Some(block)) {
                Verdict::Accepted(agreement) => assert_eq!(agreement.rtr, want),
                Verdict::Failed(_, Some((cause, _))) => assert_eq!((cause, want), (TerminateCause::LLP_RTR, None)),
                other => panic!("{other:?}"),
            }
        }
    }

    /// If a request for markers is rejected, the reply has the same bytes as the reply of siw.
    #[test]
    fn markers_are_refused() {
        let mut asks = header(StartupKind::Request, 2, false);
        asks.markers = true;
        let Judgement::Refused(_, requested) = judge_request(&asks, Some(Enhanced::default()), false) else { panic!() };
        assert_eq!(reject(&requested, b"")[16..], [0x30, 2, 0, 4, 0, 0, 0, 0]);
        let Judgement::Refused(_, requested) = judge_request(&StartupHeader { revision: 1, ..asks }, None, false)
        else {
            panic!()
        };
        assert_eq!(reject(&requested, b"")[16..], [0x20, 1, 0, 0]);
        let mut reply = header(StartupKind::Reply, 2, false);
        reply.markers = true;
        let verdict = judge_reply(&terms(true, 2), &reply, Some(Enhanced::default()));
        assert!(matches!(verdict, Verdict::Failed(_, None)));
        // A request for markers is accepted if the local side can send markers.
        let able = StartupTerms { markers: true, ..terms(true, 2) };
        let verdict = judge_reply(&able, &reply, Some(Enhanced::default()));
        assert!(matches!(verdict, Verdict::Accepted(Agreement { markers: true, .. })));
        let Judgement::Acceptable(requested) = judge_request(&asks, Some(Enhanced::default()), true) else { panic!() };
        let (bytes, agreement) = accept(&able, &requested, b"");
        // The local side does not require markers itself.
        assert!(agreement.markers && !read(StartupKind::Reply, &bytes).0.markers);
    }

    #[test]
    fn depths() {
        let ours = terms(true, 2);
        let reply = header(StartupKind::Reply, 2, true);
        let answer = |ird, ord| judge_reply(&ours, &reply, Some(Enhanced { ird, ord, ..Enhanced::default() }));
        assert!(matches!(answer(3, 2), Verdict::Accepted(Agreement { ird: 2, ord: 3, .. })));
        assert!(matches!(answer(200, 4), Verdict::Accepted(Agreement { ird: 4, ord: 8, .. })));
        assert!(matches!(answer(3, 5), Verdict::Failed(_, Some((TerminateCause::LLP_IRD, true)))));
        let open = answer(NO_NEGOTIATION, NO_NEGOTIATION);
        assert!(matches!(open, Verdict::Accepted(Agreement { ird: 4, ord: 8, .. })));
        let requested = |ird, ord| {
            let enhanced = Some(Enhanced { ird, ord, ..Enhanced::default() });
            let (bytes, agreement) = accept(
                &ours,
                &RequestTerms { revision: 2, crc: false, markers: false, enhanced, local: false, path: None },
                b"",
            );
            let block = read(StartupKind::Reply, &bytes).1.unwrap();
            (block.ird, block.ord, agreement.ird, agreement.ord)
        };
        assert_eq!(requested(2, 100), (128, 2, 128, 2));
        assert_eq!(requested(2, 5), (8, 2, 8, 2));
        assert_eq!(StartupTerms::new(false, 3, 3, false).ird, 4);
        assert_eq!(requested(1000, 1000), (128, 8, 128, 8));
        assert_eq!(requested(NO_NEGOTIATION, NO_NEGOTIATION), (NO_NEGOTIATION, NO_NEGOTIATION, 4, 8));
    }

    #[test]
    fn no_frame_is_too_long_for_siw() {
        let data = [1; MAX_PRIVATE_DATA_OUT];
        let frame = request(&terms(true, 2), &data);
        assert_eq!(frame.len() - STARTUP_HEADER_LEN, 255);
        assert_eq!(read(StartupKind::Request, &frame).2, data);
    }

    proptest! {
        #[test]
        fn noise_does_no_harm(kind: bool, tail: [u8; 4], noise in prop::collection::vec(any::<u8>(), 600)) {
            let kind = if kind { StartupKind::Request } else { StartupKind::Reply };
            let mut bytes = header(kind, 2, true).emit().to_vec();
            bytes[16..].copy_from_slice(&tail);
            bytes.extend_from_slice(&noise);
            let mut reader = FrameReader::new(kind);
            let mut at = 0;
            while at < bytes.len() {
                let n = reader.space().len().min(7);
                prop_assert!(n > 0);
                reader.space()[..n].copy_from_slice(&bytes[at..at + n]);
                at += n;
                match reader.filled(n) {
                    Ok(None) => {}
                    Ok(Some(header)) => {
                        let (enhanced, _) = reader.body();
                        let _ = judge_reply(&terms(false, 2), &header, enhanced);
                        if let Judgement::Acceptable(requested) = judge_request(&header, enhanced, false) {
                            let frame = accept(&terms(false, 2), &requested, b"").0;
                            prop_assert!(frame.len() <= STARTUP_HEADER_LEN + 4);
                        }
                        break;
                    }
                    Err(_) => break,
                }
            }
        }
    }
}
