//! Transfers of lists of pieces (`RemoteContext::transfer`) on virtual time, over a simulated
//! network with random delays and short writes. Peers stop, close, are aborted, or name wrong
//! memory. Each transfer must end once, at most the time of a flush after its time limit. Its
//! report about the pieces must be true.
//!
//! `TRANSFER_WORLDS=100` sets the number of worlds (default: 4,000), and `TRANSFER_SEED=7` runs only the world with that seed.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rdma_reactor::{
    Access, Config, ConnectionId, Context, DisconnectReason, Handler, Message, Piece, Reactor, Region, RegionOptions,
    Transfer, TransferEnd, TransferId, TransferOptions, TransferOutcome,
};
use rdma_reactor_tests::sim::fabric::{Fabric, Shared, lock};
use rdma_reactor_tests::sim::poller::virtual_ns;
use rdma_reactor_tests::sim::quiet::reactor;
use rdma_reactor_tests::sim::rng::Rng;
use rdma_reactor_tests::sim::seeds::each_world;
use rdma_reactor_tests::sim::swarm::{FaultOptions, MS, Options};
use rdma_reactor_tests::sim::tcp::address;
use rdma_reactor_tests::sim::trace::Trace;

/// The number of random actions in a simulated world.
const ACTS: u64 = 120;
/// The number of simulation steps within which all transfers and connections must have ended.
const STEPS: u64 = 400_000;
const PORT: u16 = 7471;
/// The time that the reactor waits for a device to flush, in ns.
const FLUSH: u64 = 50 * MS;
/// The longest time from the time limit of a transfer to the end of the transfer, in ns. The end waits until the completions that arrived
/// before the flush timeout are handled. Some worlds handle one completion per turn, and a turn that opens 40 connections takes 2 ms.
const LATE: u64 = 20 * MS;
/// The length of the memory of one transfer on each side, in bytes.
const ROOM: usize = 4096;
/// The largest number of transfers in a simulated world.
const TRANSFERS: usize = 40;
/// The content of the local memory before a transfer.
const HERE: u8 = 0xee;
/// The content of the peer's memory before a transfer.
const THERE: u8 = 0xdd;

/// A transfer that has not ended.
#[derive(Clone, Debug)]
struct Begun {
    /// The number of the transfer, which selects its part of the memory.
    number: usize,
    reads: bool,
    confirms: bool,
    list: Vec<Piece>,
    /// The time by which the transfer must have ended, in ns.
    until: u64,
    /// The index of the piece that has a wrong remote key, if there is one.
    wrong: Option<usize>,
}

/// The number of transfers by their outcome, and the number of messages that arrived.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    done: u64,
    cancelled: u64,
    late: u64,
    failed: u64,
    messages: u64,
}

/// The record of the client.
#[derive(Default)]
struct Book {
    up: Vec<ConnectionId>,
    begun: BTreeMap<(ConnectionId, TransferId), Begun>,
    /// The local memory of each transfer, by its number.
    locals: BTreeMap<usize, Region>,
    /// The region of the peer that holds the remote memory of all transfers.
    remote: Option<Rc<RefCell<Region>>>,
    tally: Tally,
    wrong: Vec<String>,
    /// True if this world has no faults, so that each transfer completes unless it is cancelled.
    calm: bool,
}

/// Returns the payload byte of a transfer at an offset of its memory.
fn byte(number: usize, at: usize) -> u8 {
    ((number * 31 + at * 7) % 199) as u8
}

impl Book {
    /// Returns the bytes at the destination of a piece. Returns `None` if the program has dropped the memory that contains the destination.
    fn target(&self, begun: &Begun, piece: &Piece) -> Option<Vec<u8>> {
        let mut bytes = vec![0; piece.len()];
        if begun.reads {
            self.locals.get(&begun.number)?.copy_to(piece.offset as usize, &mut bytes);
        } else if let Some(remote) = &self.remote {
            remote.borrow().copy_to(begun.number * ROOM + piece.offset as usize, &mut bytes);
        }
        Some(bytes)
    }

