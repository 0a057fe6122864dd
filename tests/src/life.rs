//! A test program whose connections use each kind of operation once and check the results. The operations are: messages, writes to the
//! peer's memory, reads of the peer's memory, a transfer of a list, large messages in both directions, timers, and a close. One of the
//! large messages lands in the program's memory. Other connections request echoes repeatedly.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use rdma_reactor::{
    Access, Config, ConnectError, ConnectOptions, ConnectionId, Context, DisconnectReason, Error, Failure, Handler,
    Immediate, Message, Offered, Outcome, Piece, Region, RegionOptions, RemoteRegion, SendErrorKind, SendId, TimerId,
    Transfer, TransferEnd, TransferId, TransferOptions, Wait,
};

/// The length of a large message, which does not fit in one buffer, in bytes.
const LARGE: usize = 5_000;
/// The number of bytes that the program writes to the peer's memory and reads from it.
const PART: usize = 8;
/// The pause before a close, and between two echoes.
const PAUSE: Duration = Duration::from_millis(5);
const TOLD: u32 = 77;
/// The time limit of a transfer.
const WITHIN: Duration = Duration::from_secs(10);

/// Returns settings for nodes that run this program on virtual time: small queues and buffers, and short timeouts.
#[must_use]
pub fn config() -> Config {
    let ms = Duration::from_millis;
    Config::default()
        .wait(Wait::Event)
        .buffer_size(1024)
        .large_messages(|l| l.max_message = 64 * 1024)
        .receive_depth(8)
        .send_depth(8)
        .timeouts(|t| t.connect = ms(3_000))
        .timeouts(|t| t.handshake = ms(2_000))
        .timeouts(|t| t.close = ms(1_000))
        .timeouts(|t| t.flush = ms(50))
        .timeouts(|t| t.transfer = ms(2_000))
        .timeouts(|t| (t.keepalive_interval, t.keepalive) = (ms(1_000), ms(3_000)))
}

/// The purpose of a connection. The side that opens the connection chooses it, and sends it in the private data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// The connection does everything once, and is then closed.
    Life,
    /// The connection requests an echo every few milliseconds, until [`Book::quiet`] is set.
    Ping,
}

impl Kind {
    const fn name(self) -> &'static [u8] {
        match self {
            Self::Life => b"life",
            Self::Ping => b"ping",
        }
    }
}

/// The last callback of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum How {
    /// `on_disconnect`.
    Disconnected(DisconnectReason),
    /// `on_connect_error`.
    NotConnected(ConnectError),
}

/// The record of a connection that has ended.
#[derive(Clone, Debug)]
pub struct Ended {
    /// The purpose of the connection.
    pub kind: Kind,
    /// True if this side has opened the connection.
    pub opened_here: bool,
    /// True if the connection has completed all its operations before its end.
    pub done: bool,
    /// The last callback of the connection.
    pub how: How,
}

/// The next operation of a connection.
#[derive(Clone, Copy, Debug)]
enum Want {
    Offer,
    Write,
    Read,
    List,
    Large,
    Bye,
    Ask,
    Echo(u64),
}

#[derive(Debug)]
struct Talk {
    kind: Kind,
    opened_here: bool,
    up: bool,
    done: bool,
    wants: VecDeque<Want>,
    /// The sends that were accepted and have not completed.
    sends: BTreeSet<SendId>,
    read: Option<SendId>,
    /// The transfer that has not completed.
    list: Option<TransferId>,
    /// The region with the large message that the peer fetches.
    source: Option<Region>,
    /// The offered message that must land, and the region in which it lands.
    landing: Option<(Offered, Region)>,
    region: Option<Region>,
    remote: Option<RemoteRegion>,
    told: bool,
    echoes: u64,
}

impl Talk {
    const fn new(kind: Kind, opened_here: bool) -> Self {
        Self {
            kind,
            opened_here,
            up: false,
            done: false,
            wants: VecDeque::new(),
            sends: BTreeSet::new(),
            read: None,
            list: None,
            source: None,
            landing: None,
            region: None,
            remote: None,
            told: false,
            echoes: 0,
        }
    }
}

/// The state and the results of a node.
#[derive(Debug, Default)]
pub struct Book {
    talks: BTreeMap<ConnectionId, Talk>,
    /// The connections that have ended, in the order in which they ended.
    pub ended: Vec<Ended>,
    /// Descriptions of the calls that were refused permanently.
    pub refused: Vec<String>,
    /// The number of echoes that have arrived.
    pub echoes: u64,
    /// True if the connections of the kind [`Kind::Ping`] must end.
    pub quiet: bool,
    timers: BTreeMap<TimerId, ConnectionId>,
}

