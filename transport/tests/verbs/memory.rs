//! Memory regions: what a peer may do to them, how that is taken back, and what it is told that may not.

use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdma_transport::{
    Access, CmEventKind, DisconnectCause, Features, Memory, Provider, RemoteKey, SendFlags, SendOp, SgeList, WcStatus,
};

use crate::world::*;

const EVERYTHING: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);

fn connected(kind: Kind) -> (World, End, End) {
    let mut world = World::new();
    let (_, to) = world.listen(kind.address());
    let (active, passive) = world.pair(to);
    (world, active, passive)
}

impl World {
    /// Both sides hear of the end of the connection.
    fn both_end(&mut self, active: &End, passive: &End) {
        let mut ends = vec![active.id, passive.id];
        while !ends.is_empty() {
            let event = self.news();
            println!("{event:?}");
            let CmEventKind::Disconnected(_) = event.kind else { panic!("{event:?}") };
            ends.retain(|&id| id != event.id);
        }
    }

    /// An operation that the peer must refuse: nothing of it arrives, and the connection ends. What the completion says
    /// differs by device: this is the table.
    fn refused(&mut self, kind: Kind, active: &End, passive: &End, op: SendOp, sge: rdma_transport::Sge) {
        let wc = self.done(active, op, SgeList::one(sge), SendFlags::empty());
        println!("{op:?}: {:?}", wc.status);
        match (kind, op) {
            // A write is done when it was sent, unless the end of the connection was faster.
            (Kind::Siw, SendOp::Write(_)) => {}
            (Kind::Siw, _) => assert!(!wc.status.is_success()),
            (Kind::Rxe, _) => assert_eq!(wc.status, WcStatus::RemoteAccessError),
        }
        if kind == Kind::Siw {
            self.both_end(active, passive);
        } else {
            // The target hears nothing until somebody disconnects.
            assert!(self.event_within(Duration::from_millis(50)).is_none_or(|event| event.id == active.id));
            self.provider.disconnect(active.id, Instant::now()).unwrap();
            loop {
                let event = self.news();
                if event.id == passive.id {
                    let CmEventKind::Disconnected(cause) = event.kind else { panic!("{event:?}") };
                    println!("{cause:?}");
                    assert!(matches!(cause, DisconnectCause::Peer | DisconnectCause::Path(_)));
                    break;
                }
            }
        }
    }
}

