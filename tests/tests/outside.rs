//! Compiles `aio`, `broadcast`, `call` and `stream` as a part of this crate, where only the public API of the reactor is visible. So a user
//! could have written these modules. The check is that they compile.
#![allow(dead_code, missing_docs, unreachable_pub, unused_imports, reason = "nothing here is used or published")]
#![allow(unexpected_cfgs, reason = "features of the reactor: what they add is left out here")]

extern crate futures_util as futures_io;

use rdma_reactor::*;
use rdma_transport::planted;

#[path = "../../reactor/src/aio/mod.rs"]
mod aio;
// Constants only.
#[path = "../../reactor/src/approval.rs"]
mod approval;
#[path = "../../reactor/src/broadcast/mod.rs"]
mod broadcast;
#[path = "../../reactor/src/call/mod.rs"]
mod call;
#[path = "../../reactor/src/stream/mod.rs"]
mod stream;

/// A program drives a reactor by the parts of a turn, as `aio` does: it waits for the reactor's descriptor itself.
mod turns {
    use std::os::fd::AsRawFd;
    use std::time::Duration;

    use mio::unix::SourceFd;
    use mio::{Events, Interest, Poll, Token};
    use rdma_reactor::{
        Access, Blocked, Config, ConnectionId, Context, DetachedMessage, Handler, Message, ProviderChoice, Reactor,
        Reactors, RegionOptions, SendErrorKind, Transfer, TransferEnd, TransferId, TransferOptions, TransferOutcome,
        Wait,
    };
    use rdma_reactor_tests::patience::patient;

    const ECHOES: usize = 20;

    /// A program that counts messages, and echoes those of accepted connections. It records the ends of transfers.
    #[derive(Default)]
    struct Program {
        conn: Option<ConnectionId>,
        received: usize,
        transferred: Vec<(TransferId, TransferOutcome)>,
    }

    impl Handler for Program {
        fn on_connect(&mut self, _: &mut Context<'_>, conn: ConnectionId) {
            self.conn = Some(conn);
        }

        fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
            self.received += 1;
            if cx.connection(conn).listener().is_some() {
                cx.send(conn, &message).expect("room");
            }
        }