    /// Checks the report about an ended transfer against the memory. Returns the reason if the report is wrong.
    fn judge(&mut self, conn: ConnectionId, transfer: TransferId, now: u64, end: &TransferEnd) -> Result<(), String> {
        let begun = self.begun.remove(&(conn, transfer)).ok_or("it had ended, or was never begun")?;
        if now > begun.until {
            return Err(format!("it has ended {} ns late", now - begun.until));
        }
        if end.pieces != begun.list || end.there + end.unknown > end.pieces.len() {
            return Err(format!("its account is of something else: {end:?}"));
        }
        let proves = begun.reads || begun.confirms;
        if end.there > 0 && !proves {
            return Err(format!("{} pieces are said to be there, and nobody has asked", end.there));
        }
        match end.outcome {
            TransferOutcome::Done => {
                self.tally.done += 1;
                let all = if proves { (end.pieces.len(), 0) } else { (0, end.pieces.len()) };
                if (end.there, end.unknown) != all || (proves && begun.wrong.is_some()) {
                    return Err(format!("it is done: {end:?}, wrong {:?}", begun.wrong));
                }
            }
            TransferOutcome::Cancelled => self.tally.cancelled += 1,
            TransferOutcome::Deadline => self.tally.late += 1,
            _ => self.tally.failed += 1,
        }
        if self.calm && !matches!(end.outcome, TransferOutcome::Done | TransferOutcome::Cancelled) {
            return Err(format!("nothing has happened to it: {:?}", end.outcome));
        }
        for (nth, piece) in end.pieces.iter().enumerate() {
            let Some(bytes) = self.target(&begun, piece) else { continue };
            let before = if begun.reads { HERE } else { THERE };
            let is_there = (0..).zip(&bytes).all(|(at, &b)| b == byte(begun.number, piece.offset as usize + at));
            if nth < end.there && !is_there {
                return Err(format!("piece {nth} is said to be there: {end:?}"));
            }
            if nth >= end.there + end.unknown && bytes.iter().any(|&b| b != before) {
                return Err(format!("piece {nth} was touched: {end:?}"));
            }
        }
        // The transfer has ended, so its local memory is no longer lent to it and can be written.
        let local = self.locals.get_mut(&begun.number);
        if local.is_some_and(|local| local.copy_from(0, &[0; ROOM]).is_err()) {
            return Err("its memory is still lent".into());
        }
        Ok(())
    }
}

#[derive(Clone, Default)]
struct Client(Rc<RefCell<Book>>);

impl Handler for Client {
    fn on_connect(&mut self, _: &mut Context<'_>, conn: ConnectionId) {
        self.0.borrow_mut().up.push(conn);
    }
    fn on_transfer(&mut self, cx: &mut Context<'_>, conn: ConnectionId, transfer: TransferId, end: TransferEnd) {
        let mut book = self.0.borrow_mut();
        let begun = book.begun.get(&(conn, transfer)).cloned();
        if let Err(why) = book.judge(conn, transfer, virtual_ns(cx.now()), &end) {
            book.wrong.push(format!("{transfer:?} of {conn}: {why}; {begun:?}"));
        }
    }
    fn on_disconnect(&mut self, _: &mut Context<'_>, conn: ConnectionId, _: DisconnectReason) {
        let mut book = self.0.borrow_mut();
        book.up.retain(|&up| up != conn);
        if let Some((id, _)) = book.begun.keys().find(|(of, _)| *of == conn).map(|&(of, id)| (id, of)) {
            book.wrong.push(format!("{conn} has ended before {id:?}"));
        }
    }
}

/// The peer, which owns the remote memory. A message to it names a transfer and its pieces. If the transfer is a write, all bytes of these
/// pieces must have arrived before the message.
#[derive(Clone, Default)]
struct Server(Rc<RefCell<Served>>);

#[derive(Default)]
struct Served {
    up: Vec<ConnectionId>,
    memory: Option<Rc<RefCell<Region>>>,
    wrong: Vec<String>,
    messages: u64,
}