fn what_a_peer_may_not(kind: Kind) {
    let rights = [Access::REMOTE_READ, Access::REMOTE_WRITE];
    type Case = (&'static str, fn(&Area, &Area) -> SendOp);
    let cases: [Case; 6] = [
        ("write with a key that never was", |both, _| {
            let mut remote = both.remote(0);
            remote.key = RemoteKey(remote.key.0 ^ 0x5500);
            SendOp::Write(remote)
        }),
        ("read with a key that never was", |both, _| {
            let mut remote = both.remote(0);
            remote.key = RemoteKey(remote.key.0 ^ 0x5500);
            SendOp::Read(remote)
        }),
        ("write past the end", |both, _| SendOp::Write(both.remote(4096 - 63))),
        ("read past the end", |both, _| SendOp::Read(both.remote(4096 - 63))),
        ("write without the right", |read, _| SendOp::Write(read.remote(0))),
        ("read without the right", |_, write| SendOp::Read(write.remote(0))),
    ];
    // Siw of Linux 6.1 never asks for the right to read.
    let checks_reads = kind == Kind::Rxe;
    for (what, op) in cases {
        println!("-- {what}");
        let (mut world, active, passive) = connected(kind);
        let areas = rights.map(|access| {
            // The first two cases need a region that would allow it.
            let access = if what.contains("right") { access } else { EVERYTHING };
            world.area(&passive, 4096, access)
        });
        let local = world.area(&active, 4096, Access::LOCAL_WRITE);
        local.fill(1);
        let before = local.bytes()[..64].to_vec();
        if what == "read without the right" && !checks_reads {
            world.good(&active, op(&areas[0], &areas[1]), local.sge(0, 64));
            continue;
        }
        world.refused(kind, &active, &passive, op(&areas[0], &areas[1]), local.sge(0, 64));
        for area in &areas {
            assert!(area.bytes().iter().all(|&byte| byte == 0), "{what}: the target is untouched");
        }
        assert_eq!(local.bytes()[..64], before, "{what}: and so is the sink");
    }
    if kind == Kind::Rxe {
        let (mut world, active, passive) = connected(kind);
        let target = world.area(&passive, 4096, EVERYTHING);
        let local = world.area(&active, 4096, Access::LOCAL_WRITE);
        let op = SendOp::FetchAdd { remote: target.remote(0), add: 1 };
        world.refused(kind, &active, &passive, op, local.sge(0, 8));
        assert_eq!(target.word(0), 0);
    }
}

/// On iWARP a peer may give a key back that it was given. InfiniBand allows that for memory windows only: there it ends
/// the connection, and the key stays.
fn send_with_invalidate(kind: Kind) {
    let (mut world, active, passive) = connected(kind);
    let features = world.provider.device(active.device).unwrap().capabilities.features;
    assert!(features.contains(Features::SEND_WITH_INVALIDATE));
    assert_eq!(features.contains(Features::REMOTE_INVALIDATION), kind == Kind::Siw);
    let area = world.area(&passive, 4096, EVERYTHING);
    let local = world.area(&active, 4096, Access::LOCAL_WRITE);
    local.fill(9);
    let op = SendOp::SendInvalidate(area.region.remote_key);
    let sent = world.done(&active, op, SgeList::one(local.sge(0, 10)), SendFlags::empty());
    assert_eq!(sent.status, WcStatus::Success, "it was delivered");
    let got = world.completions(passive.cq).remove(0);
    if kind == Kind::Rxe {
        assert_eq!(got.status, WcStatus::RemoteInvalidRequest);
        return;
    }
    assert_eq!((got.status, got.byte_len), (WcStatus::Success, 10));
    println!("the receiver is told: {:?}", got.invalidated);
    assert!(got.invalidated.is_none_or(|key| key == area.region.remote_key));
    // Still good for the program itself.
    passive.write(DEPTH as usize, b"x");
    world.good(&passive, SendOp::Send, area.sge(0, 100));
    world.completion(active.cq);
    world.refused(kind, &active, &passive, SendOp::Write(area.remote(0)), local.sge(0, 10));
    assert!(area.bytes().iter().all(|&byte| byte == 0));
}

/// A peer that writes without end while the key is taken back: what is there when the call returns stays. On siw the part of a
/// frame that is being placed on another processor at that moment still is, so that what is there stays from the end of the
/// connection on, which the refused write brings about.
fn nothing_is_touched_after_invalidate(kind: Kind) {
    let (mut world, active, passive) = connected(kind);
    let area = world.area(&passive, 1 << 20, EVERYTHING);
    let local = world.area(&active, 1 << 20, Access::LOCAL_WRITE);
    local.fill(5);
    let chain: Vec<_> = (0..DEPTH as u64)
        .map(|wr_id| rdma_transport::SendWr {
            wr_id,
            op: SendOp::Write(area.remote(0)),
            sges: SgeList::one(local.sge(0, 1 << 20)),
            flags: SendFlags::SIGNALED,
        })
        .collect();
    world.provider.post_send(active.qp, &chain).unwrap();
    // They are under way.
    let first = world.completions(active.cq);
    println!("{} writes before", first.len());
    world.provider.remote_keys().unwrap().invalidate(area.region.id).unwrap();
    if kind == Kind::Siw {
        // All writes may have been done before, so that one more is tried; the connection may have ended meanwhile.
        let _ = world.provider.post_send(active.qp, &chain[..1]);
        world.both_end(&active, &passive);
    }
    for at in 0..area.memory.len() / 8 {
        area.set_word(at * 8, 0);
    }
    let until = Instant::now() + Duration::from_millis(500);
    while let Some(left) = until.checked_duration_since(Instant::now()) {
        let _ = world.event_within(left);
    }
    assert!(area.bytes().iter().all(|&byte| byte == 0));
}

/// A process that may lock little is told the limit and the cure.
fn too_little_memory_may_be_locked(kind: Kind) {
    if let Some(address) = other_process() {
        return lock_too_much(address);
    }
    let program = std::env::current_exe().unwrap();
    let test = kind.test("memory", "too_little_memory_may_be_locked");
    let script = format!("ulimit -l 64; exec {} --exact {test} --nocapture", program.display());
    assert!(Command::new("chmod").args(["-R", "a+rw", "/dev/infiniband"]).status().unwrap().success());
    let output = Command::new("setpriv")
        .args(["--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all", "bash", "-c", &script])
        .env("RDMA_TEST_PEER", kind.address().to_string())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    println!("{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success());
    let said = text.lines().find(|line| line.contains("cannot register")).expect("an error");
    assert!(said.contains("64 KiB (RLIMIT_MEMLOCK)") && said.contains("ulimit -l"), "{said}");
}

/// The other process.
fn lock_too_much(address: std::net::IpAddr) {
    let mut world = World::new();
    let (_, to) = world.listen(address);
    let (_, device) = world.resolved(to);
    let memory = Arc::new(Memory::new(1 << 20).unwrap());
    let error = world.provider.register(device, &memory, 0..memory.len(), Access::LOCAL_WRITE).unwrap_err();
    println!("\n{error}");
}

on_each_device! {
    what_a_peer_may_not
    send_with_invalidate
    nothing_is_touched_after_invalidate
    too_little_memory_may_be_locked
}
