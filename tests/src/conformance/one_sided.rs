//! The tests of regions, and of one-sided operations on the regions of a peer.

use std::time::Duration;

use rdma_reactor::transport::caps::Features;
use rdma_reactor::{
    Access, Blocked, ConnectionId, Context, MemoryLocation, Outcome, ProviderChoice, Region, RegionOptions,
    RemoteRegion, SendErrorKind, SendId, SendKind,
};

use super::harness::{Event, PATIENCE, Pair, Probe, Setup, now, pattern};

const BOTH: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);

/// Creates a connected pair. Returns it with the client's id of the connection and the server's id.
fn connected(setup: &Setup) -> (Pair, ConnectionId, ConnectionId) {
    // Some tests shut the client down while the server takes no turns. On an iWARP device, the shutdown of the client waits for the server,
    // at most for this timeout.
    let config = setup.config().timeouts(|t| t.close = Duration::from_secs(2));
    let mut p = Pair::new(setup, config, Probe::default(), Probe::default());
    let here = p.connect();
    let there = p.s.connection().expect("the server was told");
    (p, here, there)
}

/// Returns a region of the server, on which the client has the rights `access`.
fn shared(p: &mut Pair, there: ConnectionId, len: usize, access: Access) -> Region {
    p.server.context().regions().register(there, len, &RegionOptions::new().allow(access)).expect("a shared region")
}

/// Returns a region of the client without rights for peers.
fn own(p: &mut Pair, here: ConnectionId, len: usize) -> Region {
    p.client.context().regions().register(here, len, &RegionOptions::new()).expect("a region")
}

/// Returns a region of the client that can be the destination of reads.
fn sink(p: &mut Pair, here: ConnectionId, len: usize) -> Region {
    p.client.context().regions().register(here, len, &RegionOptions::new().allow(Access::READ_SINK)).expect("a region")
}

/// Returns a copy of the bytes in a region.
fn copy(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; region.len()];
    region.copy_to(0, &mut bytes);
    bytes
}

/// Waits until an operation of the client has completed. Returns its outcome.
fn ended(p: &mut Pair, send: SendId) -> Outcome {
    let find = move |p: &Pair| {
        p.c.events.iter().find_map(|event| match event {
            Event::Sent(_, sequence, outcome) if *sequence == send.sequence() => Some(*outcome),
            _ => None,
        })
    };
    p.until("the operation has ended", |p| find(p).is_some());
    find(p).expect("just seen")
}

fn done(p: &mut Pair, send: SendId) {
    assert_eq!(ended(p, send), Outcome::Sent);
}

/// Waits until the earlier writes of the client have arrived. For this, sends a message after the writes and waits until it has arrived.
fn placed(p: &mut Pair, here: ConnectionId) {
    let received = p.s.received;
    p.client.context().send(here, b"written").expect("room");
    p.until("the message behind the writes", |p| p.s.received > received);
}

/// Ranges of every size must be written and read back correctly. No other byte may change.
pub fn reads_and_writes_of_every_size(setup: &Setup) {
    let (mut p, here, there) = connected(setup);
    let room = (1 << 20) + 16;
    let mut remote = shared(&mut p, there, room, BOTH);
    let (mut source, mut sink) = (own(&mut p, here, room), sink(&mut p, here, room));
    for (i, len) in [0, 1, 7, 8, 1024, 1447, 1448, 1449, 4096, 65_536, 1 << 20].into_iter().enumerate() {
        println!("{len} bytes");
        remote.copy_from(0, &vec![0xee; room]).expect("nothing is lent");
        sink.copy_from(0, &vec![0xee; room]).expect("nothing is lent");
        source.bytes_mut().expect("nobody uses it")[..len].copy_from_slice(&pattern(i, len));
        let target = remote.remote().part(8, len as u64).expect("inside");
        let write = p.client.context().remote(here).write(target, &source, 0..len).expect("room");
        assert_eq!((write.kind(), write.sequence()), (SendKind::Write, 2 * i as u64));
        // The embedded provider copies a short write when it is posted. So the program may have access to the source of the write
        // immediately.
        let may_be_copied = setup.provider == ProviderChoice::Iwarp && len <= 256;
        assert!(may_be_copied || source.bytes_mut().is_none(), "lent to be read");
        assert!(source.bytes().is_some(), "it is only read");
        p.client.context().remote(here).fence();
        let read = p.client.context().remote(here).read(target, &mut sink, 8..8 + len).expect("room");
        assert_eq!(read.kind(), SendKind::Read);
        assert_eq!(sink.copy_from(8, &[0xee; 8]).is_err(), len > 0, "lent to be written");
        done(&mut p, read);
        let mut there = vec![0; room];
        remote.copy_to(0, &mut there);
        let mut want = vec![0xee; room];
        want[8..8 + len].copy_from_slice(&pattern(i, len));
        assert!(there == want, "{len} bytes written");
        assert!(copy(&sink) == want, "{len} bytes read");
    }
    p.finish();
}

