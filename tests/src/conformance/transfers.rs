//! The tests of transfers. A transfer is a list of many pieces with a single completion.

use std::time::Duration;

use rdma_reactor::transport::caps::Features;
use rdma_reactor::{
    Access, Config, ConnectionId, DisconnectReason, Piece, Region, RegionOptions, SendErrorKind, Transfer, TransferEnd,
    TransferId, TransferOptions, TransferOutcome,
};

use super::harness::{Event, PATIENCE, Pair, Probe, Setup, pattern};
use super::one_sided::once_there_is_room;

const BOTH: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);
/// The length of a block, in bytes.
const BLOCK: usize = 48;
/// The number of blocks. It exceeds the length of every send queue in these tests.
const BLOCKS: usize = 1000;

/// A connected pair. Each side has a region with space for all blocks.
struct Bench {
    p: Pair,
    here: ConnectionId,
    remote: Region,
    local: Region,
}

fn bench(setup: &Setup, send_depth: u32) -> Bench {
    bench_with(setup, setup.config().send_depth(send_depth).timeouts(|t| t.close = Duration::from_secs(5)))
}

fn bench_with(setup: &Setup, config: Config) -> Bench {
    let mut p = Pair::new(setup, config, Probe::default(), Probe::default());
    let here = p.connect();
    let there = p.s.connection().expect("the server was told");
    let len = BLOCK * BLOCKS;
    let remote =
        p.server.context().regions().register(there, len, &RegionOptions::new().allow(BOTH)).expect("a shared region");
    let local = p
        .client
        .context()
        .regions()
        .register(here, len, &RegionOptions::new().allow(Access::READ_SINK))
        .expect("a region");
    Bench { p, here, remote, local }
}

/// Returns the pieces of a list. Local block `n` corresponds to remote block `n * 7`, modulo the number of blocks.
fn pieces(remote: &Region) -> Vec<Piece> {
    let block = |n: usize| remote.remote().part((n * 7 % BLOCKS * BLOCK) as u64, BLOCK as u64).expect("inside");
    (0..BLOCKS).map(|n| Piece::new(n * BLOCK, block(n))).collect()
}

/// Returns the expected content of the remote region after all blocks of `bytes` were written.
fn shuffled(bytes: &[u8]) -> Vec<u8> {
    let mut out = vec![0; bytes.len()];
    for (n, block) in bytes.chunks(BLOCK).enumerate() {
        out[n * 7 % BLOCKS * BLOCK..][..BLOCK].copy_from_slice(block);
    }
    out
}

fn copy(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; region.len()];
    region.copy_to(0, &mut bytes);
    bytes
}

fn soon() -> TransferOptions {
    TransferOptions::within(PATIENCE)
}

impl Bench {
    fn write(&mut self, pieces: Vec<Piece>, options: &TransferOptions) -> Result<TransferId, SendErrorKind> {
        self.p.client.context().remote(self.here).transfer(Transfer::Write(&[&self.local]), pieces, options)
    }

    fn read(&mut self, pieces: Vec<Piece>, options: &TransferOptions) -> Result<TransferId, SendErrorKind> {
        self.p.client.context().remote(self.here).transfer(Transfer::Read(&mut [&mut self.local]), pieces, options)
    }

    /// Waits for the end of a transfer, and returns its result.
    fn end(&mut self, transfer: TransferId) -> TransferEnd {
        let find = |p: &Pair| {
            p.c.events.iter().find_map(|event| match event {
                Event::Transferred(_, id, end) if *id == transfer => Some(end.clone()),
                _ => None,
            })
        };
        self.p.until("the transfer has ended", |p| find(p).is_some());
        find(&self.p).expect("just seen")
    }

    /// Returns true if, on this device, the completion of a write proves that the bytes have arrived.
    fn proves(&mut self) -> bool {
        let features = self.p.client.context().connection(self.here).capabilities().expect("connected").features;
        features.contains(Features::ACKNOWLEDGED_WRITES)
    }

    /// Checks that the connection still works, and that it can be closed gracefully.
    fn finish(mut self) {
        let (here, received) = (self.here, self.p.s.received);
        once_there_is_room(&mut self.p, |cx| cx.send(here, b"on")).expect("it is open");
        self.p.until("a message behind it all", |p| p.s.received > received);
        drop((self.remote, self.local));
        self.p.finish();
    }
}

