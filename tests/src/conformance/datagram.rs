//! The tests of datagrams and multicast groups. A provider that does not support them must refuse with a clear error.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::thread;
use std::time::Duration;

use rdma_reactor::transport::TransportError;
use rdma_reactor::transport::cm::ConnectFailure;
use rdma_reactor::{
    Blocked, ConnectError, Context, DatagramHandler, DisconnectReason, EndpointId, EndpointOptions, Error, Handler,
    Origin, Outcome, PeerId, Reactor, Reactors, SendErrorKind,
};

use super::harness::{Event, PATIENCE, Pair, Probe, Setup, now, pattern};

/// A duration that is longer than any test.
const LONG: Duration = Duration::from_secs(3600);

/// Returns a multicast group that no other process of the host uses, so that concurrent runs of a
/// test do not receive each other's datagrams.
fn group(last: u8) -> IpAddr {
    let [.., high, low] = std::process::id().to_be_bytes();
    [239, high, low, last].into()
}

/// Creates a pair of reactors if the provider supports datagrams. Otherwise checks that the error names the provider, and returns
/// `None`: the test does not apply.
fn datagrams(setup: &Setup, s: Probe, c: Probe) -> Option<Pair> {
    // On an iWARP device, closing a connection may take this whole time.
    let close = if setup.datagrams { PATIENCE } else { Duration::from_secs(2) };
    datagrams_with(setup, close, s, c)
}

