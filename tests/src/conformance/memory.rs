//! The tests of regions in shared memory, and of regions that other threads register.

use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_reactor::transport::mem::Memory;
use rdma_reactor::transport::{Features, TransportError};
use rdma_reactor::{Access, ConnectionId, Error, Outcome, Region, RegionOptions};

use super::harness::{Event, Pair, Probe, Setup, pattern};

const LEN: usize = 1 << 16;

fn connected(setup: &Setup) -> (Pair, ConnectionId, ConnectionId) {
    let mut p = Pair::new(setup, setup.config(), Probe::default(), Probe::default());
    let here = p.connect();
    let there = p.s.connection().expect("the server was told");
    (p, here, there)
}

/// Writes `bytes` from the client to a region of the server. Then sends a message and waits for it, so that the bytes have arrived.
fn write(p: &mut Pair, here: ConnectionId, to: &Region, bytes: Vec<u8>) {
    let (len, received) = (bytes.len(), p.s.received);
    let source = p.client.context().regions().register_vec(here, bytes, &RegionOptions::new()).expect("a region");
    p.client.context().remote(here).write(to.remote(), &source, 0..len).expect("room");
    p.client.context().send(here, b"written").expect("room");
    p.until("the message behind the write", |p| p.s.received > received);
}

fn copy(region: &Region) -> Vec<u8> {
    let mut out = vec![0; region.len()];
    region.copy_to(0, &mut out);
    out
}

/// A peer's write to a memory file must be visible to all mappings of the file. The region must not give the program a reference to the
/// bytes, because other processes may change these bytes at any time.
pub fn a_memory_file_is_shared_with_other_mappings(setup: &Setup) {
    let (mut p, here, there) = connected(setup);
    let (memory, file) = Memory::new_file(LEN).expect("a memory file");
    let (memory, other) = (Arc::new(memory), Memory::map_file(file.as_fd(), 0, LEN).expect("another mapping"));
    let writable = RegionOptions::new().allow(Access::REMOTE_WRITE | Access::REMOTE_READ);
    let region = p.server.context().regions().register_memory(there, Arc::clone(&memory), &writable).expect("a region");
    write(&mut p, here, &region, pattern(1, LEN));
    let mut seen = vec![0; LEN];
    assert!(other.copy_out(0, &mut seen) && memory.word(0).is_some());
    assert_eq!(seen, pattern(1, LEN));
    assert_eq!(copy(&region), seen);
    p.server.context().regions().revoke(&region).expect("the device takes keys back");
    assert!(region.bytes().is_none(), "no peer writes it any more, but other processes may");

    // In the opposite direction, bytes that were written through another mapping must be sent.
    assert!(other.copy_in(7, b"from elsewhere"));
    let from = p.server.context().regions().register_memory(there, Arc::clone(&memory), &writable).expect("a region");
    p.server.context().send_region(there, &from, 7..21).expect("room");
    p.until("the message", |p| p.c.received == 1);
    assert_eq!(p.c.messages(), [b"from elsewhere"]);

    drop((region, from));
    p.until("the regions have released it", |_| Arc::strong_count(&memory) == 1);
    p.finish();
}