/// Lists must be written and read with send queues of any length. Each list must have one completion. A message or immediate data that
/// belongs to a list must arrive after the last byte of the list.
pub fn lists_have_one_end(setup: &Setup) {
    for send_depth in [1, 5, 64] {
        let mut b = bench(setup, send_depth);
        let bytes = pattern(1, BLOCK * BLOCKS);
        b.local.copy_from(0, &bytes).expect("nothing is lent");
        let list = pieces(&b.remote);
        let write = b.write(list.clone(), &soon().message(b"all")).expect("it is open");
        assert!(b.local.bytes_mut().is_none(), "lent");
        b.p.until("the message", |p| p.s.received == 1);
        assert!(copy(&b.remote) == shuffled(&bytes), "what was written before the message is there");
        let end = b.end(write);
        let there = if b.proves() { BLOCKS } else { 0 };
        let unknown = BLOCKS - there;
        assert_eq!((end.outcome, end.there, end.unknown), (TransferOutcome::Done, there, unknown));
        assert!(end.pieces == list && end.untouched() == 0);
        b.p.until("the lease is over", |_| true);
        assert!(b.local.copy_from(0, &[0; BLOCK * BLOCKS]).is_ok(), "free again");

        let read = b.read(list, &soon().immediate(7)).expect("it is open");
        let end = b.end(read);
        assert_eq!((end.is_done(), end.there, end.unknown), (true, BLOCKS, 0));
        assert!(copy(&b.local) == bytes);
        b.p.until("the news of it", |p| p.s.count(|e| matches!(e, Event::Immediate(_, 7, 48_000))) == 1);

        // Every second piece is empty, so batches end with an empty piece. An empty piece must not
        // complete before the Reads that precede it.
        b.local.copy_from(0, &[0; BLOCK * BLOCKS]).expect("the lease is over");
        let nothing = Piece::new(0, b.remote.remote().part(0, 0).expect("inside"));
        let sparse = pieces(&b.remote).into_iter().flat_map(|piece| [piece, nothing]).collect();
        let read = b.read(sparse, &soon()).expect("it is open");
        let end = b.end(read);
        assert_eq!((end.is_done(), end.there, end.unknown), (true, 2 * BLOCKS, 0));
        assert!(copy(&b.local) == bytes);
        assert_eq!(b.p.c.count(|e| matches!(e, Event::Sent(..))), 0, "no piece is reported separately");
        b.finish();
    }
}

/// A write with confirmation may complete only after its bytes have arrived.
pub fn a_confirmed_write_is_there(setup: &Setup) {
    let mut b = bench(setup, 64);
    let bytes = pattern(2, BLOCK * BLOCKS);
    b.local.copy_from(0, &bytes).expect("nothing is lent");
    let mut list = pieces(&b.remote);
    // The list ends with an empty piece, for which nothing is posted.
    list.push(Piece::new(0, b.remote.remote().part(0, 0).expect("inside")));
    let write = b.write(list, &soon().confirm()).expect("it is open");
    let end = b.end(write);
    assert_eq!((end.is_done(), end.there, end.unknown), (true, BLOCKS + 1, 0));
    assert!(copy(&b.remote) == shuffled(&bytes));
    b.finish();
}

/// Lists, messages and single operations share a send queue. All must make progress, and none may wait forever.
pub fn lists_and_messages_share_the_queue(setup: &Setup) {
    for send_depth in [1, 4, 64] {
        let mut b = bench(setup, send_depth);
        let bytes = pattern(3, BLOCK * BLOCKS);
        b.local.copy_from(0, &bytes).expect("nothing is lent");
        let list = pieces(&b.remote);
        let first = b.write(list.clone(), &soon().message(b"first")).expect("it is open");
        let second = b.write(list.clone(), &soon().message(b"second")).expect("it is open");
        let none = b.write(Vec::new(), &soon()).expect("it is open");
        let mut sent = 0;
        let both = |p: &Pair| p.c.count(|e| matches!(e, Event::Transferred(..))) == 3;
        let told = |p: &Pair| p.s.messages().iter().filter(|m| **m != b"beside").count() == 2;
        while !both(&b.p) || !told(&b.p) || sent < 100 {
            sent += u64::from(b.p.client.context().send(b.here, b"beside").is_ok());
            b.p.turn();
        }
        for transfer in [first, second, none] {
            assert!(b.end(transfer).is_done());
        }
        b.p.until("all messages", |p| p.s.received == sent + 2);
        assert!(copy(&b.remote) == shuffled(&bytes));
        b.finish();
    }
}