/// An operation may have several local ranges for one remote range. If many operations are in flight, they must be carried out in order.
pub fn vectored_and_many_at_once(setup: &Setup) {
    let (mut p, here, there) = connected(setup);
    let remote = shared(&mut p, there, 4000, BOTH);
    let (mut a, mut b) = (own(&mut p, here, 3000), own(&mut p, here, 3000));
    a.bytes_mut().expect("unused").copy_from_slice(&pattern(1, 3000));
    b.bytes_mut().expect("unused").copy_from_slice(&pattern(2, 3000));
    let parts = [(&a, 0..1000), (&b, 500..501), (&a, 2000..2000), (&b, 1000..3000)];
    let write = p.client.context().remote(here).write_vectored(remote.remote(), &parts).expect("room");
    done(&mut p, write);
    placed(&mut p, here);
    let want = [&pattern(1, 3000)[..1000], &pattern(2, 3000)[500..501], &pattern(2, 3000)[1000..]].concat();
    let mut got = vec![0; want.len()];
    remote.copy_to(0, &mut got);
    assert!(got == want);

    let (mut a, mut b) = (sink(&mut p, here, 3000), sink(&mut p, here, 3000));
    let mut parts = [(&mut a, 1..2), (&mut b, 0..3000)];
    let read = p.client.context().remote(here).read_vectored(remote.remote(), &mut parts).expect("room");
    done(&mut p, read);
    assert_eq!(copy(&a)[..3], [0, want[0], 0]);
    assert!(copy(&b) == [&want[1..], &[0; 3000][..3000 - (want.len() - 1)]].concat()[..3000]);

    // There are more reads than any device supports at the same time. The probe checks that they complete in order.
    let mut sink = sink(&mut p, here, 4000);
    let mut last = None;
    for i in 0..60 {
        let part = remote.remote().part(i * 50, 50).expect("inside");
        let at = i as usize * 50;
        last = Some(p.client.context().remote(here).read(part, &mut sink, at..at + 50).expect("room"));
    }
    done(&mut p, last.expect("sixty"));
    assert!(copy(&sink)[..3000] == want[..3000]);
    p.finish();
}

/// Immediate data must arrive after the bytes of its write, and in order with messages.
pub fn immediate_data_follows_its_write(setup: &Setup) {
    let (mut p, here, there) = connected(setup);
    let mut remote = shared(&mut p, there, 70_000, Access::REMOTE_WRITE);
    let mut source = own(&mut p, here, 70_000);
    for (i, len) in [0, 1, 5000, 70_000].into_iter().enumerate() {
        source.bytes_mut().expect("unused").copy_from_slice(&pattern(i, 70_000));
        let target = remote.remote();
        let mut cx = p.client.context();
        cx.send(here, b"before").expect("room");
        let write =
            cx.remote(here).write_with_immediate(target, &source, 0..len, 0xabcd_0000 + i as u32).expect("room");
        cx.send(here, b"after").expect("room");
        p.until("the message behind it", |p| p.s.received == 2 * (i as u64 + 1));
        done(&mut p, write);
        let news: Vec<_> = p.s.events.iter().rev().take(3).rev().cloned().collect();
        assert!(matches!(&news[0], Event::Recv(_, bytes) if bytes == b"before"), "{news:?}");
        assert_eq!(news[1], Event::Immediate(there, 0xabcd_0000 + i as u32, len as u32));
        let mut got = vec![0; len];
        remote.copy_to(0, &mut got);
        assert!(got == pattern(i, 70_000)[..len]);
        remote.copy_from(0, &[0; 70_000]).expect("nothing is lent");
    }
    p.finish();
}