impl Handler for Server {
    fn on_connect(&mut self, _: &mut Context<'_>, conn: ConnectionId) {
        self.0.borrow_mut().up.push(conn);
    }
    fn on_recv(&mut self, _: &mut Context<'_>, _: ConnectionId, message: Message<'_>) {
        let Served { memory, wrong, messages, .. } = &mut *self.0.borrow_mut();
        *messages += 1;
        let Some((&[number, writes], ranges)) = message.split_first_chunk() else { return };
        for range in ranges.chunks_exact(4).filter(|_| writes == 1) {
            let offset = usize::from(u16::from_le_bytes([range[0], range[1]]));
            let mut bytes = vec![0; usize::from(u16::from_le_bytes([range[2], range[3]]))];
            let memory = memory.as_ref().expect("it was registered").borrow();
            memory.copy_to(usize::from(number) * ROOM + offset, &mut bytes);
            if (offset..).zip(&bytes).any(|(at, &b)| b != byte(number.into(), at)) {
                wrong.push(format!("the message of transfer {number} has overtaken its bytes"));
            }
        }
    }
    fn on_disconnect(&mut self, _: &mut Context<'_>, conn: ConnectionId, _: DisconnectReason) {
        self.0.borrow_mut().up.retain(|&up| up != conn);
    }
}

struct World {
    rng: Rng,
    fabric: Shared,
    client: (Reactor, Client),
    server: (Reactor, Server),
    more: [bool; 2],
    /// The server is stopped and runs no turns until this time, in ns.
    stopped: u64,
    next: usize,
}

impl World {
    fn new(seed: u64) -> Self {
        let options = Options::draw(seed);
        let faults = FaultOptions { every: 0, kinds: Vec::new() };
        let fabric = Arc::new(Mutex::new(Fabric::new(seed, 2, options.net, faults, Trace::new(0))));
        let mut rng = Rng::new(seed, "transfers");
        let mut config = || {
            Config::default()
                .buffer_size(256)
                .receive_depth(rng.skewed(5..=16) as u32)
                .send_depth(rng.skewed(1..=32) as u32)
                .completions(|c| c.per_turn = rng.skewed(1..=64) as u32)
                .timeouts(|t| {
                    (t.keepalive_interval, t.keepalive) = (Duration::from_millis(200), Duration::from_millis(700));
                    (t.flush, t.close) = (Duration::from_nanos(FLUSH), Duration::from_millis(100));
                })
        };
        let configs = [config(), config()];
        let [mut server, client] = [0, 1].map(|node| reactor(node, &fabric, configs[node].clone()));
        let options = RegionOptions::new().allow(Access::REMOTE_READ | Access::REMOTE_WRITE).any_peer();
        let mut cx = server.context();
        cx.listen(address(0, PORT)).expect("a listener");
        let mut region = cx.regions().register_at(address(0, PORT).ip(), ROOM * TRANSFERS, &options).expect("memory");
        region.copy_from(0, &[THERE; ROOM * TRANSFERS]).expect("nothing is lent");
        let region = Rc::new(RefCell::new(region));
        let (client, server) = ((client, Client::default()), (server, Server::default()));
        client.1.0.borrow_mut().calm = rng.chance(200);
        client.1.0.borrow_mut().remote = Some(Rc::clone(&region));
        server.1.0.borrow_mut().memory = Some(region);
        Self { rng, fabric, client, server, more: [true; 2], stopped: 0, next: 0 }
    }

    fn now(&self) -> u64 {
        lock(&self.fabric).now()
    }

    /// Runs one turn of each node whose turn is due. If no turn is due, advances the virtual time instead. Then checks the promises.
    fn step(&mut self) {
        let now = self.now();
        let (mut next, mut idle) = (lock(&self.fabric).next(), true);
        for node in [0, 1] {
            if node == 0 && now < self.stopped {
                next = next.into_iter().chain([self.stopped]).min();
                continue;
            }
            let reactor = if node == 0 { &mut self.server.0 } else { &mut self.client.0 };
            let due = reactor.next_deadline().map(virtual_ns);
            if self.more[node] || lock(&self.fabric).is_runnable(node, true) || due.is_some_and(|due| due <= now) {
                lock(&self.fabric).seen(node);
                let turn = match node {
                    0 => reactor.turn(&mut self.server.1, Duration::ZERO),
                    _ => reactor.turn(&mut self.client.1, Duration::ZERO),
                };
                self.more[node] = turn.expect("a turn").more;
                idle = false;
            }
            next = next.into_iter().chain(due).min();
        }
        if idle {
            lock(&self.fabric).advance(next.map_or(now + MS, |next| next.max(now + 1)).min(now + MS));
        }
        self.look();
    }

