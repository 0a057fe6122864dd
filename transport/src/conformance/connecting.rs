//! Cases: listeners, and the establishment of connections.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::time::Duration;

use socket2::{Domain, Socket, Type};

use super::harness::*;
use crate::cm::{CmEventKind, ConnectFailure, ConnectParam, ListenParam};
use crate::error::TransportError;

/// `device_at` returns the device that has an address, even before the program has created any listener or queue pair. `device` returns
/// `None` for the handle of a device that does not exist.
pub(super) fn an_address_names_its_device(harness: &mut Harness) {
    for side in [ACTIVE, PASSIVE] {
        let address = harness.side(side).address.ip();
        let device = harness.provider(side).device_at(address).expect("the device");
        assert_eq!(device, harness.side(side).device);
        assert!(!harness.provider(side).device(device).expect("the device").name.is_empty());
        let none = crate::handle::DeviceId(u32::MAX);
        assert!(harness.provider(side).device(none).is_none());
        assert!(!harness.provider(side).name().is_empty());
    }
}

pub(super) fn port_0_takes_a_free_one(harness: &mut Harness) {
    let [(one, first), (other, second)] = [harness.listen(PASSIVE), harness.listen(PASSIVE)];
    assert_ne!(first, second);
    for id in [one, other] {
        harness.destroy_id(PASSIVE, id);
        assert_eq!(harness.provider(PASSIVE).local_address(id), None, "the listener is gone");
    }
}

pub(super) fn an_address_in_use_is_an_error(harness: &mut Harness) {
    let (listener, address) = harness.listen(PASSIVE);
    let again = harness.provider(PASSIVE).listen(address, &ListenParam::default());
    assert!(matches!(again, Err(TransportError::Listen { .. })), "{again:?}");
    harness.destroy_id(PASSIVE, listener);
}

pub(super) fn private_data_goes_both_ways(harness: &mut Harness) {
    let most = harness.side(ACTIVE).capabilities.max_private_data;
    for len in [0, 1, most] {
        let data: Vec<u8> = (0..len).map(|at| 1 + at as u8 % 200).collect();
        let param = ConnectParam { private_data: &data, ..ConnectParam::default() };
        let (active, request) = harness.request(&Spec::default(), &param);
        assert!(request.private_data.starts_with(&data), "{:?} of {len} bytes", request.private_data);
        assert_eq!(request.peer.ip(), harness.side(ACTIVE).address.ip());
        let passive = harness.create_queue_pair(PASSIVE, request.id, &Spec::default());
        let now = harness.now();
        harness.provider(PASSIVE).accept(passive.id, &param, now).expect("an accept");
        let (answer, _) = harness.established(&active);
        assert!(answer.starts_with(&data), "{answer:?} of {len} bytes");
        let (none, _) = harness.established(&passive);
        assert!(none.is_empty(), "the passive side has had the private data before");
    }
}

pub(super) fn too_much_private_data_is_refused(harness: &mut Harness) {
    let long = [7; 4096];
    let param = ConnectParam { private_data: &long, ..ConnectParam::default() };
    let too_long = |error: &TransportError| matches!(error, TransportError::PrivateDataTooLong { len: 4096, .. });
    let (_, to) = harness.listener();
    let id = harness.resolved(to, Duration::from_secs(300));
    let end = harness.create_queue_pair(ACTIVE, id, &Spec::default());
    assert!(harness.provider(ACTIVE).connect(id, &param).is_err_and(|error| too_long(&error)));
    harness.destroy(&end);
    let (_active, request) = harness.request(&Spec::default(), &ConnectParam::default());
    let passive = harness.create_queue_pair(PASSIVE, request.id, &Spec::default());
    let now = harness.now();
    assert!(harness.provider(PASSIVE).accept(passive.id, &param, now).is_err_and(|error| too_long(&error)));
    assert!(harness.provider(PASSIVE).reject(passive.id, &long, now).is_err_and(|error| too_long(&error)));
}

pub(super) fn a_reject_carries_private_data(harness: &mut Harness) {
    for data in [&b"not today"[..], b""] {
        let (active, request) = harness.request(&Spec::default(), &ConnectParam::default());
        let now = harness.now();
        harness.provider(PASSIVE).reject(request.id, data, now).expect("a reject");
        harness.forget(PASSIVE, request.id);
        let got = harness.wait_for_event("Rejected", ACTIVE, |event| match &event.kind {
            CmEventKind::Rejected { private_data } if event.id == active.id => Some(private_data.clone()),
            _ => None,
        });
        assert!(got.starts_with(data), "{got:?}");
        let gone = harness.provider(PASSIVE).accept(request.id, &ConnectParam::default(), now);
        assert!(gone.is_err(), "the id of a rejected request is gone");
    }
}

/// Returns an address of the passive side on which nobody listens, and a socket that reserves the
/// address's TCP port. Without this socket, a listener of another case could get the port before
/// this case connects. The socket is `None` if the address is not one of this host, as in a
/// simulation.
fn deserted(harness: &mut Harness) -> (SocketAddr, Option<Socket>) {
    for _ in 0..100 {
        let (listener, address) = harness.listen(PASSIVE);
        harness.destroy_id(PASSIVE, listener);
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, None).expect("a socket");
        match socket.bind(&address.into()) {
            Ok(()) => return (address, Some(socket)),
            Err(error) if error.kind() == ErrorKind::AddrInUse => {}
            Err(_) => return (address, None),
        }
    }
    panic!("no port of a listener that is destroyed is free");
}

