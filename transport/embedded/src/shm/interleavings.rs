//! Models of a ring and its calls, for the model checker loom (`make loom`). Loom runs the two sides in every order,
//! with every value that a load may return. Loom reports a deadlock if a side sleeps although there is work for that
//! side.

use std::fmt;
use std::sync::Arc;

use loom::sync::atomic::{AtomicU64, Ordering, fence};
use loom::sync::{Condvar, Mutex};
use loom::thread;

use super::doorbell::{NEWS, ROOM, arm, disarm, publish, release};
use super::record::{RecordHeader, RecordKind, WORD};
use super::ring::{Consumer, Producer};
use super::segment::{CALL, HALF, HEAD, RING, SegmentSide, TAIL, Words};

/// The number of words of the ring that the models use.
const USED: usize = 6;
const OF_HALF: usize = 3 + USED;

/// The words of a segment, as the model checker sees them.
struct ModelWords(Vec<AtomicU64>);

impl fmt::Debug for ModelWords {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Model")
    }
}

impl ModelWords {
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

impl Words for ModelWords {
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

/// The socket on which a side sleeps. A call from the peer stays in the socket until the side reads the call.
#[derive(Debug, Default)]
struct WakeSocket {
    calls: Mutex<u32>,
    changed: Condvar,
}

impl WakeSocket {
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

/// The state that both sides share.
struct ModelConnection {
    words: ModelWords,
    sockets: [WakeSocket; 2],
}

impl ModelConnection {
    fn new() -> Arc<Self> {
        Arc::new(Self { words: ModelWords::new(), sockets: Default::default() })
    }
}

/// One side of a connection.
struct ModelEnd {
    connection: Arc<ModelConnection>,
    side: SegmentSide,
    producer: Producer,
    consumer: Consumer,
}

impl ModelEnd {
    fn new(connection: &Arc<ModelConnection>, side: SegmentSide) -> Self {
        let (producer, consumer) = (Producer::new(side.outgoing()), Consumer::new(side.incoming()));
        Self { connection: Arc::clone(connection), side, producer, consumer }
    }

    fn socket(&self, own: bool) -> &WakeSocket {
        &self.connection.sockets[usize::from((self.side == SegmentSide::Active) == own)]
    }

    /// Sends a record that contains one word.
    fn send(&mut self, value: u64) {
        let header = RecordHeader::new(RecordKind::Value, 8);
        let at = self.producer.reserve(&self.connection.words, header.size()).expect("room");
        self.connection.words.poke(at, header.emit());
        self.connection.words.poke(at + WORD, value);
        self.producer.commit(header.size());
        if publish(&self.connection.words, &mut self.producer) {
            self.socket(false).call();
        }
    }

    /// Consumes and releases all records. Returns the words that they contain.
    fn receive(&mut self) -> Vec<u64> {
        let got = self.consume();
        if !got.is_empty() && release(&self.connection.words, &mut self.consumer, &self.producer) {
            self.socket(false).call();
        }
        got
    }

    /// Consumes all records without releasing them. Returns the words that they contain.
    fn consume(&mut self) -> Vec<u64> {
        let mut got = Vec::new();
        while self.consumer.available(&self.connection.words).expect("an honest peer") > 0 {
            let at = self.consumer.next_record();
            let header = RecordHeader::parse(self.connection.words.peek(at)).expect("a whole record");
            assert_eq!(header.kind, RecordKind::Value);
            got.push(self.connection.words.peek(at + WORD));
            self.consumer.advance(header.size());
        }
        got
    }

    /// Sleeps until the peer calls. Does not sleep if one of the events `causes` has already happened.
    fn sleep(&mut self, causes: u64) {
        let (ready, calls) = arm(&self.connection.words, &mut self.consumer, &self.producer, causes);
        if calls {
            self.socket(false).call();
        }
        if !ready {
            self.socket(true).sleep();
        }
        self.socket(true).take_calls();
        disarm(&self.connection.words, &self.consumer);
    }

    /// Receives `count` records. Sleeps whenever there are none. Returns the words that the records contain.
    fn receive_all(&mut self, count: usize) -> Vec<u64> {
        let mut got = self.receive();
        while got.len() < count {
            self.sleep(NEWS);
            got.extend(self.receive());
        }
        got
    }
}

fn both(active: impl FnOnce(ModelEnd) + Send + 'static, passive: impl FnOnce(ModelEnd)) {
    let connection = ModelConnection::new();
    let end = ModelEnd::new(&connection, SegmentSide::Active);
    let thread = thread::spawn(move || active(end));
    passive(ModelEnd::new(&connection, SegmentSide::Passive));
    thread.join().unwrap();
}

/// A consumer that sleeps whenever there are no records receives every record, whole and in order.
#[test]
fn nobody_sleeps_over_a_record() {
    loom::model(|| {
        both(|mut end| (7..9).for_each(|value| end.send(value)), |mut end| assert_eq!(end.receive_all(2), [7, 8]));
    });
}

/// A producer sleeps until its record is released. The consumer that releases the record must call the producer.
#[test]
fn nobody_sleeps_over_room() {
    loom::model(|| {
        both(
            |mut end| {
                end.send(7);
                while !end.producer.refresh_tail(&end.connection.words).unwrap() {
                    end.sleep(NEWS | ROOM);
                }
            },
            |mut end| assert_eq!(end.receive_all(1), [7]),
        );
    });
}

/// A consumer releases its consumed records before it sleeps, so that the producer does not wait forever for room.
#[test]
fn nobody_sleeps_over_room_that_it_owes() {
    loom::model(|| {
        both(
            |mut end| {
                end.send(7);
                while !end.producer.refresh_tail(&end.connection.words).unwrap() {
                    end.sleep(NEWS | ROOM);
                }
                end.send(8);
            },
            |mut end| {
                let mut got = end.consume();
                while got.len() < 2 {
                    end.sleep(NEWS);
                    got.extend(end.consume());
                }
                assert_eq!(got, [7, 8]);
            },
        );
    });
}

/// One side sends a record and sleeps until the answer arrives. The other side sleeps until the record arrives, and
/// then sends the answer. Neither side sleeps forever.
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