/// Compare-and-swap and fetch-and-add must work on devices that support them. Other devices must refuse both operations with a clear error.
pub fn atomics_or_a_clear_no(setup: &Setup) {
    let (mut p, here, there) = connected(setup);
    let access = BOTH | Access::REMOTE_ATOMIC;
    let has =
        p.client.context().connection(here).capabilities().expect("connected").features.contains(Features::ATOMICS);
    let mut local = own(&mut p, here, 64);
    if !has {
        eprintln!("skipped: atomics are not among the device's capabilities");
        let nowhere = RemoteRegion { address: 0, len: 8, key: 0 };
        let no = p.client.context().remote(here).fetch_add(nowhere, &mut local, 0, 1).expect_err("not there");
        assert!(matches!(no, SendErrorKind::Unsupported { feature: "atomic operations", .. }), "{no}");
        assert!(local.bytes().is_some(), "nothing was lent");
        p.finish();
        return;
    }
    let mut remote = shared(&mut p, there, 64, access);
    remote.store(8, 40).expect("nothing is lent");
    let word = remote.remote().part(8, 8).expect("inside");
    let add = p.client.context().remote(here).fetch_add(word, &mut local, 16, 2).expect("room");
    assert_eq!(add.kind(), SendKind::FetchAdd);
    done(&mut p, add);
    assert_eq!((local.load(16), remote.load(8)), (40, 42));
    for (expected, now) in [(41, 42), (42, 99)] {
        let swap = p.client.context().remote(here).compare_swap(word, &mut local, 0, expected, 99).expect("room");
        done(&mut p, swap);
        assert_eq!((local.load(0), remote.load(8)), (42, now));
    }
    p.finish();
}

/// If a region does not grant the right that an operation needs, or the right was revoked, the operation must fail and its connection must
/// end. No byte may change.
pub fn rights_are_kept(setup: &Setup) {
    type Attempt = fn(&mut Pair, ConnectionId, RemoteRegion, &mut Region) -> SendId;
    let write: Attempt =
        |p, here, remote, local| p.client.context().remote(here).write(remote, local, 0..8).expect("room");
    let read: Attempt =
        |p, here, remote, local| p.client.context().remote(here).read(remote, local, 0..8).expect("room");
    for (access, attempt, revoke) in [
        (Access::REMOTE_READ, write, false),
        (Access::REMOTE_WRITE, read, false),
        (BOTH, write, true),
        (BOTH, read, true),
    ] {
        if access == Access::REMOTE_WRITE && setup.reads_anything {
            eprintln!("skipped: reading without the right: the device does not check it");
            continue;
        }
        let (mut p, here, there) = connected(setup);
        let mut remote = shared(&mut p, there, 64, access);
        remote.copy_from(0, &[0x55; 64]).expect("nothing is lent");
        let mut local = sink(&mut p, here, 8);
        local.copy_from(0, &[0x11; 8]).expect("nothing is lent");
        if revoke {
            p.server.context().regions().revoke(&remote).expect("the device takes keys back");
            assert_eq!(remote.bytes_mut().is_none(), setup.places_late, "no peer reaches it any more");
        }
        let send = attempt(&mut p, here, remote.remote(), &mut local);
        // A Write that the peer refuses may complete with success: on iWARP, the completion only means that the Write was sent.
        let outcome = ended(&mut p, send);
        assert!(send.kind() == SendKind::Write || !outcome.is_sent(), "{outcome:?}");
        p.until("both sides know", |p| p.s.live() + p.c.live() == 0);
        assert_eq!(copy(&remote), [0x55; 64]);
        assert_eq!(copy(&local), [0x11; 8]);
        drop((remote, local));
        p.finish();
    }
}

