//! Cases: listeners, and how a connection begins.

use std::time::Duration;

use super::world::*;
use crate::cm::{CmEventKind, ConnectFailure, ConnectParam, ListenOptions};
use crate::error::Error;

/// The device of an address is there before any port or queue pair; a handle of no device names none.
pub(super) fn an_address_names_its_device(world: &mut World) {
    for side in [ACTIVE, PASSIVE] {
        let address = world.side(side).address.ip();
        let device = world.provider(side).device_at(address).expect("the device");
        assert_eq!(device, world.side(side).device);
        assert!(!world.provider(side).device(device).expect("the device").name.is_empty());
        let none = crate::handle::DeviceId(u32::MAX);
        assert!(world.provider(side).device(none).is_none());
        assert!(!world.provider(side).name().is_empty());
    }
}

pub(super) fn port_0_takes_a_free_one(world: &mut World) {
    let [(one, first), (other, second)] = [world.listen(PASSIVE), world.listen(PASSIVE)];
    assert_ne!(first, second);
    for id in [one, other] {
        world.destroy_id(PASSIVE, id);
        assert_eq!(world.provider(PASSIVE).local_address(id), None, "the listener is gone");
    }
}

pub(super) fn an_address_in_use_is_an_error(world: &mut World) {
    let (listener, address) = world.listen(PASSIVE);
    let again = world.provider(PASSIVE).listen(address, &ListenOptions::default());
    assert!(matches!(again, Err(Error::Listen { .. })), "{again:?}");
    world.destroy_id(PASSIVE, listener);
}

pub(super) fn private_data_goes_both_ways(world: &mut World) {
    let most = world.side(ACTIVE).capabilities.max_private_data;
    for len in [0, 1, most] {
        let data: Vec<u8> = (0..len).map(|at| 1 + at as u8 % 200).collect();
        let param = ConnectParam { private_data: &data, ..ConnectParam::default() };
        let (active, request) = world.request(&Spec::default(), &param);
        assert!(request.private_data.starts_with(&data), "{:?} of {len} bytes", request.private_data);
        assert_eq!(request.peer.ip(), world.side(ACTIVE).address.ip());
        let passive = world.equip(PASSIVE, request.id, &Spec::default());
        let now = world.now();
        world.provider(PASSIVE).accept(passive.id, &param, now).expect("an accept");
        let (answer, _) = world.established(&active);
        assert!(answer.starts_with(&data), "{answer:?} of {len} bytes");
        let (none, _) = world.established(&passive);
        assert!(none.is_empty(), "the passive side has had the private data before");
    }
}

pub(super) fn too_much_private_data_is_refused(world: &mut World) {
    let long = [7; 4096];
    let param = ConnectParam { private_data: &long, ..ConnectParam::default() };
    let too_long = |error: &Error| matches!(error, Error::PrivateDataTooLong { len: 4096, .. });
    let (_, to) = world.listener();
    let id = world.resolved(to, Duration::from_secs(300));
    let end = world.equip(ACTIVE, id, &Spec::default());
    assert!(world.provider(ACTIVE).connect(id, &param).is_err_and(|error| too_long(&error)));
    world.destroy(&end);
    let (_active, request) = world.request(&Spec::default(), &ConnectParam::default());
    let passive = world.equip(PASSIVE, request.id, &Spec::default());
    let now = world.now();
    assert!(world.provider(PASSIVE).accept(passive.id, &param, now).is_err_and(|error| too_long(&error)));
    assert!(world.provider(PASSIVE).reject(passive.id, &long, now).is_err_and(|error| too_long(&error)));
}

pub(super) fn a_reject_carries_private_data(world: &mut World) {
    for data in [&b"not today"[..], b""] {
        let (active, request) = world.request(&Spec::default(), &ConnectParam::default());
        let now = world.now();
        world.provider(PASSIVE).reject(request.id, data, now).expect("a reject");
        world.forget(PASSIVE, request.id);
        let got = world.event("Rejected", ACTIVE, |event| match &event.kind {
            CmEventKind::Rejected { private_data } if event.id == active.id => Some(private_data.clone()),
            _ => None,
        });
        assert!(got.starts_with(data), "{got:?}");
        let gone = world.provider(PASSIVE).accept(request.id, &ConnectParam::default(), now);
        assert!(gone.is_err(), "the id of a rejected request is gone");
    }
}

pub(super) fn an_attempt_without_a_listener_is_refused(world: &mut World) {
    let (listener, to) = world.listen(PASSIVE);
    world.destroy_id(PASSIVE, listener);
    let id = world.resolved(to, Duration::from_secs(300));
    world.equip(ACTIVE, id, &Spec::default());
    world.provider(ACTIVE).connect(id, &ConnectParam::default()).expect("a connect");
    let failure = world.event("ConnectFailed", ACTIVE, |event| failed(event, id));
    assert_eq!(failure, ConnectFailure::Refused);
}

