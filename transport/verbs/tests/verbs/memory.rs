//! Memory regions: the rights of a peer, the revocation of rights, and the refusal of operations for which the peer has
//! no right.

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
    /// Waits until both ends have received the event that the connection has ended.
    fn both_end(&mut self, active: &End, passive: &End) {
        let mut ends = vec![active.id, passive.id];
        while !ends.is_empty() {
            let event = self.news();
            println!("{event:?}");
            let CmEventKind::Disconnected(_) = event.kind else { panic!("{event:?}") };
            ends.retain(|&id| id != event.id);
        }
    }

    /// Posts an operation that the peer must refuse. Checks that the connection ends, and checks the status of the operation's completion,
    /// which depends on the device. The caller checks that the memory is unchanged.
    fn refused(&mut self, kind: Kind, active: &End, passive: &End, op: SendOp, sge: rdma_transport::Sge) {
        let wc = self.done(active, op, SgeList::one(sge), SendFlags::empty());
        println!("{op:?}: {:?}", wc.status);
        match (kind, op) {
            // On siw a write completes successfully when it is sent, before the peer refuses it. It fails only if the
            // connection ends earlier. So both results are correct.
            (Kind::Siw, SendOp::Write(_)) => {}
            (Kind::Siw, _) => assert!(!wc.status.is_success()),
            (Kind::Rxe, _) => assert_eq!(wc.status, WcStatus::RemoteAccessError),
        }
        if kind == Kind::Siw {
            self.both_end(active, passive);
        } else {
            // The passive end receives no event before one of the ends disconnects.
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
    // Siw of Linux 6.1 does not check the right to read.
    let checks_reads = kind == Kind::Rxe;
    for (what, op) in cases {
        println!("-- {what}");
        let (mut world, active, passive) = connected(kind);
        let areas = rights.map(|access| {
            // A case that is not about rights uses a region with all rights, so that only its own fault can cause the
            // refusal.
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
            assert!(area.bytes().iter().all(|&byte| byte == 0), "{what}: the target has changed");
        }
        assert_eq!(local.bytes()[..64], before, "{what}: the local memory has changed");
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

/// On iWARP a peer can invalidate a key that it has received. InfiniBand allows this for memory windows only. So on rxe the Send with
/// Invalidate ends the connection, and the key stays valid.
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
    assert_eq!(sent.status, WcStatus::Success, "the send is delivered");
    let got = world.completions(passive.cq).remove(0);
    if kind == Kind::Rxe {
        assert_eq!(got.status, WcStatus::RemoteInvalidRequest);
        return;
    }
    assert_eq!((got.status, got.byte_len), (WcStatus::Success, 10));
    println!("the receiver sees the invalidated key {:?}", got.invalidated);
    assert!(got.invalidated.is_none_or(|key| key == area.region.remote_key));
    // The program itself can still use the region for its work requests.
    passive.write(DEPTH as usize, b"x");
    world.good(&passive, SendOp::Send, area.sge(0, 100));
    world.completion(active.cq);
    world.refused(kind, &active, &passive, SendOp::Write(area.remote(0)), local.sge(0, 10));
    assert!(area.bytes().iter().all(|&byte| byte == 0));
}

/// A key is invalidated while a peer writes with it continuously. The memory does not change after the call has returned. Siw is an
/// exception: a part of a frame that another processor is placing at that moment still arrives. So on siw the test first waits until a
/// refused write has ended the connection, and then checks that the memory does not change.
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
    // Wait until the first writes have completed, so that later writes are in progress when the key is invalidated.
    let first = world.completions(active.cq);
    println!("{} writes before", first.len());
    world.provider.remote_keys().unwrap().invalidate(area.region.id).unwrap();
    if kind == Kind::Siw {
        // All writes may have completed before the call of `invalidate`. So post another write, which the peer refuses. If the connection
        // has already ended, the post fails.
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

/// If a process may lock only little memory, the error of a registration names the limit and how to raise it.
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

/// The part of the test that runs in the other process, which may lock only 64 KiB.
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
