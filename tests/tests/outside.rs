//! Compiles `aio`, `broadcast`, `call` and `stream` as a part of this crate, where only the public API of the reactor is visible. So a user
//! could have written these modules. The check is that they compile.
#![allow(dead_code, missing_docs, unreachable_pub, unused_imports, reason = "nothing here is used or published")]
#![allow(unexpected_cfgs, reason = "features of the reactor: what they add is left out here")]

extern crate futures_util as futures_io;

use rdma_reactor::*;

#[path = "../../reactor/src/aio/mod.rs"]
mod aio;
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
    use rdma_reactor::{Config, ConnectionId, Context, Handler, Message, ProviderChoice, Reactor, Wait};

    const ECHOES: usize = 20;

    /// A program that counts messages, and echoes those of accepted connections.
    #[derive(Default)]
    struct Program {
        conn: Option<ConnectionId>,
        received: usize,
    }

    impl Handler for Program {
        fn on_connect(&mut self, _: &mut Context<'_>, conn: ConnectionId) {
            self.conn = Some(conn);
        }

        fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
            self.received += 1;
            if cx.listener(conn).is_some() {
                cx.send(conn, &message).expect("room");
            }
        }
    }

    fn reactor() -> Reactor {
        Reactor::new(Config::default().provider(ProviderChoice::Iwarp).wait(Wait::Event)).expect("a reactor")
    }

    #[test]
    fn an_open_turn_does_not_ring_and_a_closed_one_does() {
        let (mut reactor, mut program) = (reactor(), Program::default());
        let mut outer = Poll::new().expect("a poller");
        let descriptor = reactor.as_raw_fd();
        outer.registry().register(&mut SourceFd(&descriptor), Token(0), Interest::READABLE).expect("a descriptor");
        let mut rings = || {
            let mut events = Events::with_capacity(1);
            outer.poll(&mut events, Some(Duration::ZERO)).expect("a poll");
            !events.is_empty()
        };
        while reactor.turn(&mut program, Duration::ZERO).expect("a turn").more {}
        rings();
        let hour = Duration::from_secs(3600);
        reactor.step(&mut program, Duration::ZERO).expect("a turn");
        reactor.context().set_timer(hour, 0);
        assert!(!rings());
        let turn = reactor.resume(&mut program).expect("its rest");
        let turn = reactor.arm(turn).expect("its end");
        assert!(!turn.more && !rings());
        reactor.context().set_timer(hour, 0);
        assert!(rings());
    }

    #[test]
    fn a_resumed_turn_posts_what_was_asked_for() {
        let (mut server, mut client) = (reactor(), reactor());
        let (mut echo, mut program) = (Program::default(), Program::default());
        let listener = server.context().listen(([127, 0, 0, 1], 0).into()).expect("a port");
        let address = server.context().local_address(listener).expect("it listens");
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