/// The peer never answers: the attempt ends, and not before its deadline.
pub(super) fn an_attempt_ends_at_its_deadline(world: &mut World) {
    let (_, to) = world.listener();
    let mut within = Duration::from_millis(500);
    // On a busy machine, the time may be over before the address is resolved.
    let (id, deadline) = loop {
        let deadline = world.now() + within;
        if let Some(id) = world.resolved_by(to, deadline) {
            break (id, deadline);
        }
        within *= 2;
        assert!(within < Duration::from_secs(300), "no attempt is resolved");
    };
    world.equip(ACTIVE, id, &Spec::default());
    world.provider(ACTIVE).connect(id, &ConnectParam::default()).expect("a connect");
    let failure = world.event("ConnectFailed", ACTIVE, |event| failed(event, id));
    assert_eq!(failure, ConnectFailure::Timeout);
    assert!(world.now() >= deadline, "too early");
}

/// Whatever an attempt is doing when its id is destroyed, nothing comes of it.
pub(super) fn an_attempt_that_is_destroyed_is_over(world: &mut World) {
    let (_, to) = world.listener();
    let deadline = world.now() + Duration::from_secs(300);
    let early = world.provider(ACTIVE).resolve(to, &crate::cm::PathOptions::default(), deadline).expect("an attempt");
    world.destroy_id(ACTIVE, early);
    let resolved = world.resolved(to, Duration::from_secs(300));
    world.destroy_id(ACTIVE, resolved);
    let (active, _) = world.request(&Spec::default(), &ConnectParam::default());
    world.destroy(&active);
    world.destroy_id(ACTIVE, active.id);
    world.settle();
    // Others come up as if nothing had been.
    let unanswered =
        |event: &crate::cm::CmEvent| matches!(event.kind, CmEventKind::ConnectRequest { .. }).then_some(());
    while world.seen(PASSIVE, unanswered).is_some() {}
    let [active, passive] = world.pair();
    world.message(&active, &passive, b"after all of that");
}

pub(super) fn a_queue_pair_comes_before_the_connection(world: &mut World) {
    let wrong = |result: crate::error::Result<()>| match result {
        Err(Error::InvalidState { .. }) => {}
        other => panic!("{other:?}"),
    };
    let (_, to) = world.listener();
    let id = world.resolved(to, Duration::from_secs(300));
    wrong(world.provider(ACTIVE).connect(id, &ConnectParam::default()));
    world.destroy_id(ACTIVE, id);
    let (active, request) = world.request(&Spec::default(), &ConnectParam::default());
    let now = world.now();
    wrong(world.provider(PASSIVE).accept(request.id, &ConnectParam::default(), now));
    let passive = world.equip(PASSIVE, request.id, &Spec::default());
    let again = world.provider(PASSIVE).create_qp(request.id, &World::attr(passive.cq, &Spec::default()));
    assert!(matches!(again, Err(Error::InvalidState { .. })), "{again:?}");
    world.provider(PASSIVE).accept(passive.id, &ConnectParam::default(), now).expect("an accept");
    world.established(&active);
}

/// A side has as many Reads outstanding as it asked for, and the other side serves as many.
pub(super) fn the_depth_of_reads_is_agreed(world: &mut World) {
    for depth in [1, 3] {
        let param = ConnectParam { responder_resources: depth, initiator_depth: depth, ..ConnectParam::default() };
        let (active, request) = world.request(&Spec::default(), &param);
        assert_eq!(request.read_depth.responder_resources, depth);
        let passive = world.equip(PASSIVE, request.id, &Spec::default());
        let now = world.now();
        world.provider(PASSIVE).accept(passive.id, &ConnectParam::default(), now).expect("an accept");
        assert_eq!(world.established(&active).1.initiator_depth, depth);
        assert!(world.established(&passive).1.responder_resources >= depth);
        // More Reads than that wait their turn.
        let bytes: Vec<u8> = (0..DEPTH as u8).collect();
        let source = world.side(PASSIVE).place(&bytes);
        let (_, remote) = world.side(PASSIVE).expose(&source, crate::mr::Access::REMOTE_READ);
        let sink = world.side(ACTIVE).room(DEPTH);
        let reads: Vec<u64> = (0..DEPTH)
            .map(|at| {
                let remote = crate::wr::RemoteAddress { address: remote.address + at as u64, ..remote };
                world.post(&active, crate::wr::SendOp::Read(remote), &(sink.start + at..sink.start + at + 1))
            })
            .collect();
        for wr_id in reads {
            world.success(&active, wr_id);
        }
        assert_eq!(world.side(ACTIVE).bytes(&sink), bytes);
    }
}
