//! A ring and its calls in every order in which two sides can run (`make loom`). The model checker reports a side that sleeps while there
//! is something for it as a deadlock, and tries each value that a load may have.

use std::fmt;
use std::sync::Arc;

use loom::sync::atomic::{AtomicU64, Ordering, fence};
use loom::sync::{Condvar, Mutex};
use loom::thread;

use super::doorbell::{NEWS, ROOM, arm, disarm, publish, release};
use super::record::{Header, Kind, WORD};
use super::ring::{Consumer, Producer};
use super::segment::{CALL, HALF, HEAD, RING, Side, TAIL, Words};

/// Words of a ring that the models use.
const USED: usize = 6;
const OF_HALF: usize = 3 + USED;

/// The words of a segment, as the model checker sees them.
struct Model(Vec<AtomicU64>);

impl fmt::Debug for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Model")
    }
}

impl Model {
    fn new() -> Self {
        Self((0..2 * OF_HALF).map(|_| AtomicU64::new(0)).collect())
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        let within = match at % HALF {
            HEAD => 0,
            TAIL => 1,
            CALL => 2,
            ring => 3 + (ring - RING) / WORD,
        };
        &self.0[at / HALF * OF_HALF + within]
    }
}

impl Words for Model {
    fn load(&self, at: usize) -> u64 {
        self.word(at).load(Ordering::Acquire)
    }
    fn store(&self, at: usize, value: u64) {
        self.word(at).store(value, Ordering::Release);
    }
    fn peek(&self, at: usize) -> u64 {
        self.word(at).load(Ordering::Relaxed)
    }
    fn poke(&self, at: usize, value: u64) {
        self.word(at).store(value, Ordering::Relaxed);
    }
    fn swap(&self, at: usize, value: u64) -> u64 {
        self.word(at).swap(value, Ordering::SeqCst)
    }
    fn fence(&self) {
        fence(Ordering::SeqCst);
    }
}

/// A socket that a side sleeps on: a call stays there until it is taken.
#[derive(Debug, Default)]
struct Bell {
    calls: Mutex<u32>,
    changed: Condvar,
}

impl Bell {
    fn call(&self) {
        *self.calls.lock().unwrap() += 1;
        self.changed.notify_one();
    }

    fn take_calls(&self) {
        *self.calls.lock().unwrap() = 0;
    }

    fn sleep(&self) {
        let mut calls = self.calls.lock().unwrap();
        while *calls == 0 {
            calls = self.changed.wait(calls).unwrap();
        }
    }
}

/// What both sides share.
struct Connection {
    words: Model,
    bells: [Bell; 2],
}

impl Connection {
    fn new() -> Arc<Self> {
        Arc::new(Self { words: Model::new(), bells: Default::default() })
    }
}

/// One side of a connection.
struct End {
    connection: Arc<Connection>,
    side: Side,
    producer: Producer,
    consumer: Consumer,
}

impl End {
    fn new(connection: &Arc<Connection>, side: Side) -> Self {
        let (producer, consumer) = (Producer::new(side.outgoing()), Consumer::new(side.incoming()));
        Self { connection: Arc::clone(connection), side, producer, consumer }
    }

    fn bell(&self, own: bool) -> &Bell {
        &self.connection.bells[usize::from((self.side == Side::Active) == own)]
    }

    /// Sends a record with one word.
    fn send(&mut self, value: u64) {
        let header = Header::new(Kind::Value, 8);
        let at = self.producer.reserve(&self.connection.words, header.size()).expect("room");
        self.connection.words.poke(at, header.emit());
        self.connection.words.poke(at + WORD, value);
        self.producer.commit(header.size());
        if publish(&self.connection.words, &mut self.producer) {
            self.bell(false).call();
        }
    }

    /// Consumes what there is, and tells the peer; returns the words.
    fn receive(&mut self) -> Vec<u64> {
        let got = self.consume();
        if !got.is_empty() && release(&self.connection.words, &mut self.consumer, &self.producer) {
            self.bell(false).call();
        }
        got
    }

    /// Consumes what there is; returns the words.
    fn consume(&mut self) -> Vec<u64> {
        let mut got = Vec::new();
        while self.consumer.available(&self.connection.words).expect("an honest peer") > 0 {
            let at = self.consumer.place();
            let header = Header::parse(self.connection.words.peek(at)).expect("a whole record");
            assert_eq!(header.kind, Kind::Value);
            got.push(self.connection.words.peek(at + WORD));
            self.consumer.advance(header.size());
        }
        got
    }

    /// Sleeps until it is called, unless there is something already.
    fn sleep(&mut self, causes: u64) {
        let (stirs, calls) = arm(&self.connection.words, &mut self.consumer, &self.producer, causes);
        if calls {
            self.bell(false).call();
        }
        if !stirs {
            self.bell(true).sleep();
        }
        self.bell(true).take_calls();
        disarm(&self.connection.words, &self.consumer);
    }

    /// Takes records until there are `count`, asleep whenever it may be.
    fn receive_all(&mut self, count: usize) -> Vec<u64> {
        let mut got = self.receive();
        while got.len() < count {
            self.sleep(NEWS);
            got.extend(self.receive());
        }
        got
    }
}

fn both(active: impl FnOnce(End) + Send + 'static, passive: impl FnOnce(End)) {
    let connection = Connection::new();
    let end = End::new(&connection, Side::Active);
    let thread = thread::spawn(move || active(end));
    passive(End::new(&connection, Side::Passive));
    thread.join().unwrap();
}

/// Records arrive whole and in order at a consumer that sleeps whenever it may.
#[test]
fn nobody_sleeps_over_a_record() {
    loom::model(|| {
        both(|mut end| (7..9).for_each(|value| end.send(value)), |mut end| assert_eq!(end.receive_all(2), [7, 8]));
    });
}

/// A producer that waits until its record is consumed is called then.
#[test]
fn nobody_sleeps_over_room() {
    loom::model(|| {
        both(
            |mut end| {
                end.send(7);
                while !end.producer.look(&end.connection.words).unwrap() {
                    end.sleep(NEWS | ROOM);
                }
            },
            |mut end| assert_eq!(end.receive_all(1), [7]),
        );
    });
}

/// A consumer that has kept what it has consumed to itself says so before it sleeps.
#[test]
fn nobody_sleeps_over_room_that_it_owes() {
    loom::model(|| {
        both(
            |mut end| {
                end.send(7);
                while !end.producer.look(&end.connection.words).unwrap() {
                    end.sleep(NEWS | ROOM);
                }
                end.send(8);
            },
            |mut end| {
                // It has not slept before: the model checker lets a swap be seen behind a later store of the other thread, if that
                // thread has said before that it is awake. No memory has two orders of the stores to one word.
                let mut got = end.consume();
                while got.is_empty() {
                    thread::yield_now();
                    got = end.consume();
                }
                while got.len() < 2 {
                    end.sleep(NEWS);
                    got.extend(end.consume());
                }
                assert_eq!(got, [7, 8]);
            },
        );
    });
}

/// Two sides that answer each other, and sleep in between.
#[test]
fn two_sides_answer_each_other() {
    loom::model(|| {
        both(
            |mut end| {
                end.send(1);
                assert_eq!(end.receive_all(1), [2]);
            },
            |mut end| {
                assert_eq!(end.receive_all(1), [1]);
                end.send(2);
            },
        );
    });
}