    /// Checks that no promise is broken, and that no transfer is overdue.
    fn look(&self) {
        let (book, now) = (self.client.1.0.borrow(), self.now());
        assert!(book.wrong.is_empty(), "{:?}", book.wrong);
        assert!(self.server.1.0.borrow().wrong.is_empty(), "{:?}", self.server.1.0.borrow().wrong);
        for (id, begun) in &book.begun {
            assert!(now <= begun.until, "{id:?} is in progress at {now}: {begun:?}");
        }
        let violations = &lock(&self.fabric).violations;
        assert!(violations.is_empty(), "{violations:?}");
    }

    fn act(&mut self) {
        let up = self.client.1.0.borrow().up.clone();
        if up.len() < 2 && (up.is_empty() || self.rng.chance(100)) {
            // The connect may fail immediately, if no descriptors are left. A later action tries again.
            let _ = self.client.0.context().connect(address(0, PORT));
        }
        let Some(&conn) = up.get(self.rng.index(up.len().max(1))) else { return };
        let most = if self.client.1.0.borrow().calm { 85 } else { 100 };
        match self.rng.below(most) {
            0..50 => self.begin(conn),
            50..60 => {
                let begun: Vec<_> = self.client.1.0.borrow().begun.keys().copied().collect();
                if !begun.is_empty() {
                    let (conn, transfer) = begun[self.rng.index(begun.len())];
                    // The transfer may have ended already, although the program is notified of this end only in the next turn. The
                    // cancellation then has no effect.
                    self.client.0.context().remote(conn).cancel_transfer(transfer);
                }
            }
            60..85 => {
                let _ = self.client.0.context().send(conn, b"");
            }
            85..87 => self.client.0.context().close(conn),
            87..88 => self.client.0.context().abort(conn),
            88..90 => {
                let there = self.server.1.0.borrow().up.first().copied();
                let mut cx = self.server.0.context();
                there.into_iter().for_each(|there| cx.abort(there));
            }
            90..93 => {
                let (from, to) = self.rng.pick(&[(0, 1), (1, 0)]);
                lock(&self.fabric).silence(from, to);
            }
            93..96 => lock(&self.fabric).mend(),
            _ => self.stopped = self.now() + self.rng.skewed(MS..=300 * MS),
        }
        self.more = [true; 2];
    }