impl Book {
    /// Returns the number of open connections of this kind.
    #[must_use]
    pub fn open(&self, kind: Kind) -> usize {
        self.talks.values().filter(|talk| talk.kind == kind).count()
    }
}

/// The handler of a node. Clones share the same state.
#[derive(Clone, Debug, Default)]
pub struct Program(pub Rc<RefCell<Book>>);

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 7 % 251) as u8).collect()
}

impl Program {
    /// Opens a connection. If that is refused, records the refusal.
    pub fn open(&self, cx: &mut Context<'_>, peer: SocketAddr, kind: Kind) {
        let mut book = self.0.borrow_mut();
        match cx.connect_with(peer, ConnectOptions::new().private_data(kind.name())) {
            Ok(id) => drop(book.talks.insert(id, Talk::new(kind, true))),
            Err(error) => book.refused.push(error.to_string()),
        }
    }

    fn with<R>(&self, conn: ConnectionId, act: impl FnOnce(&mut Talk) -> R) -> R {
        let mut book = self.0.borrow_mut();
        act(book.talks.get_mut(&conn).expect("a callback of a connection that has ended or never existed"))
    }

    /// Records that a call was refused permanently, and closes the connection.
    fn give_up(&self, cx: &mut Context<'_>, conn: ConnectionId, why: &str) {
        self.0.borrow_mut().refused.push(why.to_owned());
        self.with(conn, |talk| talk.wants.clear());
        cx.close(conn);
    }

    fn region(&self, cx: &mut Context<'_>, conn: ConnectionId, access: Access) -> Result<RemoteRegion, Error> {
        let mut region = cx.regions().register(conn, 2 * PART, &RegionOptions::new().allow(access))?;
        region.copy_from(PART, &pattern(PART)).expect("not lent");
        let remote = region.remote();
        self.with(conn, |talk| talk.region = Some(region));
        Ok(remote)
    }

    /// Starts the next operations of a connection, until the reactor refuses one for now.
    fn act(&self, cx: &mut Context<'_>, conn: ConnectionId) {
        while let Some(want) = self.with(conn, |talk| talk.wants.front().copied()) {
            if matches!(want, Want::List) {
                match self.list(cx, conn) {
                    Ok(list) => self.with(conn, |talk| {
                        talk.wants.pop_front();
                        talk.list = Some(list);
                    }),
                    Err(error) => return self.give_up(cx, conn, &error.to_string()),
                }
                continue;
            }
            match self.try_one(cx, conn, want) {
                Ok(send) => self.with(conn, |talk| {
                    talk.wants.pop_front();
                    assert!(talk.sends.insert(send), "{send:?} names two sends");
                    match want {
                        Want::Read => talk.read = Some(send),
                        Want::Bye => talk.done = true,
                        _ => {}
                    }
                    if matches!(want, Want::Bye) {
                        cx.close(conn);
                    }
                }),
                Err(SendErrorKind::WouldBlock(_)) => return,
                Err(error) => return self.give_up(cx, conn, &error.to_string()),
            }
        }
    }

    /// Starts a transfer that reads the bytes of the peer's memory again. Each byte is one piece of the list, from the last byte to the
    /// first.
    fn list(&self, cx: &mut Context<'_>, conn: ConnectionId) -> Result<TransferId, SendErrorKind> {
        self.with(conn, |talk| {
            let remote = talk.remote.expect("it was received");
            let piece = |at: usize| Piece::new(at, remote.part((PART + at) as u64, 1).expect("inside"));
            let region = talk.region.as_mut().expect("it was registered");
            region.copy_from(0, &[0; PART]).expect("not lent");
            let list = (0..PART).rev().map(piece).collect();
            cx.remote(conn).transfer(Transfer::Read(&mut [region]), list, &TransferOptions::within(WITHIN))
        })
    }

