//! Tests of a reactor that stops using a device, because the device failed or was removed. The program still holds messages and buffers of
//! the device, and returns them later, when the device is used again with a new pool.

use std::cell::RefCell;
use std::rc::Rc;

use rdma_reactor::{
    Config, ConnectionId, Context, DetachedMessage, DisconnectReason, Handler, Message, SendBuffer, SendErrorKind,
};
use rdma_reactor_tests::gate::{Call, Failure, Gate, Said};
use rdma_reactor_tests::life;
use rdma_reactor_tests::sim::fabric::{Shared, lock};
use rdma_reactor_tests::sim::quiet::{Node, gated, network, reactor, until};
use rdma_reactor_tests::sim::tcp::address;

/// The reason why the reactor stops using its device.
#[derive(Clone, Copy, Debug)]
enum How {
    /// One call of the device fails.
    Fails,
    Removed,
}

#[derive(Debug, Default)]
struct Book {
    up: Vec<ConnectionId>,
    gone: usize,
    kept: Vec<DetachedMessage>,
    received: usize,
}

/// A program that keeps every received message.
#[derive(Clone, Debug, Default)]
struct Program(Rc<RefCell<Book>>);

impl Handler for Program {
    fn on_connect(&mut self, _: &mut Context<'_>, conn: ConnectionId) {
        self.0.borrow_mut().up.push(conn);
    }
    fn on_recv(&mut self, _: &mut Context<'_>, _: ConnectionId, message: Message<'_>) {
        let mut book = self.0.borrow_mut();
        book.received += 1;
        book.kept.push(message.detach());
    }
    fn on_disconnect(&mut self, _: &mut Context<'_>, _: ConnectionId, _: DisconnectReason) {
        self.0.borrow_mut().gone += 1;
    }
}

/// A server whose device fails or is removed, and a client.
struct World {
    fabric: Shared,
    gate: Gate,
    nodes: Vec<Node>,
    server: Program,
    client: Program,
}

impl World {
    fn new(config: Config) -> Self {
        let (fabric, gate, server, client) = (network(2), Gate::default(), Program::default(), Program::default());
        let mut nodes = vec![
            Node::new(gated(0, &fabric, &gate, config.clone()).expect("no call fails"), Box::new(server.clone())),
            Node::new(reactor(1, &fabric, config), Box::new(client.clone())),
        ];
        nodes[0].reactor.context().listen(address(0, 7471)).expect("a free port");
        Self { fabric, gate, nodes, server, client }
    }

    fn until(&mut self, what: &str, done: impl FnMut(&[Node]) -> bool) {
        until(&self.fabric, &mut self.nodes, what, done);
    }

    /// Connects the client to the server. Returns the connection's id on the server, and then that on the client.
    fn connect(&mut self) -> (ConnectionId, ConnectionId) {
        let (server, client) = (self.server.clone(), self.client.clone());
        let before = (server.0.borrow().up.len(), client.0.borrow().up.len());
        self.nodes[1].reactor.context().connect(address(0, 7471)).expect("connecting");
        self.until("a connection", |_| {
            (server.0.borrow().up.len(), client.0.borrow().up.len()) == (before.0 + 1, before.1 + 1)
        });
        (server.0.borrow().up[before.0], client.0.borrow().up[before.1])
    }

    /// Makes the server's device fail, or removes it. Runs until the reactor has released the device, and then makes the device available
    /// again.
    fn give_up(&mut self, how: How) {
        let (server, gone) = (self.server.clone(), self.server.0.borrow().up.len());
        match how {
            How::Removed => self.gate.say(Said::Removal),
            How::Fails => {
                let polled = self.gate.counts().get(&Call::PollCq).copied().unwrap_or(0);
                self.gate.fail_nth(Call::PollCq, polled, Failure::Errno(libc::EIO));
            }
        }
        lock(&self.fabric).ring(0);
        self.until("the end", |_| server.0.borrow().gone == gone);
        // The reactor destroys the last connection-manager id of the device. This makes the connection-manager channel readable, which
        // `ring` simulates.
        lock(&self.fabric).ring(0);
        let gate = self.gate.clone();
        self.until("the device is given up", |_| gate.objects().completion_queues == 0);
        self.gate.heal();
        self.gate.plug_in();
        // A listener whose device was removed is created again within a second. The test waits for two.
        let calm = lock(&self.fabric).now() + 2_000_000_000;
        let fabric = self.fabric.clone();
        self.until("a listener", |_| lock(&fabric).now() > calm);
    }

    fn buffers(&mut self, conn: ConnectionId, count: usize) -> Vec<SendBuffer> {
        (0..count).map(|_| self.nodes[0].reactor.context().buffer(conn).expect("memory")).collect()
    }

