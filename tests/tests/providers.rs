//! Reactors with several providers: which one carries each connection and each listener.

use std::time::Duration;

use rdma_reactor::transport::cm::Source;
use rdma_reactor::{Config, ConnectOptions, Error, Parts, Reactor};
use rdma_reactor_tests::auto::{IN_PROCESS, each_where_it_belongs, with_loopback};
use rdma_reactor_tests::conformance::harness::{Event, Pair, Probe, Setup, with_watchdog};
use rdma_reactor_tests::forward::Forward;
use rdma_reactor_tests::gate::{Gate, Unresolved};
use rdma_reactor_tests::patience::patient;

/// Returns a server with one provider, and a client with three. For a loopback address, the client tries its last provider first.
fn pair(config: Config) -> (Pair, [Gate; 3]) {
    let mut p = Pair::new(&Setup::iwarp(), Setup::iwarp().config(), Probe::echo(), Probe::default());
    let gates: [Gate; 3] = Default::default();
    p.client = Forward::reactor_on_each(config, &gates);
    (p, gates)
}

fn ids(gates: &[Gate; 3]) -> [i64; 3] {
    [0, 1, 2].map(|nth| gates[nth].objects().ids)
}

/// A connection uses the first provider that resolves the peer's address. Providers that were tried earlier keep no state, whether they
/// have reported an error or have reported nothing for `Timeouts::resolve`.
#[test]
fn a_connection_goes_over_the_first_provider_that_leads_there() {
    with_watchdog("a_connection_goes_over_the_first_provider_that_leads_there", || {
        let config = patient(Setup::iwarp().config()).timeouts(|t| t.resolve = Duration::from_millis(20));
        let (mut p, gates) = pair(config);
        assert_eq!(p.client.provider_name(), "forward+forward+forward", "none was used");
        for (first, second, expected) in [
            (None, None, 2),
            (Some(Unresolved::Failed), None, 1),
            (Some(Unresolved::Silent), None, 1),
            (Some(Unresolved::Failed), Some(Unresolved::Silent), 0),
            (Some(Unresolved::Silent), Some(Unresolved::Failed), 0),
        ] {
            let before = ids(&gates);
            for (gate, how) in [(&gates[2], first), (&gates[1], second)] {
                how.into_iter().for_each(|how| gate.leave_unresolved(how));
            }
            let conn = p.connect();
            let on = p.client.context().connection(conn).device().expect("a device").to_owned();
            assert_eq!(on, format!("forward{expected}"), "{first:?}, {second:?}");
            let mut after = before;
            after[expected] += 1;
            assert_eq!(ids(&gates), after, "{first:?}, {second:?}");
            let received = p.c.received;
            p.client.context().send(conn, b"there and back").expect("room");
            p.until("it is back", |p| p.c.received == received + 1);
        }
        p.finish();
        assert_eq!(ids(&gates), [0; 3]);
    });
}

/// A connect that is closed while a provider resolves the address leaves no state on any provider.
#[test]
fn an_attempt_that_is_given_up_leaves_nothing() {
    with_watchdog("an_attempt_that_is_given_up_leaves_nothing", || {
        let (mut p, gates) = pair(patient(Setup::iwarp().config()));
        gates[2].leave_unresolved(Unresolved::Silent);
        let given_up = p.client.context().connect(p.address).expect("connecting");
        for _ in 0..10 {
            p.turn();
        }
        p.client.context().close(given_up);
        p.until("the end", |p| p.client.stats().connections.current == 0);
        assert_eq!(ids(&gates), [0; 3]);
        p.finish();
    });
}

