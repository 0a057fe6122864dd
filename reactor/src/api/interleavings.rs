//! Model checks of the state that threads share with a reactor, in every order in which the threads can run (`make
//! loom`). The model checker reports a reactor that sleeps while a thread waits for it as a deadlock, and bytes that
//! two threads use at the same time as a race.

use std::io;
use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::sync::{Condvar, Mutex};
use loom::thread;
use rdma_transport::mr::LocalKey;

use super::handle::{Commands, HandleCommand, HandleError, ReactorHandle};
use crate::memory::region_memory::{RegionBytes, RegionMemory};
use crate::seam::wake::{Wake, WakeFlag};

/// A model of an eventfd that a reactor sleeps on: it stays readable until a sleep has consumed it.
#[derive(Debug, Default)]
struct FakeEventFd {
    readable: Mutex<bool>,
    changed: Condvar,
}

impl FakeEventFd {
    fn sleep(&self) {
        let mut readable = self.readable.lock().unwrap();
        while !*readable {
            readable = self.changed.wait(readable).unwrap();
        }
        *readable = false;
    }
}

impl Wake for FakeEventFd {
    fn wake(&self) -> io::Result<()> {
        *self.readable.lock().unwrap() = true;
        self.changed.notify_one();
        Ok(())
    }
}

/// A model of a reactor: the parts that other threads use, with a loop that processes them as the stages of a turn do.
struct ModelReactor {
    eventfd: Arc<FakeEventFd>,
    flag: Arc<WakeFlag>,
    commands: Commands<u32>,
    taken: Vec<u32>,
    stopped: bool,
}

impl ModelReactor {
    fn new(limit: u32) -> Self {
        let eventfd = Arc::new(FakeEventFd::default());
        let flag = Arc::new(WakeFlag::new(Arc::clone(&eventfd) as Arc<dyn Wake>));
        let commands = Commands::new(Arc::clone(&flag), limit);
        Self { eventfd, flag, commands, taken: Vec::new(), stopped: false }
    }

    fn remote(&self) -> ReactorHandle<u32> {
        self.commands.handle()
    }

    /// Runs the stages from the sleep on. Calls `on_wake` for each message.
    fn turn(&mut self, sleeps: bool, mut on_wake: impl FnMut(u32)) {
        self.flag.enter();
        if sleeps && !self.flag.is_pending() {
            self.eventfd.sleep();
        }
        if self.flag.take() {
            self.stopped |= self.flag.take_stop();
            while let Some(command) = self.commands.next() {
                self.commands.done();
                let HandleCommand::Message(message) = command else { unreachable!("nobody sends") };
                self.taken.push(message);
                on_wake(message);
            }
        }
        self.flag.leave();
    }

    /// Runs a turn for a caller that sleeps on the descriptor itself between turns.
    fn turn_of_another_loop(&mut self) {
        self.turn(false, |_| {});
        if self.flag.is_pending() {
            self.flag.wake_again();
        }
    }
}

/// Starts two threads, each of which posts a message.
fn two_posts(reactor: &ModelReactor) -> [thread::JoinHandle<()>; 2] {
    [1, 2].map(|message| {
        let remote = reactor.handle();
        thread::spawn(move || remote.post(message).unwrap())
    })
}

fn join<T>(threads: [thread::JoinHandle<T>; 2]) -> [T; 2] {
    threads.map(|thread| thread.join().unwrap())
}

/// A reactor that sleeps whenever it may receives all messages of two threads.
#[test]
fn every_post_wakes() {
    loom::model(|| {
        let mut reactor = ModelReactor::new(8);
        let threads = two_posts(&reactor);
        while reactor.taken.len() < 2 {
            reactor.turn(true, |_| {});
        }
        join(threads);
    });
}

/// A callback posts to its own reactor without a system call, while another thread posts too.
#[test]
fn a_callback_posts_to_its_own_reactor() {
    loom::model(|| {
        let mut reactor = ModelReactor::new(8);
        let (remote, own) = (reactor.handle(), reactor.handle());
        let thread = thread::spawn(move || remote.post(1).unwrap());
        own.post(2).unwrap();
        while reactor.taken.len() < 3 {
            reactor.turn(true, |message| {
                if message == 2 {
                    own.post(3).unwrap();
                }
            });
        }
        thread.join().unwrap();
    });
}

/// A reactor in an outer loop, which sleeps on the descriptor between turns, is woken.
#[test]
fn another_loop_is_woken() {
    loom::model(|| {
        let mut reactor = ModelReactor::new(8);
        let threads = two_posts(&reactor);
        while reactor.taken.len() < 2 {
            reactor.eventfd.sleep();
            reactor.turn_of_another_loop();
        }
        join(threads);
    });
}

/// A stop takes effect, also while a message is in flight.
#[test]
fn a_stop_is_seen() {
    loom::model(|| {
        let mut reactor = ModelReactor::new(8);
        let (remote, stop) = (reactor.handle(), reactor.handle());
        let threads = [thread::spawn(move || remote.post(1).unwrap()), thread::spawn(move || stop.stop())];
        while !reactor.stopped {
            reactor.turn(true, |_| {});
        }
        join(threads);
    });
}

/// A queue for one message accepts one at a time, refuses the others, and accepts again after each.
#[test]
fn a_full_queue_refuses() {
    loom::model(|| {
        let mut reactor = ModelReactor::new(1);
        let threads = [1, 2].map(|message| {
            let remote = reactor.handle();
            thread::spawn(move || u32::from(remote.post(message) != Err(HandleError::Full(message))))
        });
        let accepted: u32 = join(threads).iter().sum();
        reactor.turn(false, |_| {});
        assert_eq!(reactor.taken.len() as u32, accepted);
        assert!(accepted >= 1);
        reactor.handle().post(3).unwrap();
    });
}

/// A device writes a region while the owner, on another thread, requests the bytes: the owner gets them only after the
/// write.
#[test]
fn bytes_are_lent_behind_the_write() {
    loom::model(|| {
        let key = LocalKey(1);
        let memory = Arc::new(rdma_transport::mem::Memory::new(64).unwrap());
        let mut region = RegionMemory::new(RegionBytes::Own(memory), 64);
        let (_, hold) = region.lend_mut(0..8, key).unwrap();
        // The bytes, as a cell that the model checker watches.
        let bytes = Arc::new(UnsafeCell::new(0));
        let device = {
            let bytes = Arc::clone(&bytes);
            thread::spawn(move || {
                // SAFETY: the model checker reports every concurrent use of the value.
                bytes.with_mut(|bytes| unsafe { *bytes = 7 });
                hold.done();
            })
        };
        if region.bytes_mut().is_some() {
            // SAFETY: as above.
            assert_eq!(bytes.with(|bytes| unsafe { *bytes }), 7);
        }
        device.join().unwrap();
        assert!(region.bytes_mut().is_some());
    });
}