/// Does the same as [`datagrams`], with `close` as `Timeouts::close`: the time for which a closing
/// endpoint waits for the completion of its last sends.
fn datagrams_with(setup: &Setup, close: Duration, s: Probe, c: Probe) -> Option<Pair> {
    let mut pair = Pair::new(setup, setup.config().timeouts(|t| t.close = close), s, c);
    match pair.server.context().datagrams().open(setup.address, EndpointOptions::new()) {
        Ok(endpoint) => {
            assert!(setup.datagrams, "datagrams where there are none");
            pair.server.context().datagrams().close(endpoint);
            pair.until("closed", |p| closed(&p.s, endpoint) == 1);
            pair.s.events.clear();
            Some(pair)
        }
        Err(Error::Transport(TransportError::Unsupported { provider, feature })) if !setup.datagrams => {
            assert_eq!(provider, pair.server.provider_name());
            println!("skipped: the provider {provider} has no {feature}");
            pair.connect();
            pair.finish();
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn open(reactor: &mut Reactor, setup: &Setup, options: EndpointOptions) -> EndpointId {
    reactor.context().datagrams().open(setup.address, options).expect("an endpoint")
}

fn closed(probe: &Probe, endpoint: EndpointId) -> usize {
    probe.count(|event| matches!(event, Event::EndpointClosed(id, _) if *id == endpoint))
}

fn heard(probe: &Probe, endpoint: EndpointId) -> Vec<(Origin, &[u8], Option<u32>)> {
    let of = |event| match event {
        &Event::Datagram(id, origin, ref bytes, immediate) if id == endpoint => Some((origin, &bytes[..], immediate)),
        _ => None,
    };
    probe.events.iter().filter_map(of).collect()
}

fn sent(probe: &Probe, endpoint: EndpointId) -> Vec<(u64, Outcome)> {
    let of = |event: &Event| match *event {
        Event::DatagramSent(id, sequence, outcome) if id == endpoint => Some((sequence, outcome)),
        _ => None,
    };
    probe.events.iter().filter_map(of).collect()
}

fn found(probe: &Probe, endpoint: EndpointId) -> Option<Result<PeerId, ConnectError>> {
    let of = |event: &Event| match event {
        Event::Peer(id, _, found) if *id == endpoint => Some(found.clone()),
        _ => None,
    };
    probe.events.iter().find_map(of)
}

fn joined(probe: &Probe, endpoint: EndpointId) -> Option<PeerId> {
    let of = |event: &Event| match event {
        Event::Join(id, _, joined) if *id == endpoint => Some(joined.clone().expect("joining")),
        _ => None,
    };
    probe.events.iter().find_map(of)
}

/// Opens an endpoint on the server and one on the client, and looks up the server's endpoint from the client's endpoint. Returns the
/// server's endpoint, the client's endpoint, and the peer that the lookup has found.
fn acquainted(pair: &mut Pair, setup: &Setup, options: EndpointOptions) -> (EndpointId, EndpointId, PeerId) {
    let there = open(&mut pair.server, setup, options);
    let here = open(&mut pair.client, setup, options);
    let address = pair.server.context().datagrams().address(there).expect("it is open");
    pair.client.context().datagrams().find_peer(here, address).expect("asking");
    pair.until("the peer is found", |p| found(&p.c, here).is_some());
    let peer = found(&pair.c, here).expect("an answer").expect("a peer");
    (there, here, peer)
}

/// Closes all endpoints, and ends the pair.
fn finish(mut pair: Pair) {
    pair.client.shutdown(&mut pair.c, PATIENCE).expect("the client's end");
    pair.server.shutdown(&mut pair.s, PATIENCE).expect("the server's end");
}

/// Datagrams of every size must arrive with their immediate data. The receiver must be able to answer to the origin of a datagram.
pub fn datagrams_of_every_size_both_ways(setup: &Setup) {
    let echo = |cx: &mut rdma_reactor::Context<'_>, event: &Event| {
        if let Event::Datagram(endpoint, origin, bytes, immediate) = event {
            let peer = cx.datagrams().peer_of(*endpoint, origin).expect("a way back");
            let sent = match immediate {
                Some(value) => cx.datagrams().send_with_immediate(*endpoint, peer, bytes, !value),
                None => cx.datagrams().send(*endpoint, peer, bytes),
            };
            sent.expect("there is room");
            // The datagrams to this peer that were accepted before this call must still be sent.
            cx.datagrams().forget_peer(peer);
            assert_eq!(cx.datagrams().send(*endpoint, peer, bytes), Err(SendErrorKind::NoPeer));
        }
    };
    let Some(mut pair) = datagrams(setup, Probe::new(echo), Probe::default()) else { return };
    let (there, here, peer) = acquainted(&mut pair, setup, EndpointOptions::new());
    let max = pair.client.context().datagrams().max_datagram(here).expect("it is open");
    assert_eq!(pair.server.context().datagrams().capabilities(there).expect("it is open").max_datagram as usize, max);
    assert!(max >= 256, "{max}");
    let sizes = [0, 1, 2, 39, 40, 41, 255, max - 1, max];
    for (nth, size) in sizes.into_iter().enumerate() {
        let (payload, immediate) = (pattern(nth, size), (nth % 2 == 1).then_some(nth as u32));
        let mut cx = pair.client.context();
        let send = match immediate {
            Some(value) => cx.datagrams().send_with_immediate(here, peer, &payload, value),
            None => cx.datagrams().send(here, peer, &payload),
        };
        assert_eq!(send.expect("there is room").sequence(), nth as u64);
        pair.until("there and back", |p| heard(&p.c, here).len() == nth + 1);
        let number = pair.client.context().datagrams().qp_number(here);
        let (origin, bytes, value) = heard(&pair.s, there)[nth];
        assert_eq!((bytes, value), (&payload[..], immediate), "{size}");
        assert_eq!((Some(origin.qp_number()), origin.address()), (number, Some(setup.address.ip())));
        let (origin, bytes, value) = heard(&pair.c, here)[nth];
        assert_eq!((bytes, value), (&payload[..], immediate.map(|value| !value)), "{size}");
        assert_eq!(Some(origin.qp_number()), pair.server.context().datagrams().qp_number(there));
        assert_eq!(origin, heard(&pair.c, here)[0].0, "one sender, one origin");
    }
    pair.until("all have ended", |p| sent(&p.c, here).len() == sizes.len() && sent(&p.s, there).len() == sizes.len());
    for probe in [sent(&pair.c, here), sent(&pair.s, there)] {
        assert!(probe.iter().enumerate().all(|(nth, end)| *end == (nth as u64, Outcome::Sent)), "{probe:?}");
    }
    let stats = pair.client.stats();
    assert_eq!(
        (stats.messages.datagrams_sent, stats.messages.datagrams_received),
        (sizes.len() as u64, sizes.len() as u64)
    );
    finish(pair);
}

/// A datagram that finds no posted receive is lost, which must cause no error. Later datagrams must arrive.
pub fn what_finds_no_receive_is_lost(setup: &Setup) {
    let Some(mut pair) = datagrams(setup, Probe::default(), Probe::default()) else { return };
    let options = EndpointOptions::new().receive_depth(4);
    let (there, here, peer) = acquainted(&mut pair, setup, options);
    for nth in 0..60u8 {
        pair.client.context().datagrams().send(here, peer, &[nth; 100]).expect("there is room");
    }
    // The server takes no turns during this loop, so its receives are used up.
    while sent(&pair.c, here).len() < 60 {
        pair.client.turn(&mut pair.c, Duration::from_millis(10)).expect("the client's turn");
    }
    assert!(sent(&pair.c, here).iter().all(|(_, outcome)| outcome.is_sent()), "nobody says that it was lost");
    pair.client.context().datagrams().send(here, peer, b"the last").expect("there is room");
    pair.until("a late one arrives", |p| {
        // Only the first four datagrams are certain to have a receive. The datagram `the last` may be lost like the ones before it.
        heard(&p.s, there).len() >= 4
    });
    let first: Vec<_> = heard(&pair.s, there).iter().map(|(_, bytes, _)| bytes.to_vec()).collect();
    assert_eq!(first[..4], [[0; 100], [1; 100], [2; 100], [3; 100]], "what had a receive");
    pair.client.context().datagrams().send(here, peer, b"again").expect("there is room");
    pair.until("it goes on", |p| heard(&p.s, there).iter().any(|(_, bytes, _)| *bytes == b"again"));
    assert!(heard(&pair.s, there).len() < 60, "nothing was lost");
    finish(pair);
}

/// After a refused datagram, `on_datagram_writable` must be called exactly once.
pub fn a_full_send_queue_says_so_once(setup: &Setup) {
    let Some(mut pair) = datagrams(setup, Probe::default(), Probe::default()) else { return };
    let (there, here, peer) = acquainted(&mut pair, setup, EndpointOptions::new().send_depth(4));
    let writable = |p: &Pair| p.c.count(|event| *event == Event::DatagramWritable(here));
    for round in 1..=3 {
        let mut cx = pair.client.context();
        for nth in 0..4u8 {
            cx.datagrams().send(here, peer, &[nth]).expect("there is room");
        }
        for _ in 0..3 {
            assert_eq!(cx.datagrams().send(here, peer, b"more"), Err(SendErrorKind::WouldBlock(Blocked::Queue)));
        }
        pair.until("there is room again", |p| writable(p) == round);
        pair.until("all have ended", |p| sent(&p.c, here).len() == 4 * round);
        pair.until("all have come", |p| heard(&p.s, there).len() == 4 * round);
        assert_eq!(writable(&pair), round);
    }
    finish(pair);
}

/// The lookup of an address without an endpoint must be refused. Closing an endpoint must cancel its lookups.
pub fn nobody_there_is_said(setup: &Setup) {
    let Some(mut pair) = datagrams(setup, Probe::default(), Probe::default()) else { return };
    let here = open(&mut pair.client, setup, EndpointOptions::new());
    let nobody = SocketAddr::new(setup.address.ip(), 9);
    pair.client.context().datagrams().find_peer(here, nobody).expect("asking");
    pair.until("an answer", |p| found(&p.c, here).is_some());
    assert_eq!(found(&pair.c, here), Some(Err(ConnectError::Transport(ConnectFailure::Refused))));
    let there = open(&mut pair.server, setup, EndpointOptions::new());
    let address = pair.server.context().datagrams().address(there).expect("it is open");
    pair.c.events.clear();
    for _ in 0..3 {
        pair.client.context().datagrams().find_peer(here, address).expect("asking");
    }
    pair.client.context().datagrams().close(here);
    pair.until("closed", |p| closed(&p.c, here) == 1);
    let cancelled = Event::Peer(here, address, Err(ConnectError::Cancelled));
    assert_eq!(pair.c.events[..3], [cancelled.clone(), cancelled.clone(), cancelled]);
    assert_eq!(pair.c.events[3..], [Event::EndpointClosed(here, DisconnectReason::Local { complete: true })]);
    finish(pair);
}

/// A member of a group must receive the group's datagrams. After it has left the group, it must receive none.
pub fn groups_reach_their_members(setup: &Setup) {
    let Some(mut pair) = datagrams(setup, Probe::default(), Probe::default()) else { return };
    let group = group(31);
    let members = [(); 2].map(|()| open(&mut pair.server, setup, EndpointOptions::new()));
    let sender = open(&mut pair.client, setup, EndpointOptions::new());
    for member in members {
        pair.server.context().datagrams().join(member, group).expect("joining");
        assert!(pair.server.context().datagrams().join(member, group).is_err(), "it is joining already");
    }
    pair.client.context().datagrams().join(sender, group).expect("joining");
    pair.until("all are in the group", |p| {
        members.iter().all(|member| joined(&p.s, *member).is_some()) && joined(&p.c, sender).is_some()
    });
    let peer = joined(&pair.c, sender).expect("it has joined");
    for round in 0..20 {
        pair.client.context().datagrams().send(sender, peer, &pattern(round, 200)).expect("there is room");
        for member in members {
            pair.until("every member hears", |p| heard(&p.s, member).len() == round + 1);
            assert_eq!(heard(&pair.s, member)[round].1, pattern(round, 200));
        }
    }
    // The program cannot answer to the origin of a datagram that was sent to a group.
    let origin = heard(&pair.s, members[0])[0].0;
    assert!(pair.server.context().datagrams().peer_of(members[0], &origin).is_err());
    pair.server.context().datagrams().leave(members[0], group).expect("leaving");
    assert!(pair.server.context().datagrams().leave(members[0], group).is_err(), "it has left");
    for round in 20..40 {
        pair.client.context().datagrams().send(sender, peer, &pattern(round, 200)).expect("there is room");
        pair.until("the remaining member receives it", |p| heard(&p.s, members[1]).len() == round + 1);
    }
    assert_eq!(heard(&pair.s, members[0]).len(), 20, "the member that has left does not");
    pair.client.context().datagrams().leave(sender, group).expect("leaving");
    assert_eq!(pair.client.context().datagrams().send(sender, peer, b"late"), Err(SendErrorKind::NoPeer));
    // The endpoint joins the group again.
    pair.server.context().datagrams().join(members[0], group).expect("joining again");
    pair.until("it is back", |p| p.s.count(|e| matches!(e, Event::Join(id, _, Ok(_)) if *id == members[0])) == 2);
    finish(pair);
}

/// A handler may close an endpoint in every callback. After such a close, the accepted datagrams must still be sent, and
/// `on_endpoint_closed` must be called once.
pub fn endpoints_close_in_every_callback(setup: &Setup) {
    for when in 0..3 {
        let close = move |cx: &mut rdma_reactor::Context<'_>, event: &Event| match (when, event) {
            (0, Event::Peer(endpoint, _, Ok(peer))) => {
                for nth in 0..10u8 {
                    cx.datagrams().send(*endpoint, *peer, &[nth]).expect("there is room");
                }
                cx.datagrams().close(*endpoint);
                assert_eq!(cx.datagrams().send(*endpoint, *peer, b"late"), Err(SendErrorKind::Closed));
            }
            (1, Event::DatagramSent(endpoint, ..)) | (2, Event::Join(endpoint, ..)) => cx.datagrams().close(*endpoint),
            _ => {}
        };
        let Some(mut pair) = datagrams(setup, Probe::default(), Probe::new(close)) else { return };
        let there = open(&mut pair.server, setup, EndpointOptions::new());
        let here = open(&mut pair.client, setup, EndpointOptions::new());
        let address = pair.server.context().datagrams().address(there).expect("it is open");
        pair.client.context().datagrams().join(here, group(32)).expect("joining");
        pair.client.context().datagrams().find_peer(here, address).expect("asking");
        if when == 1 {
            pair.until("the peer is found", |p| found(&p.c, here).is_some());
            let peer = found(&pair.c, here).expect("an answer").expect("a peer");
            for nth in 0..10u8 {
                pair.client.context().datagrams().send(here, peer, &[nth]).expect("there is room");
            }
        }
        pair.until("it closes", |p| closed(&p.c, here) == 1);
        assert_eq!(
            pair.c.events.last(),
            Some(&Event::EndpointClosed(here, DisconnectReason::Local { complete: true }))
        );
        let expected = if when < 2 { 10 } else { 0 };
        assert_eq!(sent(&pair.c, here).len(), expected);
        assert!(sent(&pair.c, here).iter().all(|(_, outcome)| outcome.is_sent()));
        pair.until("the accepted datagrams have arrived", |p| heard(&p.s, there).len() == expected);
        assert_eq!(pair.client.context().datagrams().address(here), None, "the id is stale");
        // Dropping the reactors must release all objects that remain.
        let Pair { server, client, .. } = pair;
        drop((server, client));
    }
}

/// When a timer closes an endpoint, the last datagram of the endpoint is not posted yet. The endpoint must end when that datagram is sent,
/// and not at the end of `Timeouts::close`.
pub fn a_closed_endpoint_ends_with_its_last_send(setup: &Setup) {
    let known = Rc::new(RefCell::new(None::<(EndpointId, PeerId)>));
    let in_timer = Rc::clone(&known);
    let close = move |cx: &mut rdma_reactor::Context<'_>, event: &Event| {
        if let (Event::Timer(_), Some((endpoint, peer))) = (event, *in_timer.borrow()) {
            cx.datagrams().send(endpoint, peer, b"the last one").expect("there is room");
            cx.datagrams().close(endpoint);
        }
    };
    let Some(mut pair) = datagrams_with(setup, LONG, Probe::default(), Probe::new(close)) else { return };
    let (there, here, peer) = acquainted(&mut pair, setup, EndpointOptions::new());
    *known.borrow_mut() = Some((here, peer));
    pair.client.context().timers().set(Duration::ZERO, 0);
    pair.until("it closes", |p| closed(&p.c, here) == 1);
    assert_eq!(sent(&pair.c, here), [(0, Outcome::Sent)]);
    pair.until("the last datagram has arrived", |p| heard(&p.s, there).len() == 1);
    finish(pair);
}