/// If no provider can resolve the peer's address, the program gets one error: that of the last provider.
#[test]
fn one_error_is_told_when_none_leads_there() {
    with_watchdog("one_error_is_told_when_none_leads_there", || {
        let (mut p, gates) = pair(patient(Setup::iwarp().config()));
        gates.iter().for_each(|gate| gate.leave_unresolved(Unresolved::Failed));
        p.client.context().connect(p.address).expect("connecting");
        p.until("the error", |p| p.c.count(|event| matches!(event, Event::ConnectError(..))) > 0);
        for _ in 0..10 {
            p.turn();
        }
        assert_eq!(p.c.count(|event| matches!(event, Event::ConnectError(..))), 1);
        assert_eq!(ids(&gates), [0; 3]);
        p.finish();
    });
}

/// A connect with a source address or a source device uses a provider that supports this choice. If no provider supports it, the connect
/// fails.
#[test]
fn a_chosen_source_is_never_ignored() {
    with_watchdog("a_chosen_source_is_never_ignored", || {
        let (mut p, gates) = pair(patient(Setup::iwarp().config()));
        for source in [Source::Address([127, 0, 0, 1].into()), Source::Device { name: "mlx5_0".into(), port: None }] {
            let options = ConnectOptions::new().source(source);
            let refused = p.client.context().connect_with(p.address, options).unwrap_err();
            assert!(refused.to_string().contains("source"), "{refused}");
        }
        assert_eq!(ids(&gates), [0; 3]);
        p.finish();
    });
}

/// A listener on a specific address is on one provider. A listener on an unspecified address is on each provider that can own the port. All
/// three providers use TCP here, so only the first one can own it.
#[test]
fn a_listener_is_on_the_providers_that_have_the_address() {
    with_watchdog("a_listener_is_on_the_providers_that_have_the_address", || {
        let (mut p, gates) = pair(patient(Setup::iwarp().config()));
        for unspecified in [false, true] {
            let address = if unspecified { [0, 0, 0, 0] } else { [127, 0, 0, 1] };
            let listener = p.client.context().listen((address, 0).into()).expect("listening");
            assert_eq!(ids(&gates), [1, 0, 0], "unspecified: {unspecified}");
            let port = p.client.context().listeners().local_address(listener).expect("an address").port();
            assert_ne!(port, 0);
            p.client.context().listeners().close(listener);
            assert_eq!(ids(&gates), [0; 3]);
        }
        p.finish();
    });
}

/// The reactor tries the program's own provider before the providers that the configuration selects. `rdma_auto.rs` tests this with
/// devices.
#[test]
fn a_provider_of_the_program_carries_what_is_its_own() {
    with_watchdog("a_provider_of_the_program_carries_what_is_its_own", || {
        let p = with_loopback(&patient(Setup::iwarp().config()));
        assert_eq!(p.server.provider_name(), "loopback+iwarp");
        let devices = [(IN_PROCESS, "loopback0".to_owned()), ([127, 0, 0, 1].into(), "iwarp0".to_owned())];
        each_where_it_belongs(p, &devices);
    });
}

/// A reactor must have one to eight providers.
#[test]
fn the_number_of_providers_is_checked() {
    let with = |count: usize| {
        let poller = Box::new(rdma_reactor::MioPoller::new().expect("a poller"));
        let net = || rdma_reactor::transport::iwarp::TcpNet::new().expect("the channels");
        let provider = |_| {
            let settings = rdma_reactor::transport::iwarp::IwarpConfig::default();
            let iwarp = rdma_reactor::transport::iwarp::Iwarp::new(settings, net(), rdma_reactor::system_entropy());
            Box::new(iwarp.expect("a provider")) as Box<dyn rdma_reactor::transport::Provider>
        };
        let providers = (0..count).map(provider).collect();
        let parts = Parts { providers, poller, clock: Box::new(rdma_reactor::SystemClock) };
        Reactor::<()>::with_parts(Config::default(), parts)
    };
    for count in [0, 9] {
        let error = with(count).expect_err("too few or too many");
        assert!(matches!(error, Error::NoProvider { .. }) && error.to_string().contains("1 to 8"), "{error}");
    }
    for count in [1, 8] {
        assert!(with(count).is_ok());
    }
}