pub(super) fn an_attempt_without_a_listener_is_refused(harness: &mut Harness) {
    let (to, _reserved) = deserted(harness);
    let id = harness.resolved(to, Duration::from_secs(300));
    harness.create_queue_pair(ACTIVE, id, &Spec::default());
    harness.provider(ACTIVE).connect(id, &ConnectParam::default()).expect("a connect");
    let failure = harness.wait_for_event("ConnectFailed", ACTIVE, |event| failed(event, id));
    assert_eq!(failure, ConnectFailure::Refused);
}

/// If the peer never answers, a connection attempt fails at its deadline, and not earlier.
pub(super) fn an_attempt_ends_at_its_deadline(harness: &mut Harness) {
    let (_, to) = harness.listener();
    let mut within = Duration::from_millis(500);
    // If the machine is busy, the deadline may pass before the address is resolved. In this case, try again with a
    // later deadline.
    let (id, deadline) = loop {
        let deadline = harness.now() + within;
        if let Some(id) = harness.resolved_by(to, deadline) {
            break (id, deadline);
        }
        within *= 2;
        assert!(within < Duration::from_secs(300), "no attempt is resolved");
    };
    harness.create_queue_pair(ACTIVE, id, &Spec::default());
    harness.provider(ACTIVE).connect(id, &ConnectParam::default()).expect("a connect");
    let failure = harness.wait_for_event("ConnectFailed", ACTIVE, |event| failed(event, id));
    assert_eq!(failure, ConnectFailure::Timeout);
    assert!(harness.now() >= deadline, "too early");
}

/// Destroying the id of a connection attempt ends the attempt, whatever state the attempt is in.
pub(super) fn an_attempt_that_is_destroyed_is_over(harness: &mut Harness) {
    let (_, to) = harness.listener();
    let deadline = harness.now() + Duration::from_secs(300);
    let early = harness.provider(ACTIVE).resolve(to, &crate::cm::PathOptions::default(), deadline).expect("an attempt");
    harness.destroy_id(ACTIVE, early);
    let resolved = harness.resolved(to, Duration::from_secs(300));
    harness.destroy_id(ACTIVE, resolved);
    let (active, _) = harness.request(&Spec::default(), &ConnectParam::default());
    harness.destroy(&active);
    harness.destroy_id(ACTIVE, active.id);
    harness.settle();
    // After the ids of several connection attempts were destroyed, a new connection is established as usual.
    let unanswered =
        |event: &crate::cm::CmEvent| matches!(event.kind, CmEventKind::ConnectRequest { .. }).then_some(());
    while harness.take_event(PASSIVE, unanswered).is_some() {}
    let [active, passive] = harness.pair();
    harness.message(&active, &passive, b"after all of that");
}

pub(super) fn a_queue_pair_comes_before_the_connection(harness: &mut Harness) {
    let wrong = |result: crate::error::Result<()>| match result {
        Err(TransportError::InvalidState { .. }) => {}
        other => panic!("{other:?}"),
    };
    let (_, to) = harness.listener();
    let id = harness.resolved(to, Duration::from_secs(300));
    wrong(harness.provider(ACTIVE).connect(id, &ConnectParam::default()));
    harness.destroy_id(ACTIVE, id);
    let (active, request) = harness.request(&Spec::default(), &ConnectParam::default());
    let now = harness.now();
    wrong(harness.provider(PASSIVE).accept(request.id, &ConnectParam::default(), now));
    let passive = harness.create_queue_pair(PASSIVE, request.id, &Spec::default());
    let again = harness.provider(PASSIVE).create_qp(request.id, &Harness::attr(passive.cq, &Spec::default()));
    assert!(matches!(again, Err(TransportError::InvalidState { .. })), "{again:?}");
    harness.provider(PASSIVE).accept(passive.id, &ConnectParam::default(), now).expect("an accept");
    harness.established(&active);
}

/// Each side can have as many Reads outstanding as it has requested, and the peer answers all of them.
pub(super) fn the_depth_of_reads_is_agreed(harness: &mut Harness) {
    for depth in [1, 3] {
        let param = ConnectParam { responder_resources: depth, initiator_depth: depth, ..ConnectParam::default() };
        let (active, request) = harness.request(&Spec::default(), &param);
        assert_eq!(request.read_depth.responder_resources, depth);
        let passive = harness.create_queue_pair(PASSIVE, request.id, &Spec::default());
        let now = harness.now();
        harness.provider(PASSIVE).accept(passive.id, &ConnectParam::default(), now).expect("an accept");
        assert_eq!(harness.established(&active).1.initiator_depth, depth);
        assert!(harness.established(&passive).1.responder_resources >= depth);
        // Post more Reads than may be outstanding at the same time. The surplus Reads wait in the send queue.
        let bytes: Vec<u8> = (0..DEPTH as u8).collect();
        let source = harness.side(PASSIVE).allocate_with(&bytes);
        let (_, remote) = harness.side(PASSIVE).expose(&source, crate::mr::Access::REMOTE_READ);
        let sink = harness.side(ACTIVE).allocate(DEPTH);
        let reads: Vec<u64> = (0..DEPTH)
            .map(|at| {
                let remote = crate::wr::RemoteAddress { address: remote.address + at as u64, ..remote };
                harness.post(&active, crate::wr::SendOp::Read(remote), &(sink.start + at..sink.start + at + 1))
            })
            .collect();
        for wr_id in reads {
            harness.success(&active, wr_id);
        }
        assert_eq!(harness.side(ACTIVE).bytes(&sink), bytes);
    }
}