/// Sends ten datagrams. No reactor takes a turn during this call.
fn ten(reactor: &mut Reactor, from: EndpointId, to: PeerId) {
    for nth in 0..10u8 {
        reactor.context().datagrams().send(from, to, &[nth]).expect("there is room");
    }
}

/// When a reactor is drained or shut down, it must send the datagrams that its endpoints have accepted, then close the endpoints, and
/// then end.
pub fn endpoints_are_drained_and_shut_down(setup: &Setup) {
    for drain in [true, false] {
        let Some(mut pair) = datagrams(setup, Probe::default(), Probe::default()) else { return };
        let (there, here, peer) = acquainted(&mut pair, setup, EndpointOptions::new());
        pair.client.context().datagrams().join(here, group(35)).expect("joining");
        pair.until("it has joined", |p| joined(&p.c, here).is_some());
        let idle = open(&mut pair.client, setup, EndpointOptions::new());
        ten(&mut pair.client, here, peer);
        if drain {
            pair.client.context().drain(LONG);
            pair.client.run(&mut pair.c).expect("it ends");
            assert!(pair.client.is_drained());
            let late = pair.client.context().datagrams().open(setup.address, EndpointOptions::new());
            assert!(matches!(late, Err(Error::Drained)), "{late:?}");
        } else {
            pair.client.shutdown(&mut pair.c, LONG).expect("it ends");
        }
        assert!(sent(&pair.c, here).iter().map(|(_, outcome)| *outcome).eq([Outcome::Sent; 10]), "{:?}", pair.c);
        for endpoint in [here, idle] {
            assert_eq!(closed(&pair.c, endpoint), 1);
            assert_eq!(pair.client.context().datagrams().address(endpoint), None, "the id is stale");
        }
        assert_eq!(pair.client.pool_levels().0, pair.client.pool_levels().1, "all buffers are home");
        pair.until("the accepted datagrams have arrived", |p| heard(&p.s, there).len() == 10);
        finish(pair);
    }
}