    /// Begins a transfer with random pieces, time limit and options.
    fn begin(&mut self, conn: ConnectionId) {
        if self.next == TRANSFERS {
            return;
        }
        let number = self.next;
        self.next += 1;
        let calm = self.client.1.0.borrow().calm;
        let rng = &mut self.rng;
        let (reads, count) = (rng.chance(500), rng.skewed(0..=64) as usize);
        let most = rng.pick(&[1_u64, 8, 64]);
        let remote = self.server.1.0.borrow().memory.as_ref().expect("it was registered").borrow().remote();
        let (mut list, mut at) = (Vec::new(), 0);
        for _ in 0..count {
            let len = rng.range(0..=most);
            list.push(Piece::new(at, remote.part((number * ROOM + at) as u64, len).expect("inside")));
            at += len as usize;
        }
        // The order of the pieces is random.
        for nth in 1..list.len() {
            list.swap(nth, rng.index(nth + 1));
        }
        let full: Vec<_> = (0..list.len()).filter(|&nth| !list[nth].is_empty()).collect();
        let wrong = (!calm && rng.chance(60) && !full.is_empty()).then(|| full[rng.index(full.len())]);
        if let Some(wrong) = wrong {
            list[wrong].remote.key ^= 0x5500;
        }
        let within = match rng.chance(30) {
            _ if calm => 60_000 * MS,
            true => 0,
            false => rng.skewed(100_000..=400 * MS),
        };
        let mut options = TransferOptions::within(Duration::from_nanos(within));
        let confirms = !reads && rng.chance(500);
        if confirms {
            options = options.confirm();
        }
        if rng.chance(500) {
            let ranges = list.iter().flat_map(|piece| {
                let [a, b] = (piece.offset as u16).to_le_bytes();
                let [c, d] = (piece.len() as u16).to_le_bytes();
                [a, b, c, d]
            });
            let claims = u8::from(!reads && wrong.is_none());
            let message: Vec<u8> = [number as u8, claims].into_iter().chain(ranges.take(240)).collect();
            options = options.message(&message);
        } else if rng.chance(200) {
            options = options.immediate(number as u32);
        }
        let payload: Vec<u8> = (0..ROOM).map(|at| byte(number, at)).collect();
        let mut book = self.client.1.0.borrow_mut();
        let mut cx = self.client.0.context();
        let Ok(mut local) = cx.regions().register(conn, ROOM, &RegionOptions::new().allow(Access::READ_SINK)) else {
            return;
        };
        let source = if reads { &[HERE; ROOM][..] } else { &payload };
        local.copy_from(0, source).expect("nothing is lent");
        if reads {
            let remote = book.remote.as_ref().expect("it was registered");
            remote.borrow_mut().copy_from(number * ROOM, &payload).expect("nothing is lent");
        }
        let transfer = match reads {
            true => cx.remote(conn).transfer(Transfer::Read(&mut [&mut local]), list.clone(), &options),
            false => cx.remote(conn).transfer(Transfer::Write(&[&local]), list.clone(), &options),
        };
        if let Ok(transfer) = transfer {
            let until = virtual_ns(cx.now()) + within + FLUSH + LATE;
            book.begun.insert((conn, transfer), Begun { number, reads, confirms, list, until, wrong });
            book.locals.insert(number, local);
        }
        // Some programs drop the local memory during the transfer. The reactor then keeps the memory until the transfer ends.
        if self.rng.chance(100) {
            book.locals.remove(&number);
        }
    }

    fn is_over(&self) -> bool {
        let settled = |reactor: &Reactor, regions: usize| {
            let stats = reactor.stats();
            let buffers = stats.memory.pool_buffers == stats.memory.pool_free;
            stats.connections.current == 0 && buffers && stats.memory.regions == regions
        };
        settled(&self.client.0, 0) && settled(&self.server.0, 1)
    }
}

fn world(seed: u64) -> Tally {
    let mut world = World::new(seed);
    for _ in 0..ACTS {
        world.act();
        for _ in 0..world.rng.skewed(1..=60) {
            world.step();
        }
    }
    let mended = world.rng.chance(500);
    if mended {
        lock(&world.fabric).mend();
        world.stopped = 0;
    }
    let mut closed = false;
    for _ in 0..STEPS {
        world.step();
        let idle = world.client.1.0.borrow().begun.is_empty();
        if idle && !std::mem::replace(&mut closed, idle) {
            world.client.1.0.borrow_mut().locals.clear();
            lock(&world.fabric).mend();
            world.client.0.context().close_all();
            world.more = [true; 2];
        }
        if closed && world.is_over() {
            let tally = world.client.1.0.borrow().tally;
            return Tally { messages: world.server.1.0.borrow().messages, ..tally };
        }
    }
    panic!("not over in {STEPS} steps: {:?}, {:?}", world.client.0.stats(), world.server.0.stats());
}

#[test]
fn nothing_is_in_progress_for_ever() {
    let mut sum = Tally::default();
    let worlds = each_world("TRANSFER", world, |tally| {
        sum.done += tally.done;
        sum.cancelled += tally.cancelled;
        sum.late += tally.late;
        sum.failed += tally.failed;
        sum.messages += tally.messages;
    });
    println!("{worlds} worlds: {sum:?}");
    let few = [sum.done, sum.cancelled, sum.late, sum.failed].iter().any(|&count| count < worlds / 4);
    assert!(worlds < 100 || !few, "the worlds show little: {sum:?}");
}