    fn try_one(&self, cx: &mut Context<'_>, conn: ConnectionId, want: Want) -> Result<SendId, SendErrorKind> {
        let mut book = self.0.borrow_mut();
        let talk = book.talks.get_mut(&conn).expect("it has not ended");
        let part = |talk: &Talk, at: u64| {
            talk.remote.and_then(|remote| remote.part(at, PART as u64)).expect("it was received")
        };
        match want {
            Want::Offer => {
                let mut message = vec![b'o'];
                message.extend(talk.region.as_ref().expect("it was registered").remote().to_bytes());
                cx.send(conn, &message)
            }
            Want::Write => {
                let (remote, region) = (part(talk, 0), talk.region.as_ref().expect("it was registered"));
                cx.remote(conn).write_with_immediate(remote, region, PART..2 * PART, TOLD)
            }
            Want::Read => {
                let remote = part(talk, PART as u64);
                cx.remote(conn).read(remote, talk.region.as_mut().expect("it was registered"), 0..PART)
            }
            Want::List => unreachable!("a list is no send"),
            // The side that has opened the connection offers the large message from a region, or sends a copy if no region can be
            // registered. The other side always sends a copy.
            Want::Large if talk.opened_here => {
                let readable = RegionOptions::new().allow(Access::REMOTE_READ);
                talk.source =
                    talk.source.take().or_else(|| cx.regions().register_vec(conn, pattern(LARGE), &readable).ok());
                match &talk.source {
                    Some(source) => cx.offer(conn, source, 0..LARGE, u64::from(TOLD)),
                    None => cx.send(conn, &pattern(LARGE)),
                }
            }
            Want::Large => cx.send(conn, &pattern(LARGE)),
            Want::Bye => cx.send(conn, b"b"),
            Want::Ask => cx.send(conn, &[&b"p"[..], &talk.echoes.to_le_bytes()].concat()),
            Want::Echo(number) => cx.send(conn, &[&b"p"[..], &number.to_le_bytes()].concat()),
        }
    }

    /// Checks the bytes that were read from the peer's memory.
    fn check_read(&self, conn: ConnectionId) {
        self.with(conn, |talk| {
            let mut bytes = [0; PART];
            talk.region.as_ref().expect("it was registered").copy_to(0, &mut bytes);
            assert_eq!(bytes[..], pattern(PART)[..], "what was read from the peer");
        });
    }

    fn want(&self, cx: &mut Context<'_>, conn: ConnectionId, wants: &[Want]) {
        self.with(conn, |talk| talk.wants.extend(wants));
        self.act(cx, conn);
    }

    fn over(&self, conn: ConnectionId, how: How) {
        let mut book = self.0.borrow_mut();
        let talk = book.talks.remove(&conn).expect("a connection ends once");
        assert!(talk.sends.is_empty(), "{conn}: {} sends never completed", talk.sends.len());
        assert!(talk.list.is_none() && talk.landing.is_none(), "{conn}: {:?}, {:?}", talk.list, talk.landing);
        let Talk { kind, opened_here, done, .. } = talk;
        book.ended.push(Ended { kind, opened_here, done, how });
    }

    fn pause(&self, cx: &mut Context<'_>, conn: ConnectionId) {
        let timer = cx.timers().set(PAUSE, 0);
        self.0.borrow_mut().timers.insert(timer, conn);
    }
}