/// A region in memory that the program owns must work like any other region. `register_raw` also returns an `Arc`. When no other `Arc` of
/// the same object is left, the region has ended, and only the program uses the memory.
#[allow(unsafe_code, reason = "it is about memory that the program promises to keep")]
pub fn memory_of_the_program_s_own_comes_back(setup: &Setup) {
    let (mut p, here, there) = connected(setup);
    let mut own = vec![0_u64; LEN / 8];
    let base = NonNull::new(own.as_mut_ptr().cast::<u8>()).expect("a vector");
    let writable = RegionOptions::new().allow(Access::REMOTE_WRITE);
    for (offset, len) in [(1, 8), (0, 0), (0, 12)] {
        // SAFETY: the call is refused before the memory is accessed.
        let refused =
            unsafe { p.server.context().regions().register_raw(there, base.byte_add(offset), len, &writable) };
        assert!(matches!(refused, Err(Error::Transport(TransportError::Memory { .. }))), "{refused:?}");
    }
    // SAFETY: the vector is not used until `share` shows that the region has ended.
    let (region, share) =
        unsafe { p.server.context().regions().register_raw(there, base, LEN, &writable) }.expect("a region");
    write(&mut p, here, &region, pattern(2, LEN));
    assert!(region.bytes().is_none());
    drop(region);
    p.until("the region has released it", |_| Arc::strong_count(&share) == 1);
    drop(share);
    let bytes: Vec<u8> = own.iter().flat_map(|word| word.to_ne_bytes()).collect();
    assert!(bytes == pattern(2, LEN), "what the peer has written is there");
    p.finish();
}

/// A region that another thread has registered must work like any other region, but only on the device and the reactor for which it was
/// registered.
#[allow(clippy::disallowed_methods, reason = "other threads are what it is about")]
pub fn other_threads_prepare_regions(setup: &Setup) {
    let (mut p, here, there) = connected(setup);
    let readable = RegionOptions::new().allow(Access::REMOTE_WRITE);
    let maker = p.server.context().regions().maker(there, &readable).expect("it is up");
    let prepare = move || [maker.prepare(LEN), maker.prepare(LEN), maker.prepare(LEN)];
    let [first, second, third] =
        std::thread::spawn(prepare).join().expect("the other thread").map(|made| made.expect("memory"));
    let region = p.server.context().regions().adopt(there, first).expect("a region");
    write(&mut p, here, &region, pattern(3, LEN));
    p.server.context().regions().revoke(&region).expect("the device takes keys back");
    if region.bytes().is_none() {
        assert_eq!(copy(&region), pattern(3, LEN), "a device that cannot take rights back");
    }
    assert!(region.bytes().is_none_or(|bytes| bytes == pattern(3, LEN)));
    let elsewhere = p.client.context().regions().adopt(here, second);
    assert!(matches!(elsewhere, Err(Error::ForeignDevice)), "{elsewhere:?}");
    drop(third);
    p.client.context().close(here);
    p.until("the end", |p| p.s.live() == 0);
    let gone = p.server.context().regions().maker(there, &readable);
    assert!(matches!(gone, Err(Error::Gone("connection"))), "{gone:?}");
    drop(region);
    p.until("the region is gone", |p| p.server.stats().memory.regions == 0);
    p.finish();
}

/// If the device supports on-demand paging, a region whose pages are not pinned must work like any other region. A device without this
/// feature must refuse such a region, with an error that names the feature.
pub fn on_demand_regions_or_a_clear_no(setup: &Setup) {
    let (mut p, here, there) = connected(setup);
    let options = RegionOptions::new().allow(Access::REMOTE_WRITE | Access::ON_DEMAND);
    let has = p
        .server
        .context()
        .connection(there)
        .capabilities()
        .expect("it is up")
        .features
        .contains(Features::ON_DEMAND_PAGING);
    println!("on-demand paging: {has}");
    match p.server.context().regions().register(there, LEN, &options) {
        Ok(region) => {
            assert!(has, "the device says that it has no such regions");
            write(&mut p, here, &region, pattern(4, LEN));
            assert_eq!(copy(&region), pattern(4, LEN));
        }
        Err(Error::Transport(TransportError::Unsupported { feature, .. })) => {
            assert!(!has && feature.starts_with("on-demand paging"), "{feature}");
        }
        Err(other) => panic!("{other}"),
    }
    p.finish();
}

