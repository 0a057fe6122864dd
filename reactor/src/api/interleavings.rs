//! Model checks of the state that other threads share with a reactor (`make loom`). The model checker runs each test in
//! every order in which the threads can interleave. It reports a deadlock if a reactor sleeps although a thread has
//! posted a message. It reports a race if two threads access the same bytes at the same time and at least one of them
//! writes.

use std::io;
use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::sync::{Condvar, Mutex};
use loom::thread;
use rdma_transport::mr::LocalKey;

use super::handle::{Commands, HandleCommand, HandleError, ReactorHandle};
use crate::memory::region_memory::{RegionBytes, RegionMemory};
use crate::seam::wake::{Wake, WakeFlag};

/// A model of the eventfd on which a reactor sleeps. It becomes readable on a wake-up, and stays readable until a sleep
/// has consumed the wake-up.
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

/// A model of a reactor. Its flag and its command queue, which other threads use, are those of a real reactor. Its loop
/// processes them in the same order as a turn of a real reactor.
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

    fn handle(&self) -> ReactorHandle<u32> {
        self.commands.handle()
    }

    /// Runs the second part of a turn: sleeps until a wake-up, and then processes the command queue. Does not sleep if
    /// `sleeps` is false or if a wake-up is pending. Calls `on_wake` with each message that was queued.
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

    /// Runs a turn without a sleep. The caller has its own loop, and sleeps on the eventfd between turns.
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

/// Two threads post a message each. The reactor sleeps whenever no wake-up is pending, and still receives both
/// messages.
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

/// A callback posts to its own reactor while another thread posts too. The reactor receives all messages, although the
/// callback's post makes no system call.
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

/// A program that runs the reactor in its own loop, and sleeps on the eventfd between turns, is woken by each post.
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

/// The reactor notices a stop, even if another thread posts a message at the same time.
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

/// A queue of length 1 accepts one message at a time and refuses others. It accepts the next message only when the
/// reactor has processed the previous one.
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

/// A device writes to a region while the owner, on another thread, requests a reference to the
/// bytes. The owner gets the reference only after the write has ended.
#[test]
fn bytes_are_lent_behind_the_write() {
    loom::model(|| {
        let key = LocalKey(1);
        let memory = Arc::new(rdma_transport::mem::Memory::new(64).unwrap());
        let mut region = RegionMemory::new(RegionBytes::Own(memory), 64);
        let (_, hold) = region.lend_mut(0..8, key).unwrap();
        // A stand-in for the bytes of the region: a cell whose accesses the model checker observes.
        let bytes = Arc::new(UnsafeCell::new(0));
        let device = {
            let bytes = Arc::clone(&bytes);
            thread::spawn(move || {
                // SAFETY: the model checker reports every concurrent access to the value.
                bytes.with_mut(|bytes| unsafe { *bytes = 7 });
                hold.done();
            })
        };
        if region.bytes_mut().is_some() {
            // SAFETY: the model checker reports every concurrent access to the value.
            assert_eq!(bytes.with(|bytes| unsafe { *bytes }), 7);
        }
        device.join().unwrap();
        assert!(region.bytes_mut().is_some());
    });
}