/// Invalid lists must be refused immediately. No operation of such a list may be posted, and the program must keep its access to the
/// regions.
pub fn careless_lists_are_refused(setup: &Setup) {
    let mut b = bench(setup, 64);
    let list = pieces(&b.remote);
    let changed = |change: fn(&mut Piece)| {
        let mut list = list.clone();
        change(&mut list[900]);
        list
    };
    let wrong = SendErrorKind::NoSuchRegion { piece: 900, region: 1, count: 1 };
    assert_eq!(b.write(changed(|p| p.region = 1), &soon()), Err(wrong));
    let len = (BLOCK * BLOCKS) as u64;
    let end = len + BLOCK as u64;
    assert_eq!(
        b.read(changed(|p| p.offset = (BLOCK * BLOCKS) as u64), &soon()),
        Err(SendErrorKind::OutOfBounds { end, len })
    );
    for offset in [u64::MAX, u64::MAX - 1] {
        let mut list = list.clone();
        list[0].offset = offset;
        assert!(matches!(b.write(list, &soon()), Err(SendErrorKind::OutOfBounds { .. })));
    }
    assert!(matches!(b.write(list.clone(), &soon().message(&[0; 1 << 20])), Err(SendErrorKind::TooLong { .. })));
    let foreign = &b.remote;
    let result = b.p.client.context().remote(b.here).transfer(Transfer::Write(&[foreign]), Vec::new(), &soon());
    assert_eq!(result, Err(SendErrorKind::ForeignRegion));
    assert!(b.local.copy_from(0, &[1; BLOCK * BLOCKS]).is_ok(), "nothing was lent");
    let write = b.write(list.clone(), &soon()).expect("it is open");
    assert!(b.end(write).is_done());
    assert!(!b.p.client.context().remote(b.here).cancel_transfer(write), "it has ended");
    let here = b.here;
    b.p.client.context().close(here);
    assert_eq!(b.write(list, &soon()), Err(SendErrorKind::Closed));
    drop((b.remote, b.local));
    b.p.finish();
}

/// A cancelled transfer must end when its posted operations have completed, and must report the number of pieces for which nothing was
/// posted. A transfer whose time limit is zero must end before anything is posted. In both cases the connection must continue.
pub fn a_cancelled_list_is_accounted_for(setup: &Setup) {
    let mut b = bench(setup, 8);
    let list = pieces(&b.remote);
    let bytes = pattern(4, BLOCK * BLOCKS);
    b.remote.copy_from(0, &bytes).expect("nothing is lent");
    let late = b.read(list.clone(), &TransferOptions::within(Duration::ZERO).message(b"never")).expect("it is open");
    let end = b.end(late);
    assert_eq!((end.outcome, end.untouched() <= BLOCKS), (TransferOutcome::Deadline, true));
    let at_once = b.read(list.clone(), &soon().message(b"never")).expect("it is open");
    assert!(b.p.client.context().remote(b.here).cancel_transfer(at_once));
    let end = b.end(at_once);
    assert_eq!((end.outcome, end.there, end.untouched()), (TransferOutcome::Cancelled, 0, BLOCKS));
    assert!(b.local.copy_from(0, &[0xee; BLOCK * BLOCKS]).is_ok(), "free again");

    let half = b.read(list, &soon().message(b"never")).expect("it is open");
    (0..6).for_each(|_| b.p.turn());
    let cancelled = b.p.client.context().remote(b.here).cancel_transfer(half);
    let end = b.end(half);
    assert!(!cancelled || end.outcome == TransferOutcome::Cancelled && end.unknown == 0, "{end:?}");
    let (got, want) = (copy(&b.local), shuffled_back(&bytes));
    let there = end.there * BLOCK;
    assert!(got[..there] == want[..there], "the reported bytes have arrived");
    assert!(got[there..].iter().all(|&byte| byte == 0xee), "and nothing else was touched");
    assert_eq!(b.p.s.received, u64::from(!cancelled));
    b.finish();
}