/// If the device supports dma-bufs, it must register a dma-buf. A device without this feature must refuse the dma-buf, with an error that
/// names the feature.
pub fn a_dma_buf_or_a_clear_no(setup: &Setup) {
    let (mut p, here, _) = connected(setup);
    let (_, file) = Memory::new_file(LEN).expect("a descriptor that is no dma-buf");
    let mut cx = p.client.context();
    let error =
        cx.regions().register_dmabuf(here, file.as_fd(), 0, LEN, &RegionOptions::new()).expect_err("it is no dma-buf");
    let has = cx.connection(here).capabilities().expect("it is up").features.contains(Features::DMABUF);
    let unsupported = matches!(error, Error::Transport(TransportError::Unsupported { .. }));
    assert!(has || unsupported, "{error}");
    assert!(error.to_string().contains("dma"), "{error}");
    cx.send(here, b"it goes on").expect("room");
    p.until("the message", |p| p.c.count(|event| matches!(event, Event::Sent(_, _, Outcome::Sent))) == 1);
    p.finish();
}

/// A server registers memory before the first client connects. If the region has rights for any peer, every client that connects on the
/// device must be able to use it. A region with rights, but not for any peer, must be refused.
pub fn memory_before_any_connection(setup: &Setup) {
    let mut p = Pair::new(setup, setup.config(), Probe::default(), Probe::default());
    let (local, open) = (setup.address.ip(), RegionOptions::new().allow(Access::REMOTE_READ | Access::REMOTE_WRITE));
    let refused = p.server.context().regions().register_at(local, LEN, &open);
    assert!(matches!(refused, Err(Error::NoPeer)), "{refused:?}");
    let region = p.server.context().regions().register_at(local, LEN, &open.any_peer()).expect("a region");
    let private =
        p.server.context().regions().register_at(local, LEN, &RegionOptions::new()).expect("a region without rights");
    for round in 1..=2 {
        let here = p.connect();
        write(&mut p, here, &region, pattern(round, LEN));
        assert_eq!(copy(&region), pattern(round, LEN));
        let there = p.server.context().connection_ids().next().expect("the connection");
        p.server.context().send_region(there, &private, 0..8).expect("room");
        p.until("the message", |p| p.c.received == round as u64);
        p.client.context().close(here);
        p.until("the end", |p| p.s.live() == 0 && p.c.live() == 0);
    }
    p.finish();
}

/// Two reactors register the same memory of the program before a client connects. A peer of one reactor writes; a peer of the other reactor
/// and the program must read the same bytes. When both regions have ended, only the program uses the memory.
pub fn memory_of_two_reactors(setup: &Setup) {
    let mut p = Pair::new(setup, setup.config(), Probe::default(), Probe::default());
    let memory = Arc::new(Memory::new(LEN).expect("memory"));
    let (local, open) = (setup.address.ip(), RegionOptions::new().allow(Access::REMOTE_READ | Access::REMOTE_WRITE));
    let refused = p.server.context().regions().register_memory_at(local, Arc::clone(&memory), &open);
    assert!(matches!(refused, Err(Error::NoPeer)), "{refused:?}");
    let open = open.any_peer();
    let written = p.server.context().regions().register_memory_at(local, Arc::clone(&memory), &open).expect("a region");
    let read = p.client.context().regions().register_memory_at(local, Arc::clone(&memory), &open).expect("a region");
    let here = p.connect();
    write(&mut p, here, &written, pattern(1, LEN));
    let mut seen = vec![0; LEN];
    assert!(memory.copy_out(0, &mut seen) && seen == pattern(1, LEN));
    let there = p.server.context().connection_ids().next().expect("the connection");
    let mut back = p.server.context().regions().register(there, LEN, &RegionOptions::new()).expect("a region");
    p.server.context().remote(there).read(read.remote(), &mut back, 0..LEN).expect("room");
    p.until("the read", |p| p.s.count(|event| matches!(event, Event::Sent(_, _, Outcome::Sent))) == 1);
    assert_eq!(copy(&back), pattern(1, LEN));
    drop((written, read));
    p.until("the regions have ended", |_| Arc::strong_count(&memory) == 1);
    p.finish();
}