/// A handler that closes no endpoint during a drain. For each endpoint that the drain closes, the handler tries to open another one. The
/// reactor must refuse to open it.
#[derive(Default)]
struct Stays {
    address: Option<SocketAddr>,
    closed: Vec<EndpointId>,
}

impl Handler for Stays {
    fn on_drain(&mut self, _: &mut Context<'_>, _: Duration) {}

    fn datagrams(&mut self) -> Option<&mut dyn DatagramHandler> {
        Some(self)
    }
}

impl DatagramHandler for Stays {
    fn on_endpoint_closed(&mut self, cx: &mut Context<'_>, endpoint: EndpointId, reason: DisconnectReason) {
        assert!(matches!(reason, DisconnectReason::Local { .. }), "{reason:?}");
        self.closed.push(endpoint);
        let another = cx.datagrams().open(self.address.expect("it is set"), EndpointOptions::new());
        assert!(matches!(another, Err(Error::Drained)), "{another:?}");
    }
}

/// If a handler leaves endpoints open during a drain, the reactor must close them at the drain's deadline. A draining reactor must open no
/// new endpoint.
pub fn endpoints_end_at_the_deadline_of_a_drain(setup: &Setup) {
    let Some(mut pair) = datagrams(setup, Probe::default(), Probe::default()) else { return };
    let mut endpoints = [(); 3].map(|()| open(&mut pair.client, setup, EndpointOptions::new()));
    let (start, deadline) = (now(), Duration::from_millis(100));
    let mut stays = Stays { address: Some(setup.address), ..Stays::default() };
    pair.client.context().drain(deadline);
    pair.client.run(&mut stays).expect("it ends");
    assert!(now() - start >= deadline, "{:?}", now() - start);
    stays.closed.sort();
    endpoints.sort();
    assert_eq!(stays.closed, endpoints);
    finish(pair);
}

/// When one reactor of a group is drained, its endpoints close. The other reactors must keep their endpoints until they are drained
/// too.
#[allow(clippy::disallowed_methods, reason = "a thread for each reactor")]
pub fn endpoints_of_a_group_are_drained(setup: &Setup) {
    let Some(mut pair) = datagrams(setup, Probe::default(), Probe::default()) else { return };
    let mut reactors: Vec<_> = (0..3).map(|_| Reactor::new(setup.config()).expect("a reactor")).collect();
    let group = Reactors::of(&mut reactors);
    let endpoints: Vec<_> = reactors.iter_mut().map(|r| open(r, setup, EndpointOptions::new())).collect();
    let address = |(r, id): (&mut Reactor, &EndpointId)| r.context().datagrams().address(*id).expect("it is open");
    let addresses: Vec<_> = reactors.iter_mut().zip(&endpoints).map(address).collect();
    let run = |(mut reactor, endpoint): (Reactor, EndpointId)| {
        thread::spawn(move || {
            // Recorded events cannot be shared between threads, so each thread has its own probe.
            let mut echo = Probe::new(|cx, event| {
                if let Event::Datagram(endpoint, origin, bytes, _) = event {
                    let peer = cx.datagrams().peer_of(*endpoint, origin).expect("a way back");
                    cx.datagrams().send(*endpoint, peer, bytes).expect("there is room");
                    cx.datagrams().forget_peer(peer);
                }
            });
            reactor.run(&mut echo).expect("a run");
            assert!(reactor.is_drained());
            assert_eq!(closed(&echo, endpoint), 1);
        })
    };
    let mut threads: Vec<_> = reactors.into_iter().zip(endpoints).map(run).collect();
    let here = open(&mut pair.client, setup, EndpointOptions::new());
    let mut echoes = 0;
    for drained in 0..3 {
        for address in &addresses[drained..] {
            pair.client.context().datagrams().find_peer(here, *address).expect("asking");
            pair.until("the peer is found", |p| found(&p.c, here).is_some());
            let peer = found(&pair.c, here).expect("an answer").expect("a peer");
            pair.c.events.retain(|event| !matches!(event, Event::Peer(..)));
            pair.client.context().datagrams().send(here, peer, b"still there?").expect("there is room");
            echoes += 1;
            pair.until("an echo", |p| heard(&p.c, here).len() == echoes);
        }
        group.drain(drained, LONG);
        let gone = threads.remove(0);
        pair.until("it ends", |_| gone.is_finished());
        gone.join().expect("a reactor");
        assert_eq!(group.load(drained), None);
    }
    finish(pair);
}

/// Invalid arguments must be refused with a reason.
pub fn careless_datagrams_are_refused(setup: &Setup) {
    let Some(mut pair) = datagrams(setup, Probe::default(), Probe::default()) else { return };
    let mut cx = pair.client.context();
    for options in [EndpointOptions::new().receive_depth(0), EndpointOptions::new().send_depth(16_385)] {
        let refused = cx.datagrams().open(setup.address, options).expect_err("a depth out of range").to_string();
        assert!(refused.contains("it must be 1 to 16,384"), "{refused}");
    }
    let refused = cx.datagrams().open(SocketAddr::from(([0, 0, 0, 0], 0)), EndpointOptions::new());
    let refused = refused.expect_err("the address of no device").to_string();
    assert!(refused.contains("datagrams need the address of a device"), "{refused}");
    let (there, here, peer) = acquainted(&mut pair, setup, EndpointOptions::new());
    let address = pair.server.context().datagrams().address(there).expect("it is open");
    let mut cx = pair.client.context();
    assert!(cx.datagrams().open(address, EndpointOptions::new()).is_err(), "the address is in use");
    let max = cx.datagrams().max_datagram(here).expect("it is open");
    let long = vec![0; max + 1];
    assert_eq!(cx.datagrams().send(here, peer, &long), Err(SendErrorKind::TooLong { len: max + 1, max }));
    // A peer can be used only with the endpoint that has looked it up.
    let other = cx.datagrams().open(setup.address, EndpointOptions::new()).expect("another endpoint");
    assert_eq!(cx.datagrams().send(other, peer, b"not yours"), Err(SendErrorKind::NoPeer));
    assert!(cx.datagrams().leave(here, group(33)).is_err(), "not in that group");
    cx.datagrams().close(other);
    assert_eq!(cx.datagrams().send(other, peer, b"closed"), Err(SendErrorKind::Closed));
    assert!(
        cx.datagrams().find_peer(other, address).is_err() && cx.datagrams().join(other, setup.address.ip()).is_err()
    );
    // The refusals must have no effect on later calls.
    cx.datagrams().send(here, peer, &long[..max]).expect("there is room");
    pair.until("it arrives", |p| heard(&p.s, there).len() == 1);
    finish(pair);
}

/// With `Config::allowed_peers`, a host outside of the allowed networks must not learn a queue pair
/// by a lookup, and its datagrams must not be delivered. The endpoint itself may still look up such
/// hosts.
pub fn other_networks_are_not_heard(setup: &Setup) {
    const DEPTH: u32 = 4;
    let Some(pair) = datagrams(setup, Probe::default(), Probe::default()) else { return };
    finish(pair);
    let networks = |text: &str| Some(vec![text.parse().expect("a network")]);
    let client = setup.config().timeouts(|t| t.connect = Duration::from_secs(10));
    // The embedded provider drops packets of other networks itself. Here it admits all of them, so that the reactor has to drop them, as on
    // a device.
    let all = if setup.address.is_ipv4() { "0.0.0.0/0" } else { "::/0" };
    let server = setup.config().allowed_peers(networks("192.0.2.0/24")).iwarp(|i| i.allowed_peers = networks(all));
    let mut pair = Pair::with_configs(setup, server, client, Probe::default(), Probe::default());
    let there = open(&mut pair.server, setup, EndpointOptions::new().receive_depth(DEPTH));
    let here = open(&mut pair.client, setup, EndpointOptions::new());
    let address = pair.server.context().datagrams().address(there).expect("it is open");
    pair.client.context().datagrams().find_peer(here, address).expect("asking");
    pair.until("the lookup ends", |p| found(&p.c, here).is_some());
    assert!(found(&pair.c, here).is_some_and(|found| found.is_err()), "{:?}", pair.c);
    // The server's endpoint sends first, so that the client has a way back without a lookup.
    let address = pair.client.context().datagrams().address(here).expect("it is open");
    pair.server.context().datagrams().find_peer(there, address).expect("asking");
    pair.until("the peer is found", |p| found(&p.s, there).is_some());
    let peer = found(&pair.s, there).expect("an answer").expect("a peer");
    pair.server.context().datagrams().send(there, peer, b"who is there?").expect("there is room");
    pair.until("it arrives", |p| heard(&p.c, here).len() == 1 && sent(&p.s, there).len() == 1);
    let origin = heard(&pair.c, here)[0].0;
    let back = pair.client.context().datagrams().peer_of(here, &origin).expect("a way back");
    // These are more datagrams than the endpoint has receives, so the buffers of dropped datagrams must be posted again.
    let before = pair.server.stats().completions.polled;
    for nth in 1..=u64::from(3 * DEPTH) {
        pair.client.context().datagrams().send(here, back, b"a stranger").expect("there is room");
        pair.until("it is received", |p| p.server.stats().completions.polled >= before + nth);
    }
    pair.turn();
    assert!(heard(&pair.s, there).is_empty(), "{:?}", pair.s);
    assert_eq!(pair.server.stats().messages.datagrams_received, 0);
    finish(pair);
}

/// One endpoint must be able to answer many others, each by its origin.
pub fn one_endpoint_hears_many(setup: &Setup) {
    const MANY: usize = 16;
    const ROUNDS: u8 = 20;
    let known: Rc<RefCell<BTreeMap<Origin, PeerId>>> = Rc::default();
    let peers = Rc::clone(&known);
    let echo = Probe::new(move |cx, event| {
        if let Event::Datagram(endpoint, origin, bytes, _) = event {
            let mut peers = peers.borrow_mut();
            let peer =
                *peers.entry(*origin).or_insert_with(|| cx.datagrams().peer_of(*endpoint, origin).expect("a way back"));
            cx.datagrams().send(*endpoint, peer, bytes).expect("there is room");
        }
    });
    let Some(mut pair) = datagrams(setup, echo, Probe::default()) else { return };
    let there = open(&mut pair.server, setup, EndpointOptions::new());
    let address = pair.server.context().datagrams().address(there).expect("it is open");
    let many: Vec<_> = (0..MANY).map(|_| open(&mut pair.client, setup, EndpointOptions::new())).collect();
    for here in &many {
        pair.client.context().datagrams().find_peer(*here, address).expect("asking");
    }
    pair.until("all have found it", |p| many.iter().all(|here| found(&p.c, *here).is_some()));
    for round in 0..ROUNDS {
        for (nth, here) in many.iter().enumerate() {
            let peer = found(&pair.c, *here).expect("an answer").expect("a peer");
            pair.client.context().datagrams().send(*here, peer, &[nth as u8, round]).expect("there is room");
        }
        pair.until("each has its answer", |p| many.iter().all(|h| heard(&p.c, *h).len() == usize::from(round) + 1));
        for (nth, here) in many.iter().enumerate() {
            assert_eq!(heard(&pair.c, *here)[usize::from(round)].1, [nth as u8, round]);
        }
    }
    assert_eq!(known.borrow().len(), MANY);
    finish(pair);
}