/// The program must get access to the memory of a region again when the peer's connection has ended, or when the region's lifetime has
/// ended.
pub fn leases_end(setup: &Setup) {
    let (mut p, _, there) = connected(setup);
    let mut with_peer = shared(&mut p, there, 100, Access::REMOTE_WRITE);
    let options = RegionOptions::new().allow(Access::REMOTE_WRITE).lifetime(Duration::from_millis(50));
    let mut short = p.server.context().regions().register(there, 100, &options).expect("a region");
    assert!(with_peer.bytes().is_none() && short.bytes().is_none(), "a peer may write them");
    p.turn_for(Duration::from_millis(60));
    // The lifetime of the region `short` has ended before this turn.
    p.turn();
    assert_eq!(short.bytes_mut().is_none(), setup.places_late, "its time is over");
    assert!(with_peer.bytes().is_none(), "this one's is not");
    p.client.shutdown(&mut p.c, PATIENCE).expect("the client's end");
    p.until("the server is notified", |p| p.s.live() == 0);
    assert_eq!(with_peer.bytes_mut().is_none(), setup.places_late, "the peer is gone");
    p.finish();
}

/// Operations with invalid arguments must be refused before anything is sent, and must have no effect.
pub fn careless_operations_are_refused(setup: &Setup) {
    let (mut p, here, there) = connected(setup);
    let remote = shared(&mut p, there, 100, BOTH);
    let foreign = shared(&mut p, there, 100, Access::empty());
    let mut local = own(&mut p, here, 100);
    let name = remote.remote();
    let mut cx = p.client.context();
    assert_eq!(cx.remote(here).write(name, &foreign, 0..10), Err(SendErrorKind::ForeignRegion));
    assert_eq!(cx.remote(here).write(name, &local, 90..101), Err(SendErrorKind::OutOfBounds { end: 101, len: 100 }));
    let part = name.part(95, 5).expect("inside");
    assert_eq!(cx.remote(here).read(part, &mut local, 0..6), Err(SendErrorKind::OutOfBounds { end: 6, len: 5 }));
    assert_eq!(cx.remote(here).write_vectored(name, &[]), Err(SendErrorKind::TooManyRegions { count: 0, max: 4 }));
    let five: Vec<_> = (0..5).map(|i| (&local, i..i + 1)).collect();
    assert_eq!(cx.remote(here).write_vectored(name, &five), Err(SendErrorKind::TooManyRegions { count: 5, max: 4 }));
    drop(five);
    if cx.connection(here).capabilities().expect("connected").features.contains(Features::ATOMICS) {
        let word = name.part(8, 8).expect("inside");
        let here_wrong = cx.remote(here).fetch_add(word, &mut local, 4, 1);
        assert_eq!(here_wrong, Err(SendErrorKind::Misaligned { location: MemoryLocation::Local, at: 4 }));
        let beside = name.part(9, 8).expect("inside");
        let there_wrong = cx.remote(here).compare_swap(beside, &mut local, 8, 0, 1);
        assert_eq!(
            there_wrong,
            Err(SendErrorKind::Misaligned { location: MemoryLocation::Remote, at: name.address + 9 })
        );
    }
    assert!(cx.regions().register(here, 0, &RegionOptions::new()).is_err());
    assert!(local.bytes_mut().is_some(), "nothing was lent");
    // If the send queue is full, the reactor must refuse an operation. When the queue has space again, the reactor must call `on_writable`.
    let mut taken = 0;
    while p.client.context().remote(here).write(name, &local, 0..100).is_ok() {
        taken += 1;
    }
    assert_eq!(
        p.client.context().remote(here).write(name, &local, 0..1),
        Err(SendErrorKind::WouldBlock(Blocked::Queue))
    );
    p.until("room again", |p| p.c.count(|e| matches!(e, Event::Writable(_))) == 1);
    p.until("all have ended", |p| p.c.sent == taken);
    p.finish();
}