impl Handler for Program {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        let kind = if cx.connection(conn).private_data() == Kind::Ping.name() { Kind::Ping } else { Kind::Life };
        let talk = |book: &mut Book| {
            let talk = book.talks.entry(conn).or_insert_with(|| Talk::new(kind, false));
            assert!(!std::mem::replace(&mut talk.up, true), "on_connect is called once");
            (talk.kind, talk.opened_here)
        };
        let talk = talk(&mut self.0.borrow_mut());
        match talk {
            (Kind::Life, true) => match self.region(cx, conn, Access::REMOTE_READ | Access::REMOTE_WRITE) {
                Ok(_) => self.want(cx, conn, &[Want::Offer]),
                Err(error) => self.give_up(cx, conn, &error.to_string()),
            },
            (Kind::Ping, true) => self.want(cx, conn, &[Want::Ask]),
            (_, false) => {}
        }
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        let (opened_here, told) = self.with(conn, |talk| (talk.opened_here, talk.told));
        match (message[0], message.len()) {
            (b'o', _) => {
                let remote = RemoteRegion::from_bytes(&message[1..]).expect("a region's name");
                self.with(conn, |talk| talk.remote = Some(remote));
                match self.region(cx, conn, Access::LOCAL_WRITE) {
                    Ok(_) => self.want(cx, conn, &[Want::Write, Want::Read]),
                    Err(error) => self.give_up(cx, conn, &error.to_string()),
                }
            }
            (b'p', _) if opened_here => {
                let number = u64::from_le_bytes(message[1..].try_into().expect("8 bytes"));
                self.with(conn, |talk| {
                    assert_eq!(number, talk.echoes, "echoes arrive in order, once");
                    talk.echoes += 1;
                });
                self.0.borrow_mut().echoes += 1;
                self.pause(cx, conn);
            }
            (b'p', _) => {
                let number = u64::from_le_bytes(message[1..].try_into().expect("8 bytes"));
                self.with(conn, |talk| talk.done = true);
                self.want(cx, conn, &[Want::Echo(number)]);
            }
            (b'b', _) => self.with(conn, |talk| talk.done = true),
            (_, LARGE) => {
                assert!(message[..] == pattern(LARGE), "the bytes of a large message");
                if opened_here {
                    assert!(told, "the peer has written before");
                    self.want(cx, conn, &[Want::Large]);
                } else {
                    self.pause(cx, conn);
                }
            }
            other => panic!("an unexpected message: {other:?}"),
        }
    }

    fn on_immediate(&mut self, _: &mut Context<'_>, conn: ConnectionId, immediate: Immediate) {
        assert_eq!((immediate.value, immediate.len as usize), (TOLD, PART));
        self.with(conn, |talk| {
            let mut bytes = [0; PART];
            talk.region.as_ref().expect("it was registered").copy_to(0, &mut bytes);
            assert_eq!(bytes[..], pattern(PART)[..], "what the peer wrote");
            talk.told = true;
        });
    }

    fn on_send_complete(&mut self, cx: &mut Context<'_>, conn: ConnectionId, send: SendId, outcome: Outcome) {
        let read = self.with(conn, |talk| {
            assert!(talk.sends.remove(&send), "{send:?} completes once");
            talk.read == Some(send) && outcome.is_sent()
        });
        if read {
            self.check_read(conn);
            self.want(cx, conn, &[Want::List]);
        }
    }

    fn on_transfer(&mut self, cx: &mut Context<'_>, conn: ConnectionId, transfer: TransferId, end: TransferEnd) {
        assert_eq!(self.with(conn, |talk| talk.list.take()), Some(transfer), "it ends once");
        if end.is_done() {
            self.check_read(conn);
            self.want(cx, conn, &[Want::Large]);
        }
    }

    fn on_offer(&mut self, cx: &mut Context<'_>, conn: ConnectionId, offer: Offered) {
        if !self.with(conn, |talk| talk.opened_here) {
            assert!(offer.tag.is_none_or(|tag| tag == u64::from(TOLD)), "{offer:?}");
            // If no region or no slot is available, the program does not answer the offer, and the message arrives by `on_recv`.
            let Ok(mut place) = cx.regions().register(conn, LARGE, &RegionOptions::new()) else { return };
            if cx.land(conn, offer.id, &mut place, 0).is_ok() {
                self.with(conn, |talk| talk.landing = Some((offer, place)));
            }
        }
    }

    fn on_landed(&mut self, cx: &mut Context<'_>, conn: ConnectionId, offer: Offered, result: Result<(), Failure>) {
        let (landing, place) = self.with(conn, |talk| talk.landing.take()).expect("it ends once");
        assert_eq!(landing, offer);
        let bytes = place.bytes().expect("it is not lent any more");
        if result.is_ok() {
            assert!(bytes == pattern(LARGE), "the bytes of a large message");
            self.pause(cx, conn);
        }
    }

    fn on_writable(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.act(cx, conn);
    }

    fn on_disconnect(&mut self, _: &mut Context<'_>, conn: ConnectionId, reason: DisconnectReason) {
        self.over(conn, How::Disconnected(reason));
    }

    fn on_connect_error(&mut self, _: &mut Context<'_>, conn: ConnectionId, error: ConnectError) {
        assert!(
            self.with(conn, |talk| talk.opened_here && !talk.up),
            "only an attempt of this side that was never connected"
        );
        self.over(conn, How::NotConnected(error));
    }

    fn on_timer(&mut self, cx: &mut Context<'_>, timer: TimerId, _: u64) {
        let conn = self.0.borrow_mut().timers.remove(&timer).expect("a timer fires once");
        let quiet = self.0.borrow().quiet;
        let talk = self.0.borrow().talks.get(&conn).map(|talk| talk.kind);
        match talk {
            Some(Kind::Life) => self.want(cx, conn, &[Want::Bye]),
            Some(Kind::Ping) if quiet => {
                self.with(conn, |talk| talk.done = true);
                cx.close(conn);
            }
            Some(Kind::Ping) => self.want(cx, conn, &[Want::Ask]),
            None => {} // The connection has ended in the meantime.
        }
    }
}