    /// Runs turns for 10 ms of virtual time.
    fn settle(&mut self) {
        let (calm, fabric) = (lock(&self.fabric).now() + 10_000_000, self.fabric.clone());
        self.nodes.iter_mut().for_each(|node| node.more = true);
        self.until("some time", |_| lock(&fabric).now() > calm);
    }

    /// Sends one message from the client, and waits until the server has received it.
    fn exchange(&mut self, conn: ConnectionId) {
        let (server, before) = (self.server.clone(), self.server.0.borrow().received);
        self.nodes[1].reactor.context().send(conn, b"traffic").expect("room");
        self.nodes[1].more = true;
        self.until("traffic", |_| server.0.borrow().received == before + 1);
        server.0.borrow_mut().kept.pop();
    }

    /// Closes all connections. Then checks that all buffers are free, and that each memory that still exists is registered with the device.
    fn finish(mut self) {
        self.server.0.borrow_mut().kept.clear();
        for node in &mut self.nodes {
            node.reactor.context().close_all();
            node.more = true;
        }
        self.until("all ends", |nodes| nodes.iter().all(|node| node.reactor.stats().connections.current == 0));
        self.settle();
        let (all, free) = self.nodes[0].reactor.pool_levels();
        assert_eq!(all, free, "buffers of connections that are gone");
        assert_eq!(self.nodes[0].reactor.stats().memory.fetched_bytes, 0);
        assert_eq!(self.gate.memories() as i64, self.gate.objects().regions, "memory that nobody has is released");
        self.nodes.clear();
        assert_eq!(self.gate.memories(), 0);
    }
}

fn mark(buffer: &mut SendBuffer, number: usize) {
    buffer.set_len(8);
    buffer.copy_from_slice(&(number as u64).to_ne_bytes());
}

fn each_way(test: impl Fn(How, Config)) {
    for how in [How::Fails, How::Removed] {
        for shared in [None, Some(64)] {
            let config =
                life::config().shared_receives(shared).completions(|c| c.queue = Some(64 + shared.unwrap_or(0)));
            println!("{how:?}, shared receives: {shared:?}");
            test(how, config);
        }
    }
}

#[test]
fn two_buffers_are_never_the_same_memory() {
    each_way(|how, config| {
        let mut world = World::new(config);
        let (conn, _) = world.connect();
        let mut old = world.buffers(conn, 50);
        old.iter_mut().enumerate().for_each(|(number, buffer)| mark(buffer, number));
        world.give_up(how);
        let (conn, there) = world.connect();
        let mut new = world.buffers(conn, 1);
        // Half of the buffers are returned now. Their pool was released with the device, so they must not get into the new pool.
        old.truncate(25);
        world.settle();
        new.extend(world.buffers(conn, 120));
        new.iter_mut().enumerate().for_each(|(number, buffer)| mark(buffer, 1000 + number));
        for (number, buffer) in
            old.iter().enumerate().chain(new.iter().enumerate().map(|(nth, buffer)| (1000 + nth, buffer)))
        {
            assert_eq!(**buffer, (number as u64).to_ne_bytes(), "buffer {number} has the bytes of another one");
        }
        world.exchange(there);
        drop(new);
        drop(old);
        world.finish();
    });
}

#[test]
fn a_buffer_of_a_device_that_was_given_up_is_refused() {
    each_way(|how, config| {
        let mut world = World::new(config);
        let (conn, _) = world.connect();
        // The test holds more buffers than the new pool has at first. So the offsets of the last buffers are outside of the new pool's
        // memory.
        let old = world.buffers(conn, 400);
        world.give_up(how);
        let (conn, there) = world.connect();
        let mut back = Vec::new();
        for (number, mut buffer) in old.into_iter().enumerate() {
            mark(&mut buffer, number);
            let refused =
                world.nodes[0].reactor.context().send_buffer(conn, buffer).expect_err("it is of another pool");
            assert_eq!(refused.kind, SendErrorKind::ForeignBuffer);
            assert!(refused.to_string().contains("Context::buffer"), "{refused}");
            assert_eq!(*refused.buffer, (number as u64).to_ne_bytes());
            back.push(refused.buffer);
        }
        world.exchange(there);
        drop(back);
        let own = world.buffers(conn, 1).pop().expect("one");
        world.nodes[0].reactor.context().send_buffer(conn, own).expect("one of its own");
        world.settle();
        world.finish();
    });
}

/// If the device refuses to destroy a shared receive queue, the device may still write into the posted receives. So the memory of these
/// receives is never freed and stays registered, and `Stats` counts the queue in `connections.undestroyed`.
#[test]
fn the_memory_of_a_shared_queue_that_the_device_keeps_is_not_freed() {
    let mut world = World::new(life::config().shared_receives(Some(64)));
    world.connect();
    world.gate.break_after(Call::DestroySrq, 0);
    world.gate.say(Said::Removal);
    lock(&world.fabric).ring(0);
    let server = world.server.clone();
    world.until("the end", |_| server.0.borrow().gone == 1);
    lock(&world.fabric).ring(0);
    world.until("the device is given up", |nodes| nodes[0].reactor.stats().connections.undestroyed == 1);
    let (unreleased, left) = (world.nodes[0].reactor.stats().memory.unreleased, world.gate.objects());
    assert!(unreleased > 0);
    assert_eq!((left.regions, left.shared_queues), (unreleased as i64, 1));
    assert_eq!(world.gate.memories(), unreleased);
}