/// Repeats an operation of the client until it is accepted. It may be refused at first, because a ping or a pong may use the only send slot
/// or the last credit for a moment.
pub(super) fn once_there_is_room(
    p: &mut Pair,
    mut operation: impl FnMut(&mut Context<'_>) -> Result<SendId, SendErrorKind>,
) -> Result<SendId, SendErrorKind> {
    let deadline = now() + PATIENCE;
    loop {
        match operation(&mut p.client.context()) {
            Err(SendErrorKind::WouldBlock(blocked)) => assert!(now() < deadline, "no room: {blocked:?}"),
            other => return other,
        }
        p.turn();
    }
}

/// An operation that needs more slots than the send queue has must be refused with a permanent error, not with `WouldBlock`.
pub fn what_never_fits_does_not_wait(setup: &Setup) {
    let config = setup.config().send_depth(1);
    let mut p = Pair::new(setup, config, Probe::default(), Probe::default());
    let here = p.connect();
    let there = p.s.connection().expect("the server was told");
    let remote = shared(&mut p, there, 64, BOTH);
    let (mut a, mut b) = (sink(&mut p, here, 64), sink(&mut p, here, 64));
    let name = remote.remote();
    let refusal = p.client.context().remote(here).read_vectored(name, &mut [(&mut a, 0..8), (&mut b, 0..8)]);
    assert_eq!(refusal, Err(SendErrorKind::TooManyRegions { count: 2, max: 1 }));
    let native = p.client.context().connection(here).capabilities().expect("connected").features;
    match once_there_is_room(&mut p, |cx| cx.remote(here).write_with_immediate(name, &a, 0..8, 1)) {
        Ok(write) => {
            assert!(native.contains(Features::WRITE_WITH_IMMEDIATE));
            done(&mut p, write);
        }
        Err(SendErrorKind::Unsupported { feature, .. }) => assert!(feature.contains("send_depth"), "{feature}"),
        Err(other) => panic!("{other}"),
    }
    let read = once_there_is_room(&mut p, |cx| cx.remote(here).read(name, &mut a, 0..8)).expect("one fits");
    assert_eq!(
        p.client.context().remote(here).read(name, &mut b, 0..8),
        Err(SendErrorKind::WouldBlock(Blocked::Queue))
    );
    done(&mut p, read);
    p.finish();
}

/// The program drops regions in all states. The regions, and the program's own memory in them, must be released. Operations in flight must
/// continue.
pub fn dropped_regions_are_given_back(setup: &Setup) {
    let (mut p, here, there) = connected(setup);
    let remote = shared(&mut p, there, 100_000, BOTH);
    let source =
        p.client.context().regions().register_vec(here, pattern(3, 99_999), &RegionOptions::new()).expect("a region");
    let write = p.client.context().remote(here).write(remote.remote(), &source, 0..99_999).expect("room");
    drop(source);
    let sink = own(&mut p, here, 1 << 20);
    drop(sink);
    done(&mut p, write);
    placed(&mut p, here);
    let mut got = vec![0; 99_999];
    remote.copy_to(0, &mut got);
    assert!(got == pattern(3, 99_999));
    p.until("the client has none left", |p| p.client.stats().memory.regions == 0);
    assert_eq!(p.server.stats().memory.regions, 1);
    // One region exists longer than its connection and its reactor. Its memory must stay valid.
    p.client.shutdown(&mut p.c, PATIENCE).expect("the client's end");
    p.until("the server is notified", |p| p.s.live() == 0);
    let Pair { server, .. } = p;
    drop(server);
    assert_eq!(remote.bytes().is_none(), setup.places_late, "nobody else has it");
    assert!(copy(&remote)[..99_999] == got);
}
