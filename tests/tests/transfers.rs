//! Transfers of lists of pieces (`RemoteContext::transfer`) with the embedded provider: peers that
//! stop, wrong keys, and futures that are dropped.

use std::time::Duration;

use futures_util::future::{Either, join, select};
use rdma_reactor::aio::AsyncReactor;
use rdma_reactor::{
    Access, Config, DisconnectReason, Piece, ProviderChoice, RegionOptions, RemoteRegion, Transfer, TransferOptions,
    TransferOutcome,
};
use rdma_reactor_tests::conformance::harness::{Event, PATIENCE, Pair, Probe, Setup, now};
use rdma_reactor_tests::patience::patient;

/// The length of a block, in bytes.
const BLOCK: usize = 4096;
/// The number of blocks in a list.
const BLOCKS: usize = 10_000;
const FLUSH: Duration = Duration::from_millis(200);

/// A peer runs no turns, and so answers no Reads. The transfer ends at its deadline, together with its connection. Another region of the
/// connection is unchanged.
#[test]
fn a_peer_that_stops_ends_a_transfer_at_its_deadline() {
    let setup = Setup::iwarp();
    let config = setup.config().timeouts(|t| t.flush = FLUSH);
    let mut p = Pair::new(&setup, config, Probe::default(), Probe::default());
    let here = p.connect();
    let there = p.s.connection().expect("the server was told");
    let options = RegionOptions::new().allow(Access::REMOTE_READ);
    let remote = p.server.context().regions().register(there, BLOCK, &options).expect("a shared region");
    let mut local = p.client.context().regions().register(here, BLOCK, &RegionOptions::new()).expect("a region");
    let beside = p.client.context().regions().register(here, BLOCK, &RegionOptions::new()).expect("a region");
    let pieces = vec![Piece::new(0, remote.remote()); BLOCKS];
    let within = Duration::from_millis(300);
    let (begun, options) = (now(), TransferOptions::within(within).message(b"never"));
    p.client.context().remote(here).transfer(Transfer::Read(&mut [&mut local]), pieces, &options).expect("it is open");
    while p.c.count(|event| matches!(event, Event::Transferred(..))) == 0 {
        assert!(begun.elapsed() < PATIENCE, "the transfer is in progress for ever");
        p.client.turn(&mut p.c, Some(Duration::from_millis(5))).expect("a turn");
    }
    // The transfer must not end before its deadline. How much later it ends depends on the machine; `transfer_worlds.rs` checks this on
    // virtual time.
    assert!(begun.elapsed() >= within);
    let Some(Event::Transferred(_, _, end)) = p.c.events.iter().find(|event| matches!(event, Event::Transferred(..)))
    else {
        unreachable!("just seen")
    };
    assert_eq!((end.outcome, end.there), (TransferOutcome::Deadline, 0));
    assert!(end.unknown > 0 && end.untouched() > BLOCKS / 2, "{} unknown, {} untouched", end.unknown, end.untouched());
    assert!(local.bytes_mut().is_some() && beside.bytes().is_some_and(|bytes| bytes.iter().all(|&byte| byte == 0)));
    assert!(p.c.events.contains(&Event::Disconnect(here, DisconnectReason::TransferTimeout)));
    p.until("the server knows", |p| p.s.live() == 0);
    assert_eq!(p.s.received, 0);
    drop((remote, local, beside));
    p.finish();
}