        fn on_transfer(&mut self, _: &mut Context<'_>, _: ConnectionId, transfer: TransferId, end: TransferEnd) {
            self.transferred.push((transfer, end.outcome));
        }
    }

    /// A program that keeps each message that it receives.
    #[derive(Default)]
    struct Keeper(Vec<DetachedMessage>);

    impl Handler for Keeper {
        fn on_recv(&mut self, _: &mut Context<'_>, _: ConnectionId, message: Message<'_>) {
            self.0.push(message.detach());
        }
    }

    fn reactor() -> Reactor {
        Reactor::new(patient(Config::default()).provider(ProviderChoice::Iwarp).wait(Wait::Event)).expect("a reactor")
    }

    /// Returns a function that returns true if a loop that waits for the reactor's descriptor was
    /// woken since the previous call.
    fn outer_loop(reactor: &Reactor) -> impl FnMut() -> bool + use<> {
        let mut outer = Poll::new().expect("a poller");
        let descriptor = reactor.as_raw_fd();
        outer.registry().register(&mut SourceFd(&descriptor), Token(0), Interest::READABLE).expect("a descriptor");
        move || {
            let mut events = Events::with_capacity(1);
            outer.poll(&mut events, Some(Duration::ZERO)).expect("a poll");
            !events.is_empty()
        }
    }

    /// Connects the reactor of a client to that of a server, each with its handler. Returns the id of the connection on the client.
    fn connect(
        (server, echo): (&mut Reactor, &mut dyn Handler),
        (client, program): (&mut Reactor, &mut Program),
    ) -> ConnectionId {
        let listener = server.context().listen(([127, 0, 0, 1], 0).into()).expect("a port");
        let address = server.context().listeners().local_address(listener).expect("it listens");
        client.context().connect(address).expect("an attempt");
        loop {
            server.turn(&mut *echo, Duration::ZERO).expect("a turn");
            client.turn(program, Duration::ZERO).expect("a turn");
            if let Some(conn) = program.conn.filter(|_| server.stats().connections.connected == 1) {
                return conn;
            }
        }
    }

    #[test]
    fn an_open_turn_does_not_ring_and_a_closed_one_does() {
        let (mut reactor, mut program) = (reactor(), Program::default());
        let mut rings = outer_loop(&reactor);
        while reactor.turn(&mut program, Duration::ZERO).expect("a turn").more {}
        rings();
        let hour = Duration::from_secs(3600);
        reactor.step(&mut program, Duration::ZERO).expect("a turn");
        reactor.context().timers().set(hour, 0);
        assert!(!rings());
        let turn = reactor.resume(&mut program).expect("its rest");
        let turn = reactor.arm(turn).expect("its end");
        assert!(!turn.more && !rings());
        reactor.context().timers().set(hour, 0);
        assert!(rings());
    }

    /// A transfer waits for a credit for its message. When a call outside of a turn cancels it, the next turn reports its end. So the
    /// call must make the descriptor readable.
    #[test]
    fn a_transfer_that_is_cancelled_outside_of_a_turn_rings() {
        let (mut server, mut client) = (reactor(), reactor());
        let (mut echo, mut program) = (Program::default(), Program::default());
        let mut rings = outer_loop(&client);
        let conn = connect((&mut server, &mut echo), (&mut client, &mut program));
        // The server takes no more turns, so it grants no more credits.
        let refused = loop {
            let sent = client.context().send(conn, b"x");
            client.turn(&mut program, Duration::ZERO).expect("a turn");
            if let Err(refused) = sent {
                break refused;
            }
        };
        assert_eq!(refused, SendErrorKind::WouldBlock(Blocked::Window));
        let options = TransferOptions::within(Duration::from_secs(3600)).message(b"never");
        let transfer = client.context().remote(conn).transfer(Transfer::Write(&[]), Vec::new(), &options);
        let transfer = transfer.expect("it is open");
        while client.turn(&mut program, Duration::ZERO).expect("a turn").more || rings() {}
        assert!(program.transferred.is_empty(), "there is no credit for its message");
        assert!(client.context().remote(conn).cancel_transfer(transfer));
        assert!(rings(), "nothing wakes the loop that waits for the descriptor");
        client.turn(&mut program, Duration::ZERO).expect("a turn");
        assert_eq!(program.transferred, [(transfer, TransferOutcome::Cancelled)]);
    }

    /// The program keeps all messages, so its peer has no credits left. When calls outside of a turn release the messages, the next turn
    /// posts their receives, and grants them to the peer. So the calls must make the descriptor readable.
    #[test]
    fn messages_that_are_released_outside_of_a_turn_ring() {
        let (mut server, mut client) = (reactor(), reactor());
        let (mut keeper, mut program) = (Keeper::default(), Program::default());
        let mut rings = outer_loop(&server);
        let conn = connect((&mut server, &mut keeper), (&mut client, &mut program));
        // The server takes no turns now, so it grants no credits.
        let mut sent = 0;
        while client.context().send(conn, b"x").is_ok() {
            client.turn(&mut program, Duration::ZERO).expect("a turn");
            sent += 1;
        }
        while keeper.0.len() < sent {
            server.turn(&mut keeper, Duration::ZERO).expect("a turn");
            client.turn(&mut program, Duration::ZERO).expect("a turn");
        }
        while server.turn(&mut keeper, Duration::ZERO).expect("a turn").more || rings() {}
        for message in keeper.0.drain(..) {
            server.context().release(message);
        }
        assert!(rings(), "nothing wakes the loop that waits for the descriptor");
    }

    /// A cork holds a send back, and a large send is refused. A refusal ends the effect of the cork, so the next turn posts the held send.
    /// So the call that is refused outside of a turn must make the descriptor readable.
    #[test]
    fn a_large_send_that_is_refused_on_a_corked_connection_rings() {
        let (mut server, mut client) = (reactor(), reactor());
        let (mut echo, mut program) = (Program::default(), Program::default());
        let mut rings = outer_loop(&client);
        let conn = connect((&mut server, &mut echo), (&mut client, &mut program));
        // Messages of this length are not sent in several buffers, but fetched by the peer. The
        // server takes no more turns, so it fetches none of them.
        let large = vec![7; 300 << 10];
        while client.context().connection(conn).writable_for(large.len()) {
            client.context().send(conn, &large).expect("room");
            client.turn(&mut program, Duration::ZERO).expect("a turn");
        }
        client.context().cork(conn);
        client.context().send(conn, b"x").expect("room");
        while client.turn(&mut program, Duration::ZERO).expect("a turn").more || rings() {}
        let refused = client.context().send(conn, &large);
        assert_eq!(refused, Err(SendErrorKind::WouldBlock(Blocked::Transfers)));
        assert!(rings(), "nothing wakes the loop that waits for the descriptor");
    }

    /// The drain of a reactor that listens does not end while another reactor of its group accepts connections. When a call outside of a
    /// turn closes the listener, the next turn ends the drain. So the call must make the descriptor readable.
    #[test]
    fn a_listener_that_is_closed_outside_of_a_turn_ends_a_drain() {
        let (mut reactors, mut program) = ([reactor(), reactor()], Program::default());
        let _group = Reactors::of(&mut reactors);
        let listens = &mut reactors[0];
        let mut rings = outer_loop(listens);
        let listener = listens.context().listen(([127, 0, 0, 1], 0).into()).expect("a port");
        listens.context().drain(Duration::from_secs(3600));
        while listens.turn(&mut program, Duration::ZERO).expect("a turn").more || rings() {}
        assert!(listens.is_draining() && !listens.is_drained(), "it listens for the other one");
        listens.context().listeners().close(listener);
        assert!(rings(), "nothing wakes the loop that waits for the descriptor");
        listens.turn(&mut program, Duration::ZERO).expect("a turn");
        assert!(listens.is_drained());
    }

    /// The end of a region's lifetime is a deadline of the reactor. If the region is registered outside of a turn, the loop may be waiting
    /// for a later deadline. So the registration must make the descriptor readable.
    #[test]
    fn a_lifetime_that_begins_outside_of_a_turn_rings() {
        let (mut reactor, mut program) = (reactor(), Program::default());
        let mut rings = outer_loop(&reactor);
        let options = RegionOptions::new().allow(Access::REMOTE_READ).any_peer();
        let _without = reactor.context().regions().register_at([127, 0, 0, 1].into(), 64, &options).expect("a region");
        while reactor.turn(&mut program, Duration::ZERO).expect("a turn").more || rings() {}
        let options = options.lifetime(Duration::from_secs(3600));
        let _with = reactor.context().regions().register_at([127, 0, 0, 1].into(), 64, &options).expect("a region");
        assert!(rings(), "nothing wakes the loop that waits for a later deadline");
    }

    #[test]
    fn a_resumed_turn_posts_what_was_asked_for() {
        let (mut server, mut client) = (reactor(), reactor());
        let (mut echo, mut program) = (Program::default(), Program::default());
        let listener = server.context().listen(([127, 0, 0, 1], 0).into()).expect("a port");
        let address = server.context().listeners().local_address(listener).expect("it listens");
        client.context().connect(address).expect("an attempt");
        let mut sent = 0;
        while program.received < ECHOES {
            server.turn(&mut echo, Duration::ZERO).expect("a turn");
            client.step(&mut program, Duration::ZERO).expect("a turn");
            let posts = client.stats().messages.doorbells;
            let sends = sent == program.received;
            if let Some(conn) = program.conn.filter(|_| sends) {
                client.context().send(conn, b"x").expect("room");
                sent += 1;
                assert_eq!(client.stats().messages.doorbells, posts, "it is posted with others");
            }
            let turn = client.resume(&mut program).expect("the rest");
            if program.conn.is_some() && sends {
                assert!(client.stats().messages.doorbells > posts);
            }
            client.arm(turn).expect("the end");
        }
    }
}