/// The reactor posts receives to a new shared queue. The device accepts only some of the receives, and then refuses to destroy the queue.
/// The connection is refused, but the queue with its posted receives is kept, and later connections use it.
#[test]
fn a_shared_queue_that_the_device_keeps_serves_later_connections() {
    let mut world = World::new(life::config().shared_receives(Some(64)));
    world.gate.fail_nth(Call::PostSrqRecv, 0, Failure::LastErrno(libc::EIO));
    world.gate.fail_nth(Call::DestroySrq, 0, Failure::Errno(libc::EBUSY));
    world.nodes[1].reactor.context().connect(address(0, 7471)).expect("connecting");
    world.until("a refusal", |nodes| nodes[0].reactor.stats().connections.refused == 1);
    assert_eq!((world.gate.failed(), world.gate.objects().shared_queues), (2, 1));
    let (_, there) = world.connect();
    world.exchange(there);
    assert_eq!(world.gate.counts()[&Call::CreateSrq], 1);
    world.finish();
}

/// The device reports that its shared receive queue has failed. The connections that use the queue end. After that, the queue is replaced,
/// and later connections use the new one. A message of the failed queue that the program still holds is intact, and its buffer returns to
/// the pool.
#[test]
fn a_shared_queue_that_has_failed_is_replaced() {
    let mut world = World::new(life::config().shared_receives(Some(64)));
    let (_, there) = world.connect();
    let server = world.server.clone();
    world.nodes[1].reactor.context().send(there, b"kept").expect("room");
    world.nodes[1].more = true;
    world.until("a message", |_| server.0.borrow().received == 1);
    world.gate.say(Said::SharedQueueFailed);
    lock(&world.fabric).ring(0);
    world.until("the end", |_| server.0.borrow().gone == 1);
    world.settle();
    let (_, there) = world.connect();
    world.exchange(there);
    let counts = world.gate.counts();
    assert_eq!((counts[&Call::CreateSrq], counts[&Call::DestroySrq]), (2, 1));
    assert_eq!(server.0.borrow().kept.iter().map(|message| &message[..]).collect::<Vec<_>>(), [b"kept"]);
    let kept = std::mem::take(&mut server.0.borrow_mut().kept);
    drop(kept);
    world.settle();
    world.exchange(there);
    world.finish();
}

#[test]
fn messages_outlive_their_device() {
    // With a transfer memory of 4 KiB, the reactor has no room to copy a message that is in several buffers into one piece, so the message
    // keeps its buffers.
    for transfer_memory in [1 << 20, 4 << 10] {
        each_way(|how, config| {
            let mut world = World::new(
                config
                    .receive_depth(32)
                    .completions(|c| c.queue = Some(256))
                    .large_messages(|l| l.max_message = 4 << 10)
                    .large_messages(|l| l.memory = transfer_memory),
            );
            for round in 0..3_usize {
                let (_, there) = world.connect();
                let (server, before) = (world.server.clone(), world.server.0.borrow().kept.len());
                let lens = [9, 2_500, 600, 9];
                for (nth, len) in lens.into_iter().enumerate() {
                    let byte = (10 * round + nth) as u8;
                    while let Err(error) = world.nodes[1].reactor.context().send(there, &vec![byte; len]) {
                        assert!(matches!(error, SendErrorKind::WouldBlock(_)), "{error}");
                        world.settle();
                    }
                    world.nodes[1].more = true;
                    world.until("the message", |_| server.0.borrow().kept.len() == before + nth + 1);
                }
                world.give_up(how);
                for (nth, message) in server.0.borrow().kept.iter().enumerate() {
                    assert!(message.iter().all(|&byte| byte == message[0]), "message {nth} after round {round}");
                }
                // The test drops one message and releases another one. It keeps the remaining messages while the device fails or is removed
                // again.
                let dropped = server.0.borrow_mut().kept.pop();
                drop(dropped);
                let released = server.0.borrow_mut().kept.remove(0);
                world.nodes[0].reactor.context().release(released);
                world.settle();
            }
            assert_eq!(world.server.0.borrow().kept.len(), 6);
            let (_, there) = world.connect();
            world.exchange(there);
            let kept = std::mem::take(&mut world.server.0.borrow_mut().kept);
            drop(kept);
            world.settle();
            world.finish();
        });
    }
}