/// In a list of 10,000 pieces, piece 7,000 has a wrong key. The report must say which pieces before it have arrived, and that later ones
/// are untouched.
#[test]
fn a_wrong_key_at_piece_7000_is_found_there() {
    let setup = Setup::iwarp();
    let mut p = Pair::new(&setup, setup.config(), Probe::default(), Probe::default());
    let here = p.connect();
    let there = p.s.connection().expect("the server was told");
    let options = RegionOptions::new().allow(Access::REMOTE_READ);
    let mut remote = p.server.context().regions().register(there, BLOCK, &options).expect("a shared region");
    remote.copy_from(0, &[7; BLOCK]).expect("nothing is lent");
    let mut local = p.client.context().regions().register(here, BLOCKS * 64, &RegionOptions::new()).expect("a region");
    let from = remote.remote().part(0, 64).expect("inside");
    let mut pieces: Vec<_> = (0..BLOCKS).map(|nth| Piece::new(nth * 64, from)).collect();
    pieces[7000].remote.key ^= 0x5500;
    let options = TransferOptions::within(PATIENCE);
    p.client.context().remote(here).transfer(Transfer::Read(&mut [&mut local]), pieces, &options).expect("it is open");
    p.until("both sides know", |p| p.s.live() + p.c.live() == 0);
    let ends =
        p.c.events.iter().filter_map(|event| if let Event::Transferred(_, _, end) = event { Some(end) } else { None });
    let ends: Vec<_> = ends.collect();
    let [end] = ends[..] else { panic!("{} ends", ends.len()) };
    // Some pieces before the piece with the wrong key are in the same batch, and may have arrived without a report. These pieces count as
    // unknown.
    assert!((6900..=7000).contains(&end.there) && end.there + end.unknown > 7000, "{} there", end.there);
    assert!(end.untouched() > 2900, "{} untouched", end.untouched());
    let bytes = local.bytes().expect("nobody uses it");
    assert!(bytes[..end.there * 64].iter().all(|&byte| byte == 7));
    assert!(bytes[7000 * 64..].iter().all(|&byte| byte == 0));
    drop((remote, local));
    p.finish();
}

/// A transfer can be awaited as a future. If the future is dropped, the transfer is cancelled: its memory is returned, and its message is
/// never sent.
#[test]
fn a_transfer_is_a_future_and_cancelled_when_it_is_dropped() {
    let net = AsyncReactor::new(patient(Config::default().provider(ProviderChoice::Iwarp))).expect("a reactor");
    let listener = net.listen(([127, 0, 0, 1], 0).into()).expect("a listener");
    let address = listener.local_address().expect("it listens");
    let serve = async {
        let conn = listener.accept().await.expect("a client");
        let access = Access::REMOTE_WRITE | Access::REMOTE_READ;
        let region = conn.register(BLOCK, &RegionOptions::new().allow(access)).expect("memory");
        conn.send(&region.remote().to_bytes()).await.expect("it is open");
        let message = conn.recv().await.expect("a message");
        assert_eq!(&message[..], b"done");
        let mut bytes = [0; BLOCK];
        region.copy_to(0, &mut bytes);
        assert_eq!(bytes, [7; BLOCK]);
        assert!(conn.recv().await.is_err(), "the other message is never sent");
    };
    let ask = async {
        let conn = net.connect(address).await.expect("a connection");
        let remote = RemoteRegion::from_bytes(&conn.recv().await.expect("a name")).expect("a region's name");
        let mut local = conn.register(BLOCK, &RegionOptions::new()).expect("memory");
        local.copy_from(0, &[7; BLOCK]).expect("nothing is lent");
        let list = vec![Piece::new(0, remote); BLOCKS];
        let options = TransferOptions::within(PATIENCE);
        let (never, source) = (options.clone().message(b"never"), [&local]);
        let dropped = conn.transfer(Transfer::Write(&source), list, &never);
        // `select` polls the transfer once, and the future is then dropped.
        match select(Box::pin(dropped), Box::pin(std::future::ready(()))).await {
            Either::Left(_) => panic!("10,000 blocks in no time"),
            Either::Right(((), dropped)) => drop(dropped),
        }
        let mut bytes = local.bytes_mut().is_some();
        while !bytes {
            net.sleep(Duration::from_millis(1)).await;
            bytes = local.bytes_mut().is_some();
        }
        let list = vec![Piece::new(0, remote)];
        let end = conn.transfer(Transfer::Write(&[&local]), list, &options.confirm().message(b"done")).await;
        let end = end.expect("it is open");
        assert_eq!((end.outcome, end.there), (TransferOutcome::Done, 1));
    };
    net.run(join(Box::pin(serve), Box::pin(ask))).expect("turns");
    net.shutdown(PATIENCE).expect("the end");
}