/// Returns the expected content of the local region after all blocks of `bytes` were read.
fn shuffled_back(bytes: &[u8]) -> Vec<u8> {
    (0..BLOCKS).flat_map(|n| &bytes[n * 7 % BLOCKS * BLOCK..][..BLOCK]).copied().collect()
}

/// A close must wait until the lists have completed.
pub fn a_close_waits_for_lists(setup: &Setup) {
    // The close waits for the list, but no longer than this timeout. So the timeout is one that
    // even a busy machine does not reach.
    let mut b = bench_with(setup, setup.config().send_depth(16).timeouts(|t| t.close = PATIENCE));
    let bytes = pattern(5, BLOCK * BLOCKS);
    b.local.copy_from(0, &bytes).expect("nothing is lent");
    let list = pieces(&b.remote);
    let write = b.write(list, &soon().message(b"all")).expect("it is open");
    let here = b.here;
    b.p.client.context().close(here);
    assert!(b.end(write).is_done());
    b.p.until("both sides are notified", |p| p.s.live() + p.c.live() == 0);
    assert_eq!(b.p.s.messages(), [b"all"]);
    assert!(copy(&b.remote) == shuffled(&bytes));
    let complete = Event::Disconnect(here, DisconnectReason::Local { complete: true });
    assert_eq!(b.p.c.events.last(), Some(&complete));
    drop((b.remote, b.local));
    b.p.finish();
}

/// If a piece in the middle of a list has a wrong key, the connection must end. The list must end exactly once, before the connection. Each
/// piece that the list reports as done must have arrived.
pub fn a_wrong_key_in_a_list_is_found(setup: &Setup) {
    for reads in [true, false] {
        let mut b = bench(setup, 64);
        let (at, bytes) = (700, pattern(6, BLOCK * BLOCKS));
        let mut list = pieces(&b.remote);
        list[at].remote.key ^= 0x0055_5500;
        let sources = if reads { &mut b.remote } else { &mut b.local };
        sources.copy_from(0, &bytes).expect("nothing is lent");
        let transfer = match reads {
            true => b.read(list, &soon().message(b"never")),
            // The write has a confirmation, because otherwise it could complete before the peer refuses it.
            false => b.write(list, &soon().confirm().message(b"never")),
        };
        let end = b.end(transfer.expect("it is open"));
        assert!(matches!(end.outcome, TransferOutcome::Failed(_)), "{:?}", end.outcome);
        assert!(end.there <= at && end.there + end.unknown > at, "{} there, {} unknown", end.there, end.unknown);
        if reads {
            let there = end.there * BLOCK;
            assert!(copy(&b.local)[..there] == shuffled_back(&bytes)[..there]);
            assert!(copy(&b.local)[(end.there + end.unknown) * BLOCK..].iter().all(|&byte| byte == 0));
        }
        b.p.until("both sides are notified", |p| p.s.live() + p.c.live() == 0);
        assert!(matches!(b.p.c.events.last(), Some(Event::Disconnect(..))));
        assert_eq!(b.p.s.received, 0);
        drop((b.remote, b.local));
        b.p.finish();
    }
}

/// If the peer disconnects during a transfer, the transfer must end with the connection.
pub fn a_list_ends_with_its_peer(setup: &Setup) {
    for reads in [true, false] {
        let mut b = bench(setup, 8);
        let list = pieces(&b.remote);
        let (first, second) = match reads {
            true => (b.read(list.clone(), &soon()), b.read(list, &soon())),
            false => (b.write(list.clone(), &soon()), b.write(list, &soon())),
        };
        (0..3).for_each(|_| b.p.turn());
        let there = b.p.s.connection().expect("the server was told");
        b.p.server.context().abort(there);
        for transfer in [first, second] {
            let end = b.end(transfer.expect("it is open"));
            // The transfer may have completed before the disconnect.
            assert!(matches!(end.outcome, TransferOutcome::Failed(_) | TransferOutcome::Done), "{:?}", end.outcome);
            assert!(end.there + end.unknown <= BLOCKS);
        }
        b.p.until("both sides are notified", |p| p.s.live() + p.c.live() == 0);
        drop((b.remote, b.local));
        b.p.finish();
    }
}
